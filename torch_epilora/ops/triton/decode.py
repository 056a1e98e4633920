"""The decode path (EpiLoRA sections 3.1 and 4.1) as one kernel, in which quantizer, shrink and GEMM overlap.

Programs have three roles. The first ones quantize parts of rows, the next ones make tiles of h = x A^T, and the rest,
the GEMM's, start beside them: they stream weights from the start, wait for x's codes before their main loop and for h
near its end. Roles of one grid need no second launch, so nothing of it is left to hide, and they share a
multiprocessor's memory evenly. Waiting is on counters in ``signal``; a program waits only for programs before it in
the grid, which the GPU starts first (CUTLASS's serial split-K relies on the same). Programmatic dependent launch
remains between calls: a call starts while the kernel before it ends, and waits for its end before it reads anything.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_epilora.ops.checks import BLOCK, Groups, aligned
from torch_epilora.ops.plan import Decode
from torch_epilora.ops.triton import quantize as q
from torch_epilora.ops.triton.common import (
    column_tile,
    on_device,
    pick,
    slot_rank,
    slot_scaling,
    sum_of,
    tile_rows,
)
from torch_epilora.ops.triton.linear import LAYOUTS, step
from torch_epilora.ops.triton.shrink import shrink_sum, stride_or_zero
from torch_epilora.ops.triton.signals import HEADER, take_signal
from torch_epilora.ops.triton.widen import half_scale, place

_SIDE = tl.constexpr(BLOCK)
_HEADER = tl.constexpr(HEADER)
# what the first integers of a signal count: quantizing programs and tiles of h done, GEMM programs that need no more
_CODES, _TILES, _LEFT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def prefetch(addresses, size):
    """Ask for ``size`` bytes (a multiple of 16, or 0) from each address for the L2 cache; later writes are still seen.

    A tensor of fewer elements than the program has threads is held, and asked for, more than once.
    """
    tl.inline_asm_elementwise(
        """{
        .reg .pred some; // dummy $0
        setp.ne.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $2;
        }""",
        "=r,l,r", [addresses.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def arrive(counter):
    """Count this program, after all it has written; return how many came before, whose writes are visible then."""
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")


@triton.jit
def announce(counter):
    """Count this program, after all that its threads have written."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(counter, expected):
    """Wait until ``expected`` programs were counted; what they wrote before is visible then."""
    arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")
    while arrived < expected:
        arrived = tl.atomic_add(counter, 0, sem="acquire", scope="gpu")


