"""Tables of measured plans: JSON files that say which candidate was the fastest on one GPU.

What is no candidate of its problem (:mod:`candidates`), and a file that is no table of the GPU, is logged and left out.
"""

import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from torch_epilora.ops import candidates
from torch_epilora.ops.arithmetic import next_power_of_2
from torch_epilora.ops.checks import COMPUTES, LAYOUTS
from torch_epilora.ops.plan import Plan, Problem, through

logger = logging.getLogger("torch_epilora")

_MOST_BYTES = 16 << 20
_MOST = 1 << 30
_NO_TABLE = (OSError, ArithmeticError, ValueError, TypeError, KeyError, RecursionError)
_NAMES = {"layout": LAYOUTS, "compute": COMPUTES, "dtype": ("bfloat16", "float16", "float32")}


@dataclass(frozen=True)
class Key:
    """What plans are measured by: a projection and a bucket of batches.

    Attributes
    ----------
    tokens, adapters : int
        Powers of two; adapters are the slots that the batch's metadata lists, 0 for a call without any.
    n, k, rank, slices : int
        Outputs, inputs, rank of the slots, output slices.
    layout, compute, dtype : str
        As in :class:`Problem`.
    codes : bool
        Likewise.
    """

    tokens: int
    adapters: int
    n: int
    k: int
    rank: int
    slices: int
    layout: str
    compute: str
    dtype: str
    codes: bool


@dataclass(frozen=True)
class Measured:
    """The plan that was the fastest.

    Attributes
    ----------
    plan : Plan
        Of the problem that the key stands for.
    us, rules_us : float
        Microseconds a call, and those of the rules' plan.
    graph : bool
        Whether calls were replayed in a CUDA graph; else they were launched one by one, host time included.
    """

    plan: Plan
    us: float
    rules_us: float
    graph: bool


def key_of(problem: Problem) -> Key:
    """Make the key of a problem."""
    adapters = min(problem.groups - 1, problem.m) if problem.rank else 0
    return Key(
        tokens=next_power_of_2(max(problem.m, 1)),
        adapters=next_power_of_2(adapters) if adapters else 0,
        n=problem.n, k=problem.k, rank=problem.rank, slices=problem.slices, layout=problem.layout,
        compute=problem.compute, dtype=str(problem.dtype).removeprefix("torch."), codes=problem.codes,
    )  # fmt: skip


def near(key: Key) -> Iterator[Key]:
    """List a key and those whose plans serve it where it was not measured: with codes made, and scales of channels.

    The kernels are the same, but for a quantizer before them and for reading one scale in place of many.
    """
    for layout in dict.fromkeys((key.layout, "channel" if key.layout == "tensor" else key.layout)):
        for codes in dict.fromkeys((key.codes, False)):
            yield replace(key, layout=layout, codes=codes)


def problem_of(key: Key, capability: tuple[int, int]) -> Problem:
    """Make the problem that a key stands for on a GPU of this compute capability: the largest of its buckets."""
    return Problem(
        key.tokens, key.n, key.k, key.rank, key.slices, key.adapters + 1, key.layout, key.compute,
        getattr(torch, key.dtype), capability, key.codes,
    )  # fmt: skip


def read(path: Path, gpu: str) -> dict[Key, Measured]:
    """Read the table of a GPU; without the file it is empty."""
    try:
        capability, plans = _content(path, gpu)
    except FileNotFoundError:
        return {}
    except _NO_TABLE as error:
        logger.warning("%s: this table of measured plans is left out: %s", path, error)
        return {}
    found, wrong = {}, []
    for entry in plans:
        try:
            key, measured = _entry(entry, capability)
        except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError) as error:
            wrong.append(f"{type(error).__name__}: {error}")
            continue
        found[key] = measured
    if wrong:
        counts = f"{len(wrong)} of {len(plans)}"
        logger.warning("%s: %s plans are left out, the first for %s", path, counts, wrong[0])
    return found


def is_table(path: Path, gpu: str) -> bool:
    """Say whether a file is a table of a GPU, to which plans can be added without losing anything else."""
    try:
        _content(path, gpu)
    except _NO_TABLE:
        return False
    return True


def _content(path: Path, gpu: str) -> tuple[tuple[int, int], list[Any]]:
    """Read a table's compute capability and its plans, not looked at yet."""
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"expected at most {_MOST_BYTES} bytes, got {path.stat().st_size}")
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("plans"), list):
        raise ValueError("expected an object with a list of plans")
    if content.get("gpu") != gpu:
        raise ValueError(f"expected a table of {gpu}, got one of {content.get('gpu')!r}")
    major, minor = map(int, content["capability"])
    return (major, minor), content["plans"]


def _entry(entry: dict[str, Any], capability: tuple[int, int]) -> tuple[Key, Measured]:
    values = {}
    for field in fields(Key):
        value = values[field.name] = entry[field.name]
        least = 0 if field.name in ("adapters", "rank") else 1
        if type(value) is not field.type or (field.type is int and not least <= value <= _MOST):
            raise ValueError(f"{field.name}={value!r} is no size or name")
    key = Key(**values)
    for name, known in _NAMES.items():
        if values[name] not in known:
            raise ValueError(f"{name}={values[name]!r} is none of {', '.join(known)}")
    problem = problem_of(key, capability)
    if key_of(problem) != key:
        raise ValueError(f"{key} is no bucket")
    plan = through(problem, entry["path"], entry["base"])
    for kernel, tiles in entry["tiles"].items():
        if kernel not in candidates.VALUES:
            raise ValueError(f"{kernel!r} is no kernel with tiles")
        own = getattr(plan, kernel)
        for field, value in tiles.items():
            if own is None or type(value) is not type(getattr(own, field)):
                raise ValueError(f"{kernel}.{field}={value!r} is of another type")
        plan = candidates.with_tiles(plan, kernel, tiles)
    why = candidates.refused(plan, problem)
    if why is not None:
        raise ValueError(why)
    us, rules_us, graph = float(entry["us"]), float(entry["rules_us"]), entry["graph"]
    if not (0 < us < _MOST and 0 < rules_us < _MOST and type(graph) is bool):
        raise ValueError(
            f"us={us}, rules_us={rules_us}, graph={graph!r}: expected times and whether they are of a graph"
        )
    return key, Measured(plan, us, rules_us, graph)


def write(
    path: Path, gpu: str, capability: tuple[int, int], plans: Mapping[Key, Measured], sources: Mapping[str, object]
) -> None:
    """Write a table, whole or not at all: ``sources`` in its head, then one plan a line.

    Raises
    ------
    OSError
        If it cannot be written.
    """
    head = {"gpu": gpu, "capability": list(capability), **sources}
    lines = ",\n".join(sorted(json.dumps(_line(key, found, capability)) for key, found in plans.items()))
    text = f'{json.dumps(head)[:-1]}, "plans": [\n{lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _line(key: Key, found: Measured, capability: tuple[int, int]) -> dict[str, Any]:
    plan = found.plan
    tiles = {name: asdict(getattr(plan, name)) for name in candidates.used(plan, problem_of(key, capability))}
    times = {"us": round(found.us, 2), "rules_us": round(found.rules_us, 2), "graph": found.graph}
    return {**asdict(key), "path": plan.path, "base": plan.base, "tiles": tiles, **times}
