"""K1 (EpiLoRA section 3.1): every adapter group's down-projection h = x A^T."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from torch_epilora.ops.arithmetic import cdiv, next_power_of_2
from torch_epilora.ops.checks import Groups
from torch_epilora.ops.plan import Shrink
from torch_epilora.ops.triton.common import on_device, pick, row_tile, slot_rank, slot_scaling, tile_rows
from torch_epilora.ops.triton.launch import Shape, address, kept
from torch_epilora.ops.triton.signals import HEADER, take_signal
from torch_epilora.ops.triton.sync import arrive

_HEADER = tl.constexpr(HEADER)


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


@triton.jit
def shrink_tile(
    pid, x_ptr, planes_ptr, h_ptr, signal_ptr, a_ptrs, rank_ptr, scaling_ptr,
    sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, K, R, num_groups, num_slots, stride_xm, stride_al, stride_ar, rank_stride, scaling_stride,
    GROUPS: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr,
    BM: tl.constexpr, BR: tl.constexpr, BS: tl.constexpr, RANK_TILES: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Make one K-split of a [BM, BR] tile of h, of rows of one group; the split that ends last adds all in order.

    Returns whether the tile is done: the last split's program says so, and one of those of a tile past the last.
    """
    split = pid % SPLIT
    tile = pid // SPLIT
    slice_index = (tile // RANK_TILES) % len(a_ptrs)
    number = tile // (RANK_TILES * len(a_ptrs))
    group, slot, first, stop = row_tile(number, ids_ptr, counts_ptr, starts_ptr, num_groups, num_slots, GROUPS, BM)
    last = split == 0
    if group >= 0:
        rows, valid = tile_rows(first, stop, sorted_ptr, M, BM)
        rank = slot_rank(rank_ptr, rank_stride, slice_index, slot, R, HAS_RANK)
        scaling = slot_scaling(scaling_ptr, scaling_stride, slice_index, slot, HAS_SCALING)
        r = (tile % RANK_TILES) * BR + tl.arange(0, BR)
        a_ptr = pick(a_ptrs, slice_index) + slot.to(tl.int64) * stride_al
        span = tl.cdiv(tl.cdiv(K, BS), SPLIT) * BS
        begin = split * span
        end = tl.minimum(begin + span, K)
        if (tile % RANK_TILES) * BR >= rank:  # nothing but zeros here: skip the reads of x
            end = begin
        acc = shrink_sum(x_ptr, a_ptr, rows, valid, r, rank, begin, end, K, stride_xm, stride_ar, BM, BR, BS, STAGES)
        offs = (rows[:, None] * len(a_ptrs) + slice_index) * R + r[None, :]
        keep = valid[:, None] & (r < R)[None, :]
        last = True
        if SPLIT > 1:
            plane = M.to(tl.int64) * len(a_ptrs) * R
            tl.store(planes_ptr + split * plane + offs, acc, mask=keep)
            last = arrive(signal_ptr + _HEADER + tile) == SPLIT - 1
            if last:
                tl.store(signal_ptr + _HEADER + tile, 0)
                acc = tl.load(planes_ptr + offs, mask=keep, other=0.0)
                for s in tl.static_range(1, SPLIT):
                    acc += tl.load(planes_ptr + s * plane + offs, mask=keep, other=0.0)
        if last:
            acc *= scaling
            # past the rank stand zeros, and not what an infinite input or scaling times zero is
            acc = tl.where((r < rank)[None, :], acc, 0.0)
            tl.store(h_ptr + offs, acc.to(h_ptr.dtype.element_ty), mask=keep)
    return last


@triton.jit(do_not_specialize=["M", "num_groups", "num_slots"])
def shrink_kernel(
    x_ptr, planes_ptr, h_ptr, signal_ptr, a_ptrs, rank_ptr, scaling_ptr, sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
    M, K, R, num_groups, num_slots, stride_xm, stride_al, stride_ar, rank_stride, scaling_stride,
    GROUPS: tl.constexpr, HAS_RANK: tl.constexpr, HAS_SCALING: tl.constexpr, BM: tl.constexpr, BR: tl.constexpr,
    BK: tl.constexpr, RANK_TILES: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Make tiles of h. PDL: the kernel after this one may start at once; it must wait before it ends."""
    if PDL:
        gdc_launch_dependents()
    shrink_tile(
        tl.program_id(0), x_ptr, planes_ptr, h_ptr, signal_ptr, a_ptrs, rank_ptr, scaling_ptr,
        sorted_ptr, ids_ptr, counts_ptr, starts_ptr,
        M, K, R, num_groups, num_slots, stride_xm, stride_al, stride_ar, rank_stride, scaling_stride,
        GROUPS, HAS_RANK, HAS_SCALING, BM, BR, BK, RANK_TILES, SPLIT, STAGES,
    )  # fmt: skip


def row_tiles(m: int, groups: int, block_m: int) -> int:
    """Bound the row tiles of any m rows in at most so many groups, what a frozen grid must launch.

    Of a group's tiles all but one are full.
    """
    groups = min(groups, m)
    return groups + (m - groups) // block_m


def stride_or_zero(t: Tensor | None) -> int:
    """Elements between slices of a per-slot vector: 0 when one vector serves all slices."""
    return t.stride(0) if t is not None and t.dim() == 2 else 0


def shrink(
    x: Tensor,
    a: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    groups: Groups,
    config: Shrink,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Launch K1.

    Parameters
    ----------
    out : Tensor, optional
        Where h goes.

    Returns
    -------
    Tensor
        h [M, slices, R] of x's dtype; without ``out``, rows without an adapter are not written.
    """
    with on_device(x):
        return prepare_shrink(x, a, rank, scaling, groups, config)(x, a, rank, scaling, groups, out=out)[0]


def prepare_shrink(
    x: Tensor, a: list[Tensor], rank: Tensor | None, scaling: Tensor | None, groups: Groups, config: Shrink, *,
    pdl: bool = False,
) -> Callable[..., tuple]:  # fmt: skip
    """Prepare K1 for all operands of these sizes, strides and types.

    What is returned takes x, a, rank, scaling, groups, and where they are there ``on`` (:data:`On`) and ``out``; it
    makes h and names the memory to hold while h is used. ``pdl`` lets the next kernel run beside K1: who launches one
    takes what it writes before, and holds the memory until then.
    """
    (m, k), (slots, r, _), slices, num_groups = x.shape, a[0].shape, len(a), groups.ids.shape[0]
    split, dtype, device = config.split_k, x.dtype, x.device
    tiles = row_tiles(m, num_groups, config.block_m) * slices * cdiv(r, config.block_r)
    launch = kept(
        shrink_kernel, (x.get_device(), dtype), _shrink_shape, m, k, r, slices, num_groups, slots, tiles, x.stride(0),
        a[0].stride(0), a[0].stride(1), stride_or_zero(rank), stride_or_zero(scaling), rank is not None,
        scaling is not None, pdl, config,
    )  # fmt: skip
    count = m * slices * r
    planes_at = cdiv(count * dtype.itemsize, 16) * 4  # h, then the planes, in one piece of memory
    room_size = (planes_at + (split * count if split > 1 else 0),)

    def run(x, a, rank, scaling, groups, on=None, out=None):
        on = x if on is None else on
        room = torch.empty_strided(room_size, (1,), dtype=torch.float32, device=device)
        if type(on) is int:
            h = room.data_ptr()
            planes = h + 4 * planes_at
        else:
            h = room.view(dtype)[:count].view(m, slices, r) if out is None else out
            planes = room[planes_at:] if split > 1 else room
        signal = take_signal(device, HEADER + tiles) if split > 1 else room
        launch(
            on, x, planes, h, address(signal, on), tuple(a), x if rank is None else rank,
            x if scaling is None else scaling, *groups[:4],
        )  # fmt: skip
        return h, (room, signal)

    return run


def _shrink_shape(
    m: int, k: int, r: int, slices: int, num_groups: int, slots: int, tiles: int, stride_xm: int, stride_al: int,
    stride_ar: int, rank_stride: int, scaling_stride: int, has_rank: bool, has_scaling: bool, pdl: bool,
    config: Shrink,
) -> Shape:  # fmt: skip
    integers = (m, k, r, num_groups, slots, stride_xm, stride_al, stride_ar, rank_stride, scaling_stride)
    constants = dict(
        GROUPS=next_power_of_2(num_groups), HAS_RANK=has_rank, HAS_SCALING=has_scaling, BM=config.block_m,
        BR=config.block_r, BK=config.block_k, RANK_TILES=cdiv(r, config.block_r), SPLIT=config.split_k,
        STAGES=config.num_stages, PDL=pdl, num_warps=config.num_warps,
    )  # fmt: skip
    return (tiles * config.split_k,), integers, constants
