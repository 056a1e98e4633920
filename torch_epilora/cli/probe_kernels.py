"""Tiny kernels that `epilora doctor` compiles and runs to see what the GPU and this Triton can do."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

__all__ = ["fp8_dot", "pdl_consumer", "pdl_producer"]


@triton.jit
def fp8_dot(a, b, c, SIZE: tl.constexpr):
    """C [SIZE, SIZE] fp32 = A B^T of two e4m3 matrices, all contiguous."""
    offsets = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(c + offsets, tl.dot(tl.load(a + offsets), tl.trans(tl.load(b + offsets))))


@triton.jit
def pdl_producer(x, y, SIZE: tl.constexpr):
    """Y = X + 1, one block of SIZE a program; lets the next kernel start before Y is written."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    gdc_launch_dependents()
    tl.store(y + i, tl.load(x + i) + 1)


@triton.jit
def pdl_consumer(y, z, SIZE: tl.constexpr):
    """Z = 2 Y; waits for the kernel before it, so that a launch without a working wait reads old values."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    gdc_wait()
    tl.store(z + i, tl.load(y + i) * 2)
