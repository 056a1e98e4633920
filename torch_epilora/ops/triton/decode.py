"""The decode path (EpiLoRA sections 3.1 and 4.1) as one kernel, in which quantizer, shrink and GEMM overlap.

Programs have three roles. The first ones quantize parts of rows, the next ones make tiles of h = x A^T, and the rest,
the GEMM's, start beside them: they stream weights from the start, wait for x's codes before their main loop and for h
near its end. Roles of one grid need no second launch, so nothing of it is left to hide, and they share a
multiprocessor's memory evenly. Waiting is on counters in ``signal``; a program waits only for programs before it in
the grid, which the GPU starts first (CUTLASS's serial split-K relies on the same). Programmatic dependent launch
remains between calls: a call starts while the kernel before it ends, and waits for its end before it reads anything.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_epilora.ops.arithmetic import cdiv, next_power_of_2
from torch_epilora.ops.checks import BLOCK, Groups, aligned, row_stride
from torch_epilora.ops.plan import DECODE_MAX_RANK, Decode, terms
from torch_epilora.ops.triton import quantize as q
from torch_epilora.ops.triton.common import (
    column_tile,
    on_device,
    pick,
    sum_of,
)
from torch_epilora.ops.triton.launch import Shape, kept
from torch_epilora.ops.triton.linear import LAYOUTS, settle, step
from torch_epilora.ops.triton.shrink import row_tiles, shrink_tile, stride_or_zero
from torch_epilora.ops.triton.signals import BESIDE, COUNTERS, HEADER, take_signal
from torch_epilora.ops.triton.sync import CODES, LEFT, TILES, announce, clear, leave, prefetch, wait_for

_COUNTERS, _BESIDE = tl.constexpr(COUNTERS), tl.constexpr(BESIDE)
_RANK_BITS = tl.constexpr(DECODE_MAX_RANK.bit_length())


@triton.jit
def groups_of(
    ids_ptr, counts_ptr, starts_ptr, rank_ptr, num_groups, num_slots, slice_index, R, rank_stride,
    GROUPS: tl.constexpr, HAS_RANK: tl.constexpr,
):  # fmt: skip
    """(adapters, counts, starts of the groups, and which of them are active: have rows and an adapter of any rank).

    An adapter is its slot and, if ranks are given, its rank in the low bits: one reduction finds both.
    """
    g = tl.arange(0, GROUPS)
    ids = tl.load(ids_ptr + g, mask=g < num_groups, other=-1)
    counts = tl.load(counts_ptr + g, mask=g < num_groups, other=0)
    starts = tl.load(starts_ptr + g, mask=g < num_groups, other=0)
    active = (ids >= 0) & (ids < num_slots) & (counts > 0)
    adapters = ids
    if HAS_RANK:
        ranks = tl.minimum(tl.load(rank_ptr + slice_index * rank_stride + ids, mask=active, other=0), R)
        active = active & (ranks > 0)
        adapters = (ids << _RANK_BITS) | ranks
    return adapters, counts, starts, active


@triton.jit
def unpack(adapter, R, HAS_RANK: tl.constexpr):
    """(slot, rank) of an adapter."""
    slot = adapter
    rank = R
    if HAS_RANK:
        slot = adapter >> _RANK_BITS
        rank = adapter - (slot << _RANK_BITS)
    return slot, rank


@triton.jit
def turns(row, adapters, counts, starts, active, GROUPS: tl.constexpr, BM: tl.constexpr):
    """(each row's turn, adapters and their turns, number of turns): active groups take turns in order; -1 is none.

    There are at most BM turns, as each has a row. All is found in registers: slots read from memory in the loop over
    turns would halve how far ahead B's loads are issued.
    """
    place = tl.arange(0, BM)
    turn = tl.where(active, tl.cumsum(active.to(tl.int32), 0), 0)
    row = tl.where(place < tl.sum(counts, 0), row, -1)
    position = tl.max(tl.where(row[:, None] == place[None, :], place[:, None], -1), 0)
    inside = (
        (position[:, None] >= 0)
        & (position[:, None] >= starts[None, :])
        & (position[:, None] < (starts + counts)[None, :])
    )
    # with a reduction last, Triton would hand its result to other threads only where it is used, behind the main loop
    mine = tl.max(tl.where(inside, turn[None, :], 0), 1) - 1
    last = tl.max(turn, 0)
    turn -= 1
    # up to 32 groups are searched as they are, in one instruction a turn; of more, those whose turn comes are lined up
    PLACES: tl.constexpr = max(BM, 32)
    if GROUPS > PLACES:
        nth = turn[:, None] == tl.arange(0, PLACES)[None, :]
        adapters = tl.sum(tl.where(nth, adapters[:, None], 0), 0)
        turn = tl.arange(0, PLACES)
    return mine, adapters, turn, last


@triton.jit
def first_of(adapters, counts, starts, active, R, GROUPS: tl.constexpr, HAS_RANK: tl.constexpr):
    """(slot, rank, first position, end) of the first active group, where no other has rows here."""
    g = tl.arange(0, GROUPS)
    first = g == tl.min(tl.where(active, g, GROUPS), 0)
    slot, rank = unpack(tl.sum(tl.where(first, adapters, 0), 0), R, HAS_RANK)
    start = tl.sum(tl.where(first, starts, 0), 0)
    return slot, rank, start, start + tl.sum(tl.where(first, counts, 0), 0)


@triton.jit
def one_turn(row, start, stop, BM: tl.constexpr):
    """Each row's turn, 0 or -1, if only positions from ``start`` to ``stop`` have one: less to find than for many."""
    place = tl.arange(0, BM)
    inside = (place >= start) & (place < stop)
    return tl.max(tl.where((row[:, None] == place[None, :]) & inside[:, None], 0, -1), 0)


@triton.jit
def load_b(slot, rank, b_ptrs, slice_index, within, there, r, R, stride_bls, stride_bn, HAS_RANK: tl.constexpr):
    """Read columns ``within`` of B, each of its own slot, up to its rank in steps of 8, [columns, BR]."""
    rows = pick(b_ptrs, slice_index) + slot.to(tl.int64) * pick(stride_bls, slice_index)
    rows += within.to(tl.int64) * stride_bn
    there = there[:, None] & (r < R)[None, :]
    if HAS_RANK:
        there = there & (r[None, :] < (tl.cdiv(rank, 8) * 8)[:, None])
    return tl.load(rows[:, None] + r[None, :], mask=there, other=0.0)


@triton.jit
def update(
    b, h, slot, rank, within, there, r, width, b_bias_ptrs, scaling_ptr, slice_index, scaling_stride,
    SELECT: tl.constexpr, HAS_SCALING: tl.constexpr, HAS_LORA_BIAS: tl.constexpr,
):  # fmt: skip
    """B h, an up-projection of all rows, and its bias; slot and rank for each row of B.

    SELECT: of the last 8 columns that were read some may lie beyond the rank.
    """
    if SELECT:
        b = tl.where(r[None, :] < rank[:, None], b, 0.0)
    total = tl.dot(b, h, input_precision="ieee")
    if HAS_LORA_BIAS:
        scaling = tl.full(slot.shape, 1.0, tl.float32)
        if HAS_SCALING:
            scaling = tl.load(scaling_ptr + slice_index * scaling_stride + slot, mask=there, other=0.0)
        b_bias_ptr = pick(b_bias_ptrs, slice_index) + slot.to(tl.int64) * width + within
        # settled, or ptxas would wait after every MMA (C7515)
        total = settle(total) + (scaling * tl.load(b_bias_ptr, mask=there, other=0.0).to(tl.float32))[:, None]
    return total


@triton.jit
def up_projections(
    h, mine, adapters, turn, last, b_ptrs, b_bias_ptrs, scaling_ptr, slice_index, inner, width, r, R, stride_bls,
    stride_bn, scaling_stride,
    SELECT: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, HAS_LORA_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, TOGETHER: tl.constexpr, B_STAGES: tl.constexpr,
):  # fmt: skip
    """Each row's own up-projection, [BN, BM]; several turns a step, one below the other: their MMAs do not wait."""
    lora = tl.zeros([BN, BM], tl.float32)
    which = tl.arange(0, TOGETHER * BN) // BN
    within = inner + tl.arange(0, TOGETHER * BN) % BN
    for i in tl.range(0, last, TOGETHER, num_stages=B_STAGES):
        adapter = tl.zeros([TOGETHER * BN], tl.int32)
        for j in tl.static_range(TOGETHER):
            adapter = tl.where(which == j, tl.sum(tl.where(turn == i + j, adapters, 0), 0), adapter)
        slot, rank = unpack(adapter, R, HAS_RANK)
        there = within < width
        if not HAS_RANK:  # else a turn past the last has rank 0
            there = there & (i + which < last)
        b = load_b(slot, rank, b_ptrs, slice_index, within, there, r, R, stride_bls, stride_bn, HAS_RANK)
        total = update(
            b, h, slot, rank, within, there, r, width, b_bias_ptrs, scaling_ptr, slice_index, scaling_stride,
            SELECT, HAS_SCALING, HAS_LORA_BIAS,
        )  # fmt: skip
        # a select, not a sum: an infinity in one tenant's B cannot reach another tenant's rows as 0 * inf
        total = tl.reshape(total, [TOGETHER, BN, BM])
        chosen = mine[None, :] == i + tl.arange(0, TOGETHER)[:, None]
        chosen = tl.sum(tl.where(chosen[:, None, :], total, 0.0), 0)
        lora = tl.where(((mine >= i) & (mine < i + TOGETHER))[None, :], chosen, lora)
    return lora


@triton.jit(
    do_not_specialize=[
        "M", "num_groups", "num_slots", "quantize_programs", "shrink_programs", "shrink_tiles", "linear_programs"
    ]
)  # fmt: skip
def decode_kernel(
    x_ptr, codes_ptr, x_scale_ptr, w_ptr, w_scale_ptr, bias_ptr, y_ptr, planes_ptr, h_ptr, signal_ptr,
    a_ptrs, b_ptrs, b_bias_ptrs, rank_ptr, scaling_ptr, sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, K, R, num_groups, num_slots, quantize_programs, shrink_programs, shrink_tiles, linear_programs,
    stride_xm, stride_cm, stride_sm, stride_wn, stride_al, stride_ar, stride_bls, stride_bn, rank_stride,
    scaling_stride, w_blocks, widths,
    GROUPS: tl.constexpr, LAYOUT: tl.constexpr, TERMS: tl.constexpr, LORA: tl.constexpr, MANY: tl.constexpr,
    QUANTIZE: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, HAS_LORA_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, CHUNKS: tl.constexpr, BQ: tl.constexpr,
    PART: tl.constexpr, RANK_TILES: tl.constexpr, SPLIT: tl.constexpr, SHRINK_M: tl.constexpr,
    SHRINK_R: tl.constexpr, SHRINK_K: tl.constexpr, SHRINK_STAGES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, BR: tl.constexpr, STAGES: tl.constexpr, TOGETHER: tl.constexpr, B_STAGES: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, OVERLAP: tl.constexpr, BESIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program of one of the roles; the GEMM's make BN outputs of one slice for all rows.

    MANY: more than one group can have an adapter. If only one can, its B and h are read EARLY steps before the main
    loop ends. AHEAD bytes of each row of weights are asked for while the kernel before this one ends. The kernel after
    this one may start before the main loop (OVERLAP) or near its end. BESIDE: only the kernel after this one needs what
    the kernel before it makes, so its end is waited for last.
    """
    if BESIDE:
        signal_ptr += _BESIDE
    pid = tl.program_id(0)
    if QUANTIZE >= 0:
        if pid < quantize_programs:
            if PDL and not BESIDE:
                gdc_wait()
            parts = tl.cdiv(K, PART)
            row = (pid // parts).to(tl.int64)
            q.quantize_part(
                x_ptr + row * stride_xm, codes_ptr + row * stride_cm, x_scale_ptr + row * stride_sm, pid % parts, K,
                M.to(tl.int64) * stride_cm, QUANTIZE, TERMS, CHUNKS, BQ, PART,
            )  # fmt: skip
            announce(signal_ptr + CODES)
            return
    if LORA:
        if pid < quantize_programs + shrink_programs:
            if PDL:
                gdc_wait()
            done = shrink_tile(
                pid - quantize_programs, x_ptr, planes_ptr, h_ptr, signal_ptr, a_ptrs, rank_ptr, scaling_ptr,
                sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
                M, K, R, num_groups, num_slots, stride_xm, stride_al, stride_ar, rank_stride, scaling_stride,
                GROUPS, HAS_RANK, HAS_SCALING, SHRINK_M, SHRINK_R, SHRINK_K, RANK_TILES, SPLIT, SHRINK_STAGES,
            )  # fmt: skip
            if done:
                announce(signal_ptr + TILES)
            return
    tile = pid - quantize_programs - shrink_programs
    slice_index, base, inner, width = column_tile(tile, widths, BN)
    within = inner + tl.arange(0, BN)
    n_valid = within < width
    n = base + within
    k = tl.arange(0, BK)
    r = tl.arange(0, BR)
    rows = tl.arange(0, BM)
    valid = rows < M
    w_rows = w_ptr + n.to(tl.int64) * stride_wn
    if AHEAD > 0:
        halves = tl.arange(0, 2) * (AHEAD // 2)
        prefetch(w_rows[:, None] + halves[None, :], tl.where(n_valid[:, None], AHEAD // 2, 0))
    if PDL and not BESIDE:
        gdc_wait()
    # what the epilogue needs is read first: it arrives while the main loop runs
    if LAYOUT == 1:
        w_scale = tl.load(w_scale_ptr + n, mask=n_valid, other=0.0)
    elif LAYOUT == 0:
        w_scale = tl.load(w_scale_ptr + tl.zeros([BN], tl.int32))
    if HAS_BIAS:
        bias = tl.load(bias_ptr + n, mask=n_valid, other=0.0)
    b = tl.zeros([BN, BR], y_ptr.dtype.element_ty)
    h = tl.zeros([BR, BM], y_ptr.dtype.element_ty)
    slot = 0
    rank = R
    start = 0
    stop = 0
    if LORA:
        adapters, counts, starts, active = groups_of(
            ids_ptr, counts_ptr, starts_ptr, rank_ptr, num_groups, num_slots, slice_index, R, rank_stride, GROUPS,
            HAS_RANK,
        )  # fmt: skip
        row = tl.load(sorted_ptr + rows, mask=valid, other=-1)
        h_ptrs = h_ptr + (rows[None, :] * len(widths) + slice_index) * R + r[:, None]
        h_mask = valid[None, :] & (r < R)[:, None]
        if QUANTIZE >= 0:
            # in the time that codes take to be made; with codes given it would hold the main loop up
            if MANY:
                mine, adapters, turn, last = turns(row, adapters, counts, starts, active, GROUPS, BM)
            else:
                slot, rank, start, stop = first_of(adapters, counts, starts, active, R, GROUPS, HAS_RANK)
                mine = one_turn(row, start, stop, BM)
                b = load_b(
                    slot + n * 0, rank + n * 0, b_ptrs, slice_index, within, n_valid, r, R, stride_bls, stride_bn,
                    HAS_RANK,
                )  # fmt: skip
    # the GEMM's columns: each row once, or once a term
    ALL_TERMS: tl.constexpr = 1 if TERMS == 1 else 2 if TERMS == 2 else 4
    COLS: tl.constexpr = BM * ALL_TERMS
    X_BLOCKS: tl.constexpr = LAYOUT == 2 and TERMS == 1
    col = tl.arange(0, COLS)
    col_valid = (col % BM < M) & (col // BM < TERMS)
    col_rows = (col // BM * M + col % BM).to(tl.int64)
    x_ptrs = codes_ptr + col_rows[None, :] * stride_cm + k[:, None]
    w_ptrs = w_rows[:, None] + k[None, :]
    acc = tl.zeros([BN, COLS], tl.float32)
    early = tl.maximum(tl.cdiv(K, BK) - 1 - EARLY, 0) * BK
    ticket = 0
    if QUANTIZE >= 0:
        wait_for(signal_ptr + CODES, quantize_programs)
        if not LORA:
            ticket = leave(signal_ptr + LEFT)
    if PDL and OVERLAP:
        gdc_launch_dependents()
    if not X_BLOCKS:
        x_scale = tl.load(x_scale_ptr + rows.to(tl.int64) * stride_sm, mask=valid, other=0.0)
    PROMOTE: tl.constexpr = TERMS > 1 and LAYOUT != 2
    part = acc
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        # W8A16 is added up in fp32 every 256 inputs, whatever BK: the tensor cores keep fewer bits of a long sum
        part = step(
            tl.zeros_like(acc) if PROMOTE and BK % 256 == 0 else part, w_ptrs, x_ptrs, w_scale_ptr, x_scale_ptr,
            col_rows, col_valid, n, n_valid, k0, K, stride_sm, w_blocks, LAYOUT, X_BLOCKS, EVEN_K, BK,
        )  # fmt: skip
        if PROMOTE and BK % 256 == 0:
            acc += part
        elif PROMOTE:
            full = (k0 + BK) % 256 == 0
            acc = tl.where(full, acc + part, acc)
            part = tl.where(full, 0.0, part)
        # loads alone: an MMA of another type in here would have ptxas serialize the main loop's (C7515)
        if LORA and not MANY:
            if k0 == early:
                if PDL and not OVERLAP:
                    gdc_launch_dependents()
                if QUANTIZE < 0:
                    slot, rank, start, stop = first_of(adapters, counts, starts, active, R, GROUPS, HAS_RANK)
                    b = load_b(
                        slot + n * 0, rank + n * 0, b_ptrs, slice_index, within, n_valid, r, R, stride_bls, stride_bn,
                        HAS_RANK,
                    )  # fmt: skip
                wait_for(signal_ptr + TILES, shrink_tiles)
                ticket = leave(signal_ptr + LEFT)
                h = tl.load(h_ptrs, mask=h_mask, other=0.0)
    if PDL and not OVERLAP and (MANY or not LORA):
        gdc_launch_dependents()
    if not PROMOTE or BK % 256 != 0:
        acc += part
    if TERMS > 1:
        # each term was made 32 times as large as what it stands for beside the one before
        share = ((127 - 5 * tl.arange(0, ALL_TERMS)) << 23).to(tl.float32, bitcast=True)
        acc = tl.sum(tl.reshape(acc, [BN, ALL_TERMS, BM]) * share[None, :, None], 1)
    if not X_BLOCKS:
        acc *= x_scale[None, :]
    if LAYOUT != 2:
        acc *= w_scale[:, None]
    if LORA:
        if MANY:
            if QUANTIZE < 0:
                mine, adapters, turn, last = turns(row, adapters, counts, starts, active, GROUPS, BM)
            wait_for(signal_ptr + TILES, shrink_tiles)
            ticket = leave(signal_ptr + LEFT)
            h = tl.load(h_ptrs, mask=h_mask, other=0.0)
            # each B is read up to its rank; registers for what lies beyond a rank that ends within 16 bytes are paid
            # for only in a batch that has one
            if not HAS_RANK or tl.max(tl.where(turn >= 0, adapters & 7, 0), 0) == 0:
                lora = up_projections(
                    h, mine, adapters, turn, last, b_ptrs, b_bias_ptrs, scaling_ptr, slice_index, inner, width, r, R,
                    stride_bls, stride_bn, scaling_stride,
                    False, HAS_RANK, HAS_SCALING, HAS_LORA_BIAS, BM, BN, TOGETHER, B_STAGES,
                )  # fmt: skip
            else:
                lora = up_projections(
                    h, mine, adapters, turn, last, b_ptrs, b_bias_ptrs, scaling_ptr, slice_index, inner, width, r, R,
                    stride_bls, stride_bn, scaling_stride,
                    True, HAS_RANK, HAS_SCALING, HAS_LORA_BIAS, BM, BN, 1, 2,
                )  # fmt: skip
        else:
            if QUANTIZE < 0:
                mine = one_turn(row, start, stop, BM)
            lora = update(
                b, h, slot + n * 0, rank + n * 0, within, n_valid, r, width, b_bias_ptrs, scaling_ptr, slice_index,
                scaling_stride, HAS_RANK, HAS_SCALING, HAS_LORA_BIAS,
            )  # fmt: skip
        acc = tl.where((mine >= 0)[None, :], acc + lora, acc)
    if HAS_BIAS:
        acc += bias.to(tl.float32)[:, None]
    y_ptrs = y_ptr + rows.to(tl.int64)[None, :] * sum_of(widths) + n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=valid[None, :] & n_valid[:, None])
    if LORA or QUANTIZE >= 0:
        for i in tl.static_range(_COUNTERS):
            clear(signal_ptr + i, ticket, linear_programs - 1)
    if PDL and BESIDE:
        gdc_wait()


def decode(
    x: Tensor,
    x_codes: Tensor | None,
    x_scale: Tensor | None,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    layout: str,
    config: Decode,
    *,
    quantize: int,
    pdl: bool,
    a: list[Tensor] | None = None,
    b: list[Tensor] | None = None,
    b_bias: list[Tensor] | None = None,
    rank: Tensor | None = None,
    scaling: Tensor | None = None,
    groups: Groups | None = None,
    h: Tensor | None = None,
) -> Tensor:
    """Launch the decode kernel.

    Parameters
    ----------
    x_codes, x_scale : Tensor, optional
        The GEMM's operand and its scale, if they exist.
    quantize : int
        A mode of the quantizer, to make the GEMM's operand in this launch; -1 otherwise.
    pdl : bool
        Launch as a programmatic dependent of the kernel before.
    a, b, groups : list of Tensor and Groups, optional
        Adapters; without them the result is the bare base.
    h : Tensor, optional
        The shrink's result [M, slices, R], to leave it out of the launch: what benchmarks subtract.
    """
    lora = bool(a)
    a, b, b_bias = a or [], b if a and b else [], b_bias if a and b_bias else []
    rank, scaling = (rank, scaling) if lora else (None, None)
    run = prepare_decode(
        x, x_codes, x_scale, weight, bias, layout, config, quantize, pdl, a, b, b_bias, rank, scaling, groups, h
    )
    with on_device(x):
        return run(x, x_codes, x_scale, weight, weight_scale, bias, a, b, b_bias, rank, scaling, groups, h)


def prepare_decode(
    x: Tensor, x_codes: Tensor | None, x_scale: Tensor | None, weight: Tensor, bias: Tensor | None, layout: str,
    config: Decode, quantize: int, pdl: bool, a: list[Tensor], b: list[Tensor], b_bias: list[Tensor],
    rank: Tensor | None, scaling: Tensor | None, groups: Groups | None, h: Tensor | None = None, beside: bool = False,
) -> Callable[..., Tensor]:  # fmt: skip
    """Prepare the decode kernel for all operands of these sizes, strides, types and alignment of the weight.

    Lists are empty and per-slot vectors None for the bare base. What is returned takes the tensors that :func:`decode`
    does, in their order. ``beside``: the bare base runs beside the kernel before, which only the kernel after needs;
    ``before`` then launches that kernel, once all that this one writes has been taken.
    """
    (m, k), n, lora = x.shape, weight.shape[0], bool(a)
    dtype, slices = x.dtype, max(len(a), 1)
    slots, r = (a[0].shape[0], a[0].shape[1]) if lora else (0, 1)
    num_groups = groups.ids.shape[0] if groups is not None and lora else 1
    tiles = 0
    if lora and h is None:
        tiles = row_tiles(m, min(num_groups, slots), config.shrink_m) * slices * cdiv(r, _shrink_ranks(r, config))
    split = config.split_k if tiles and config.split_k > 1 else 0
    codes = terms("w8a16" if quantize == q.TERMS else "w8a8", dtype)
    stride_sm = q.scale_stride(k, quantize)
    if quantize < 0:
        stride_sm = row_stride(x_scale)
    stride_cm = k if quantize >= 0 else x.stride(0) if x_codes is None else x_codes.stride(0)
    kernel = kept(
        decode_kernel, (x.get_device(), dtype), _decode_shape, m, k, r, num_groups, slots, tiles,
        tuple(t.shape[1] for t in b) if lora else (n,), x.stride(0), stride_cm, stride_sm, weight.stride(0),
        a[0].stride(0) if lora else 0, a[0].stride(1) if lora else 0, tuple(t.stride(0) for t in b) or (0,),
        b[0].stride(1) if lora else 0, stride_or_zero(rank), stride_or_zero(scaling), layout, codes, quantize, lora,
        rank is not None, scaling is not None, bool(b_bias), bias is not None, aligned(weight), pdl, beside, config,
    )  # fmt: skip
    waits = lora or quantize >= 0

    def run(
        x, x_codes, x_scale, weight, weight_scale, bias, a, b, b_bias, rank, scaling, groups, h=None, before=None
    ):  # fmt: skip
        device = x.device
        y = torch.empty((m, n), dtype=dtype, device=device)
        if h is None:
            h = torch.empty((m, slices, r), dtype=dtype, device=device) if lora else y
        planes = torch.empty((split, m, slices, r), dtype=torch.float32, device=device) if split else y
        operand = x if x_codes is None else x_codes
        if quantize >= 0:
            operand, made = q.empty_codes(m, k, quantize, device, terms=codes)
            x_scale = x_scale if made is None else made
        signal = take_signal(device, HEADER + tiles) if waits else y
        if before is not None:
            before()
        kernel(
            x, x, operand, x if x_scale is None else x_scale, weight, weight_scale, y if bias is None else bias, y,
            planes, h, signal, tuple(a) or (y,), tuple(b) or (y,), tuple(b_bias) or (y,),
            y if rank is None else rank, y if scaling is None else scaling,
            *(groups[:4] if groups is not None else (y, y, y, y)),
        )  # fmt: skip
        return y

    return run


def _shrink_ranks(r: int, config: Decode) -> int:
    return min(max(next_power_of_2(r), 16), config.shrink_r)


def _decode_shape(
    m: int, k: int, r: int, num_groups: int, slots: int, tiles: int, widths: tuple[int, ...], stride_xm: int,
    stride_cm: int, stride_sm: int, stride_wn: int, stride_al: int, stride_ar: int, stride_bls: tuple[int, ...],
    stride_bn: int, rank_stride: int, scaling_stride: int, layout: str, codes: int, quantize: int, lora: bool,
    has_rank: bool, has_scaling: bool, has_lora_bias: bool, has_bias: bool, aligned_weight: bool, pdl: bool,
    beside: bool, config: Decode,
) -> Shape:  # fmt: skip
    quantize_programs = m * cdiv(k, config.part) if quantize >= 0 else 0
    shrink_programs = tiles * config.split_k
    linear_programs = sum(cdiv(w, config.block_n) for w in widths)
    integers = (
        m, k, r, num_groups, slots, quantize_programs, shrink_programs, tiles, linear_programs, stride_xm, stride_cm,
        stride_sm, stride_wn, stride_al, stride_ar, stride_bls, stride_bn, rank_stride, scaling_stride,
        cdiv(k, BLOCK), widths,
    )  # fmt: skip
    chunk, shrink_r = q.row_block(k), _shrink_ranks(r, config)
    constants = dict(
        # as many as one instruction adds up, where there are fewer
        GROUPS=max(next_power_of_2(num_groups), 32), LAYOUT=LAYOUTS[layout], TERMS=codes, LORA=lora,
        MANY=min(num_groups, slots, m) > 1, QUANTIZE=quantize, HAS_RANK=has_rank, HAS_SCALING=has_scaling,
        HAS_LORA_BIAS=has_lora_bias, HAS_BIAS=has_bias, EVEN_K=k % config.block_k == 0,
        CHUNKS=cdiv(k, chunk) if quantize in (q.TOKEN, q.TERMS) else 1, BQ=chunk,
        PART=config.part if quantize >= 0 else BLOCK, RANK_TILES=cdiv(r, shrink_r),
        SPLIT=config.split_k if tiles else 1, SHRINK_M=config.shrink_m, SHRINK_R=shrink_r, SHRINK_K=config.shrink_k,
        SHRINK_STAGES=config.shrink_stages, BM=config.block_m, BN=config.block_n, BK=config.block_k,
        BR=max(next_power_of_2(r), 16), STAGES=config.num_stages, TOGETHER=config.together,
        B_STAGES=config.b_stages, AHEAD=config.ahead if quantize >= 0 and aligned_weight else 0, EARLY=config.early,
        # measured: another call's blocks beside the main loop pay where codes are made or nothing else is done
        OVERLAP=config.overlap and lora == (quantize >= 0), BESIDE=beside, PDL=pdl, num_warps=config.num_warps,
        # as in K2: rows without adapter must round as the bare base does
        enable_fp_fusion=layout == "block",
    )  # fmt: skip
    if pdl:
        constants["launch_pdl"] = True
    return (quantize_programs + shrink_programs + linear_programs,), integers, constants
