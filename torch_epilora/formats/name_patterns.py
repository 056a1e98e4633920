"""PEFT's patterns for module names, matched in time that the names and patterns bound.

A config comes from whoever trained the adapter, and a backtracking matcher can be made to run for ever. Here the set
of positions in the name that a pattern can reach is one integer, a bit a position, and moves by whole steps of the
pattern; the run of a repeated character is one addition (Cameron et al. 2014, "Bitwise data parallelism in regular
expression matching", MatchStar). Names, the usual case by far, are looked up.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

MAX_NAME = 512
"""Most characters of a module's name, and of one pattern."""
MAX_PATTERNS = 65536
MAX_REGEX_CHARS = 32768
"""Most characters of all patterns of one field that are more than a name."""
MAX_DOT_LAYOUTS = 512
"""Most different places of the dots in the names of one field: each costs every module one look-up."""
MAX_CLASSES = 256
"""Most different [...], \\d and the like in the patterns of one field."""
MAX_DEPTH = 8
ACCEPTED = (
    "expected names, '.', [...], \\d \\w \\s, escaped punctuation, each with at most one of * + ? {m,n} up to 9; "
    f"^ $ |; and groups (...) or (?:...) with at most one ?, up to {MAX_DEPTH} deep"
)

V = TypeVar("V")
_META = r"\\\[\](){}*+?|^$"
_NAME = re.compile(rf"(?:\\[^a-zA-Z0-9\n]|[^{_META}\n])*")
_TOKEN = re.compile(
    rf"""(?P<open>\((?:\?:)?(?!\?))
    | (?P<close>\)) (?P<optional>\?\??)?
    | (?P<bar>\|)
    | (?P<anchor>[\^$])
    | (?P<atom> \\[^a-zA-Z0-9] | \\[dDwWsS] | \[\^?\]?(?:\\.|[^\]\\])*\] | [^{_META}])
      (?: (?P<simple>[*+?])\?? | \{{(?P<least>[0-9])(?:(?P<comma>,)(?P<most>[0-9])?)?\}}\?? )?""",
    re.VERBOSE | re.DOTALL,
)
_SIMPLE: dict[str | None, tuple[int, int | None]] = {None: (1, 1), "*": (0, None), "+": (1, None), "?": (0, 1)}
# Stands for "any character" in a template; a module's name has no line break.
_ANY = "\n"


class NamePatterns(Generic[V]):
    r"""Values by patterns; a module gets the value of the first pattern that is its name or follows a dot in it.

    This is what ``re.match(rf"(.*\.)?({pattern})$", module)`` says, so a dot in a pattern is any character.

    Parameters
    ----------
    values : mapping of str to value
        In order of precedence.
    where : str
        What errors call it.

    Raises
    ------
    ValueError
        If a pattern is no regular expression, or there is too much of them.
    NotImplementedError
        If a pattern needs more of regular expressions than is matched here; the message says what is.
    """

    def __init__(self, values: Mapping[str, V], where: str = "patterns") -> None:
        """Read the patterns once."""
        if len(values) > MAX_PATTERNS:
            raise ValueError(f"{where}: expected at most {MAX_PATTERNS} patterns, got {len(values)}.")
        self._values = list(values.values())
        self._templates: dict[str, int] = {}
        self._regexes: list[tuple[int, _Group]] = []
        layouts: dict[tuple[int, ...], None] = {}
        classes: dict[str, re.Pattern[str]] = {}
        chars = 0
        for index, pattern in enumerate(values):
            if len(pattern) > MAX_NAME:
                raise ValueError(
                    f"{where}: expected patterns of at most {MAX_NAME} characters, got {len(pattern)} in "
                    f"{pattern[:40]!r}..."
                )
            if _NAME.fullmatch(pattern):
                template = re.sub(r"\\(.)|\.", lambda m: m[1] or _ANY, pattern)
                self._templates.setdefault(template, index)
                layouts[(len(template), *(i for i, c in enumerate(template) if c == _ANY))] = None
            else:
                # Before it is parsed, so that parsing is bounded too.
                chars += len(pattern)
                if chars > MAX_REGEX_CHARS:
                    raise ValueError(
                        f"{where}: expected regular expressions of {MAX_REGEX_CHARS} characters in all, got more."
                    )
                self._regexes.append((index, _parse(pattern, where, classes)))
                if len(classes) > MAX_CLASSES:
                    raise ValueError(f"{where}: expected at most {MAX_CLASSES} different character classes, got more.")
        if len(layouts) > MAX_DOT_LAYOUTS:
            raise ValueError(
                f"{where}: expected names with their dots in at most {MAX_DOT_LAYOUTS} different places, "
                f"got {len(layouts)}."
            )
        self._dots: dict[int, list[tuple[int, ...]]] = {}
        for length, *dots in layouts:
            self._dots.setdefault(length, []).append(tuple(dots))

    def find(self, module: str, default: V) -> V:
        """Return the value for ``module``, a name without line breaks, or ``default``."""
        starts = [0, *(i + 1 for i, c in enumerate(module) if c == ".")]
        first = min(self._named(module, starts), default=len(self._values))
        name = _Name(module)
        begin = sum(1 << i for i in starts)
        for index, group in self._regexes:
            if index > first:
                break
            if group.step(begin, name) >> len(module):
                first = index
                break
        return default if first == len(self._values) else self._values[first]

    def _named(self, module: str, starts: list[int]) -> Iterator[int]:
        """Yield where the patterns stand that are names and match."""
        for start in starts:
            for dots in self._dots.get(len(module) - start, ()):
                chars = list(module[start:])
                for i in dots:
                    chars[i] = _ANY
                index = self._templates.get("".join(chars))
                if index is not None:
                    yield index


