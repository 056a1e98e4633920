"""Launches that skip Triton's own once it has compiled a kernel (EpiLoRA, Table 26).

Triton binds every argument by name, asks how each specializes the kernel and makes a string of all of it, to find the
kernel that it compiled the time before. Here the key is the values that the grid, the integers and the constants follow
from, and what is launched is the kernel that Triton found for the same values, so the bits are the same.
"""

from collections.abc import Callable

import triton
from torch import Tensor

from torch_epilora.ops.triton.common import on_device

Shape = tuple[tuple[int, ...], tuple, dict]
"""A launch's grid, integers (or tuples of them) and constants, these with Triton's launch options."""

_ALIGNMENT = 15
"""Triton compiles for pointers that are multiples of 16 bytes or for any; only kernels of the first kind are kept."""

_MOST = 1 << 15
"""Launches kept. A new number of tokens is a new one; past this many all are made anew."""

_kept: dict[tuple, tuple] = {}


def launch(kernel, on: Tensor, pointers: tuple, shape: Callable[..., Shape], *values) -> None:
    """Launch a Triton kernel on a tensor's GPU, whichever is the current one.

    Parameters
    ----------
    kernel : JITFunction
        The kernel; its parameters are pointers, then integers, then constants.
    on : Tensor
        Names the device; on the CPU Triton's interpreter runs.
    pointers : tuple
        Tensors, and tuples of tensors.
    shape : callable
        Makes the :data:`Shape` of ``values``, and of nothing else.
    *values
        Hashable; what this launch depends on besides the pointers.
    """
    if not on.is_cuda:
        grid, integers, constants = shape(*values)
        kernel[grid](*pointers, *integers, **constants)
        return
    with on_device(on):
        _launch(kernel, on.device.index, pointers, shape, values)


def _launch(kernel, device: int, pointers: tuple, shape: Callable[..., Shape], values: tuple) -> None:
    addresses, kinds, seen = [], [], 0
    for pointer in pointers:
        if type(pointer) is tuple:
            several = tuple([t.data_ptr() for t in pointer])
            addresses.append(several)
            kinds.extend([t.dtype for t in pointer])
            for address in several:
                seen |= address
        else:
            address = pointer.data_ptr()
            addresses.append(address)
            kinds.append(pointer.dtype)
            seen |= address
    key = (shape, device, *kinds, *values)
    kept = None if seen & _ALIGNMENT or _watched() else _kept.get(key)
    if kept is not None:
        compiled, function, metadata, grid, rest = kept
        stream = triton.runtime.driver.active.get_current_stream(device)
        compiled.run(*grid, stream, function, metadata, None, None, None, *addresses, *rest)
        return
    grid, integers, constants = shape(*values)
    compiled = kernel[grid](*pointers, *integers, **constants)
    if compiled is not None and not seen & _ALIGNMENT:
        if len(_kept) >= _MOST:
            _kept.clear()
        names = kernel.arg_names[len(pointers) + len(integers) :]
        rest = *integers, *(constants[name] for name in names)
        _kept[key] = compiled, compiled.function, compiled.packed_metadata, (*grid, 1, 1)[:3], rest


def _watched() -> bool:
    """Whether a profiler wants to be told of each launch, which only Triton's own does."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
