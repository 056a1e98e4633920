"""Every operator in plain torch: what the CPU runs, and the oracle of every test. Nothing here is tuned."""

import torch
from torch import Tensor
from torch.nn import functional

from torch_epilora.ops import checks

FP8_MAX = 448.0
MIN_SCALE = 1.0 / (FP8_MAX * 512.0)
"""Floor of per-token, per-channel, per-tensor and weight-block scales, that of vLLM's dynamic per-token quantizer."""
MIN_GROUP_AMAX = 1e-10
"""Floor of a 128-group's largest magnitude, that of vLLM's per-token-group quantizer."""


def _divide(x: Tensor, y: Tensor | float) -> Tensor:
    # by a tensor: torch on CUDA turns a division by a Python number into a multiplication, not the IEEE quotient
    return x / (y if isinstance(y, Tensor) else torch.full((), y, device=x.device))


def _to_codes(x: Tensor) -> Tensor:
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def _compact(codes: Tensor) -> Tensor:
    # a copy, since contiguous() leaves a single row its wide stride, which the fake does not have
    return codes.clone(memory_format=torch.contiguous_format)


def _amax(x: Tensor, dim: int) -> Tensor:
    return x.abs().amax(dim, keepdim=True) if x.shape[dim] else x.new_zeros(*x.shape[:dim], 1)


