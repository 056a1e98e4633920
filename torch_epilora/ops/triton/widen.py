"""W8A16 at the speed of W8A8: codes widened in the registers that the MMA reads them from.

Hopper has no instruction from e4m3 to bf16, but one from two codes to fp16. So activations come as fp16 times a power
of two of their row (exact for all that matters beside the row's largest), and codes as int32 words, whose bytes a
permutation of the inputs makes a thread's own fragments of the first operand: one 16-byte read of shared memory for 16.
"""

import triton
import triton.language as tl

# Triton's interpreter has no inline assembly: it runs plain twins, which the GPU tests compare bit for bit
_ASM = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def place(k):
    """Where input k of x stands for ``operand_of_words``: a permutation inside each block of 64."""
    return (k & -64) + ((k >> 2) & 3) * 16 + ((k >> 1) & 1) * 8 + ((k >> 4) & 3) * 2 + (k & 1)


@triton.jit
def half_scale(amax):
    """Return a power of two and its reciprocal, which brings a row's largest magnitude into [2^15, 2^16).

    As fp16, whose largest value is 65504, it then keeps every fp16 row exactly, and of a bf16 row what is not below
    2^-32 of its largest. Both are finite, so infinities and NaN stay what they are.
    """
    exponent = tl.minimum(tl.maximum(amax.to(tl.int32, bitcast=True) >> 23, 32), 254)
    scale = ((exponent - 15) << 23).to(tl.float32, bitcast=True)
    return scale, ((269 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _widen(words):
    """fp16 values of the four codes of each word, lowest byte first."""
    if _ASM:
        return tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high;
            .reg .b32 a, b;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 a, low;
            cvt.rn.f16x2.e4m3x2 b, high;
            mov.b32 {$0, $1}, a;
            mov.b32 {$2, $3}, b;
            }""",
            "=h,=h,=h,=h,r", [words], dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    return _byte(words, 0), _byte(words, 8), _byte(words, 16), _byte(words, 24)


@triton.jit
def _byte(words, shift: tl.constexpr):
    return ((words >> shift) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def operand_of_words(words, BN: tl.constexpr, BK: tl.constexpr):
    """fp16 values [BN, BK] of code words [BN, BK / 4], input k at ``place(k)``."""
    a, b, c, d = _widen(words)
    values = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [BN, BK // 64, 4, 4, 2, 2])
    return tl.reshape(tl.permute(values, (0, 1, 3, 4, 2, 5)), [BN, BK])


@triton.jit
def settle(acc):
    """Wait for the MMAs behind acc: the next step would overwrite their first operand in registers (triton#9433)."""
    if _ASM:
        acc = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [acc], dtype=tl.float32, is_pure=True, pack=1)
    return acc
