"""Gradients of the adapters' matrices: sums over each slot's tokens of outer products, all slices in one launch.

dA [R, K] = dh^T x and dB [N_i, R] = g^T h (EpiLoRA section 3.3): one of the factors is as wide as the layer, the other
has a slice's R columns. Sums are in fp32 and in a fixed order: tokens are split into as many parts as fill the GPU, and
the program that ends last adds them up one by one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_epilora.ops.arithmetic import cdiv, next_power_of_2
from torch_epilora.ops.triton.common import column_tile, on_device, pick
from torch_epilora.ops.triton.launch import Shape, kept
from torch_epilora.ops.triton.signals import HEADER, take_signal
from torch_epilora.ops.triton.sync import arrive

_HEADER = tl.constexpr(HEADER)
_TOKENS, _RANKS = 64, 64
_MOST_PARTS = 16
_PROGRAMS = 528
"""As many as keep the largest GPU busy, four on each multiprocessor."""


@triton.jit(do_not_specialize=["M", "num_groups", "tiles"])
def outer_kernel(
    wide_ptr, narrow_ptr, planes_ptr, signal_ptr, out_ptrs, sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, R, num_groups, tiles, stride_wide, stride_slot, stride_r, stride_d, widths,
    SHARED: tl.constexpr, GROUPS: tl.constexpr, BR: tl.constexpr, BD: tl.constexpr,
    BT: tl.constexpr, RANK_TILES: tl.constexpr, PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One part of a [BR, BD] tile of out[slot, r, d] = sum over the slot's tokens of narrow[t, slice, r] wide[t, d].

    SHARED: all slices have the same wide factor; otherwise each has its columns of it. Slots without tokens get zeros.
    """
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS
    r = (tile % RANK_TILES) * BR + tl.arange(0, BR)
    slice_index, base, begin, width = column_tile((tile // RANK_TILES) % tiles, widths, BD)
    slot = tile // (RANK_TILES * tiles)
    g = tl.arange(0, GROUPS)
    mine = tl.load(ids_ptr + g, mask=g < num_groups, other=-1) == slot
    start = tl.sum(tl.load(starts_ptr + g, mask=mine, other=0), 0)
    stop = tl.minimum(start + tl.maximum(tl.sum(tl.load(counts_ptr + g, mask=mine, other=0), 0), 0), M)
    start = tl.maximum(start, 0)
    span = tl.cdiv(tl.cdiv(tl.maximum(stop - start, 0), BT), PARTS) * BT
    first = start + part * span
    stop = tl.minimum(first + span, stop)
    d = begin + tl.arange(0, BD)
    column = d if SHARED else base + d
    acc = tl.zeros([BR, BD], tl.float32)
    for t0 in tl.range(first, stop, BT, num_stages=STAGES):
        position = t0 + tl.arange(0, BT)
        token = tl.load(sorted_ptr + position, mask=position < stop, other=-1)
        valid = (position < stop) & (token >= 0) & (token < M)
        token = token.to(tl.int64)
        wide = tl.load(
            wide_ptr + token[:, None] * stride_wide + column[None, :],
            mask=valid[:, None] & (d < width)[None, :], other=0.0,
        )  # fmt: skip
        narrow = tl.load(
            narrow_ptr + (token[None, :] * len(widths) + slice_index) * R + r[:, None],
            mask=valid[None, :] & (r < R)[:, None], other=0.0,
        )  # fmt: skip
        acc = tl.dot(narrow, wide, acc, input_precision="ieee")
    last = True
    if PARTS > 1:
        offs = tl.arange(0, BR)[:, None] * BD + tl.arange(0, BD)[None, :]
        planes_ptr += tile.to(tl.int64) * PARTS * BR * BD
        tl.store(planes_ptr + part * BR * BD + offs, acc)
        last = arrive(signal_ptr + _HEADER + tile) == PARTS - 1
        if last:
            tl.store(signal_ptr + _HEADER + tile, 0)
            acc = tl.load(planes_ptr + offs)
            for i in tl.static_range(1, PARTS):
                acc += tl.load(planes_ptr + i * BR * BD + offs)
    if last:
        out = pick(out_ptrs, slice_index) + slot.to(tl.int64) * pick(stride_slot, slice_index)
        out += r[:, None].to(tl.int64) * stride_r + d[None, :].to(tl.int64) * stride_d
        mask = (r < R)[:, None] & (d < width)[None, :]
        tl.store(out, acc.to(out_ptrs[0].dtype.element_ty), mask=mask)


def outer(
    wide: Tensor, narrow: Tensor, widths: tuple[int, ...], groups: tuple[Tensor, ...], out: list[Tensor], *,
    by_rank: bool,
) -> None:  # fmt: skip
    """Launch the sums.

    Parameters
    ----------
    wide : Tensor
        [M, D] of all slices side by side (dB's), or of each slice alike (dA's).
    narrow : Tensor
        [M, slices, R], contiguous.
    widths : tuple of int
        D of each slice.
    groups : tuple of Tensor
        Sorted tokens, ids, counts, starts.
    out : list of Tensor
        A slice's result: [slots, R, D] if ``by_rank``, which is dA's, or [slots, D, R]; contiguous.
    by_rank : bool
        Whether ``wide`` is shared and the results have the ranks before the columns.
    """
    (m, _, r), slots = narrow.shape, out[0].shape[0]
    tiles, config = _config(m, r, slots, widths, wide.dtype.itemsize)
    planes, signal = narrow, narrow
    if config["PARTS"] > 1:
        count = tiles * config["PARTS"] * config["BR"] * config["BD"]
        planes = torch.empty(count, dtype=torch.float32, device=wide.device)
        with on_device(wide):
            signal = take_signal(wide.device, HEADER + tiles)
    launch = kept(
        outer_kernel, (wide.get_device(), wide.dtype, out[0].dtype), _shape, m, r, slots, groups[1].shape[0],
        wide.stride(0), widths, by_rank, wide.dtype.itemsize,
    )  # fmt: skip
    launch(wide, wide, narrow, planes, signal, tuple(out), *groups)


def _config(m: int, r: int, slots: int, widths: tuple[int, ...], itemsize: int) -> tuple[int, dict]:
    """Count the tiles; choose their size and into how many parts tokens are split."""
    ranks, columns = min(max(next_power_of_2(r), 16), _RANKS), 128 if itemsize == 2 else 64
    tiles = slots * sum(cdiv(w, columns) for w in widths) * cdiv(r, ranks)
    parts = max(min(cdiv(_PROGRAMS, tiles), cdiv(m, 4 * _TOKENS), _MOST_PARTS), 1)
    return tiles, dict(BR=ranks, BD=columns, RANK_TILES=cdiv(r, ranks), PARTS=parts)


def _shape(
    m: int, r: int, slots: int, num_groups: int, stride_wide: int, widths: tuple[int, ...], by_rank: bool,
    itemsize: int,
) -> Shape:  # fmt: skip
    tiles, config = _config(m, r, slots, widths, itemsize)
    # of [slots, R, D] or [slots, D, R]; D differs by slice where ranks come last alone
    stride_r, stride_d = (widths[0], 1) if by_rank else (1, r)
    per_slot = tiles // (slots * config["RANK_TILES"])
    integers = (
        m, r, num_groups, per_slot, stride_wide, tuple(r * w for w in widths), stride_r, stride_d, widths,
    )  # fmt: skip
    constants = dict(
        SHARED=by_rank, GROUPS=next_power_of_2(num_groups), BT=_TOKENS, STAGES=3 if itemsize == 2 else 1,
        num_warps=4, **config,
    )  # fmt: skip
    return (tiles * config["PARTS"],), integers, constants
