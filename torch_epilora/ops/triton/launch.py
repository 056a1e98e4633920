"""Launches that skip Triton's own once it has compiled a kernel (EpiLoRA, Table 26).

Triton binds every argument by name, asks how each specializes the kernel and makes a string of all of it, to find the
kernel that it compiled the time before. A :class:`Launch` keeps the kernel that Triton found, so the bits are the same.
"""

from collections.abc import Callable
from functools import reduce
from operator import or_

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from torch_epilora.ops.checks import On
from torch_epilora.ops.compiling import compiles_only
from torch_epilora.ops.memory import remember

Shape = tuple[tuple[int, ...], tuple, dict]
"""A launch's grid, integers (or tuples of them) and constants, these with Triton's launch options."""

_ALIGNMENT = 15
"""Triton compiles for pointers that are multiples of 16 bytes or for any; only kernels of the first kind are kept."""

_kept: dict[tuple, "Launch"] = {}


class Launch:
    """A kernel's launches on one device that differ in addresses alone, not in the types behind them.

    Parameters
    ----------
    kernel : JITFunction
        The kernel; its parameters are pointers, then integers, then constants.
    shape : Shape
        What it is launched with besides pointers.
    """

    __slots__ = ("_constants", "_grid", "_integers", "_kernel", "_ready")

    def __init__(self, kernel, shape: Shape):
        self._kernel = kernel
        self._grid, self._integers, self._constants = shape
        self._ready: tuple | None = None

    def __call__(self, on: On, *pointers) -> None:
        """Launch on the GPU of a tensor, whichever is the current one, or in Triton's interpreter on the CPU.

        Parameters
        ----------
        on : Tensor or int
            A tensor names the device. A number is a stream of the current one; the kernel that was kept runs there.
        *pointers
            Tensors, tuples of tensors, and tensor descriptors; on a stream, addresses in place of the tensors.
        """
        if type(on) is int:
            run, function, metadata, grid, rest = self._ready  # type: ignore[misc]
            run(*grid, on, function, metadata, None, None, None, *pointers, *rest)
            return
        device = on.get_device()
        if device < 0:
            self._kernel[self._grid](*pointers, *self._integers, **self._constants)
        elif device == torch.cuda.current_device():
            self._on(device, pointers)
        else:
            with torch.cuda.device(device):
                self._on(device, pointers)

    def _on(self, device: int, pointers: tuple) -> None:
        addresses, seen = [], 0
        for pointer in pointers:
            if type(pointer) is tuple:
                several = tuple([t.data_ptr() for t in pointer])
                addresses.append(several)
                for address in several:
                    seen |= address
            elif type(pointer) is TensorDescriptor:
                addresses.append(pointer)
                seen |= pointer.base.data_ptr()
            else:
                address = pointer.data_ptr()
                addresses.append(address)
                seen |= address
        if self._ready is not None and not seen & _ALIGNMENT and not _watched():
            run, function, metadata, grid, rest = self._ready
            run(*grid, raw_stream(device), function, metadata, None, None, None, *addresses, *rest)
            return
        if compiles_only():
            self._kernel.warmup(*pointers, *self._integers, grid=self._grid, **self._constants)
            return
        compiled = self._kernel[self._grid](*pointers, *self._integers, **self._constants)
        if compiled is not None and not seen & _ALIGNMENT:
            names = self._kernel.arg_names[len(pointers) + len(self._integers) :]
            rest = *self._integers, *(self._constants[name] for name in names)
            grid = (*self._grid, 1, 1)[:3]
            self._ready = compiled.run, compiled.function, compiled.packed_metadata, grid, rest


def kept(kernel, kinds: tuple, shape: Callable[..., Shape], *values) -> Launch:
    """Make a launch, or find the one that was made for the same device, types and values.

    Parameters
    ----------
    kernel : JITFunction
        As a :class:`Launch` takes it.
    kinds : tuple
        The device's number, and the types that say what all pointers' types are.
    shape : callable
        Makes the :data:`Shape` of ``values``, and of nothing else.
    *values
        Hashable; what this launch depends on besides the pointers.

    Returns
    -------
    Launch
        The launch, still to be called.
    """
    return remember(_kept, (shape, kinds, values), lambda: Launch(kernel, shape(*values)))


def address(t: Tensor, on: On):
    """Name a tensor as a launch there takes it."""
    return t.data_ptr() if type(on) is int else t


def stream_for(device: int, addresses: list[int]) -> int | None:
    """Find the current device's stream to launch on by address; None where Triton's own launch has to look first."""
    if device < 0 or reduce(or_, addresses) & _ALIGNMENT or _watched():
        return None
    return raw_stream(device)


def raw_stream(device: int) -> int:
    """Handle of a device's current stream, without the object that torch makes of it."""
    return triton.runtime.driver.active.get_current_stream(device)


def _watched() -> bool:
    """Whether a kernel that was kept must not be launched: a profiler wants to be told, or there are no launches."""
    if compiles_only():
        return True
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