@triton.jit
def leave(signal_ptr, programs):
    """Count a program that has done its last waiting; the last one leaves the counters at zero for the next call."""
    if tl.atomic_add(signal_ptr + _LEFT, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(signal_ptr + _CODES, 0)
        tl.store(signal_ptr + _TILES, 0)
        tl.store(signal_ptr + _LEFT, 0)


@triton.jit
def quantize_part(
    x_ptr, codes_ptr, scale_ptr, part, K, MODE: tl.constexpr, CHUNKS: tl.constexpr, BQ: tl.constexpr, PART: tl.constexpr
):
    """Make PART of a row's codes, or of its fp16 operand; a row's scale is found by each of its parts alike."""
    cols = part * PART + tl.arange(0, PART)
    places = cols
    x = tl.load(x_ptr + cols, mask=cols < K, other=0.0).to(tl.float32)
    if MODE == 0 or MODE == 3:
        every = tl.arange(0, BQ)
        amax = tl.zeros([BQ], tl.float32)
        for i in tl.static_range(CHUNKS):
            chunk = tl.load(x_ptr + i * BQ + every, mask=i * BQ + every < K, other=0.0).to(tl.float32)
            amax = q.larger(amax, tl.abs(chunk))
        amax = tl.reduce(amax, 0, q.larger)
        if MODE == 3:
            scale, reciprocal = half_scale(amax)
            codes = (x * reciprocal).to(tl.float16)
            places = place(cols)
        else:
            scale = q.token_scale(amax)
            codes = q.to_codes(q.divide(x, scale))
        tl.store(scale_ptr, scale)
    elif MODE == 1:
        x = tl.reshape(x, [PART // _SIDE, _SIDE])
        scales = q.group_scale(tl.reduce(tl.abs(x), 1, q.larger))
        group = part * (PART // _SIDE) + tl.arange(0, PART // _SIDE)
        tl.store(scale_ptr + group, scales, mask=group * _SIDE < K)
        codes = q.to_codes(tl.reshape(q.divide(x, scales[:, None]), [PART]))
    else:
        codes = q.to_codes(x * tl.div_rn(1.0, tl.load(scale_ptr)))
    tl.store(codes_ptr + places, codes, mask=cols < K)


@triton.jit
def groups_of(ids_ptr, counts_ptr, num_groups, num_slots, GROUPS: tl.constexpr):
    """(numbers, slots, counts of the groups, and which of them have rows and an adapter)."""
    g = tl.arange(0, GROUPS)
    ids = tl.load(ids_ptr + g, mask=g < num_groups, other=-1)
    counts = tl.load(counts_ptr + g, mask=g < num_groups, other=0)
    return g, ids, counts, (ids >= 0) & (ids < num_slots) & (counts > 0)


@triton.jit
def shrink_tile(
    pid, x_ptr, planes_ptr, h_ptr, signal_ptr, a_ptrs, rank_ptr, scaling_ptr,
    sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, K, R, num_groups, num_slots, stride_xm, stride_al, stride_ar, rank_stride, scaling_stride,
    GROUPS: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, RANK_TILES: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Make one K-split of an active group's [BM, BR] tile of h; the split that ends last adds all in order.

    A tile beyond the active groups is announced as it is, so that a frozen grid expects one number of tiles.
    """
    g, ids, _, active = groups_of(ids_ptr, counts_ptr, num_groups, num_slots, GROUPS)
    turn = tl.cumsum(active.to(tl.int32), 0)
    split = pid % SPLIT
    tile = pid // SPLIT
    slice_index = (tile // RANK_TILES) % len(a_ptrs)
    number = tile // (RANK_TILES * len(a_ptrs))
    last = split == 0
    if number < tl.max(turn, 0):
        group = tl.sum(tl.where(active & (turn == number + 1), g, 0), 0)
        slot = tl.sum(tl.where(g == group, ids, 0), 0)
        rows, valid = tile_rows(group, 0, sorted_ptr, counts_ptr, starts_ptr, M, BM)
        rank = slot_rank(rank_ptr, rank_stride, slice_index, slot, R, HAS_RANK)
        r = (tile % RANK_TILES) * BR + tl.arange(0, BR)
        a_ptr = pick(a_ptrs, slice_index) + slot.to(tl.int64) * stride_al
        span = tl.cdiv(tl.cdiv(K, BS), SPLIT) * BS
        begin = split * span
        end = tl.minimum(begin + span, K)
        acc = shrink_sum(x_ptr, a_ptr, rows, valid, r, rank, begin, end, K, stride_xm, stride_ar, BM, BR, BS, STAGES)
        offs = (rows[:, None] * len(a_ptrs) + slice_index) * R + r[None, :]
        keep = valid[:, None] & (r < R)[None, :]
        last = True
        if SPLIT > 1:
            plane = M * len(a_ptrs) * R
            tl.store(planes_ptr + split * plane + offs, acc, mask=keep)
            last = arrive(signal_ptr + _HEADER + tile) == SPLIT - 1
            if last:
                tl.store(signal_ptr + _HEADER + tile, 0)
                acc = tl.load(planes_ptr + offs, mask=keep, other=0.0)
                for s in tl.static_range(1, SPLIT):
                    acc += tl.load(planes_ptr + s * plane + offs, mask=keep, other=0.0)
        if last:
            acc *= slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING)
            tl.store(h_ptr + offs, acc.to(h_ptr.dtype.element_ty), mask=keep)
    if last:
        announce(signal_ptr + _TILES)


@triton.jit
def load_b(slot, b_ptrs, slice_index, within, n_valid, r, R, stride_bls, stride_bn):
    """Read the slot's B [BN, BR], whatever its rank."""
    b_ptr = pick(b_ptrs, slice_index) + slot.to(tl.int64) * pick(stride_bls, slice_index)
    return tl.load(
        b_ptr + within[:, None].to(tl.int64) * stride_bn + r[None, :],
        mask=n_valid[:, None] & (r < R)[None, :], other=0.0,
    )  # fmt: skip


@triton.jit
def update(
    lora, b, h, member, slot, b_bias_ptrs, rank_ptr, scaling_ptr, slice_index, within, n_valid, width, r, R,
    rank_stride, scaling_stride, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, HAS_LORA_BIAS: tl.constexpr,
):  # fmt: skip
    """Put B h, a group's up-projection, into its members' columns of ``lora``.

    A select, not a sum: an infinity in one tenant's B cannot reach another tenant's rows as 0 * inf.
    """
    if HAS_RANK:
        rank = slot_rank(rank_ptr, rank_stride, slice_index, slot, R, HAS_RANK)
        b = tl.where((r < rank)[None, :], b, 0.0)
        member = member & (rank > 0)
    total = tl.dot(b, h, input_precision="ieee")
    if HAS_LORA_BIAS:
        scaling = slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING)
        b_bias_ptr = pick(b_bias_ptrs, slice_index) + slot.to(tl.int64) * width
        total += (scaling * tl.load(b_bias_ptr + within, mask=n_valid, other=0.0).to(tl.float32))[:, None]
    return tl.where(member[None, :], total, lora)


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
    GROUPS: tl.constexpr, LAYOUT: tl.constexpr, W8A8: tl.constexpr, LORA: tl.constexpr, MANY: tl.constexpr,
    QUANTIZE: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, HAS_LORA_BIAS: tl.constexpr,
    HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, OWN_CODES: tl.constexpr, CHUNKS: tl.constexpr, BQ: tl.constexpr,
    PART: tl.constexpr, RANK_TILES: tl.constexpr, SPLIT: tl.constexpr, SHRINK_R: tl.constexpr, SHRINK_K: tl.constexpr,
    SHRINK_STAGES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr,
    STAGES: tl.constexpr, B_STAGES: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program of one of the roles; the GEMM's make BN outputs of one slice for all rows.

    MANY: more than one group can have an adapter. If only one can, its B and h are read EARLY steps before the main
    loop ends. AHEAD bytes of each row of weights are asked for while the kernel before this one ends.
    """
    pid = tl.program_id(0)
    if QUANTIZE >= 0 and not OWN_CODES:
        if pid < quantize_programs:
            if PDL:
                gdc_wait()
            parts = tl.cdiv(K, PART)
            row = (pid // parts).to(tl.int64)
            quantize_part(
                x_ptr + row * stride_xm, codes_ptr + row * stride_cm, x_scale_ptr + row * stride_sm, pid % parts, K,
                QUANTIZE, CHUNKS, BQ, PART,
            )  # fmt: skip
            announce(signal_ptr + _CODES)
            return
    if LORA:
        if pid < quantize_programs + shrink_programs:
            if PDL:
                gdc_wait()
            shrink_tile(
                pid - quantize_programs, x_ptr, planes_ptr, h_ptr, signal_ptr, a_ptrs, rank_ptr, scaling_ptr,
                sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
                M, K, R, num_groups, num_slots, stride_xm, stride_al, stride_ar, rank_stride, scaling_stride,
                GROUPS, HAS_RANK, HAS_SCALING, BM, SHRINK_R, SHRINK_K, RANK_TILES, SPLIT, SHRINK_STAGES,
            )  # fmt: skip
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
    if PDL:
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
    if LORA:
        g, ids, counts, active = groups_of(ids_ptr, counts_ptr, num_groups, num_slots, GROUPS)
        starts = tl.load(starts_ptr + g, mask=g < num_groups, other=0)
        row = tl.load(sorted_ptr + rows, mask=valid, other=-1)
        h_ptrs = h_ptr + (rows[None, :] * len(widths) + slice_index) * R + r[:, None]
        h_mask = valid[None, :] & (r < R)[:, None]
    if OWN_CODES:
        # so few rows that each program makes its own codes sooner than it would hear of another's
        codes_ptr += tile.to(tl.int64) * M * stride_cm
        if QUANTIZE != 2:
            x_scale_ptr += tile.to(tl.int64) * M * stride_sm
        for token in range(M):
            for part in range(tl.cdiv(K, PART)):
                quantize_part(
                    x_ptr + token * stride_xm, codes_ptr + token * stride_cm, x_scale_ptr + token * stride_sm, part, K,
                    QUANTIZE, CHUNKS, BQ, PART,
                )  # fmt: skip
        tl.debug_barrier()
    elif QUANTIZE >= 0:
        wait_for(signal_ptr + _CODES, quantize_programs)
        if not LORA:
            leave(signal_ptr, linear_programs)
    rows64 = rows.to(tl.int64)
    WORDS: tl.constexpr = QUANTIZE == 3
    if (W8A8 and LAYOUT != 2) or WORDS:
        x_scale = tl.load(x_scale_ptr + rows64 * stride_sm, mask=valid, other=0.0)
    w_ptrs = w_rows[:, None] + k[None, :]
    if WORDS:
        w_ptrs = w_rows.to(tl.pointer_type(tl.int32), bitcast=True)[:, None] + tl.arange(0, BK // 4)[None, :]
    x_ptrs = codes_ptr + rows64[None, :] * stride_cm + k[:, None]
    acc = tl.zeros([BN, BM], tl.float32)
    early = tl.maximum(tl.cdiv(K, BK) - 1 - EARLY, 0) * BK
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        acc = step(
            acc, w_ptrs, x_ptrs, w_scale_ptr, x_scale_ptr, rows64, valid, n, n_valid, k0, K, stride_sm, w_blocks,
            LAYOUT, W8A8, EVEN_K, BK, WORDS,
        )  # fmt: skip
        # loads alone: an MMA of another type in here would have ptxas serialize the main loop's (C7515)
        if LORA and not MANY:
            if k0 == early:
                if PDL:
                    gdc_launch_dependents()
                # as the shrink, the first: counts of a larger batch may name groups whose rows are not here
                first = tl.min(tl.where(active, g, GROUPS), 0)
                slot = tl.sum(tl.where(g == first, ids, 0), 0)
                b = load_b(slot, b_ptrs, slice_index, within, n_valid, r, R, stride_bls, stride_bn)
                wait_for(signal_ptr + _TILES, shrink_tiles)
                leave(signal_ptr, linear_programs)
                h = tl.load(h_ptrs, mask=h_mask, other=0.0)
    if PDL and (MANY or not LORA):
        gdc_launch_dependents()
    if (W8A8 and LAYOUT != 2) or WORDS:
        acc *= x_scale[None, :]
    if LAYOUT != 2:
        acc *= w_scale[:, None]
    if LORA:
        # each row's place in adapter order, then its group's turn among those that are active; -1 is the bare base
        row = tl.where(rows < tl.sum(counts, 0), row, -1)
        position = tl.max(tl.where(row[:, None] == rows[None, :], rows[:, None], -1), 0)
        turn = tl.cumsum(active.to(tl.int32), 0)
        inside = (
            (position[:, None] >= 0)
            & (position[:, None] >= starts[None, :])
            & (position[:, None] < (starts + counts)[None, :])
        )
        order = tl.max(tl.where(inside & active[None, :], turn[None, :], 0), 1) - 1
        lora = tl.zeros([BN, BM], tl.float32)
        if MANY:
            wait_for(signal_ptr + _TILES, shrink_tiles)
            leave(signal_ptr, linear_programs)
            h = tl.load(h_ptrs, mask=h_mask, other=0.0)
            # the slots in that order, at most one a row: found in registers, where one read from memory inside the loop
            # would halve how far ahead B's loads are issued, and in few enough of them for one warp to search
            nth = active[None, :] & (turn[None, :] == rows[:, None] + 1)
            slots = tl.sum(tl.where(nth, ids[None, :], 0), 1)
            for i in tl.range(0, tl.max(turn, 0), num_stages=B_STAGES):
                slot = tl.sum(tl.where(rows == i, slots, 0), 0)
                b = load_b(slot, b_ptrs, slice_index, within, n_valid, r, R, stride_bls, stride_bn)
                lora = update(
                    lora, b, h, order == i, slot, b_bias_ptrs, rank_ptr, scaling_ptr, slice_index, within, n_valid,
                    width, r, R, rank_stride, scaling_stride, HAS_RANK, HAS_SCALING, HAS_LORA_BIAS,
                )  # fmt: skip
        else:
            lora = update(
                lora, b, h, order == 0, slot, b_bias_ptrs, rank_ptr, scaling_ptr, slice_index, within, n_valid,
                width, r, R, rank_stride, scaling_stride, HAS_RANK, HAS_SCALING, HAS_LORA_BIAS,
            )  # fmt: skip
        acc = tl.where((order >= 0)[None, :], acc + lora, acc)
    if HAS_BIAS:
        acc += bias.to(tl.float32)[:, None]
    y_ptrs = y_ptr + rows64[None, :] * sum_of(widths) + n[:, None]
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=valid[None, :] & n_valid[:, None])


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
        The GEMM's operand and its scale if they exist; with neither and ``quantize`` -1, x itself is it (W8A16).
    quantize : int
        A mode of the quantizer, to make the GEMM's operand in this launch; -1 otherwise. HALF needs K in multiples of
        the plan's block_k and rows of weights that start at multiples of 16 bytes.
    pdl : bool
        Launch as a programmatic dependent of the kernel before.
    a, b, groups : list of Tensor and Groups, optional
        Adapters; without them the result is the bare base.
    h : Tensor, optional
        The shrink's result [M, slices, R], to leave it out of the launch: what benchmarks subtract.
    """
    (m, k), n = x.shape, weight.shape[0]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    lora = bool(a)
    a, b, b_bias = a or [], b if a and b else [], b_bias if a and b_bias else []
    rank, scaling = (rank, scaling) if lora else (None, None)
    slices = max(len(a), 1)
    slots, r = (a[0].shape[0], a[0].shape[1]) if lora else (0, 1)
    num_groups = groups.ids.shape[0] if groups is not None and lora else 1
    active = min(num_groups, slots, m)
    shrink_r = min(max(triton.next_power_of_2(r), 16), config.shrink_r)
    rank_tiles = triton.cdiv(r, shrink_r)
    tiles = active * slices * rank_tiles if h is None else 0
    planes = y
    if h is None:
        h = torch.empty((m, slices, r), dtype=x.dtype, device=x.device) if lora else y
    if tiles and config.split_k > 1:
        planes = torch.empty((config.split_k, m, slices, r), dtype=torch.float32, device=x.device)
    widths = tuple(t.shape[1] for t in b) if lora else (n,)
    linear_programs = sum(triton.cdiv(w, config.block_n) for w in widths)
    half = quantize == q.HALF
    own_codes = quantize >= 0 and m <= config.own_codes
    operand = x if x_codes is None else x_codes
    per_row = x_scale is not None and quantize != q.STATIC and x_scale.shape[0] == m
    if quantize >= 0:
        rows = m * linear_programs if own_codes else m
        operand, made = q.empty_codes(rows, k, quantize, x.device)
        if made is not None:
            x_scale, per_row = made, True
    quantize_programs = m * triton.cdiv(k, config.part) if quantize >= 0 and not own_codes else 0
    chunk = q.row_block(k)
    with on_device(x):
        signal = take_signal(x.device, HEADER + tiles) if lora or quantize_programs else y
        decode_kernel[(quantize_programs + tiles * config.split_k + linear_programs,)](
            x, operand, x if x_scale is None else x_scale, weight, weight_scale, y if bias is None else bias, y,
            planes, h, signal, tuple(a) or (y,), tuple(b) or (y,), tuple(b_bias) or (y,), y if rank is None else rank,
            y if scaling is None else scaling, *(groups[:4] if groups is not None else (y, y, y, y)),
            m, k, r, num_groups, slots, quantize_programs, tiles * config.split_k, tiles, linear_programs,
            x.stride(0), operand.stride(0), x_scale.stride(0) if per_row else 0, weight.stride(0),
            a[0].stride(0) if lora else 0, a[0].stride(1) if lora else 0, tuple(t.stride(0) for t in b) or (0,),
            b[0].stride(1) if lora else 0, stride_or_zero(rank), stride_or_zero(scaling), triton.cdiv(k, BLOCK), widths,
            GROUPS=triton.next_power_of_2(num_groups), LAYOUT=LAYOUTS[layout], W8A8=x_scale is not None and not half,
            LORA=lora, MANY=active > 1, QUANTIZE=quantize, HAS_RANK=rank is not None, HAS_SCALING=scaling is not None,
            HAS_LORA_BIAS=bool(b_bias), HAS_BIAS=bias is not None, EVEN_K=k % config.block_k == 0,
            OWN_CODES=own_codes, CHUNKS=triton.cdiv(k, chunk) if quantize in (q.TOKEN, q.HALF) else 1, BQ=chunk,
            PART=config.part if quantize >= 0 else BLOCK, RANK_TILES=rank_tiles,
            SPLIT=config.split_k if tiles else 1, SHRINK_R=shrink_r, SHRINK_K=config.shrink_k,
            SHRINK_STAGES=config.shrink_stages, BM=config.block_m, BN=config.block_n, BK=config.block_k,
            BR=max(triton.next_power_of_2(r), 16), STAGES=config.num_stages, B_STAGES=config.b_stages,
            AHEAD=config.ahead if aligned(weight) else 0, EARLY=config.early, PDL=pdl, num_warps=config.num_warps,
            # as in K2: rows without adapter must round as the bare base does
            enable_fp_fusion=layout == "block",
            **({"launch_pdl": True} if pdl else {}),
        )  # fmt: skip
    return y
