"""The demo's table of paths: how the patched model's projections run, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from rich.table import Table

from torch_epilora.cli.paths import choose_path
from torch_epilora.nn import ProjectionInfo, describe

__all__ = ["path_table"]


def path_table(model: Any, tokens: Mapping[str, int]) -> Table:
    """Make the table of the projections' paths at the token counts the demo met.

    Parameters
    ----------
    model : transformers model
        Already patched.
    tokens : mapping of str to int
        Number of tokens in a forward, by a name for it ("prompt", "each new token").

    Returns
    -------
    Table
        One row a shape of projection; linears that ran fused are one projection.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    capability = torch.cuda.get_device_capability(model.device) if model.device.type == "cuda" else None
    for projection in (part for info in describe(model) for part in _as_run(info)):
        chosen = [choose_path(projection, m, capability, model.dtype) for m in tokens.values()]
        name = " + ".join(path.rpartition(".")[2] for path in projection.names)
        why = "; ".join(dict.fromkeys(reason for _, reason in chosen))
        counts[name, f"{projection.n} x {projection.k}", *(path for path, _ in chosen), why] += 1
    table = Table(title="Which path ran, and why")
    for heading in ("projection", "N x K", *(f"{name}, {m} tokens" for name, m in tokens.items()), "why", "layers"):
        table.add_column(heading, justify="right" if heading == "layers" else "left")
    for cells, count in counts.items():
        table.add_row(*cells, str(count))
    return table


def _as_run(info: ProjectionInfo) -> Iterator[ProjectionInfo]:
    """One projection of a fused group; each linear of its own where the model made the group unfuse."""
    if info.fused or len(info.names) == 1:
        yield info
    else:
        yield from (replace(info, names=(name,), slices=(n,)) for name, n in zip(info.names, info.slices, strict=True))
