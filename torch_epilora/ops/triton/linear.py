"""K2 (EpiLoRA section 3.1, Figure 10): the GEMM over rows sorted by adapter, with the up-projections in its epilogue.

The weights are the first operand and the tokens the second, so a decode batch fills Hopper's FP8 MMA from 16 tokens on.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_epilora.ops.arithmetic import cdiv, next_power_of_2
from torch_epilora.ops.checks import BLOCK, Groups, row_stride
from torch_epilora.ops.plan import Gemm
from torch_epilora.ops.triton.common import ASM, pick, rows_at, slot_rank, slot_scaling, sum_of, walk_tiles
from torch_epilora.ops.triton.launch import Shape, kept
from torch_epilora.ops.triton.shrink import stride_or_zero

LAYOUTS = {"tensor": 0, "channel": 1, "block": 2}
_SIDE = tl.constexpr(BLOCK)


@triton.jit
def settle(acc):
    """Wait for the MMAs behind acc: the next step would overwrite their first operand in registers (triton#9433)."""
    if ASM:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc


@triton.jit
def step(
    acc, w_ptrs, x_ptrs, w_scale_ptr, x_scale_ptr, rows, valid, n, n_valid, k0, K, stride_sm, w_blocks,
    LAYOUT: tl.constexpr, X_BLOCKS: tl.constexpr, EVEN_K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """acc[n, m] += sum of w[n, k] x[m, k] over BK inputs from k0, under 128x128 scales times those of the block.

    X_BLOCKS: x has scales by the 128-block too.
    """
    k = k0 + tl.arange(0, BK)
    if EVEN_K:
        w = tl.load(w_ptrs + k0, mask=n_valid[:, None], other=0.0)
        x = tl.load(x_ptrs + k0, mask=valid[None, :], other=0.0)
    else:
        w = tl.load(w_ptrs + k0, mask=n_valid[:, None] & (k < K)[None, :], other=0.0)
        x = tl.load(x_ptrs + k0, mask=valid[None, :] & (k < K)[:, None], other=0.0)
    w = w.to(x.dtype)
    if LAYOUT == 2:
        block = k0 // _SIDE
        scale = tl.load(w_scale_ptr + (n // _SIDE) * w_blocks + block, mask=n_valid, other=0.0)[:, None]
        if X_BLOCKS:
            scale = scale * tl.load(x_scale_ptr + rows * stride_sm + block, mask=valid, other=0.0)[None, :]
        acc += tl.dot(w, x, input_precision="ieee") * scale
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    if x.dtype == tl.float16 or x.dtype == tl.bfloat16:
        acc = settle(acc)
    return acc


@triton.jit(do_not_specialize=["M", "num_groups", "num_slots", "m_tiles", "n_tiles"])
def linear_kernel(
    x_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr, h_ptr, b_ptrs, b_bias_ptrs, rank_ptr, scaling_ptr,
    sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, K, R, num_groups, num_slots, m_tiles, n_tiles,
    stride_wn, stride_xm, stride_sm, stride_bls, stride_bn, rank_stride, scaling_stride, w_blocks, widths,
    GROUPS: tl.constexpr, LAYOUT: tl.constexpr, W8A8: tl.constexpr, LORA: tl.constexpr, HAS_RANK: tl.constexpr,
    HAS_SCALING: tl.constexpr, HAS_LORA_BIAS: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr, SWIZZLE: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of BN outputs of one slice by BM rows in adapter order."""
    m_tile, slice_index, base, inner, width = walk_tiles(tl.program_id(0), m_tiles, n_tiles, widths, BN, SWIZZLE)
    within = inner + tl.arange(0, BN)
    n_valid = within < width
    n = base + within
    position = m_tile * BM + tl.arange(0, BM)
    rows = position
    if LORA:
        rows, g, ids, counts, starts = rows_at(
            position, sorted_ptr, ids_ptr, counts_ptr, starts_ptr, M, num_groups, GROUPS
        )  # fmt: skip
    valid = (rows >= 0) & (rows < M) & (position < M)
    rows = rows.to(tl.int64)
    k = tl.arange(0, BK)
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * stride_wn + k[None, :]
    x_ptrs = x_ptr + rows[None, :] * stride_xm + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        acc = step(
            acc, w_ptrs, x_ptrs, w_scale_ptr, x_scale_ptr, rows, valid, n, n_valid, k0, K, stride_sm, w_blocks,
            LAYOUT, W8A8 and LAYOUT == 2, EVEN_K, BK,
        )  # fmt: skip
    if LAYOUT != 2:
        if W8A8:
            acc *= tl.load(x_scale_ptr + rows * stride_sm, mask=valid, other=0.0)[None, :]
        if LAYOUT == 1:
            acc *= tl.load(w_scale_ptr + n, mask=n_valid, other=0.0)[:, None]
        else:
            acc *= tl.load(w_scale_ptr)
    if LORA:
        here = (ids >= 0) & (ids < num_slots) & (counts > 0)
        here = here & (starts < (m_tile + 1) * BM) & (starts + counts > m_tile * BM)
        first = tl.min(tl.where(here, g, GROUPS), 0)
        last = tl.max(tl.where(here, g, -1), 0)
        for group in tl.range(first, last + 1, num_stages=1):
            slot = tl.load(ids_ptr + group)
            start = tl.load(starts_ptr + group)
            stop = start + tl.load(counts_ptr + group)
            rank = 0
            if (slot >= 0) & (slot < num_slots):
                rank = slot_rank(rank_ptr, rank_stride, slice_index, slot, R, HAS_RANK)
            if rank > 0:
                member = valid & (position >= start) & (position < stop)
                b_ptr = pick(b_ptrs, slice_index) + slot.to(tl.int64) * pick(stride_bls, slice_index)
                total = acc
                for r0 in tl.range(0, rank, BR, num_stages=1):
                    # loads stop at R, whose divisibility is known; a select drops what lies beyond the rank
                    r = r0 + tl.arange(0, BR)
                    b = tl.load(
                        b_ptr + within[:, None].to(tl.int64) * stride_bn + r[None, :],
                        mask=n_valid[:, None] & (r < R)[None, :], other=0.0,
                    )  # fmt: skip
                    h = tl.load(
                        h_ptr + (rows[None, :] * len(widths) + slice_index) * R + r[:, None],
                        mask=member[None, :] & (r < R)[:, None], other=0.0,
                    )  # fmt: skip
                    if HAS_RANK:
                        b = tl.where((r < rank)[None, :], b, 0.0)
                        h = tl.where((r < rank)[:, None], h, 0.0)
                    total = tl.dot(b, h, total, input_precision="ieee")
                if HAS_LORA_BIAS:
                    b_bias_ptr = pick(b_bias_ptrs, slice_index) + slot.to(tl.int64) * width
                    scaling = slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING)
                    total += (scaling * tl.load(b_bias_ptr + within, mask=n_valid, other=0.0).to(tl.float32))[:, None]
                # a select, not a sum: an infinity in one tenant's B cannot reach another tenant's rows as 0 * inf
                acc = tl.where(member[None, :], total, acc)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + n, mask=n_valid, other=0.0).to(tl.float32)[:, None]
    y_ptrs = y_ptr + rows[None, :] * sum_of(widths) + n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=valid[None, :] & n_valid[:, None])


def linear(
    x: Tensor,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    layout: str,
    out_dtype: torch.dtype,
    config: Gemm,
    *,
    h: Tensor | None = None,
    b: list[Tensor] | None = None,
    b_bias: list[Tensor] | None = None,
    rank: Tensor | None = None,
    scaling: Tensor | None = None,
    groups: Groups | None = None,
) -> Tensor:
    """Launch K2 over x's codes (with ``x_scale``) or x itself (W8A16); without ``h``, the bare base."""
    m, k = x.shape
    n = weight.shape[0]
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    b, b_bias = b or [], b_bias or []
    lora = h is not None
    stride_sm = row_stride(x_scale)
    kernel = kept(
        linear_kernel, (x.get_device(), x.dtype, out_dtype), _linear_shape, m, k,
        tuple([t.shape[1] for t in b]) if lora else (n,),
        (h.shape[2], groups.ids.shape[0], b[0].shape[0]) if groups is not None and h is not None else (1, 0, 0),
        weight.stride(0), x.stride(0), stride_sm, tuple([t.stride(0) for t in b]) or (0,), b[0].stride(1) if b else 0,
        stride_or_zero(rank), stride_or_zero(scaling), layout, x_scale is not None, lora, rank is not None,
        scaling is not None, bool(b_bias), bias is not None, config,
    )  # fmt: skip
    kernel(
        x, x, x if x_scale is None else x_scale, weight, weight_scale, y if bias is None else bias, y,
        y if h is None else h, tuple(b) or (y,), tuple(b_bias) or (y,), y if rank is None else rank,
        y if scaling is None else scaling, *(groups[:4] if groups is not None else (y, y, y, y)),
    )  # fmt: skip
    return y


def _linear_shape(
    m: int, k: int, widths: tuple[int, ...], adapters: tuple[int, int, int], stride_wn: int, stride_xm: int,
    stride_sm: int, stride_bls: tuple[int, ...], stride_bn: int, rank_stride: int,
    scaling_stride: int, layout: str, w8a8: bool, lora: bool, has_rank: bool, has_scaling: bool, has_lora_bias: bool,
    has_bias: bool, config: Gemm,
) -> Shape:  # fmt: skip
    r, num_groups, slots = adapters
    n_tiles, m_tiles = sum(cdiv(w, config.block_n) for w in widths), cdiv(m, config.block_m)
    integers = (
        m, k, r, num_groups, slots, m_tiles, n_tiles, stride_wn, stride_xm, stride_sm, stride_bls,
        stride_bn, rank_stride, scaling_stride, cdiv(k, BLOCK), widths,
    )  # fmt: skip
    constants = dict(
        GROUPS=next_power_of_2(max(num_groups, 1)), LAYOUT=LAYOUTS[layout], W8A8=w8a8, LORA=lora, HAS_RANK=has_rank,
        HAS_SCALING=has_scaling, HAS_LORA_BIAS=has_lora_bias, HAS_BIAS=has_bias, EVEN_K=k % config.block_k == 0,
        BM=config.block_m, BN=config.block_n, BK=config.block_k,
        BR=min(max(next_power_of_2(r), 16), config.block_r), SWIZZLE=8, STAGES=config.num_stages,
        num_warps=config.num_warps,
        # a product fused into the bias's sum would round rows without adapter otherwise than the bare base does;
        # block scales have their products inside the main loop, which both share
        enable_fp_fusion=layout == "block",
    )  # fmt: skip
    return (m_tiles * n_tiles,), integers, constants
