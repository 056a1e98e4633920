"""K2 for more tokens than a decode batch: weights come by the tensor memory accelerator, x's codes row by row.

As in :mod:`linear` the rows are those of one adapter after the other and the up-projections are added in the epilogue
(EpiLoRA section 3.1, Figure 10), but tokens are the first operand: there are enough of them for the MMA.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torch_epilora.ops.arithmetic import cdiv, next_power_of_2
from torch_epilora.ops.checks import Groups
from torch_epilora.ops.plan import Tma
from torch_epilora.ops.triton.common import pick, rows_at, slot_scaling, sum_of, walk_tiles
from torch_epilora.ops.triton.launch import Shape, address, kept
from torch_epilora.ops.triton.linear import settle
from torch_epilora.ops.triton.shrink import stride_or_zero


@triton.jit
def add_adapters(
    acc, rows, valid, position, turn, turns, ids, counts, starts, ranks, h_ptr, b_ptrs, b_bias_ptrs, scaling_ptr,
    slice_index, within, n_valid, R, stride_bls, stride_bn, scaling_stride, widths, width,
    SELECT: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, HAS_LORA_BIAS: tl.constexpr,
    BR: tl.constexpr, B_STAGES: tl.constexpr,
):  # fmt: skip
    """Add each row's own up-projection, one group's after the other, BR ranks at a time.

    B is read up to its rank in steps of 8. SELECT: some of the last 8 may lie beyond a rank.
    """
    r = tl.arange(0, BR)
    chunks = tl.cdiv(R, BR)
    h_ptrs = h_ptr + (rows[:, None] * len(widths) + slice_index) * R
    for i in tl.range(0, turns * chunks, num_stages=B_STAGES):
        # found in registers: what is read from memory would hold up B's loads
        mine = turn == i // chunks
        slot = tl.sum(tl.where(mine, ids, 0), 0)
        start = tl.sum(tl.where(mine, starts, 0), 0)
        member = valid & (position >= start) & (position < start + tl.sum(tl.where(mine, counts, 0), 0))
        at = i % chunks * BR + r
        h = tl.load(h_ptrs + at[None, :], mask=member[:, None] & (at < R)[None, :], other=0.0)
        b_ptr = pick(b_ptrs, slice_index) + slot.to(tl.int64) * pick(stride_bls, slice_index)
        there = at < R
        if HAS_RANK:
            rank = tl.sum(tl.where(mine, ranks, 0), 0)
            there = there & (at < tl.cdiv(rank, 8) * 8)
        b = tl.load(
            b_ptr + within[None, :].to(tl.int64) * stride_bn + at[:, None],
            mask=n_valid[None, :] & there[:, None], other=0.0,
        )  # fmt: skip
        if SELECT:
            b = tl.where((at < rank)[:, None], b, 0.0)
        # settled, or ptxas would wait after every MMA of the main loop too (C7515)
        total = settle(tl.dot(h, b, input_precision="ieee"))
        if HAS_LORA_BIAS:
            scaling = slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING)
            b_bias_ptr = pick(b_bias_ptrs, slice_index) + slot.to(tl.int64) * width
            b_bias = tl.load(b_bias_ptr + within, mask=n_valid & (i % chunks == 0), other=0.0)
            total += (scaling * b_bias.to(tl.float32))[None, :]
        # a select, not a sum: an infinity in one tenant's B cannot reach another tenant's rows as 0 * inf
        acc = tl.where(member[:, None], acc + total, acc)
    return acc


@triton.jit(do_not_specialize=["M", "num_groups", "num_slots", "m_tiles", "n_tiles"])
def tma_kernel(
    w_desc, x_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, y_ptr, h_ptr, b_ptrs, b_bias_ptrs, rank_ptr,
    scaling_ptr, sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, K, R, num_groups, num_slots, m_tiles, n_tiles, stride_cm, stride_sm, stride_bls, stride_bn, rank_stride,
    scaling_stride, widths,
    GROUPS: tl.constexpr, LAYOUT: tl.constexpr, LORA: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr,
    HAS_LORA_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWIZZLE: tl.constexpr, STAGES: tl.constexpr,
    B_STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of BM rows in adapter order by BN outputs of one slice."""
    m_tile, slice_index, base, inner, width = walk_tiles(tl.program_id(0), m_tiles, n_tiles, widths, BN, SWIZZLE)
    within = inner + tl.arange(0, BN)
    n_valid = within < width
    n = base + within
    position = m_tile * BM + tl.arange(0, BM)
    rows = position
    if LORA:
        rows, _, ids, counts, starts = rows_at(
            position, sorted_ptr, ids_ptr, counts_ptr, starts_ptr, M, num_groups, GROUPS
        )  # fmt: skip
        # groups that have rows in this tile take turns
        here = (ids >= 0) & (ids < num_slots) & (counts > 0)
        here = here & (starts < (m_tile + 1) * BM) & (starts + counts > m_tile * BM)
        ranks = tl.zeros([GROUPS], tl.int32) + R
        if HAS_RANK:
            ranks = tl.minimum(tl.load(rank_ptr + slice_index * rank_stride + ids, mask=here, other=0), R)
            here = here & (ranks > 0)
        turn = tl.where(here, tl.cumsum(here.to(tl.int32), 0) - 1, -1)
        turns = tl.sum(here.to(tl.int32), 0)
    valid = (rows >= 0) & (rows < M) & (position < M)
    rows = rows.to(tl.int64)
    if LAYOUT == 1:
        w_scale = tl.load(w_scale_ptr + n, mask=n_valid, other=0.0)
    else:
        w_scale = tl.load(w_scale_ptr + tl.zeros([BN], tl.int32))
    k = tl.arange(0, BK)
    x_ptrs = x_ptr + rows[:, None] * stride_cm + k[None, :]
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        x = tl.load(x_ptrs + k0, mask=valid[:, None] & (k0 + k < K)[None, :], other=0.0)
        acc = tl.dot(x, w_desc.load([base + inner, k0]).T, acc)
    acc *= tl.load(x_scale_ptr + rows * stride_sm, mask=valid, other=0.0)[:, None]
    acc *= w_scale[None, :]
    if LORA:
        # as in the decode kernel: one more select in the way of the MMA only where a rank ends within 16 bytes
        if not HAS_RANK or tl.max(tl.where(here, ranks % 8, 0), 0) == 0:
            acc = add_adapters(
                acc, rows, valid, position, turn, turns, ids, counts, starts, ranks, h_ptr, b_ptrs, b_bias_ptrs,
                scaling_ptr, slice_index, within, n_valid, R, stride_bls, stride_bn, scaling_stride, widths, width,
                False, HAS_RANK, HAS_SCALING, HAS_LORA_BIAS, BR, B_STAGES,
            )  # fmt: skip
        else:
            acc = add_adapters(
                acc, rows, valid, position, turn, turns, ids, counts, starts, ranks, h_ptr, b_ptrs, b_bias_ptrs,
                scaling_ptr, slice_index, within, n_valid, R, stride_bls, stride_bn, scaling_stride, widths, width,
                True, HAS_RANK, HAS_SCALING, HAS_LORA_BIAS, BR, B_STAGES,
            )  # fmt: skip
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n_valid, other=0.0).to(tl.float32)[None, :]
    y_ptrs = y_ptr + rows[:, None] * sum_of(widths) + n[None, :]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=valid[:, None] & n_valid[None, :])


