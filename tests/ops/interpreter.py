"""Repairs Triton's interpreter, so that kernels of bf16 and e4m3 compute what the GPU computes.

As shipped it multiplies bf16 as raw bits in a dot (triton-lang/triton#11584), truncates fp32 to bf16, and loses the
carry of fp32 to e4m3 (triton-lang/triton#11897). Here every conversion to or from those types goes through torch. And
its fused multiply-add rounds twice; here the product is exact.
"""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

NARROW = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}


def widen(handle) -> np.ndarray:
    """The values of a handle as float32 if its type is narrow, as they are otherwise."""
    narrow = NARROW.get(handle.dtype.scalar)
    if narrow is None:
        return handle.data
    data = np.ascontiguousarray(handle.data)
    return torch.from_numpy(data.view(np.int16 if narrow.itemsize == 2 else np.int8)).view(narrow).float().numpy()


def convert(handle, to):
    """The handle's values, rounded to nearest even in type ``to``."""
    to = to.scalar
    values = widen(handle)
    storage = interpreter._get_np_dtype(to)
    if to in NARROW:
        rounded = torch.from_numpy(np.ascontiguousarray(values.astype(np.float32))).to(NARROW[to])
        data = rounded.view(torch.int16 if storage.itemsize == 2 else torch.int8).numpy().view(storage)
    else:
        data = values.astype(storage)
    return interpreter.TensorHandle(data, to)


@pytest.fixture
def repaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with the repair in place."""
    builder = interpreter.InterpreterBuilder

    def cast(self, source, to):
        return convert(source, to)

    def dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        product = np.matmul(widen(a).astype(np.float32), widen(b).astype(np.float32))
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    def fma(self, a, b, c):
        total = a.data.astype(np.float64) * b.data + c.data
        return interpreter.TensorHandle(total.astype(a.data.dtype), a.dtype.scalar)

    monkeypatch.setattr(builder, "cast_impl", cast)
    monkeypatch.setattr(builder, "create_fma", fma)
    for name in (
        "create_fp_ext",
        "create_fp_trunc",
        "create_si_to_fp",
        "create_ui_to_fp",
        "create_fp_to_si",
        "create_fp_to_ui",
    ):
        monkeypatch.setattr(builder, name, cast)
    monkeypatch.setattr(builder, "create_fp_to_fp", lambda self, source, to, rounding: convert(source, to))
    monkeypatch.setattr(builder, "create_dot", dot)
