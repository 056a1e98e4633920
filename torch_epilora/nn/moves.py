"""Moving tensors whose dtype is part of their meaning: codes, scales and counts."""

from collections.abc import Callable

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 4: torch.int32}


def move_bits(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply ``nn.Module._apply``'s function to the bits of a tensor, so that it moves but is never cast.

    ``half()`` and ``to(dtype)`` cast what is floating point, and e4m3 is; integers they leave alone. A function that
    casts integers too (``type(dst)``) is followed in its device only.
    """
    bits = _BITS[tensor.element_size()]
    # A tensor made in inference mode has no version, which the groups compare.
    with torch.inference_mode(False):
        moved = fn(tensor.view(bits))
    if moved.dtype != bits:
        return tensor.to(moved.device)
    if moved.device == tensor.device and not moved.is_meta and moved.data_ptr() == tensor.data_ptr():
        return tensor
    return moved.view(tensor.dtype)


def move_value(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Apply ``nn.Module._apply``'s function to a tensor that may be cast; a leaf that requires a gradient stays one."""
    with torch.inference_mode(False), torch.no_grad():
        moved = fn(tensor)
    return moved if moved is tensor else moved.detach().requires_grad_(tensor.requires_grad)
