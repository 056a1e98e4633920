"""K1 (EpiLoRA section 3.1): every adapter group's down-projection, and x's codes made in the same launch."""

from collections.abc import Callable
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_epilora.ops.arithmetic import cdiv, next_power_of_2
from torch_epilora.ops.checks import Groups
from torch_epilora.ops.plan import Shrink
from torch_epilora.ops.triton import quantize as q
from torch_epilora.ops.triton.common import pick, row_tile, slot_rank, slot_scaling, tile_rows
from torch_epilora.ops.triton.launch import Launch, Shape, kept


@triton.jit
def shrink_sum(
    x_ptr, a_ptr, rows, valid, r, rank, begin, end, K, stride_xm, stride_ar,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """acc[m, r] = sum of x[m, k] a[r, k] over the inputs from ``begin`` to ``end``; columns past the rank are zeros."""
    k = tl.arange(0, BK)
    acc = tl.zeros([BM, BR], tl.float32)
    for k0 in tl.range(begin, end, BK, num_stages=STAGES):
        x = tl.load(
            x_ptr + rows[:, None] * stride_xm + (k0 + k)[None, :],
            mask=valid[:, None] & (k0 + k < K)[None, :],
            other=0.0,
        )
        a = tl.load(
            a_ptr + r[None, :].to(tl.int64) * stride_ar + (k0 + k)[:, None],
            mask=(r < rank)[None, :] & ((k0 + k) < K)[:, None],
            other=0.0,
        )
        acc = tl.dot(x, a, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M", "num_groups", "num_slots", "quantize_rows"])
def shrink_kernel(
    x_ptr, codes_ptr, x_scale_ptr, h_ptr, a_ptrs, rank_ptr, scaling_ptr, sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, K, R, num_groups, num_slots, rank_tiles, quantize_rows,
    stride_xm, stride_sm, stride_al, stride_ar, rank_stride, scaling_stride,
    GROUPS: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, QUANTIZE: tl.constexpr, BQ: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs below ``quantize_rows`` quantize one row each; the others make one [BM, BR] tile of one K-split of h.

    h is [M, slices, R] in x's dtype, scaled, when SPLIT is 1, else fp32 planes [SPLIT, M, slices, R] that the consumer
    adds in order. Only rows of groups with an adapter are written, columns past the rank as zeros.
    """
    pid = tl.program_id(0)
    if QUANTIZE >= 0:
        if pid < quantize_rows:
            row = pid.to(tl.int64)
            q.quantize_row(x_ptr + row * stride_xm, codes_ptr + row * K, x_scale_ptr + row * stride_sm, K, QUANTIZE, BQ)
            return
    pid -= quantize_rows
    split = pid % SPLIT
    pid = pid // SPLIT
    r0 = (pid % rank_tiles) * BR
    pid = pid // rank_tiles
    slice_index = pid % len(a_ptrs)
    group, first = row_tile(pid // len(a_ptrs), ids_ptr, counts_ptr, num_groups, num_slots, GROUPS, BM)
    if group < 0:
        return
    slot = tl.load(ids_ptr + group)
    rows, valid = tile_rows(group, first, sorted_ptr, counts_ptr, starts_ptr, M, BM)
    rank = slot_rank(rank_ptr, rank_stride, slice_index, slot, R, HAS_RANK)
    r = r0 + tl.arange(0, BR)
    a_ptr = pick(a_ptrs, slice_index) + slot.to(tl.int64) * stride_al
    span = tl.cdiv(tl.cdiv(K, BK), SPLIT) * BK
    begin = split * span
    end = tl.minimum(begin + span, K)
    if r0 >= rank:  # nothing but zeros here: skip the reads of x
        end = begin
    acc = shrink_sum(x_ptr, a_ptr, rows, valid, r, rank, begin, end, K, stride_xm, stride_ar, BM, BR, BK, STAGES)
    offs = (rows[:, None] * len(a_ptrs) + slice_index) * R + r[None, :]
    keep = valid[:, None] & (r < R)[None, :]
    if SPLIT == 1:
        acc *= slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING)
        tl.store(h_ptr + offs, acc.to(h_ptr.dtype.element_ty), mask=keep)
    else:
        plane = split.to(tl.int64) * M * len(a_ptrs) * R
        tl.store(h_ptr + plane + offs, acc, mask=keep)


@triton.jit(do_not_specialize=["M", "num_groups", "num_slots"])
def sum_planes_kernel(
    planes_ptr, h_ptr, scaling_ptr, sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, R, num_groups, num_slots, scaling_stride,
    SLICES: tl.constexpr, GROUPS: tl.constexpr, HAS_SCALING: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Add planes: h = dtype(scaling * (plane 0 + plane 1 + ...)) for the rows of groups with an adapter."""
    group, first = row_tile(tl.program_id(0), ids_ptr, counts_ptr, num_groups, num_slots, GROUPS, BM)
    if group < 0:
        return
    slice_index = tl.program_id(1)
    slot = tl.load(ids_ptr + group)
    rows, valid = tile_rows(group, first, sorted_ptr, counts_ptr, starts_ptr, M, BM)
    scaling = slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING)
    for r0 in range(0, R, BR):
        r = r0 + tl.arange(0, BR)
        offs = (rows[:, None] * SLICES + slice_index) * R + r[None, :]
        keep = valid[:, None] & (r < R)[None, :]
        total = tl.zeros([BM, BR], tl.float32)
        for s in tl.static_range(SPLIT):
            total += tl.load(planes_ptr + tl.cast(s, tl.int64) * M * SLICES * R + offs, mask=keep, other=0.0)
        tl.store(h_ptr + offs, (total * scaling).to(h_ptr.dtype.element_ty), mask=keep)


def row_tiles(m: int, groups: int, block_m: int) -> int:
    """Bound the row tiles of any m rows in at most ``groups`` groups: what a frozen grid must launch."""
    return cdiv(m, block_m) + min(groups, m)


def stride_or_zero(t: Tensor | None) -> int:
    """Elements between slices of a per-slot vector: 0 when one vector serves all slices."""
    return t.stride(0) if t is not None and t.dim() == 2 else 0


def shrink_planes(
    x: Tensor,
    a: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    groups: Groups,
    config: Shrink,
    *,
    quantize: int = -1,
    x_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch K1.

    Parameters
    ----------
    quantize : int
        A mode of the quantizer, to make x's codes in the same launch; -1 for the shrink alone.
    x_scale : Tensor, optional
        The static scale, for the STATIC mode.
    out : Tensor, optional
        Where h goes when ``config.split_k`` is 1.

    Returns
    -------
    tuple of Tensor
        h (x's dtype [1, M, slices, R], or fp32 planes [split_k, M, slices, R] unless the plan reduces them), x's codes
        and their scale (x itself and None without quantization).
    """
    made = prepare_planes(x, a, rank, scaling, groups, config, quantize)
    return made(x, a, rank, scaling, groups, x_scale, out)


def prepare_planes(
    x: Tensor, a: list[Tensor], rank: Tensor | None, scaling: Tensor | None, groups: Groups, config: Shrink,
    quantize: int,
) -> Callable[..., tuple[Tensor, Tensor, Tensor | None]]:  # fmt: skip
    """Prepare K1 for all operands of these sizes, strides and types.

    What is returned takes x, a, rank, scaling, groups, and where they are there x_scale and out.
    """
    (m, k), (slots, r, _), slices, num_groups = x.shape, a[0].shape, len(a), groups.ids.shape[0]
    split, x_dtype = config.split_k, x.dtype
    shape, dtype = (split, m, slices, r), (x_dtype if split == 1 else torch.float32)
    kinds = x.get_device(), x_dtype
    shrink = kept(
        shrink_kernel, kinds, _shrink_shape, m, k, r, slices, num_groups, slots, x.stride(0),
        q.scale_stride(k, quantize), a[0].stride(0), a[0].stride(1), stride_or_zero(rank), stride_or_zero(scaling),
        rank is not None, scaling is not None, quantize, config,
    )  # fmt: skip
    add = _prepare_sum(kinds, split, m, slices, r, num_groups, slots, scaling) if config.reduce and split > 1 else None

    def run(x, a, rank, scaling, groups, x_scale=None, out=None):
        h = out if out is not None else torch.empty(shape, dtype=dtype, device=x.device)
        codes = x
        if quantize >= 0:
            codes, made = q.empty_codes(m, k, quantize, x.device)
            x_scale = x_scale if made is None else made
        some = x if scaling is None else scaling
        shrink(
            x, x, codes, x if x_scale is None else x_scale, h, tuple(a), x if rank is None else rank, some, *groups[:4]
        )
        if add is not None:
            total = torch.empty((1, *shape[1:]), dtype=x_dtype, device=x.device)
            add(x, h, total, some, *groups[:4])
            h = total
        return h, codes, x_scale

    return run


def _shrink_shape(
    m: int, k: int, r: int, slices: int, num_groups: int, slots: int, stride_xm: int, stride_sm: int, stride_al: int,
    stride_ar: int, rank_stride: int, scaling_stride: int, has_rank: bool, has_scaling: bool, quantize: int,
    config: Shrink,
) -> Shape:  # fmt: skip
    rank_tiles, tiles = cdiv(r, config.block_r), row_tiles(m, num_groups, config.block_m)
    quantize_rows = m if quantize >= 0 else 0
    integers = (
        m, k, r, num_groups, slots, rank_tiles, quantize_rows, stride_xm, stride_sm, stride_al, stride_ar, rank_stride,
        scaling_stride,
    )  # fmt: skip
    constants = dict(
        GROUPS=next_power_of_2(num_groups), HAS_RANK=has_rank, HAS_SCALING=has_scaling, QUANTIZE=quantize,
        BQ=q.row_block(k), BM=config.block_m, BR=config.block_r, BK=config.block_k, SPLIT=config.split_k,
        STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return (quantize_rows + tiles * slices * rank_tiles * config.split_k,), integers, constants


def sum_planes(planes: Tensor, scaling: Tensor | None, groups: Groups, slots: int, out: Tensor) -> Tensor:
    """Add K1's fp32 planes [split_k, M, slices, R] in order into ``out`` [M, slices, R], scaled and rounded."""
    add = _prepare_sum((out.get_device(), out.dtype), *planes.shape, groups.ids.shape[0], slots, scaling)
    add(out, planes, out, out if scaling is None else scaling, *groups[:4])
    return out


def _prepare_sum(
    kinds: tuple, split: int, m: int, slices: int, r: int, num_groups: int, slots: int, scaling: Tensor | None
) -> Launch:
    strides = stride_or_zero(scaling), scaling is not None
    return kept(sum_planes_kernel, kinds, _sum_shape, split, m, slices, r, num_groups, slots, *strides)


def _sum_shape(
    split: int, m: int, slices: int, r: int, num_groups: int, slots: int, scaling_stride: int, has_scaling: bool
) -> Shape:
    block_m = 16
    constants = dict(
        SLICES=slices, GROUPS=next_power_of_2(num_groups), HAS_SCALING=has_scaling, BM=block_m,
        BR=min(next_power_of_2(r), 128), SPLIT=split,
    )  # fmt: skip
    return (row_tiles(m, num_groups, block_m), slices), (m, r, num_groups, slots, scaling_stride), constants


def shrink(
    x: Tensor, a: list[Tensor], rank: Tensor | None, scaling: Tensor | None, groups: Groups, config: Shrink
) -> Tensor:
    """Make the public operator's h [M, slices, R], zero in rows without an adapter."""
    slots, r, _ = a[0].shape
    h = torch.zeros((x.shape[0], len(a), r), dtype=x.dtype, device=x.device)
    if config.split_k == 1:
        shrink_planes(x, a, rank, scaling, groups, config, out=h)
        return h
    planes, _, _ = shrink_planes(x, a, rank, scaling, groups, replace(config, reduce=False))
    return sum_planes(planes, scaling, groups, slots, h)
