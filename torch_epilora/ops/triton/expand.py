"""Expand-add: the up-projection added to an output that is already there (the hybrid path, after the vendor's GEMM).

Tiles run over the concatenated output and never cross a slice, whose widths are kernel arguments (EpiLoRA appendix D).
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from torch_epilora.ops.arithmetic import cdiv, next_power_of_2
from torch_epilora.ops.checks import Groups
from torch_epilora.ops.plan import Expand
from torch_epilora.ops.triton.common import (
    column_tile,
    pick,
    row_tile,
    slot_rank,
    slot_scaling,
    tile_rows,
)
from torch_epilora.ops.triton.launch import Shape, kept
from torch_epilora.ops.triton.shrink import row_tiles, stride_or_zero


@triton.jit
def load_h(h_ptrs, mask, plane_stride, scaling, PLANES: tl.constexpr, DTYPE: tl.constexpr):
    """Read a tile of h: as stored when K1 did not split K, else its planes added in order, scaled and rounded."""
    if PLANES == 1:
        return tl.load(h_ptrs, mask=mask, other=0.0)
    total = tl.load(h_ptrs, mask=mask, other=0.0)
    for s in tl.static_range(1, PLANES):
        total += tl.load(h_ptrs + tl.cast(s, tl.int64) * plane_stride, mask=mask, other=0.0)
    return (total * scaling).to(DTYPE)


@triton.jit
def load_b(b_ptr, n, n_valid, r, rank, R, stride_bn, HAS_RANK: tl.constexpr):
    """Read B^T [BR, BN]: the load stops at R, whose divisibility is known; a select drops what is past the rank."""
    b = tl.load(
        b_ptr + n[None, :].to(tl.int64) * stride_bn + r[:, None], mask=n_valid[None, :] & (r < R)[:, None], other=0.0
    )
    if HAS_RANK:
        b = tl.where((r < rank)[:, None], b, 0.0)
    return b


@triton.jit(do_not_specialize=["M", "num_groups", "num_slots", "column_runs"])
def expand_kernel(
    y_ptr, h_ptr, b_ptrs, b_bias_ptrs, rank_ptr, scaling_ptr, sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, R, num_groups, num_slots, column_runs, stride_ym, plane_stride, stride_bls, stride_bn, rank_stride,
    scaling_stride, widths,
    GROUPS: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, HAS_BIAS: tl.constexpr,
    PLANES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, RUN: tl.constexpr, ONCE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Add to RUN columns of one slice, BM rows of one group: y += h B^T + scaling * b_bias in fp32, rounded once.

    The search for the group and the load of h serve the whole run. ONCE: all ranks fit one chunk, so h stays in
    registers.
    """
    pid = tl.program_id(0)
    group, first = row_tile(pid // column_runs, ids_ptr, counts_ptr, num_groups, num_slots, GROUPS, BM)
    if group < 0:
        return
    slice_index, base, begin, width = column_tile(pid % column_runs, widths, RUN)
    slot = tl.load(ids_ptr + group)
    rank = slot_rank(rank_ptr, rank_stride, slice_index, slot, R, HAS_RANK)
    if rank <= 0:
        return
    rows, valid = tile_rows(group, first, sorted_ptr, counts_ptr, starts_ptr, M, BM)
    scaling = slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING)
    b_ptr = pick(b_ptrs, slice_index) + slot.to(tl.int64) * pick(stride_bls, slice_index)
    b_bias_ptr = pick(b_bias_ptrs, slice_index) + slot.to(tl.int64) * width
    h_ptrs = h_ptr + (rows[:, None] * len(widths) + slice_index) * R
    r = tl.arange(0, BR)
    if ONCE:
        h_mask = valid[:, None] & (r < R)[None, :]
        h = load_h(h_ptrs + r[None, :], h_mask, plane_stride, scaling, PLANES, y_ptr.dtype.element_ty)
        h = tl.where((r < rank)[None, :], h, 0.0)
    for column in tl.range(begin, tl.minimum(begin + RUN, width), BN, num_stages=STAGES):
        n = column + tl.arange(0, BN)
        y_ptrs = y_ptr + rows[:, None] * stride_ym + (base + n)[None, :]
        y_mask = valid[:, None] & (n < width)[None, :]
        y = tl.load(y_ptrs, mask=y_mask, other=0.0)
        acc = tl.zeros([BM, BN], tl.float32)
        if ONCE:
            b = load_b(b_ptr, n, n < width, r, rank, R, stride_bn, HAS_RANK)
            acc = tl.dot(h, b, acc, input_precision="ieee")
        else:
            for r0 in tl.range(0, rank, BR, num_stages=1):
                part = load_h(
                    h_ptrs + r0 + r[None, :], valid[:, None] & (r0 + r < R)[None, :], plane_stride, scaling, PLANES,
                    y_ptr.dtype.element_ty,
                )  # fmt: skip
                part = tl.where((r0 + r < rank)[None, :], part, 0.0)
                b = load_b(b_ptr, n, n < width, r0 + r, rank, R, stride_bn, HAS_RANK)
                acc = tl.dot(part, b, acc, input_precision="ieee")
        if HAS_BIAS:
            bias = tl.load(b_bias_ptr + n, mask=n < width, other=0.0)
            acc += (scaling * bias.to(tl.float32))[None, :]
        tl.store(y_ptrs, (y.to(tl.float32) + acc).to(y_ptr.dtype.element_ty), mask=y_mask)


