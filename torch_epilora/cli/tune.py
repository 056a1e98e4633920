"""`epilora tune`: search the fastest launch configurations of a model's projections on the GPU present."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from torch_epilora.cli.projections import choose_layout, read_dtype, read_projections
from torch_epilora.nn.tuning import Size, sizes
from torch_epilora.ops import choice, tables
from torch_epilora.ops.plan import Plan, Problem, unsupported
from torch_epilora.ops.tables import Measured, problem_of
from torch_epilora.ops.trial import Trial

__all__ = ["run_tune"]


def run_tune(
    console: Console, folder: Path, *, layout: str | None, compute: str, rank: int, adapters: Sequence[int],
    tokens: Sequence[int], graph_tokens: int, jobs: int, output: Path | None,
) -> None:  # fmt: skip
    """Search all sizes, print what was gained, and write the table.

    Parameters
    ----------
    console : Console
        Where to print.
    folder : Path
        A model's folder; only its config.json is read.
    layout : str or None
        Layout of the weight scales; None is the checkpoint's own, else "channel".
    compute : str
        "w8a8" or "w8a16".
    rank : int
        Rank that the adapter slots hold.
    adapters, tokens : sequence of int
        Numbers of slots and sizes of batches to tune for, each with each.
    graph_tokens : int
        Batches up to here are timed as graph replays, larger ones with the host's time.
    jobs : int
        Processes that search, each with a size of its own.
    output : Path, optional
        Where the table goes, added to what it has of this GPU; by default the user's own table.

    Raises
    ------
    ValueError
        If the folder is no model's or the GPU runs none of the kernels.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    why = unsupported(capability)
    if why is not None:
        raise ValueError(f"{gpu}: nothing to tune: {why}")
    chosen, _ = choose_layout(folder, layout)
    dtype = getattr(torch, read_dtype(folder))
    projections_found = read_projections(folder, layout=chosen, compute=compute, rank=rank, slots=1)
    todo: list[Size] = []
    for slots in adapters:
        projections = [
            (
                Problem(1, p.n, p.k, rank, len(p.slices), slots + 1, p.layout, compute, dtype, capability),
                p.slices,
            )
            for p in projections_found
        ]
        todo += [size for size in sizes(projections, tokens, graph_tokens) if size not in todo]
    console.print(f"{len(todo)} sizes on {gpu}", markup=False)
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(min(jobs, len(todo)), _begin, (spawn.Lock(),)) as pool:
        searched = pool.imap_unordered(_search, [(size, capability) for size in todo])
        plans = list(track(searched, "Searching", len(todo), console=console, transient=True))
    best: dict[tables.Key, Measured] = {}
    # once more, now that no other process uses the GPU
    for size, found_plans in track(plans, "Choosing", console=console, transient=True):
        key = size.key
        measured = Trial(problem_of(key, capability), size.widths, device).fastest(found_plans, graph=size.graph)
        best[key] = measured
        console.print(
            f"{key.tokens} tokens, {key.adapters} adapters, {key.k} to {key.n}: {measured.rules_us:.1f} -> "
            f"{measured.us:.1f} us, {measured.plan.path} over {measured.plan.base}",
            markup=False, highlight=False,
        )  # fmt: skip
    if output is None:
        output = choice.keep(gpu, capability, best)
    else:
        tables.write(output, gpu, capability, tables.read(output, gpu) | best, choice.versions())
    console.print(f"written to {output}", markup=False, highlight=False)


_alone: Any = None


def _begin(lock: Any) -> None:
    global _alone
    _alone = lock


def _search(work: tuple[Size, tuple[int, int]]) -> tuple[Size, list[Plan]]:
    """Search one size in a process of its own; kernels are compiled beside others, and timed while the lock is held."""
    size, capability = work
    device = torch.device("cuda", torch.cuda.current_device())
    trial = Trial(problem_of(size.key, capability), size.widths, device, _alone)
    found = size, trial.search(graph=size.graph)
    del trial
    torch.cuda.empty_cache()
    return found
