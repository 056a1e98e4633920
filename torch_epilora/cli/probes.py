"""What this machine can do, found by trying: FP8 matrix products and programmatic dependent launch (PDL).

A probe compiles a tiny kernel, runs it and compares its values. Where there is no GPU it only compiles, for the
architecture asked for, which needs no device.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_epilora.ops.switches import DISABLE_PDL, disabled_by

if TYPE_CHECKING:
    import torch

__all__ = ["Probe", "probe_fp8", "probe_pdl", "probe_scaled_mm"]

INTERPRET = "TRITON_INTERPRET"
SIZE = 64
BLOCKS = 256


@dataclass(frozen=True)
class Probe:
    """What one probe found.

    Attributes
    ----------
    name : str
        What was tried.
    ok : bool or None
        True: it works. False: it does not. None: it was not run.
    detail : str
        What was seen, or why it does not work or was not run.
    """

    name: str
    ok: bool | None
    detail: str


def probe_fp8(arch: int, *, device: str | None = None) -> Probe:
    """Try Triton's matrix product of e4m3 codes, the core of the fused path.

    Parameters
    ----------
    arch : int
        Compute capability times ten, such as 90.
    device : str, optional
        A CUDA device to run on. Without one the kernel is only compiled.
    """
    name = f"FP8 dot (Triton, sm_{arch})"
    interpreted = disabled_by(INTERPRET)
    if interpreted:
        return Probe(name, None, f"not run: {interpreted} makes Triton interpret kernels")
    if arch < 89:
        return Probe(name, False, "needs sm_89 or later")
    problem = _compile_problem("fp8_dot", {"a": "*fp8e4nv", "b": "*fp8e4nv", "c": "*fp32"}, arch)
    if problem:
        return Probe(name, False, problem)
    if device is None:
        return Probe(name, None, "compiles; not run, no CUDA device")
    return _attempt(name, lambda: _run_fp8(device))


def probe_scaled_mm(arch: int, *, device: str | None = None) -> Probe:
    """Try `torch._scaled_mm` with a scale a row and a column, the base GEMM of the hybrid path.

    Parameters
    ----------
    arch : int
        Compute capability times ten, such as 90.
    device : str, optional
        A CUDA device to run on. Without one nothing is tried.
    """
    name = f"torch._scaled_mm (row-wise, sm_{arch})"
    if device is None:
        return Probe(name, None, "not run, no CUDA device")
    return _attempt(name, lambda: _run_scaled_mm(device))


def probe_pdl(arch: int, *, device: str | None = None) -> Probe:
    """Try a kernel launched as the programmatic dependent of the one before it.

    Parameters
    ----------
    arch : int
        Compute capability times ten, such as 90.
    device : str, optional
        A CUDA device to run on. Without one the kernels are only compiled.

    Notes
    -----
    `EPILORA_DISABLE_PDL=1` is honoured: nothing is compiled or launched then.
    """
    name = f"PDL (Triton, sm_{arch})"
    off = disabled_by(DISABLE_PDL)
    if off:
        return Probe(name, False, f"switched off by {off}")
    interpreted = disabled_by(INTERPRET)
    if interpreted:
        return Probe(name, None, f"not run: {interpreted} makes Triton interpret kernels")
    if arch < 90:
        return Probe(name, False, "needs sm_90 or later")
    for kernel in ("pdl_producer", "pdl_consumer"):
        pointers = {"x": "*fp32", "y": "*fp32"} if kernel == "pdl_producer" else {"y": "*fp32", "z": "*fp32"}
        problem = _compile_problem(kernel, pointers, arch)
        if problem:
            return Probe(name, False, problem)
    if device is None:
        return Probe(name, None, "compiles; not run, no CUDA device")
    return _attempt(name, lambda: _run_pdl(device))


def _run_fp8(device: str) -> str | None:
    import torch

    from torch_epilora.cli import probe_kernels

    # Whole numbers up to 8 are exact in e4m3, and so is every sum: the comparison is bitwise.
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-8, 9, (SIZE, SIZE), generator=generator).float() for _ in range(2))
    codes = [t.to(device).to(torch.float8_e4m3fn) for t in (a, b)]
    out = torch.full((SIZE, SIZE), float("nan"), device=device)
    probe_kernels.fp8_dot[(1,)](*codes, out, SIZE=SIZE)
    return _differs(out.cpu(), a @ b.T)


def _run_scaled_mm(device: str) -> str | None:
    import torch

    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-2, 3, (SIZE, SIZE), generator=generator).float() for _ in range(2))
    codes = [t.to(device).to(torch.float8_e4m3fn) for t in (a, b)]
    ones = torch.ones(SIZE, 1, device=device)
    out = torch._scaled_mm(codes[0], codes[1].t(), scale_a=ones, scale_b=ones.t(), out_dtype=torch.bfloat16)
    return _differs(out.float().cpu(), (a @ b.T).bfloat16().float())


def _run_pdl(device: str) -> str | None:
    import torch

    from torch_epilora.cli import probe_kernels

    x = torch.arange(BLOCKS * SIZE, dtype=torch.float32, device=device)
    y, z = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    probe_kernels.pdl_producer[(BLOCKS,)](x, y, SIZE=SIZE)
    probe_kernels.pdl_consumer[(BLOCKS,)](y, z, SIZE=SIZE, launch_pdl=True)
    return _differs(z.cpu(), (x.cpu() + 1) * 2)


def _differs(got: torch.Tensor, want: torch.Tensor) -> str | None:
    """None where both tensors are equal, otherwise how many values are wrong."""
    wrong = int((got != want).sum())
    return f"{wrong} of {want.numel()} values are wrong" if wrong else None


def _attempt(name: str, run: Callable[[], str | None]) -> Probe:
    """Run a probe; whatever the compiler or driver raises is the probe's finding, not the command's failure."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            problem = run()
    except Exception as error:
        return Probe(name, False, _first_error(error))
    return Probe(name, problem is None, problem or "compiles, runs, values exact")


def _compile_problem(kernel: str, pointers: dict[str, str], arch: int) -> str | None:
    """Compile a probe kernel for an architecture, with or without a GPU; None, or why it does not compile."""
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from torch_epilora.cli import probe_kernels

        source = ASTSource(getattr(probe_kernels, kernel), {**pointers, "SIZE": "constexpr"}, {"SIZE": SIZE})
        # A failing compilation prints the whole PTX file; the reason is in the exception as well.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            triton.compile(source, target=GPUTarget("cuda", arch, 32), options={})
    except Exception as error:
        return f"does not compile: {_first_error(error)}"
    return None


def _first_error(error: Exception) -> str:
    """Return the line of a compiler's or driver's message that says what is wrong, at most 200 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    chosen = next((line for line in lines if "error" in line.lower() and "internal" not in line.lower()), None)
    return f"{type(error).__name__}: {chosen or (lines[0] if lines else 'no message')}"[:200]
