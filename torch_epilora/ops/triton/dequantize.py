"""Value of FP8 weight codes in the activations' dtype: what the vendor's 16-bit GEMM multiplies in training."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_epilora.ops.arithmetic import cdiv
from torch_epilora.ops.checks import BLOCK, scale_layout
from torch_epilora.ops.triton.launch import Shape, kept
from torch_epilora.ops.triton.linear import LAYOUTS

_SIDE = tl.constexpr(BLOCK)
_ROWS, _COLUMNS = 1, 2048


@triton.jit(do_not_specialize=["n_first", "n_stop", "k_first", "k_stop"])
def dequantize_kernel(
    w_ptr, scale_ptr, out_ptr, n_first, n_stop, k_first, k_stop, stride_wn, w_blocks, stride_out,
    LAYOUT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of out[n - n_first, k - k_first] = code * scale, rounded once."""
    n = n_first + tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    k = k_first + tl.program_id(1) * BK + tl.arange(0, BK)
    valid = (n < n_stop)[:, None] & (k < k_stop)[None, :]
    w = tl.load(w_ptr + n[:, None] * stride_wn + k[None, :], mask=valid, other=0.0).to(tl.float32)
    if LAYOUT == 0:
        w *= tl.load(scale_ptr)
    elif LAYOUT == 1:
        w *= tl.load(scale_ptr + n, mask=n < n_stop, other=0.0)[:, None]
    else:
        w *= tl.load(scale_ptr + (n // _SIDE)[:, None] * w_blocks + (k // _SIDE)[None, :], mask=valid, other=0.0)
    out = out_ptr + (n - n_first)[:, None] * stride_out + (k - k_first)[None, :]
    tl.store(out, w.to(out_ptr.dtype.element_ty), mask=valid)


def dequantize(weight: Tensor, scale: Tensor, out: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """Write rows and columns (first, past the last) of the weight into ``out``, contiguous and of their size."""
    launch = kept(
        dequantize_kernel, (weight.get_device(), out.dtype), _shape, *rows, *columns, tuple(weight.shape),
        weight.stride(0), scale_layout(weight.shape, scale),
    )  # fmt: skip
    launch(weight, weight, scale, out)
    return out


def _shape(
    n_first: int, n_stop: int, k_first: int, k_stop: int, shape: tuple[int, int], stride_wn: int, layout: str
) -> Shape:
    grid = (cdiv(n_stop - n_first, _ROWS), cdiv(k_stop - k_first, _COLUMNS))
    integers = (n_first, n_stop, k_first, k_stop, stride_wn, cdiv(shape[1], BLOCK), k_stop - k_first)
    return grid, integers, dict(LAYOUT=LAYOUTS[layout], BN=_ROWS, BK=_COLUMNS, num_warps=4)


def scratch(weight: Tensor, dtype: torch.dtype, most: int) -> Tensor:
    """Allocate room for a whole weight in ``dtype``, or for ``most`` bytes of it."""
    count = min(weight.numel(), max(most // dtype.itemsize, weight.shape[0], weight.shape[1]))
    return torch.empty(count, dtype=dtype, device=weight.device)
