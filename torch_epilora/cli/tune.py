"""`epilora tune`: search the fastest launch configurations of a model's projections on the GPU present."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from torch_epilora.cli.projections import choose_layout, read_dtype, read_projections
from torch_epilora.nn.tuning import Size, sizes
from torch_epilora.ops import choice, tables
from torch_epilora.ops.plan import Plan, unsupported
from torch_epilora.ops.switches import TUNE, tune_mode
from torch_epilora.ops.tables import Key, Measured, problem_of
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
        If the folder is no model's, the GPU runs none of the kernels, ``output`` is there and no table of this GPU, or
        ``EPILORA_TUNE=off``.
    OSError
        If the table cannot be written.
    RuntimeError
        If a process that searches was killed.
    """
    if tune_mode() == "off":
        raise ValueError(f"{TUNE}=off: measured plans are not used, so there is nothing to search. Unset it.")
    device = torch.device("cuda", torch.cuda.current_device())
    gpu, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    why = unsupported(capability)
    if why is not None:
        raise ValueError(f"{gpu}: nothing to tune: {why}")
    chosen, note = choose_layout(folder, layout)
    if note is not None:
        console.print(note, markup=False, highlight=False)
    todo = _sizes(folder, chosen, compute, rank, adapters, tokens, graph_tokens, capability)
    # before minutes of work: is there a place for it, and nothing in it that would be lost?
    save = partial(_save, output, gpu, capability)
    if output is not None and output.exists() and not tables.is_table(output, gpu):
        raise ValueError(
            f"--out {output}: expected a new file or a table of {gpu}, got another file. Name another one."
        )
    path = save({})
    console.print(f"{len(todo)} sizes on {gpu}", markup=False)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(jobs, len(todo)), spawn, _begin, (spawn.Lock(),)) as pool:
        searched = [pool.submit(_search, size, capability) for size in todo]
        for _ in track(as_completed(searched), "Searching", len(todo), console=console, transient=True):
            pass
    # once more, now that no other process uses the GPU
    for size, search in zip(track(todo, "Choosing", console=console, transient=True), searched, strict=True):
        key = size.key
        name = f"{key.tokens} tokens, {key.adapters} adapters, {key.k} to {key.n}"
        try:
            trial = Trial(problem_of(key, capability), size.widths, device)
            measured = trial.fastest(search.result(), graph=size.graph)
        except BrokenProcessPool as error:
            raise RuntimeError(f"a process was killed, for want of memory? Fewer --jobs take less: {error}") from error
        except RuntimeError as error:
            console.print(f"{name}: left out: {str(error)[:300]}", markup=False, highlight=False)
            continue
        path = save({key: measured})
        console.print(
            f"{name}: {measured.rules_us:.1f} -> {measured.us:.1f} us, {measured.plan.path} over {measured.plan.base}",
            markup=False, highlight=False,
        )  # fmt: skip
    console.print(f"written to {path}", markup=False, highlight=False)


def _save(output: Path | None, gpu: str, capability: tuple[int, int], plans: dict[Key, Measured]) -> Path:
    """Add plans to the table that was named, or the user's; return where it is."""
    if output is None:
        return choice.keep(gpu, capability, plans)
    tables.write(output, gpu, capability, tables.read(output, gpu) | plans, choice.versions())
    return output


def _sizes(
    folder: Path, layout: str, compute: str, rank: int, adapters: Sequence[int], tokens: Sequence[int],
    graph_tokens: int, capability: tuple[int, int],
) -> list[Size]:  # fmt: skip
    """List what a model's projections run with each number of adapters; those without slots run bare."""
    dtype = getattr(torch, read_dtype(folder))
    found = read_projections(folder, layout=layout, compute=compute, rank=rank, slots=1)
    todo: dict[Key, Size] = {}
    for slots in adapters:
        with_slots = [replace(info, slots=slots if info.slots else 0) for info in found]
        projections = [(info.problem(1, dtype, capability), info.slices) for info in with_slots]
        todo |= {size.key: size for size in sizes(projections, tokens, graph_tokens)}
    return list(todo.values())


_alone: Any = None


def _begin(lock: Any) -> None:
    global _alone
    _alone = lock


def _search(size: Size, capability: tuple[int, int]) -> list[Plan]:
    """Search one size in a process of its own; kernels are compiled beside others, and timed while the lock is held."""
    device = torch.device("cuda", torch.cuda.current_device())
    trial = Trial(problem_of(size.key, capability), size.widths, device, _alone)
    found = trial.search(graph=size.graph)
    del trial
    torch.cuda.empty_cache()
    return found
