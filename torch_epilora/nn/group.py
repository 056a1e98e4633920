"""ProjectionGroup: one buffer and one operator call for the linears that read the same input."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torch_epilora.formats.fp8 import Fp8Weight
from torch_epilora.nn.bank import AdapterBank
from torch_epilora.nn.batch import AdapterBatch, AdapterState
from torch_epilora.nn.moves import move_bits, move_value
from torch_epilora.nn.tracing import check_version, note_version, trace_number
from torch_epilora.ops import BLOCK

logger = logging.getLogger("torch_epilora")

_STRIKES = 2
"""Times in a row that a shared result may go unclaimed (an exception, a layer called alone) before a group unfuses."""


@dataclass(frozen=True)
class Member:
    """Where one linear lies in its group.

    Attributes
    ----------
    path : str
        Its path in the model.
    row, width : int
        First output row and number of output rows.
    slice, slices : int
        First output slice of the bank and number of slices (one, unless the linear is itself a fused one).
    scale_start : int
        First element of its scale among the group's.
    scale_shape : tuple of int
        Shape of its scale.
    """

    path: str
    row: int
    width: int
    slice: int
    slices: int
    scale_start: int
    scale_shape: tuple[int, ...]


def can_fuse(weights: Sequence[Fp8Weight]) -> bool:
    """Say whether the weights can lie in one buffer under one scale and one static input scale."""
    first = weights[0]
    if any(w.codes.shape[1] != first.codes.shape[1] or w.codes.device != first.codes.device for w in weights):
        return False
    if any(w.layout == "block" for w in weights):
        return all(w.layout == "block" and w.codes.shape[0] % BLOCK == 0 for w in weights)
    static = [w.input_scale for w in weights]
    if static[0] is None:
        return all(s is None for s in static)
    return all(s is not None and (s.is_meta or torch.equal(s, static[0])) for s in static)


class ProjectionGroup(nn.Module):
    """Linears that read the same input, computed as one projection with one or more output slices.

    The first member that is called with an input computes all of them; the others are handed their part when they are
    called with the same tensor object at the same version, under the same batch, adapters and gradient mode (tensors
    made in inference mode have no version, so there the object alone counts). A model that calls them otherwise unfuses
    the group: each member then computes itself, on its part of the same buffers.

    Parameters
    ----------
    weights : sequence of Fp8Weight
        One a member; several only if :func:`can_fuse` allows it.
    biases : sequence of Tensor or None
        [N_i] each, all or none.
    paths : sequence of str
        The members' paths.
    widths : sequence of sequence of int
        Each member's output slices; they sum to its N.
    state : AdapterState
        The model's.
    slots : int
        Adapter slots.
    compute : str
        "w8a8" or "w8a16".
    dtype : torch.dtype
        Of activations, bias and adapters.
    """

    scale: Tensor
    row_scale: Tensor | None
    static_scale: Tensor | None
    base_bias: Tensor | None

    def __init__(
        self,
        weights: Sequence[Fp8Weight],
        biases: Sequence[Tensor | None],
        paths: Sequence[str],
        widths: Sequence[Sequence[int]],
        state: AdapterState,
        slots: int,
        compute: str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.state, self.compute = state, compute
        self.in_features = weights[0].codes.shape[1]
        self.members = _lay_out(weights, paths, widths)
        self.fused = len(weights) > 1
        self._pending: tuple[Tensor, AdapterBatch, tuple[int, ...], Tensor, int] | None = None
        self._strikes = 0
        device = weights[0].codes.device
        codes = [w.codes for w in weights]
        self.codes = nn.Parameter(torch.cat(codes) if self.fused else codes[0], requires_grad=False)
        self.block = weights[0].layout == "block"
        for name, tensor in (
            ("scale", torch.cat([w.scale.flatten() for w in weights])),
            ("row_scale", None),
            ("static_scale", _cat([w.input_scale for w in weights])),
            ("base_bias", _cat([None if b is None else b.detach().to(dtype) for b in biases])),
        ):
            self.register_buffer(name, tensor, persistent=False)
        self._expand_scales()
        self.bank = AdapterBank(
            self.in_features, [n for member in widths for n in member], slots, state.max_rank, dtype, device
        )
        self._prepare_batches()

    # --- what a member shows -------------------------------------------------------------------------------------

    def member_codes(self, index: int) -> Tensor:
        """Codes [N_i, K] of a member, a view."""
        m = self.members[index]
        return self.codes.detach().narrow(0, m.row, m.width)

    def member_scale(self, index: int) -> Tensor:
        """Scale of a member, a view in its own layout."""
        m = self.members[index]
        count = torch.Size(m.scale_shape).numel()
        return self.scale.narrow(0, m.scale_start, count).view(m.scale_shape)

    def member_input_scale(self, index: int) -> Tensor | None:
        """Input scale [1] of a member, a view; None if it is not static."""
        return None if self.static_scale is None else self.static_scale.narrow(0, index, 1)

    def member_bias(self, index: int) -> Tensor | None:
        """Bias [N_i] of a member, a view, or None."""
        m = self.members[index]
        return None if self.base_bias is None else self.base_bias.narrow(0, m.row, m.width)

    @torch.no_grad()
    def load_member(self, index: int, tensors: Mapping[str, Tensor], assign: bool) -> None:
        """Copy a member's checked ``weight``, ``weight_scale``, ``input_scale`` and ``bias`` into the buffers."""
        if assign and self.codes.is_meta:
            device = next(iter(tensors.values())).device
            self._apply(lambda t: torch.zeros_like(t, device=device))
        targets = {
            "weight": self.member_codes(index),
            "weight_scale": self.member_scale(index),
            "input_scale": self.member_input_scale(index),
            "bias": self.member_bias(index),
        }
        for name, value in tensors.items():
            target = targets[name]
            if target is not None:
                target.copy_(value)
        self._expand_scales()
        static = self.static_scale
        if len(self.members) > 1 and static is not None and not static.is_meta and "input_scale" in tensors:
            # Only equal input scales give equal codes. While members load one by one they differ; the last one decides.
            self.fused = bool((static == static[0]).all())
        self._pending = None
        self.state.version += 1

    def _expand_scales(self) -> None:
        """Rebuild the per-row scale that stands for members with one scale each."""
        if len(self.members) > 1 and any(m.scale_shape == (1,) for m in self.members):
            rows = [
                self.member_scale(i).expand(m.width, 1) if m.scale_shape == (1,) else self.member_scale(i)
                for i, m in enumerate(self.members)
            ]
            full = torch.cat(rows)
            if self.row_scale is None or self.row_scale.device != full.device:
                self.row_scale = full
            else:
                self.row_scale.copy_(full)

    # --- forward -------------------------------------------------------------------------------------------------

    def project(self, x: Tensor, index: int) -> Tensor:
        """Output of member ``index`` for x [..., K]: [..., N_i]."""
        batch = self.state.current()
        if not self.fused:
            return self._compute(x, batch, index if len(self.members) > 1 else None)
        m, bit = self.members[index], 1 << index
        stamp = self._stamp(x)
        if self._pending is not None:
            of, under, at, y, claimed = self._pending
            same = of is x and under is batch
            if same and at == stamp and not claimed & bit:
                if torch.compiler.is_dynamo_compiling():
                    check_version(x)
                claimed |= bit
                done = claimed == (1 << len(self.members)) - 1
                self._pending = None if done else (of, under, at, y, claimed)
                self._strikes = 0 if done else self._strikes
                return y.narrow(-1, m.row, m.width)
            self._strikes += 1
            if self._strikes >= _STRIKES or (same and at[0] != stamp[0]):
                self._unfuse()
                return self._compute(x, batch, index)
        if torch.compiler.is_dynamo_compiling():
            note_version(x)
        y = self._compute(x, batch, None)
        self._pending = (x, batch, stamp, y, bit)
        return y.narrow(-1, m.row, m.width)

    def _stamp(self, x: Tensor) -> tuple[int, ...]:
        """Say what must not change between the members' calls; a traced graph has it fixed by its own guards.

        Only within itself: what another graph computed, before a graph break, has that one's number.
        """
        if torch.compiler.is_dynamo_compiling():
            return (trace_number(),)
        return (
            -1 if x.is_inference() else x._version,
            self.codes._version + sum(t._version for t in self._buffers.values() if t is not None),
            self.bank.content_version,
            torch.is_grad_enabled(),
            _autocast(x),
        )

    def separate(self) -> None:
        """Let every member be computed by itself from now on, on its part of the buffers."""
        self.fused = False
        self._pending = None

    def _unfuse(self) -> None:
        self.separate()
        names = ", ".join(m.path for m in self.members)
        logger.warning("%s are not called with the same input tensor; each of them is computed by itself.", names)

    def _compute(self, x: Tensor, batch: AdapterBatch, index: int | None) -> Tensor:
        """Run the operator for one member, or for the whole group if None."""
        flat, out_dtype = self.rows_of(x)
        bank = self.bank
        # A router hands experts any number of rows: without slots the batch does not matter.
        groups = self.state.groups(batch if bank.slots else self.state.bare, x)
        codes: Tensor = self.codes
        scale, bias, static = self.full_scale(), self.base_bias, self.static_scale
        first, last = 0, bank.slices
        if index is not None:
            member = self.members[index]
            codes, scale, bias = self.member_codes(index), self.member_scale(index), self.member_bias(index)
            static = self.member_input_scale(index)
            first, last = member.slice, member.slice + member.slices
        elif static is not None:
            static = static.narrow(0, 0, 1)
        adapters: tuple[Any, ...] = ([], [], [], None, None)
        if bank.slots:
            if not bank.has_b_bias and not torch.compiler.is_compiling() and batch.captured:
                bank.captured_without_bias = True
            adapters = (
                bank.a[first:last],
                bank.b[first:last],
                bank.b_bias[first:last],
                bank.rank.narrow(0, first, last - first),
                bank.scaling.narrow(0, first, last - first),
            )
        y = torch.ops.epilora.lora_linear(
            flat,
            None,
            static if self.compute == "w8a8" else None,
            codes,
            scale,
            bias,
            *adapters,
            *groups,
            self.compute,
        )
        return y.view(*x.shape[:-1], codes.shape[0]).to(out_dtype)

    def rows_of(self, x: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return x [..., K] as the operators take it, [M, K] in the group's dtype, and the dtype of the result.

        Raises
        ------
        ValueError
            If x does not end in K features.
        TypeError
            If x has another dtype than the group, outside of autocast.
        """
        if not x.dim() or x.shape[-1] != self.in_features:
            raise ValueError(
                f"x: expected [..., {self.in_features}] for {self.members[0].path}, got shape {list(x.shape)}."
            )
        dtype, out_dtype = self.bank.dtype, x.dtype
        if _autocast(x):
            x, out_dtype = x.to(dtype), torch.get_autocast_dtype(x.device.type)
        elif x.dtype != dtype:
            raise TypeError(
                f"x: expected {_name(dtype)}, the dtype of {self.members[0].path}, got {_name(x.dtype)}. "
                "Move the model with .to(dtype)."
            )
        flat = x.reshape(-1, self.in_features)
        return flat if flat.stride(-1) == 1 else flat.contiguous(), out_dtype

    def full_scale(self) -> Tensor:
        """Scale of all members' codes, as the operator takes it."""
        if self.row_scale is not None:
            return self.row_scale
        if self.block:
            return self.scale.view(-1, self.members[0].scale_shape[1])
        return self.scale if self.scale.numel() == 1 else self.scale.view(-1, 1)

    # --- moves and copies ------------------------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ProjectionGroup":
        self._pending = None
        codes = move_bits(fn, self.codes.detach())
        if codes.data_ptr() != self.codes.data_ptr() or codes.device != self.codes.device or codes.is_meta:
            self.codes = nn.Parameter(codes, requires_grad=False)
        for name, tensor in self._buffers.items():
            if tensor is not None:
                self._buffers[name] = (move_value if name == "base_bias" else move_bits)(fn, tensor)
        before = self.bank.rank
        self.bank._apply(fn)
        if self.codes.is_meta:
            self.state.forget_adapters()
        if self.bank.rank is not before and not self.state.slots:
            self.bank.clear_all()  # to_empty() leaves anything there
        self._prepare_batches()
        self.state.version += 1
        return self

    def _prepare_batches(self) -> None:
        for batch in (self.state.bare, self.state.base):
            batch.prepare(self.codes.device)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out a result that waits to be claimed: copies start without."""
        return {**self.__dict__, "_pending": None}

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Nothing: the members save their own parts."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the members load their own parts."""


def _lay_out(weights: Sequence[Fp8Weight], paths: Sequence[str], widths: Sequence[Sequence[int]]) -> tuple[Member, ...]:
    members: list[Member] = []
    row = slice_ = scale = 0
    for weight, path, slices in zip(weights, paths, widths, strict=True):
        n = weight.codes.shape[0]
        members.append(Member(path, row, n, slice_, len(slices), scale, tuple(weight.scale.shape)))
        row, slice_, scale = row + n, slice_ + len(slices), scale + weight.scale.numel()
    return tuple(members)


def _cat(tensors: Sequence[Tensor | None]) -> Tensor | None:
    return None if any(t is None for t in tensors) else torch.cat([t for t in tensors if t is not None])


def _autocast(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
