"""What is made once for everything alike, and how much of it is kept."""

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

logger = logging.getLogger("torch_epilora")
Made = TypeVar("Made")

MOST = 1 << 15
"""Things that one memory keeps. A new number of tokens is a new one; past this many all are made anew."""


def remember(memory: dict[tuple, Made], key: tuple, make: Callable[[], Made]) -> Made:
    """Find what was made for a key, or make it; what raises is not kept."""
    found = memory.get(key)
    if found is None:
        found = make()
        if len(memory) >= MOST:
            memory.clear()
        memory[key] = found
    return found


def _tensor_guards() -> Any:
    """Find ``torch.compile``'s check of many tensors at once, private to torch; None where it is not what it was."""
    t = torch.empty(2, 2, device="cpu")
    try:
        from torch._C._dynamo import guards

        found: Any = guards.TensorGuards
        check = found(t, dynamic_dims_sizes=[[2, 2]], dynamic_dims_strides=[[2, 1]]).check
        told: Any = check(t), check(t[:1]), check(t.t()), check(t.int())
    except Exception as error:  # whatever a changed one raises: without it a call is slower, never wrong
        told, found = error, None
    if told != (True, False, False, False):
        logger.info(
            "torch's check of many tensors answers otherwise (%s): eager calls take some microseconds more", told
        )
        return None
    return found


TensorGuards = _tensor_guards()


def like(tensors: list[Tensor]) -> Callable[..., bool]:
    """Make what tells whether as many other tensors have the sizes, strides, types and devices of these.

    By ``torch.compile``'s check where torch has it: one call for all tensors, a sixth of the time.
    """
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    if TensorGuards is not None:
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    kinds = [(t.dtype, t.device) for t in tensors]
    return lambda *others: (
        [list(t.shape) for t in others] == sizes
        and [list(t.stride()) for t in others] == strides
        and [(t.dtype, t.device) for t in others] == kinds
    )
