"""Plans a problem may run under: what is timed against each other, and all that a table of measured plans may name."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from torch_epilora.ops.plan import (
    Plan,
    Problem,
    Tiles,
    bare,
    make_plan,
    refusal,
    through,
    unsupported,
    vendor_refusal,
)

ROUTES = (
    ("decode", "own"), ("fused", "own"), ("fused", "tma"), ("hybrid", "vendor"), ("hybrid", "tma"), ("hybrid", "own"),
    ("hybrid", "decode"),
)  # fmt: skip
"""Paths, each with what computes its base."""

VALUES: dict[str, dict[str, tuple]] = {
    "gemm": {},
    "shrink": {
        "block_m": (16, 32, 64), "block_r": (16, 32, 64, 128), "block_k": (64, 128, 256), "split_k": (1, 2, 4, 8, 16),
        "num_stages": (2, 3, 4),
    },
    "expand": {
        "block_m": (16, 32, 64), "block_n": (64, 128), "run": (1, 2, 4, 8), "num_warps": (4, 8),
        "num_stages": (2, 3, 4), "early": (False, True),
    },
    "tma": {
        "block_m": (64, 128), "block_n": (64, 128, 256), "num_warps": (4, 8), "num_stages": (3, 4, 5, 6),
        "b_stages": (2, 3, 4),
    },
    "decode": {
        "block_k": (128, 256), "num_stages": (3, 4, 5, 6, 8), "part": (1024, 2048, 4096, 8192), "shrink_k": (64, 128),
        "shrink_stages": (2, 3, 4), "split_k": (1, 2, 4, 8), "together": (1, 2), "b_stages": (2, 3, 4),
        "ahead": (0, 512, 1024), "early": (1, 2, 3), "overlap": (False, True), "num_warps": (4, 8),
    },
}  # fmt: skip
"""Values that are tried for a field of a kernel's tiles; the rules' own value is one more."""

OWN_MOST_TOKENS = 64
"""Above it K2 without the tensor memory accelerator is slower than every other (benchmarks/NOTES.md)."""


def used(plan: Plan, problem: Problem) -> tuple[str, ...]:
    """Name the kernels of a plan that run a problem and have tiles."""
    adapters = ("shrink",) if problem.rank else ()
    if plan.path == "decode":
        return ("decode",)
    if plan.path == "fused":
        return (*adapters, "tma" if plan.base == "tma" else "gemm")
    base = {"tma": ("tma",), "own": ("gemm",), "decode": ("decode",)}.get(plan.base, ())
    return (*adapters, *base, *(("expand",) if problem.rank else ()))


def _runs(path: str, base: str, rules: Plan, problem: Problem) -> bool:
    if base == "vendor":
        return vendor_refusal(problem) is None
    if base == "tma":
        return rules.tma is not None and (path == "fused" or problem.rank > 0)
    if path == "hybrid" and base == "own":
        return problem.rank > 0 and (problem.m <= OWN_MOST_TOKENS or rules.tma is None)
    if path == "fused":
        return problem.m <= OWN_MOST_TOKENS or rules.tma is None
    if base == "decode" and not problem.rank:
        return False
    return refusal(through(problem, path, base).decode, bare(problem) if base == "decode" else problem) is None


def routes(problem: Problem) -> list[Plan]:
    """List a problem's paths with the rules' tiles: first the plan of the rules, then the others that can run.

    Parameters
    ----------
    problem : Problem
        The projection, the batch and the GPU.

    Returns
    -------
    list of Plan
        Only the plan of the reference where no kernel runs.
    """
    rules = make_plan(problem)
    if unsupported(problem.capability):
        return [rules]
    others = [
        through(problem, path, base)
        for path, base in ROUTES
        if (path, base) != (rules.path, rules.base) and _runs(path, base, rules, problem)
    ]
    return [rules, *others]


def refused(plan: Plan, problem: Problem) -> str | None:
    """Say why a plan is none of a problem's candidates, or None if it is one.

    So whatever a file says, only what the search could have tried runs.
    """
    if (plan.path, plan.base) not in [(route.path, route.base) for route in routes(problem)]:
        return f"{plan.path} over {plan.base} does not run it"
    rules = through(problem, plan.path, plan.base)
    for kernel in used(plan, problem):
        tiles, own = getattr(plan, kernel), getattr(rules, kernel)
        for field in fields(own):
            value = getattr(tiles, field.name)
            if value != getattr(own, field.name) and value not in VALUES[kernel].get(field.name, ()):
                return f"{kernel}.{field.name}={value} is not one of its values"
        why = refusal(tiles, bare(problem) if kernel == "decode" and plan.base == "decode" else problem)
        if why is not None:
            return f"{kernel}: {why}"
    return None


def with_tiles(plan: Plan, kernel: str, values: dict[str, Any]) -> Plan:
    """Change fields of one kernel's tiles."""
    changed: Any = {kernel: replace(getattr(plan, kernel), **values)}
    return replace(plan, **changed)


def neighbours(plan: Plan, problem: Problem) -> Iterator[tuple[str, list[Plan]]]:
    """For each field of each kernel that a plan uses: its name, and the plans that differ in it alone and can run."""
    for kernel in used(plan, problem):
        tiles: Tiles = getattr(plan, kernel)
        for field, values in VALUES[kernel].items():
            changed = [with_tiles(plan, kernel, {field: v}) for v in values if v != getattr(tiles, field)]
            yield f"{kernel}.{field}", [other for other in changed if refused(other, problem) is None]
