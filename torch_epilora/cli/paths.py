"""The table of `epilora doctor MODEL_DIR`: which path each projection takes at several batch sizes, and why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from torch_epilora.cli.projections import read_dtype, read_projections
from torch_epilora.nn import ProjectionInfo
from torch_epilora.ops.choice import choose
from torch_epilora.ops.plan import make_plan

__all__ = ["TOKENS", "choose_path", "paths_table", "print_reasons"]

TOKENS = tuple(1 << i for i in range(14))
ON_CPU = "on the CPU every operator is its plain-torch reference"


def paths_table(
    folder: Path, arch: int | None, *, layout: str, compute: str, rank: int, slots: int, gpu: str | None = None
) -> tuple[Table, list[str]]:
    """Make the table of a model's projections.

    Parameters
    ----------
    folder : Path
        A model's folder; only its config.json is read.
    arch : int or None
        Compute capability times ten of the GPU; None is the CPU.
    layout : str
        Layout of the weight scales, "tensor", "channel" or "block".
    compute : str
        "w8a8" or "w8a16".
    rank : int
        Rank that the adapter slots hold.
    slots : int
        Adapter slots; 0 is a model without adapters.
    gpu : str, optional
        Name of the GPU, whose measured plans count; without it the rules choose.

    Returns
    -------
    Table
        One row a shape of projection: its paths by number of tokens, each with the number of its reason.
    list of str
        The reasons; the first has number 1.

    Raises
    ------
    ValueError
        Where the folder has no config.json that transformers can build a causal LM from.
    """
    dtype = read_dtype(folder)
    place = "CPU" if arch is None else f"sm_{arch}"
    table = Table(
        title=f"Paths of {folder.resolve().name}\n"
        f"{place}, {dtype}, {layout} scales, {compute}, {slots} slots of rank {rank}",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
    )
    for heading in ("projection", "count", "K", "N"):
        table.add_column(heading, justify="left" if heading == "projection" else "right")
    table.add_column("path by number of tokens")
    capability = None if arch is None else divmod(arch, 10)
    reasons: list[str] = []
    for info, count in read_projections(folder, layout=layout, compute=compute, rank=rank, slots=slots).items():
        spans: list[tuple[str, int, int]] = []  # path, number of its reason, last number of tokens
        for tokens in TOKENS:
            path, reason = choose_path(info, tokens, capability, getattr(torch, dtype), gpu)
            if reason not in reasons:
                reasons.append(reason)
            number = reasons.index(reason) + 1
            if spans and spans[-1][:2] == (path, number):
                spans.pop()
            spans.append((path, number, tokens))
        paths = "\n".join(f"to {last}: {path} ({number})" for path, number, last in spans)
        name = "+".join(info.names).replace("_proj", "")
        table.add_row(name, str(count), str(info.k), str(info.n), paths)
    return table, reasons


def print_reasons(console: Console, reasons: Sequence[str]) -> None:
    """Print the reasons that a table of paths refers to by number, from 1.

    Parameters
    ----------
    console : Console
        Where to print.
    reasons : sequence of str
        In the order of their numbers.
    """
    for number, reason in enumerate(reasons, 1):
        console.print(f"({number}) {reason}", markup=False, highlight=False)


def choose_path(
    info: ProjectionInfo, tokens: int, capability: tuple[int, int] | None, dtype: torch.dtype, gpu: str | None = None
) -> tuple[str, str]:
    """Say which path a projection takes, and why.

    Parameters
    ----------
    info : ProjectionInfo
        The projection.
    tokens : int
        Rows of its input.
    capability : tuple of int or None
        Compute capability of the GPU; None is the CPU.
    dtype : torch.dtype
        Of its input.
    gpu : str, optional
        Name of the GPU, whose measured plans count; without it the rules choose.

    Returns
    -------
    str, str
        The path and the reason.
    """
    if capability is None:
        return "reference", ON_CPU
    problem = info.problem(tokens, dtype, capability)
    plan = make_plan(problem) if gpu is None else choose(problem, gpu)
    return plan.path, plan.reason
