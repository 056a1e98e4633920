"""tune: time a model's projections on its GPU, and keep the fastest plans (EpiLoRA section 3.2)."""

import logging
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from operator import index

import torch
from torch import nn

from torch_epilora.nn.adapters import patched_parts
from torch_epilora.nn.describe import describe
from torch_epilora.nn.linear import groups_of
from torch_epilora.ops import choice
from torch_epilora.ops.arithmetic import next_power_of_2
from torch_epilora.ops.plan import Problem, unsupported
from torch_epilora.ops.switches import TUNE, tune_mode
from torch_epilora.ops.tables import Key, Measured, key_of, problem_of
from torch_epilora.ops.trial import Trial

logger = logging.getLogger("torch_epilora")

TOKENS = tuple(1 << i for i in range(12))
GRAPH_TOKENS = 512
"""Up to here vLLM captures its batches in CUDA graphs by default."""
SECONDS = 10.0

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Size:
    """One thing to time: a key, the widths of its slices, and whether it runs in a CUDA graph."""

    key: Key
    widths: tuple[int, ...]
    graph: bool


def sizes(
    projections: Iterable[tuple[Problem, tuple[int, ...]]], tokens: Iterable[int], graph_tokens: float
) -> list[Size]:
    """List what to time: each projection at each bucket of tokens, with all its slots and as the bare base.

    ``projections`` are problems of any token count, with the widths of their slices.
    """
    found: dict[Key, Size] = {}
    projections = list(projections)
    for m in sorted({next_power_of_2(m) for m in tokens}):
        for problem, widths in projections:
            bare = replace(problem, m=m, rank=0, slices=1, groups=1)
            for p, parts in ((replace(problem, m=m), widths), (bare, (problem.n,))):
                if p.rank or p is bare:
                    found.setdefault(key_of(p), Size(key_of(p), parts, m <= graph_tokens))
    return list(found.values())


def tune(
    model: nn.Module,
    *,
    tokens: Iterable[int] = TOKENS,
    graph_tokens: int = GRAPH_TOKENS,
    seconds: float = SECONDS,
    progress: Progress | None = None,
) -> int:
    """Time the paths that a model's projections can take on its GPU, and follow the fastest from now on.

    A size is a projection with all its slots, or without adapters, and a power of two of tokens; a Llama-like model has
    some 100, of which each takes a few seconds where its kernels have to be compiled. Sizes that were timed before on
    this GPU, by the same version, are not timed again: they are kept in a table in ``EPILORA_CACHE`` (by default
    ``~/.cache/torch_epilora``); for the H200 a table of Qwen3-8B's projections with slots of rank 64 comes with the
    library. When the time is up the rest keep the rules' plans until the next call. Plans differ in speed and in the
    last bits of a result, as other token counts do. Beside the model it takes memory for a projection of each size:
    adapters in all slots, 200 MB of weights, inputs and outputs.

    Parameters
    ----------
    model : nn.Module
        A patched model, on a GPU.
    tokens : iterable of int
        Sizes of batches that will be used; rounded up to powers of two.
    graph_tokens : int
        Batches up to here are replayed in CUDA graphs and timed so; larger ones are timed with the host's time.
    seconds : float
        When to stop: no size is begun that would take longer, if it takes as long as the longest so far.
    progress : callable, optional
        Called with the number of sizes done and of all to do.

    Returns
    -------
    int
        Sizes that were timed.

    Raises
    ------
    TypeError, ValueError
        If it is no patched model, lies on no GPU that runs the kernels or on several, an argument does not fit, or
        ``EPILORA_TUNE=off``.
    OSError
        If the table cannot be written; nothing changes then.
    """
    if tune_mode() == "off":
        raise ValueError(f"{TUNE}=off: measured plans are not used, so there is nothing to time. Unset it.")
    counts = _counts(tokens)
    for name, value in (("graph_tokens", graph_tokens), ("seconds", seconds)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name}: expected a number, got {type(value).__name__}.")
        if not value >= 0:
            raise ValueError(f"{name}: expected at least 0, got {value}.")
    if progress is not None and not callable(progress):
        raise TypeError(f"progress: expected a function of two counts, got {type(progress).__name__}.")
    device = _device(model)
    capability, gpu = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    why = unsupported(capability)
    if why is not None:
        raise ValueError(f"model: expected one on a GPU that runs the kernels, got {gpu}: {why}.")
    return tune_projections(
        _projections(model, capability), device, tokens=counts, graph_tokens=graph_tokens, seconds=seconds,
        progress=progress,
    )  # fmt: skip