def quantize_fp8_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize per row as vLLM: scale = max(amax / 448, 1 / (448 * 512)), codes = e4m3(clamp(x / scale))."""
    checks.check_matrix("x", x)
    wide = x.float()
    scale = _divide(_amax(wide, 1), FP8_MAX).clamp_min(MIN_SCALE)
    return _to_codes(wide / scale), scale


def quantize_fp8_group(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize per row and 128 columns as vLLM: scale = max(amax, 1e-10) / 448; a short last group counts as one."""
    checks.check_matrix("x", x)
    m, k = x.shape
    groups = -(-k // checks.BLOCK)
    wide = functional.pad(x.float(), (0, groups * checks.BLOCK - k)).view(m, groups, checks.BLOCK)
    scale = _divide(wide.abs().amax(2).clamp_min(MIN_GROUP_AMAX), FP8_MAX)
    codes = _to_codes(wide / scale[..., None]).view(m, groups * checks.BLOCK)[:, :k]
    return _compact(codes), scale


def quantize_fp8_static(x: Tensor, scale: Tensor) -> Tensor:
    """Codes of x under a given scale: e4m3(clamp(x * (1 / scale))), the form of vLLM's per-tensor op."""
    checks.check_static(x, scale)
    return _to_codes(x.float() * _divide(torch.ones((), device=x.device), scale.reshape(())))


def quantize_fp8_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """One dynamic scale for all of x, codes by its reciprocal; vLLM's dynamic per-tensor op."""
    checks.check_matrix("x", x)
    amax = x.float().abs().amax().reshape(1) if x.numel() else torch.zeros(1, device=x.device)
    scale = _divide(amax, FP8_MAX).clamp_min(MIN_SCALE)
    return quantize_fp8_static(x, scale), scale


def quantize_fp8_weight(weight: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Codes and scale of a weight [N, K] per "tensor", "channel" (row) or 128x128 "block".

    Channels use the per-token form, which is what vLLM's ``fp8_per_channel`` computes; blocks divide by
    max(amax / 448, 1 / (448 * 512)).
    """
    n, k = checks.check_quantizable_weight(weight, layout)
    if layout == "tensor":
        return quantize_fp8_tensor(weight)
    if layout == "channel":
        return quantize_fp8_token(weight)
    side = checks.BLOCK
    rows, cols = -(-n // side), -(-k // side)
    tiles = functional.pad(weight.float(), (0, cols * side - k, 0, rows * side - n)).view(rows, side, cols, side)
    scale = _divide(tiles.abs().amax((1, 3)), FP8_MAX).clamp_min(MIN_SCALE)
    codes = _to_codes(tiles / scale[:, None, :, None]).view(rows * side, cols * side)
    return _compact(codes[:n, :k]), scale


def widen(codes: Tensor) -> Tensor:
    """Exact fp32 values of e4m3 codes.

    On the CPU by placing the code's bits in an fp16 word (bias 15 against 7: a factor of 2^8), which is several times
    faster than torch's conversion; the one value that e4m3 lacks, 480, stands for its NaN.
    """
    if codes.device.type != "cpu":
        return codes.float()
    bits = codes.contiguous().view(torch.int8).to(torch.int16)
    values = (((bits & 0x7F) << 7) | (bits & -0x8000)).view(torch.float16).float().mul_(256)
    return values.masked_fill_(values.abs() == 480, float("nan"))


def expand_scale(scale: Tensor, shape: tuple[int, int] | torch.Size) -> Tensor:
    """Broadcast a weight scale of any layout to [N, K] or to something that broadcasts over it."""
    layout = checks.scale_layout(shape, scale)
    if layout == "tensor":
        return scale.reshape(1, 1)
    if layout == "channel":
        return scale.reshape(-1, 1)
    wide = scale.repeat_interleave(checks.BLOCK, 0)[: shape[0]]
    return wide.repeat_interleave(checks.BLOCK, 1)[:, : shape[1]]


def dequantize_fp8(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Value of FP8 weight codes.

    Parameters
    ----------
    codes : Tensor
        e4m3 [N, K].
    scale : Tensor
        fp32 in any layout of ``torch_epilora.ops.scale_layout``.
    dtype : torch.dtype
        Of the result; the product is taken in fp32 and rounded once.

    Returns
    -------
    Tensor
        [N, K].

    Raises
    ------
    ValueError
        If the scale's shape fits no layout.
    """
    return (widen(codes) * expand_scale(scale, codes.shape)).to(dtype)


def adapter_groups(slots: Tensor, rows: int, num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stable sort of the rows by slot; see :func:`torch_epilora.ops.adapter_groups`."""
    checks.check_slots(slots, num_slots)
    entries = slots.shape[0]
    if rows < 0 or (entries == 0 and rows) or (entries and rows % entries):
        raise ValueError(f"rows: expected a multiple of the {entries} entries of slots, got {rows}.")
    if slots.device.type == "cpu" and entries and (slots.min() < -1 or slots.max() >= num_slots):
        raise ValueError(f"slots: expected values from -1 to {num_slots - 1}, got {slots.min()} to {slots.max()}.")
    row_slots = slots.repeat_interleave(rows // entries, output_size=rows) if entries else slots
    # a slot outside the bank cannot be reported from a GPU without a synchronization; it counts as the bare base
    row_slots = torch.where((row_slots < 0) | (row_slots >= num_slots), -1, row_slots)
    ids = torch.arange(-1, num_slots, dtype=torch.int32, device=slots.device)
    ordered, order = torch.sort(row_slots, stable=True)
    ends = torch.searchsorted(ordered, ids, right=True, out_int32=True)
    starts = functional.pad(ends, (1, 0))
    return order.to(torch.int32), ids, starts.diff(), starts


def _members(
    sorted_tokens: Tensor, ids: Tensor, counts: Tensor, starts: Tensor, slots: int, rows: int
) -> list[tuple[int, Tensor]]:
    """(slot, its rows) for every group that has an adapter and rows. Reads the metadata on the host.

    As in the kernels, positions and rows outside the batch do not exist.
    """
    m, found = rows, []
    for slot, count, start in zip(ids.tolist(), counts.tolist(), starts.tolist(), strict=False):
        if 0 <= slot < slots and count > 0:
            listed = sorted_tokens[max(start, 0) : max(min(start + count, m), 0)].long()
            found.append((slot, listed[(listed >= 0) & (listed < m)]))
    return found


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype that sums are taken in: fp32, for an x of fp64 that."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _per_slot(t: Tensor | None, slice_: int, slot: int, default: float) -> float:
    if t is None:
        return default
    return (t[slice_, slot] if t.dim() == 2 else t[slot]).item()


def shrink(
    x: Tensor,
    a: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    sorted_tokens: Tensor,
    ids: Tensor,
    counts: Tensor,
    starts: Tensor,
) -> Tensor:
    """Down-project: h[m, s, :] = x.dtype(scaling * x[m] A_s[slot of m]^T), zero where a row has no adapter."""
    checks.check_shrink(x, a, rank, scaling, sorted_tokens, ids, counts, starts)
    return shrink_rows(x, a, rank, scaling, _members(sorted_tokens, ids, counts, starts, a[0].shape[0], x.shape[0]))


def shrink_rows(
    x: Tensor, a: list[Tensor], rank: Tensor | None, scaling: Tensor | None, members: list[tuple[int, Tensor]]
) -> Tensor:
    """Down-project rows by slot, sums in :func:`wide` and rounded once."""
    width, into = a[0].shape[1], wide(x)
    h = x.new_zeros((x.shape[0], len(a), width))
    for slot, rows in members:
        for s, weights in enumerate(a):
            r = max(min(int(_per_slot(rank, s, slot, width)), width), 0)
            partial = x[rows].to(into) @ weights[slot, :r].to(into).t()
            h[rows, s, :r] = (partial * _per_slot(scaling, s, slot, 1.0)).to(x.dtype)
    return h


def expand_rows(
    acc: Tensor,
    h: Tensor,
    b: list[Tensor],
    b_bias: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    members: list[tuple[int, Tensor]],
) -> None:
    """Add every group's up-projection to the accumulator in place."""
    for slot, rows in members:
        start = 0
        for s, weights in enumerate(b):
            stop = start + weights.shape[1]
            r = min(int(_per_slot(rank, s, slot, weights.shape[2])), weights.shape[2])
            if r > 0:
                delta = h[rows, s, :r].to(acc.dtype) @ weights[slot, :, :r].to(acc.dtype).t()
                if b_bias:
                    delta += _per_slot(scaling, s, slot, 1.0) * b_bias[s][slot].float()
                acc[rows, start:stop] += delta
            start = stop


def expand_add_(
    y: Tensor,
    h: Tensor,
    b: list[Tensor],
    b_bias: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    sorted_tokens: Tensor,
    ids: Tensor,
    counts: Tensor,
    starts: Tensor,
) -> None:
    """Add the up-projection to y in place, y += h B^T + scaling * b_bias; rows without adapter keep their bits."""
    checks.check_expand(y, h, b, b_bias, rank, scaling, sorted_tokens, ids, counts, starts)
    members = _members(sorted_tokens, ids, counts, starts, b[0].shape[0], y.shape[0])
    for slot, rows in members:
        acc = y[rows].float()
        expand_rows(acc, h[rows], b, b_bias, rank, scaling, [(slot, torch.arange(len(rows), device=y.device))])
        y[rows] = acc.to(y.dtype)


def lora_add_(*arguments) -> None:
    """Add all that adapters add to what another base wrote, in place: shrink, then expand."""
    add = checks.Add(*arguments)
    checks.check_add(add)
    if not add.no_adapter.item():
        rows = add.groups[:4]
        h = shrink(add.x, add.a, add.rank, add.scaling, *rows)
        expand_add_(add.y, h, add.b, add.b_bias, add.rank, add.scaling, *rows)


def quantize_activations(
    x: Tensor, x_codes: Tensor | None, x_scale: Tensor | None, layout: str
) -> tuple[Tensor, Tensor]:
    """Codes and scale that W8A8 multiplies: those handed in, or x under its static scale, or per token or group."""
    if x_codes is not None and x_scale is not None:
        return x_codes, x_scale if x_scale.dim() == 2 else x_scale[:, None]
    if x_scale is not None:
        return quantize_fp8_static(x, x_scale), x_scale.reshape(1, 1)
    return quantize_fp8_group(x) if layout == "block" else quantize_fp8_token(x)


def multiply(
    x: Tensor, x_codes: Tensor | None, x_scale: Tensor | None, weight: Tensor, weight_scale: Tensor, compute: str
) -> Tensor:
    """Multiply by the base weight in fp32, in fp64 an x of that: scales outside of the sum, but those of blocks."""
    layout = checks.scale_layout(weight.shape, weight_scale)
    if compute == "w8a16":
        operand = x.to(wide(x))
        row_scale = operand.new_ones(())
    else:
        codes, row_scale = quantize_activations(x, x_codes, x_scale, layout)
        operand = widen(codes)
        if layout == "block":
            operand = operand * row_scale.repeat_interleave(checks.BLOCK, 1)[:, : x.shape[1]]
            row_scale = operand.new_ones(())
    if layout == "block":
        return operand @ dequantize_fp8(weight, weight_scale).to(operand.dtype).t() * row_scale
    return operand @ widen(weight).to(operand.dtype).t() * row_scale * weight_scale.reshape(1, -1)


def lora_linear(*arguments) -> Tensor:
    """Compute the whole projection in fp32, rounded once; see :func:`torch_epilora.ops.lora_linear`."""
    call = checks.Call(*arguments)
    checks.check_call(call)
    x = call.x
    acc = multiply(x, call.x_codes, call.x_scale, call.weight, call.weight_scale, call.compute)
    if call.has_adapters:
        groups = call.groups[:4]
        h = shrink(x, call.a, call.rank, call.scaling, *groups)
        members = _members(*groups, call.a[0].shape[0], x.shape[0])
        expand_rows(acc, h, call.b, call.b_bias, call.rank, call.scaling, members)
    if call.bias is not None:
        acc += call.bias.float()
    return acc.to(x.dtype)
