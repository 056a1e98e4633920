"""What a patched model consists of, for people and for `epilora doctor`."""

from dataclasses import dataclass, replace

import torch
from torch import nn

from torch_epilora.nn.adapters import patched_parts
from torch_epilora.nn.linear import groups_of
from torch_epilora.ops.checks import scale_layout
from torch_epilora.ops.plan import Problem


@dataclass(frozen=True)
class ProjectionInfo:
    """One projection of a patched model.

    Attributes
    ----------
    names : tuple of str
        Paths of the linears in it.
    k : int
        Input features.
    slices : tuple of int
        Output features of each slice.
    layout, compute : str
        Of the weight's scales ("tensor", "channel", "block"); "w8a8" or "w8a16".
    slots, max_rank : int
        Capacity for adapters.
    fused : bool
        Whether its linears run as one.
    """

    names: tuple[str, ...]
    k: int
    slices: tuple[int, ...]
    layout: str
    compute: str
    slots: int
    max_rank: int
    fused: bool

    @property
    def n(self) -> int:
        """Output features of all slices."""
        return sum(self.slices)

    def as_run(self) -> "list[ProjectionInfo]":
        """List itself, or each of its linears where the model calls them apart."""
        if self.fused or len(self.names) == 1:
            return [self]
        return [replace(self, names=(name,), slices=(n,)) for name, n in zip(self.names, self.slices, strict=True)]

    def problem(self, tokens: int, dtype: torch.dtype, capability: tuple[int, int]) -> Problem:
        """Make the problem of a batch of so many tokens on a GPU."""
        rank = self.max_rank if self.slots else 0
        return Problem(
            tokens, self.n, self.k, rank, len(self.slices), self.slots + 1, self.layout, self.compute, dtype, capability
        )


def describe(model: nn.Module) -> list[ProjectionInfo]:
    """List the projections of a patched model, in its own order.

    Raises
    ------
    TypeError, ValueError
        If it is not a patched model.
    """
    _, linears = patched_parts(model)
    return [
        ProjectionInfo(
            names=tuple(m.path for m in group.members),
            k=group.in_features,
            slices=tuple(b.shape[1] for b in group.bank.b),
            layout=scale_layout(group.codes.shape, group.full_scale()),
            compute=group.compute,
            slots=group.bank.slots,
            max_rank=group.bank.max_rank,
            fused=group.fused,
        )
        for group in groups_of(linears)
    ]
