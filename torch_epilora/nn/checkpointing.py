"""Gradient checkpointing: a forward that is recomputed in backward runs under the batch it first ran under."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_epilora.nn.batch import AdapterBatch, AdapterState

_ATTRIBUTE = "_gradient_checkpointing_func"


class BatchCheckpoint:
    """A transformers layer's checkpoint function that notes the batch for the recomputation."""

    def __init__(self, original: Callable[..., Any], state: AdapterState) -> None:
        self.original, self.state = original, state

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Checkpoint ``function`` under the batch of now."""
        if torch.compiler.is_compiling():
            return self.original(function, *args, **kwargs)
        return self.original(_Under(self.state, self.state.current(), function), *args, **kwargs)


class _Under:
    def __init__(self, state: AdapterState, batch: AdapterBatch, function: Callable[..., Any]) -> None:
        self.state, self.batch, self.function = state, batch, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        state, batch = self.state, self.batch
        state.enter(batch)
        state.followed += 1
        try:
            return self.function(*args, **kwargs)
        finally:
            state.followed -= 1
            state.leave(batch)


def follow_checkpointing(model: nn.Module, state: AdapterState) -> None:
    """Let the layers of a transformers model that checkpoints recompute under the right batch."""
    for module in model.modules():
        function = module.__dict__.get(_ATTRIBUTE)
        if function is not None and not isinstance(function, BatchCheckpoint):
            module.__dict__[_ATTRIBUTE] = BatchCheckpoint(function, state)


def leave_checkpointing(model: nn.Module) -> None:
    """Give the layers their own checkpoint function back."""
    for module in model.modules():
        function = module.__dict__.get(_ATTRIBUTE)
        if isinstance(function, BatchCheckpoint):
            module.__dict__[_ATTRIBUTE] = function.original