def prepare_tma(
    x: Tensor, stride_cm: int, stride_sm: int, weight: Tensor, bias: Tensor | None, layout: str, config: Tma,
    b: list[Tensor], b_bias: list[Tensor], rank: Tensor | None, scaling: Tensor | None, groups: Groups | None,
) -> Callable[..., Tensor]:  # fmt: skip
    """Prepare K2 for all operands of these sizes, strides and types; without ``b`` it computes the bare base.

    ``stride_cm`` and ``stride_sm`` are the row strides of x's codes and of their scale, 0 for one scale of all rows.
    What is returned takes the codes, their scale, the weight, its scale, bias, h, b, b_bias, rank, scaling, groups, and
    where it is there ``on`` (:data:`On`); the codes, their scale and the weight are tensors on a stream too.
    """
    (m, k), n, dtype, lora = x.shape, weight.shape[0], x.dtype, bool(b)
    launch = kept(
        tma_kernel, (x.get_device(), dtype), _tma_shape, m, k, tuple([t.shape[1] for t in b]) if lora else (n,),
        (b[0].shape[2], groups.ids.shape[0], b[0].shape[0]) if groups is not None and lora else (1, 0, 0),
        stride_cm, stride_sm, tuple([t.stride(0) for t in b]) or (0,), b[0].stride(1) if lora else 0,
        stride_or_zero(rank), stride_or_zero(scaling), layout, lora, rank is not None, scaling is not None,
        bool(b_bias), bias is not None, config,
    )  # fmt: skip
    descriptor = vars(TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]))
    del descriptor["base"]
    device = x.device

    def run(codes, scale, weight, weight_scale, bias, h, b, b_bias, rank, scaling, groups, on=None):
        on = codes if on is None else on
        made = torch.empty_strided((m, n), (n, 1), dtype=dtype, device=device)
        y = address(made, on)
        # what making a descriptor checks was found to be so when this was prepared
        weights = TensorDescriptor.__new__(TensorDescriptor)
        weights.__dict__.update(descriptor, base=weight)
        launch(
            on, weights, address(codes, on), address(scale, on), weight_scale, y if bias is None else bias, y,
            y if h is None else h, tuple(b) or (y,), tuple(b_bias) or (y,), y if rank is None else rank,
            y if scaling is None else scaling, *(groups[:4] if lora else (y, y, y, y)),
        )  # fmt: skip
        return made

    return run


def _tma_shape(
    m: int, k: int, widths: tuple[int, ...], adapters: tuple[int, int, int], stride_cm: int, stride_sm: int,
    stride_bls: tuple[int, ...], stride_bn: int, rank_stride: int, scaling_stride: int, layout: str, lora: bool,
    has_rank: bool, has_scaling: bool, has_lora_bias: bool, has_bias: bool, config: Tma,
) -> Shape:  # fmt: skip
    r, num_groups, slots = adapters
    n_tiles, m_tiles = sum(cdiv(w, config.block_n) for w in widths), cdiv(m, config.block_m)
    integers = (
        m, k, r, num_groups, slots, m_tiles, n_tiles, stride_cm, stride_sm, stride_bls, stride_bn, rank_stride,
        scaling_stride, widths,
    )  # fmt: skip
    constants = dict(
        GROUPS=next_power_of_2(max(num_groups, 1)), LAYOUT=1 if layout == "channel" else 0, LORA=lora,
        HAS_RANK=has_rank, HAS_SCALING=has_scaling, HAS_LORA_BIAS=has_lora_bias, HAS_BIAS=has_bias,
        BM=config.block_m, BN=config.block_n, BK=config.block_k,
        BR=min(max(next_power_of_2(r), 16), config.block_r), SWIZZLE=8, STAGES=config.num_stages,
        B_STAGES=config.b_stages, num_warps=config.num_warps,
        # a product fused into a later sum would round rows without adapter otherwise than the bare base does
        enable_fp_fusion=False,
    )  # fmt: skip
    return (m_tiles * n_tiles,), integers, constants
