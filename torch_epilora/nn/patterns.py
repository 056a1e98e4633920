"""How users name modules: by name, by glob, or by regular expression."""

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase


def matches(path: str, pattern: str) -> bool:
    """Say whether a module path is meant by a pattern.

    Parameters
    ----------
    path : str
        Full path, such as ``model.layers.0.self_attn.q_proj``.
    pattern : str
        ``re:`` and a regular expression that must match the whole path; or, with any of ``*?[``, a glob over the whole
        path; or one or more whole components of the path (``q_proj``, ``layers.0``, ``self_attn``).

    Returns
    -------
    bool
        Whether it matches.
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], path) is not None
    if any(c in pattern for c in "*?["):
        return fnmatchcase(path, pattern)
    return f".{pattern}." in f".{path}."


def as_patterns(name: str, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Check a pattern or several and return them as a tuple.

    Raises
    ------
    TypeError
        If they are not iterable, or an entry is not a string.
    ValueError
        If an entry is empty or an invalid regular expression.
    """
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{name}: expected module names or patterns, got {type(patterns).__name__}. Use () for none.")
    entries = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for entry in entries:
        if not isinstance(entry, str):
            raise TypeError(f"{name}: expected module names or patterns, got an entry of type {type(entry).__name__}.")
        if not entry.removeprefix("re:"):
            raise ValueError(f"{name}: expected names or patterns that are not empty, got {entry!r}.")
        if entry.startswith("re:"):
            try:
                re.compile(entry[3:])
            except (re.error, RecursionError, OverflowError) as error:
                shown = entry if len(entry) <= 80 else f"{entry[:80]}..."
                raise ValueError(f"{name}: {shown!r} is not a regular expression: {error}.") from error
    return entries
