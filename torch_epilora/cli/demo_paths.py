"""The demo's table of paths: how the patched model's projections run, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from rich.table import Table

from torch_epilora.cli.paths import choose_path
from torch_epilora.nn import describe

__all__ = ["path_table"]


def path_table(model: Any, tokens: Mapping[str, int]) -> tuple[Table, list[str]]:
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
        One row a shape of projection: its path by number of tokens, each with the number of its reason. Linears that
        ran fused are one projection.
    list of str
        The reasons; the first has number 1.
    """
    counts: Counter[tuple[str, ...]] = Counter()
    reasons: list[str] = []
    capability = gpu = None
    if model.device.type == "cuda":
        capability, gpu = torch.cuda.get_device_capability(model.device), torch.cuda.get_device_name(model.device)
    for projection in (part for info in describe(model) for part in info.as_run()):
        paths = []
        for m in tokens.values():
            path, reason = choose_path(projection, m, capability, model.dtype, gpu)
            if reason not in reasons:
                reasons.append(reason)
            paths.append(f"{path} ({reasons.index(reason) + 1})")
        name = " + ".join(path.rpartition(".")[2] for path in projection.names)
        counts[name, f"{projection.n} x {projection.k}", *paths] += 1
    table = Table(title="Which path ran, and why")
    for heading in ("projection", "N x K", *(f"{name}, {m} tokens" for name, m in tokens.items()), "layers"):
        table.add_column(heading, justify="right" if heading == "layers" else "left")
    for cells, count in counts.items():
        table.add_row(*cells, str(count))
    return table, reasons