def tune_projections(
    projections: Iterable[tuple[Problem, tuple[int, ...]]],
    device: torch.device,
    *,
    tokens: Iterable[int],
    graph_tokens: float,
    seconds: float = SECONDS,
    progress: Progress | None = None,
    how: str = "call torch_epilora.tune(model, seconds=...).",
) -> int:
    """Do what :func:`tune` does, for projections on a GPU that runs the kernels.

    ``projections`` are problems of any token count, with the widths of their slices; ``how`` says how to time what
    there was no time for.

    Returns
    -------
    int
        Sizes that were timed.

    Raises
    ------
    OSError
        If the table cannot be written; nothing changes then.
    """
    capability, gpu = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    known = choice.table(gpu)
    todo = [
        size
        for size in sizes(projections, tokens, graph_tokens)
        if size.key not in known or known[size.key].graph != size.graph
    ]
    found: dict[Key, Measured] = {}
    end, longest = time.monotonic() + seconds, 0.0
    try:
        for done, size in enumerate(todo):
            if progress is not None:
                progress(done, len(todo))
            begun = time.monotonic()
            # nor is one begun that would not end in time: where kernels are compiled, one takes seconds
            if begun + longest >= end:
                logger.warning(
                    "%d of %d sizes were timed in %g s, the rest keep the rules' plans until they are timed: %s",
                    done, len(todo), seconds, how,
                )  # fmt: skip
                break
            try:
                trial = Trial(problem_of(size.key, capability), size.widths, device)
                found[size.key] = trial.fastest(graph=size.graph)
            except Exception as error:  # no memory for it, or whatever a compiler or driver raises
                logger.warning("%s keeps the rules' plan: %s", size.key, str(error)[:300])
            longest = max(longest, time.monotonic() - begun)
    finally:
        if found:
            choice.keep(gpu, capability, found)
    if progress is not None:
        progress(len(found), len(todo))
    return len(found)


def _counts(tokens: Iterable[int]) -> list[int]:
    try:
        counts = [index(m) for m in tokens]
    except TypeError as error:
        raise TypeError(f"tokens: expected integers, got {tokens!r}: {error}.") from None
    if not counts or min(counts) < 1:
        raise ValueError(f"tokens: expected positive integers, got {counts}.")
    return counts


def tune_at_load(model: nn.Module) -> None:
    """Tune a model that was just patched, if ``EPILORA_TUNE=full`` and it lies on one GPU that runs the kernels.

    What goes wrong is logged: the model is right without measured plans.
    """
    devices = {t.device for t in model.parameters()}
    if tune_mode() != "full" or len(devices) != 1 or next(iter(devices)).type != "cuda":
        return
    try:
        tune(model, progress=_shown if sys.stderr.isatty() else None)
    except (OSError, RuntimeError, ValueError) as error:
        logger.warning("%s=full: plans were not measured: %s", TUNE, error)


def _shown(done: int, todo: int) -> None:
    print(
        f"\rtorch_epilora: {done} of {todo} sizes timed", end="\n" if done == todo else "", file=sys.stderr, flush=True
    )


def _device(model: nn.Module) -> torch.device:
    _, linears = patched_parts(model)
    devices = {group.codes.device for group in groups_of(linears)}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"model: expected all projections on one GPU, got them on {names}. Move the model with .to('cuda'); over "
            "several GPUs it follows the rules' plans and the shipped ones."
        )
    return next(iter(devices))


def _projections(model: nn.Module, capability: tuple[int, int]) -> list[tuple[Problem, tuple[int, ...]]]:
    """List the projections as they run: the members of a group that the model calls apart one by one."""
    _, linears = patched_parts(model)
    return [
        (part.problem(1, group.bank.dtype, capability), part.slices)
        for info, group in zip(describe(model), groups_of(linears), strict=True)
        for part in info.as_run()
    ]