class _Name:
    """A module's name, and at which of its positions a character or a class stands."""

    def __init__(self, text: str) -> None:
        self.length = len(text)
        self._chars: dict[str, int] = {}
        for i, c in enumerate(text):
            self._chars[c] = self._chars.get(c, 0) | 1 << i
        self._classes: dict[re.Pattern[str], int] = {}

    def mask(self, what: str | re.Pattern[str]) -> int:
        """Return the positions of the characters that match, a bit each."""
        if isinstance(what, str):
            return self._chars.get(what, 0)
        if what not in self._classes:
            self._classes[what] = sum(mask for c, mask in self._chars.items() if what.match(c))
        return self._classes[what]


@dataclass(frozen=True)
class _Anchor:
    start: bool

    def step(self, reached: int, name: _Name) -> int:
        return reached & (1 if self.start else 1 << name.length)


@dataclass(frozen=True)
class _Atom:
    """One character or class, ``least`` to ``most`` times (None: without end)."""

    what: str | re.Pattern[str]
    least: int
    most: int | None

    def step(self, reached: int, name: _Name) -> int:
        mask = name.mask(self.what)
        for _ in range(self.least):
            reached = (reached & mask) << 1
        if self.most is None:
            return (((reached & mask) + mask) ^ mask) | reached
        for _ in range(self.most - self.least):
            reached |= (reached & mask) << 1
        return reached


@dataclass
class _Group:
    """Branches, each a sequence; ``optional`` if the group may be left out."""

    branches: list[list["_Anchor | _Atom | _Group"]] = field(default_factory=lambda: [[]])
    optional: bool = False

    def step(self, reached: int, name: _Name) -> int:
        result = reached if self.optional else 0
        for branch in self.branches:
            at = reached
            for part in branch:
                if not at:
                    break
                at = part.step(at, name)
            result |= at
        return result


def _parse(pattern: str, where: str, classes: dict[str, re.Pattern[str]]) -> _Group:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as e:
        raise ValueError(f"{where}: expected a regular expression, got {pattern!r} ({e}).") from e
    stack = [_Group()]
    at = 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None or len(stack) > MAX_DEPTH + 1:
            raise NotImplementedError(f"{where}: {pattern!r} is not supported at {pattern[at:]!r}; {ACCEPTED}.")
        at = token.end()
        if token["open"]:
            stack.append(_Group())
        elif token["close"]:
            group = stack.pop()
            group.optional = token["optional"] is not None
            stack[-1].branches[-1].append(group)
        elif token["bar"]:
            stack[-1].branches.append([])
        elif token["anchor"]:
            stack[-1].branches[-1].append(_Anchor(token["anchor"] == "^"))
        else:
            stack[-1].branches[-1].append(_Atom(_character(token["atom"], classes), *_repeats(token)))
    return stack[0]


def _character(source: str, classes: dict[str, re.Pattern[str]]) -> str | re.Pattern[str]:
    """Return the character that an atom is, or its class, compiled once."""
    if source[0] == "\\" and source[1:] not in tuple("dDwWsS"):
        return source[1:]
    if len(source) == 1 and source != ".":
        return source
    if source not in classes:
        classes[source] = re.compile(source)
    return classes[source]


def _repeats(token: re.Match[str]) -> tuple[int, int | None]:
    if token["least"] is None:
        return _SIMPLE[token["simple"]]
    least = int(token["least"])
    if token["most"]:
        return least, int(token["most"])
    return least, None if token["comma"] else least
