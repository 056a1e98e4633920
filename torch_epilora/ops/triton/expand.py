"""Expand-add: the up-projection added to an output that is already there (the hybrid path, after the vendor's GEMM).

Tiles run over the concatenated output and never cross a slice, whose widths are kernel arguments (EpiLoRA appendix D).
"""

from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

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
from torch_epilora.ops.triton.sync import prefetch


@triton.jit
def load_b(b_ptr, n, n_valid, r, rank, R, stride_bn, SELECT: tl.constexpr, HAS_RANK: tl.constexpr):
    """Read B^T [BR, BN] up to its rank in steps of 8; SELECT drops those of the last 8 that lie beyond it."""
    there = r < R
    if HAS_RANK:
        there = there & (r < tl.cdiv(rank, 8) * 8)
    b = tl.load(
        b_ptr + n[None, :].to(tl.int64) * stride_bn + r[:, None], mask=n_valid[None, :] & there[:, None], other=0.0
    )
    if SELECT:
        b = tl.where((r < rank)[:, None], b, 0.0)
    return b


@triton.jit
def ask_for_rows(b_ptr, n, width, ranks, stride_bn):
    """Ask for so many ranks of rows n of B, in the whole 16 bytes that can be asked for: none past their end."""
    first = (b_ptr + n.to(tl.int64) * stride_bn).to(tl.int64)
    end = first + ranks * (b_ptr.dtype.element_ty.primitive_bitwidth // 8)
    first, end = first & -16, end & -16
    prefetch(first, tl.where(n < width, end - first, 0).to(tl.int32))


@triton.jit
def add_run(
    y_ptr, h_ptrs, b_ptr, b_bias_ptr, rows, valid, base, begin, width, rank, R, slot, slice_index, scaling_ptr,
    stride_ym, stride_bn, scaling_stride,
    SELECT: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, HAS_BIAS: tl.constexpr, BN: tl.constexpr,
    BR: tl.constexpr, RUN: tl.constexpr, ONCE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add one group's up-projection to RUN columns of its rows, BN at a time."""
    r = tl.arange(0, BR)
    if ONCE:
        h = tl.load(h_ptrs + r[None, :], mask=valid[:, None] & (r < R)[None, :], other=0.0)
        h = tl.where((r < rank)[None, :], h, 0.0)
    for column in tl.range(begin, tl.minimum(begin + RUN, width), BN, num_stages=STAGES):
        n = column + tl.arange(0, BN)
        y_ptrs = y_ptr + rows[:, None] * stride_ym + (base + n)[None, :]
        y_mask = valid[:, None] & (n < width)[None, :]
        y = tl.load(y_ptrs, mask=y_mask, other=0.0)
        acc = y.to(tl.float32)
        if ONCE:
            b = load_b(b_ptr, n, n < width, r, rank, R, stride_bn, SELECT, HAS_RANK)
            acc = tl.dot(h, b, acc, input_precision="ieee")
        else:
            for r0 in tl.range(0, rank, BR, num_stages=1):
                part = tl.load(h_ptrs + r0 + r[None, :], mask=valid[:, None] & (r0 + r < R)[None, :], other=0.0)
                part = tl.where((r0 + r < rank)[None, :], part, 0.0)
                b = load_b(b_ptr, n, n < width, r0 + r, rank, R, stride_bn, SELECT, HAS_RANK)
                acc = tl.dot(part, b, acc, input_precision="ieee")
        if HAS_BIAS:
            bias = tl.load(b_bias_ptr + n, mask=n < width, other=0.0)
            scaling = slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING)
            acc += (scaling * bias.to(tl.float32))[None, :]
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=y_mask)