def expand_add(
    y: Tensor,
    h: Tensor,
    b: list[Tensor],
    b_bias: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    groups: Groups,
    config: Expand,
) -> None:
    """Launch the expand over h [planes, M, slices, R], as K1 leaves it."""
    add = prepare_expand(y.shape[0], y.stride(0), h.shape[3], h.shape[0], b, b_bias, rank, scaling, groups, config)
    add(y, h, b, b_bias, rank, scaling, groups)


def prepare_expand(
    m: int, stride_ym: int, r: int, planes: int, b: list[Tensor], b_bias: list[Tensor], rank: Tensor | None,
    scaling: Tensor | None, groups: Groups, config: Expand,
) -> Callable[..., None]:  # fmt: skip
    """Prepare the expand for all operands of these sizes, strides and types; what is returned takes expand_add's."""
    expand = kept(
        expand_kernel, (b[0].get_device(), b[0].dtype), _expand_shape, m, r, groups.ids.shape[0], b[0].shape[0], planes,
        tuple(t.shape[1] for t in b), stride_ym, m * len(b) * r, tuple(t.stride(0) for t in b), b[0].stride(1),
        stride_or_zero(rank), stride_or_zero(scaling), rank is not None, scaling is not None, bool(b_bias), config,
    )  # fmt: skip

    def run(y, h, b, b_bias, rank, scaling, groups):
        expand(
            y, y, h, tuple(b), tuple(b_bias) or (y,), y if rank is None else rank, y if scaling is None else scaling,
            *groups[:4],
        )  # fmt: skip

    return run


def _expand_shape(
    m: int, r: int, num_groups: int, slots: int, planes: int, widths: tuple[int, ...], stride_ym: int,
    plane_stride: int, stride_bls: tuple[int, ...], stride_bn: int, rank_stride: int, scaling_stride: int,
    has_rank: bool, has_scaling: bool, has_bias: bool, config: Expand,
) -> Shape:  # fmt: skip
    run = config.block_n * config.run
    column_runs = sum(cdiv(w, run) for w in widths)
    integers = (
        m, r, num_groups, slots, column_runs, stride_ym, plane_stride, stride_bls, stride_bn, rank_stride,
        scaling_stride, widths,
    )  # fmt: skip
    constants = dict(
        GROUPS=next_power_of_2(num_groups), HAS_RANK=has_rank, HAS_SCALING=has_scaling, HAS_BIAS=has_bias,
        PLANES=planes, BM=config.block_m, BN=config.block_n, BR=config.block_r, RUN=run, ONCE=r <= config.block_r,
        STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
    return (column_runs * row_tiles(m, num_groups, config.block_m),), integers, constants
