"""Device functions the kernels share: which rows a tile has, which slice a column belongs to, an adapter's rank.

Kernels do not specialize on counts (tokens, groups, slots, tiles), so that a new batch size does not compile a kernel.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

ASM = tl.constexpr(not triton.knobs.runtime.interpret)
"""Whether there is inline assembly: Triton's interpreter has none, and runs plain twins of what is written in it."""


def on_device(t: torch.Tensor) -> AbstractContextManager:
    """Make the tensor's own GPU the current one; nothing to do where it is, or on the CPU."""
    elsewhere = t.is_cuda and t.device.index != torch.cuda.current_device()
    return torch.cuda.device(t.device) if elsewhere else nullcontext()


@triton.jit
def row_tile(
    tile, ids_ptr, counts_ptr, starts_ptr, num_groups, num_slots, GROUPS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """Find the tile-th tile of BM rows: (group, slot, first position among the sorted rows, its group's end).

    Tiles never span two groups and cover only groups with an adapter; group -1, of slot 0, is past the end. Each
    program scans the counts itself, so no work list is written to memory and a CUDA graph's fixed grid follows whatever
    the counts say at replay.
    """
    g = tl.arange(0, GROUPS)
    ids = tl.load(ids_ptr + g, mask=g < num_groups, other=-1)
    counts = tl.maximum(tl.load(counts_ptr + g, mask=g < num_groups, other=0), 0)
    starts = tl.load(starts_ptr + g, mask=g < num_groups, other=0)
    tiles = tl.where((ids >= 0) & (ids < num_slots), (counts + BM - 1) // BM, 0)
    ends = tl.cumsum(tiles, 0)
    group = tl.sum((ends <= tile).to(tl.int32), 0)
    begin = tl.sum(tl.where(g == group, starts + (tile - ends + tiles) * BM, 0), 0)
    stop = tl.sum(tl.where(g == group, starts + counts, 0), 0)
    # in registers: one more load would have to come back before any of A or B is asked for
    slot = tl.sum(tl.where(g == group, ids, 0), 0)
    return tl.where(tile < tl.sum(tiles, 0), group, -1), slot, begin, stop


@triton.jit
def tile_rows(begin, stop, sorted_ptr, M, BM: tl.constexpr):
    """(rows of the tile from position ``begin``, which of them exist), for any metadata."""
    position = begin + tl.arange(0, BM)
    inside = (position < stop) & (position >= 0) & (position < M)
    rows = tl.load(sorted_ptr + position, mask=inside, other=-1)
    valid = (rows >= 0) & (rows < M)
    return rows.to(tl.int64), valid


@triton.jit
def pick(values, index):
    """values[index] for a tuple of pointers or integers and a run-time index."""
    picked = values[0]
    for i in tl.static_range(1, len(values)):
        if index == i:
            picked = values[i]
    return picked


@triton.jit
def sum_of(values):
    """Sum of a tuple of integers."""
    summed = 0
    for i in tl.static_range(len(values)):
        summed += values[i]
    return summed


@triton.jit
def column_tile(tile, widths, BN: tl.constexpr):
    """(slice, its first column in the concatenated output, the tile's first column in the slice, the slice's width)."""
    index = 0
    start = 0
    inner = tile * BN
    width = widths[0]
    passed = 0
    base = 0
    for i in tl.static_range(0, len(widths) - 1):
        passed += (widths[i] + BN - 1) // BN
        base += widths[i]
        if tile >= passed:
            index = i + 1
            start = base
            inner = (tile - passed) * BN
            width = widths[i + 1]
    return index, start, inner, width


@triton.jit
def walk_tiles(pid, m_tiles, n_tiles, widths, BN: tl.constexpr, SWIZZLE: tl.constexpr):
    """(row tile, then what ``column_tile`` says) of a program of K2.

    Neighbours share weights: SWIZZLE row tiles walk the columns together, so that a wave reads few tiles of each.
    """
    band = pid // (SWIZZLE * n_tiles)
    band_rows = tl.minimum(m_tiles - band * SWIZZLE, SWIZZLE)
    m_tile = band * SWIZZLE + (pid % (SWIZZLE * n_tiles)) % band_rows
    index, base, inner, width = column_tile((pid % (SWIZZLE * n_tiles)) // band_rows, widths, BN)
    return m_tile, index, base, inner, width


@triton.jit
def rows_at(position, sorted_ptr, ids_ptr, counts_ptr, starts_ptr, M, num_groups, GROUPS: tl.constexpr):
    """(rows at positions of the batch in adapter order; the groups' numbers, slots, counts and starts)."""
    g = tl.arange(0, GROUPS)
    ids = tl.load(ids_ptr + g, mask=g < num_groups, other=-1)
    counts = tl.load(counts_ptr + g, mask=g < num_groups, other=0)
    starts = tl.load(starts_ptr + g, mask=g < num_groups, other=0)
    # past the last counted row the list may be stale; those rows are padding and stand where they are
    listed = position < tl.minimum(tl.sum(counts, 0), M)
    rows = tl.where(listed, tl.load(sorted_ptr + position, mask=listed, other=0), position)
    return rows, g, ids, counts, starts


@triton.jit
def slot_rank(rank_ptr, rank_stride, slice_index, slot, R, HAS_RANK: tl.constexpr):
    """Columns of the slot's A and B that are real: rank[slice, slot], at most R; all of them without a rank vector."""
    rank = R
    if HAS_RANK:
        rank = tl.minimum(tl.load(rank_ptr + slice_index * rank_stride + slot), R)
    return rank


@triton.jit
def slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING: tl.constexpr):
    """Read the slot's scaling for this slice; 1 without a scaling vector."""
    scaling = 1.0
    if HAS_SCALING:
        scaling = tl.load(scaling_ptr + slice_index * scaling_stride + slot)
    return scaling
