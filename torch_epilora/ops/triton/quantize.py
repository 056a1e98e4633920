"""FP8 quantizers: per token, per token and 128-group, and under a given scale. Bits equal those of vLLM's CUDA ops."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from torch_epilora.ops.arithmetic import cdiv, next_power_of_2
from torch_epilora.ops.checks import BLOCK
from torch_epilora.ops.reference import FP8_MAX, MIN_GROUP_AMAX, MIN_SCALE
from torch_epilora.ops.triton.launch import Shape, address, kept

TOKEN, GROUP, STATIC = 0, 1, 2
TERMS = 3
"""Of the decode kernel only: W8A16's operand, several codes whose sum is x (``quantize_part``)."""
_MAX = tl.constexpr(FP8_MAX)
_MIN_SCALE = tl.constexpr(MIN_SCALE)
_MIN_AMAX = tl.constexpr(MIN_GROUP_AMAX)
_SIDE = tl.constexpr(BLOCK)


@triton.jit
def to_codes(x):
    """Make e4m3 codes of fp32 values, clamped to the format's range; NaN stays NaN."""
    low = tl.maximum(x, -_MAX, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(low, _MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def larger(a, b):
    """Maximum that keeps NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def divide(x, scale, DTYPE: tl.constexpr):
    """IEEE quotient by a scale that is not zero, the same bits as of a division but without its branches.

    The product with the reciprocal, twice corrected by what it leaves of x, is rounded as the quotient is (Markstein,
    "Computation of elementary functions on the IBM RISC System/6000 processor", 1990). One correction does for values
    that are exact in DTYPE, if that has 16 bits: all 2^10 significands of fp16 by all 2^23 of a scale were tried. That
    what is left of dividends below about 2^-100 underflows is no matter: their code is zero.
    """
    reciprocal = tl.div_rn(1.0, scale)
    # by infinity only infinity is not zero; NaN stays in the reciprocal
    divisor = tl.where(scale < float("inf"), scale, 0.0)
    quotient = x * reciprocal
    quotient = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    if DTYPE == tl.float32:
        quotient = tl.fma(tl.fma(-quotient, divisor, x), reciprocal, quotient)
    # a zero keeps its sign
    sign = x.to(tl.int32, bitcast=True) & -(2**31)
    return (quotient.to(tl.int32, bitcast=True) & (2**31 - 1) | sign).to(tl.float32, bitcast=True)


@triton.jit
def token_scale(amax):
    """Scale of a token whose largest magnitude is amax."""
    return larger(tl.div_rn(amax, _MAX), _MIN_SCALE)


@triton.jit
def group_scale(amax):
    """Scale of a 128-group whose largest magnitude is amax."""
    return tl.div_rn(larger(amax, _MIN_AMAX), _MAX)


@triton.jit
def binary_scale(amax):
    """Return a power of two and its reciprocal, which brings a row's largest magnitude into [2^7, 2^8).

    Below 2^-119 it stays under that, as the scale would be no normal number; bf16 has no digits there to lose.
    """
    exponent = tl.minimum(tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 8), 254)
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    return scale, ((261 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def quantize_part(
    x_ptr, codes_ptr, scale_ptr, part, K, term_stride,
    MODE: tl.constexpr, TERMS: tl.constexpr, CHUNKS: tl.constexpr, BQ: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Make PART of a row's codes; a row's scale is found by each of its parts alike.

    Mode 3 makes TERMS codes of each value, ``term_stride`` apart: what each leaves is 32 times as large for the next.
    A code keeps 4 significant bits and leaves a rest, so two hold the 8 of bf16 exactly and three the 11 of fp16, but
    for what is below 2^-22 of a row's largest.
    """
    cols = part * PART + tl.arange(0, PART)
    # the weights streaming through the L2 cache should not drive x out of it, which is read again
    x = tl.load(x_ptr + cols, mask=cols < K, other=0.0, eviction_policy="evict_last").to(tl.float32)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    if MODE == 0 or MODE == 3:
        every = tl.arange(0, BQ)
        amax = tl.zeros([BQ], tl.float32)
        for i in tl.static_range(CHUNKS):
            inside = i * BQ + every < K
            chunk = tl.load(x_ptr + i * BQ + every, mask=inside, other=0.0, eviction_policy="evict_last")
            amax = larger(amax, tl.abs(chunk.to(tl.float32)))
        amax = tl.reduce(amax, 0, larger)
        if MODE == 3:
            scale, reciprocal = binary_scale(amax)
            rest = x * reciprocal
            rest = tl.where(tl.abs(rest) < float("inf"), rest, float("nan"))
            for i in tl.static_range(TERMS - 1):
                term = to_codes(rest)
                tl.store(codes_ptr + i * term_stride + cols, term, mask=cols < K)
                rest = (rest - term.to(tl.float32)) * 32
            codes_ptr += (TERMS - 1) * term_stride
            codes = to_codes(rest)
        else:
            scale = token_scale(amax)
            codes = to_codes(divide(x, scale, DTYPE))
        tl.store(scale_ptr, scale)
    elif MODE == 1:
        x = tl.reshape(x, [PART // _SIDE, _SIDE])
        scales = group_scale(tl.reduce(tl.abs(x), 1, larger))
        group = part * (PART // _SIDE) + tl.arange(0, PART // _SIDE)
        tl.store(scale_ptr + group, scales, mask=group * _SIDE < K)
        codes = to_codes(tl.reshape(divide(x, scales[:, None], DTYPE), [PART]))
    else:
        codes = to_codes(x * tl.div_rn(1.0, tl.load(scale_ptr)))
    tl.store(codes_ptr + cols, codes, mask=cols < K)


@triton.jit
def quantize_kernel(
    x_ptr, codes_ptr, scale_ptr, K, stride_xm, stride_sm,
    MODE: tl.constexpr, CHUNKS: tl.constexpr, BK: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """One program a row, in CHUNKS pieces of BK columns: it finds the scale, then makes codes of what it has read.

    A row of more than four pieces is read again, from cache.

    BESIDE: it may run beside the kernel before, for which it waits last: who reads the codes finds both ended.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    codes_ptr += row * K
    scale_ptr += row * stride_sm
    HELD: tl.constexpr = CHUNKS <= 4
    if MODE == 0:
        cols = tl.arange(0, BK)
        amax = tl.zeros([BK], tl.float32)
        held = ()
        for i in tl.static_range(CHUNKS):
            x = tl.load(x_ptr + i * BK + cols, mask=i * BK + cols < K, other=0.0)
            amax = larger(amax, tl.abs(x.to(tl.float32)))
            if HELD:
                held = held + (x,)  # noqa: RUF005 - Triton unpacks no tuples
        scale = token_scale(tl.reduce(amax, 0, larger))
        tl.store(scale_ptr, scale)
        for i in tl.static_range(CHUNKS):
            if HELD:
                x = held[i]
            else:
                x = tl.load(x_ptr + i * BK + cols, mask=i * BK + cols < K, other=0.0)
            codes = to_codes(divide(x.to(tl.float32), scale, x.dtype))
            tl.store(codes_ptr + i * BK + cols, codes, mask=i * BK + cols < K)
    elif MODE == 1:
        inner = tl.arange(0, _SIDE)
        outer = tl.arange(0, BK // _SIDE)
        for i in tl.static_range(CHUNKS):
            offs = i * BK + outer[:, None] * _SIDE + inner[None, :]
            x = tl.load(x_ptr + offs, mask=offs < K, other=0.0)
            scale = group_scale(tl.reduce(tl.abs(x.to(tl.float32)), 1, larger))
            group = i * (BK // _SIDE) + outer
            tl.store(scale_ptr + group, scale, mask=group * _SIDE < K)
            codes = to_codes(divide(x.to(tl.float32), scale[:, None], x.dtype))
            tl.store(codes_ptr + offs, codes, mask=offs < K)
    else:
        cols = tl.arange(0, BK)
        inverse = tl.div_rn(1.0, tl.load(scale_ptr))
        for i in tl.static_range(CHUNKS):
            x = tl.load(x_ptr + i * BK + cols, mask=i * BK + cols < K, other=0.0).to(tl.float32)
            tl.store(codes_ptr + i * BK + cols, to_codes(x * inverse), mask=i * BK + cols < K)
    if BESIDE:
        gdc_wait()


def _quantize_shape(m: int, k: int, stride_xm: int, stride_sm: int, mode: int, beside: bool) -> Shape:
    block = row_block(k)
    constants = dict(MODE=mode, CHUNKS=cdiv(k, block), BK=block, BESIDE=beside, num_warps=4 if k <= 4096 else 8)
    if beside:
        constants["launch_pdl"] = True
    return (m,), (k, stride_xm, stride_sm), constants


def row_block(k: int) -> int:
    """Columns a program handles at once: a power of two, at least one 128-group."""
    return min(max(next_power_of_2(k), BLOCK), 4096)


def empty_codes(rows: int, k: int, mode: int, device: torch.device, *, terms: int = 1) -> tuple[Tensor, Tensor | None]:
    """Room for what a mode makes of rows of K: ``terms`` codes of each value, and their scales but for STATIC."""
    codes = torch.empty_strided((rows * terms, k), (k, 1), dtype=torch.float8_e4m3fn, device=device)
    if mode == STATIC:
        return codes, None
    groups = scale_stride(k, mode)
    return codes, torch.empty_strided((rows, groups), (groups, 1), dtype=torch.float32, device=device)


def scale_stride(k: int, mode: int) -> int:
    """Elements between rows of the scales that a mode makes; 0 where it makes none."""
    return 0 if mode in (-1, STATIC) else cdiv(k, BLOCK) if mode == GROUP else 1


def quantize(x: Tensor, mode: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Launch the quantizer over x [M, K]; ``scale`` is read in STATIC mode and made otherwise."""
    m, k = x.shape
    codes, made = empty_codes(m, k, mode, x.device)
    scale = scale if made is None else made
    if m and k:
        prepare_quantize(x, mode)(x, codes, scale)
    elif m and made is not None and mode == TOKEN:
        made.fill_(MIN_SCALE)
    return codes, scale  # type: ignore[return-value]  # STATIC has one given


def prepare_quantize(x: Tensor, mode: int, *, beside: bool = False) -> Callable[..., None]:
    """Prepare the quantizer for all x of this size, stride and type: it takes x, the codes, their scale and ``on``.

    ``beside``: it runs beside the kernel before, which must let it and must not make x. All that it writes is taken
    before that kernel is launched: memory that is let go of in between may be in use.
    """
    m, k = x.shape
    values = m, k, x.stride(0), scale_stride(k, mode), mode, beside
    launch = kept(quantize_kernel, (x.get_device(), x.dtype), _quantize_shape, *values)

    def run(x, codes: Tensor, scale: Tensor, on=None):
        on = x if on is None else on
        launch(on, x, address(codes, on), address(scale, on))

    return run