@triton.jit(do_not_specialize=["M", "num_groups", "num_slots", "column_runs"])
def expand_kernel(
    y_ptr, h_ptr, b_ptrs, b_bias_ptrs, rank_ptr, scaling_ptr, sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, R, num_groups, num_slots, column_runs, stride_ym, stride_bls, stride_bn, rank_stride,
    scaling_stride, widths,
    GROUPS: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr, RUN: tl.constexpr, ONCE: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Add to RUN columns of one slice, BM rows of one group: y += h B^T + scaling * b_bias in fp32, rounded once.

    The search for the group and the load of h serve the whole run. ONCE: all ranks fit one chunk, so h stays in
    registers. EARLY: only y and h are the work of kernels that may still run; B is asked for before their end.
    """
    pid = tl.program_id(0)
    group, slot, first, stop = row_tile(
        pid // column_runs, ids_ptr, counts_ptr, starts_ptr, num_groups, num_slots, GROUPS, BM
    )
    slice_index, base, begin, width = column_tile(pid % column_runs, widths, RUN)
    b_ptr = pick(b_ptrs, slice_index) + slot.to(tl.int64) * pick(stride_bls, slice_index)
    rows, valid = tile_rows(first, stop, sorted_ptr, M, BM)
    rank = tl.where(group >= 0, slot_rank(rank_ptr, rank_stride, slice_index, slot, R, HAS_RANK), 0)
    if EARLY:
        if rank > 0:
            read = tl.minimum(tl.cdiv(rank, 8) * 8, R)
            ask_for_rows(b_ptr, begin + tl.arange(0, BN), tl.minimum(begin + RUN, width), read, stride_bn)
        gdc_wait()
    if rank <= 0:
        return
    b_bias_ptr = pick(b_bias_ptrs, slice_index) + slot.to(tl.int64) * width
    h_ptrs = h_ptr + (rows[:, None] * len(widths) + slice_index) * R
    # as in the decode kernel: one more select in the way of the MMA only where a rank ends within 16 bytes
    if not HAS_RANK or rank % 8 == 0:
        add_run(
            y_ptr, h_ptrs, b_ptr, b_bias_ptr, rows, valid, base, begin, width, rank, R, slot, slice_index, scaling_ptr,
            stride_ym, stride_bn, scaling_stride,
            False, HAS_RANK, HAS_SCALING, HAS_BIAS, BN, BR, RUN, ONCE, STAGES,
        )  # fmt: skip
    else:
        add_run(
            y_ptr, h_ptrs, b_ptr, b_bias_ptr, rows, valid, base, begin, width, rank, R, slot, slice_index, scaling_ptr,
            stride_ym, stride_bn, scaling_stride,
            True, HAS_RANK, HAS_SCALING, HAS_BIAS, BN, BR, RUN, ONCE, 1,
        )  # fmt: skip


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
    """Launch the expand over h [M, slices, R]."""
    add = prepare_expand(y.shape[0], y.stride(0), h.shape[2], b, b_bias, rank, scaling, groups, config)
    add(y, h, b, b_bias, rank, scaling, groups)


def prepare_expand(
    m: int, stride_ym: int, r: int, b: list[Tensor], b_bias: list[Tensor], rank: Tensor | None,
    scaling: Tensor | None, groups: Groups, config: Expand, *, pdl: bool = False,
) -> Callable[..., None]:  # fmt: skip
    """Prepare the expand for all operands of these sizes, strides and types.

    What is returned takes expand_add's, and where it is there ``on`` (:data:`On`).

    Where ``pdl`` is there, an early one is a dependent of the kernel before: when that one starts, all but y and h must
    be there.
    """
    expand = kept(
        expand_kernel, (b[0].get_device(), b[0].dtype), _expand_shape, m, r, groups.ids.shape[0], b[0].shape[0],
        tuple(t.shape[1] for t in b), stride_ym, tuple(t.stride(0) for t in b), b[0].stride(1), stride_or_zero(rank),
        stride_or_zero(scaling), rank is not None, scaling is not None, bool(b_bias), pdl and config.early, config,
    )  # fmt: skip

    def run(y, h, b, b_bias, rank, scaling, groups, on=None):
        expand(
            y if on is None else on, y, h, tuple(b), tuple(b_bias) or (y,), y if rank is None else rank,
            y if scaling is None else scaling, *groups[:4],
        )  # fmt: skip

    return run


def _expand_shape(
    m: int, r: int, num_groups: int, slots: int, widths: tuple[int, ...], stride_ym: int, stride_bls: tuple[int, ...],
    stride_bn: int, rank_stride: int, scaling_stride: int, has_rank: bool, has_scaling: bool, has_bias: bool,
    early: bool, config: Expand,
) -> Shape:  # fmt: skip
    run = config.block_n * config.run
    column_runs = sum(cdiv(w, run) for w in widths)
    integers = (
        m, r, num_groups, slots, column_runs, stride_ym, stride_bls, stride_bn, rank_stride, scaling_stride, widths,
    )  # fmt: skip
    constants = dict(
        GROUPS=next_power_of_2(num_groups), HAS_RANK=has_rank, HAS_SCALING=has_scaling, HAS_BIAS=has_bias,
        BM=config.block_m, BN=config.block_n, BR=config.block_r, RUN=run, ONCE=r <= config.block_r,
        STAGES=config.num_stages, EARLY=early, num_warps=config.num_warps,
    )  # fmt: skip
    if early:
        constants["launch_pdl"] = True
    return (column_runs * row_tiles(m, num_groups, config.block_m),), integers, constants
