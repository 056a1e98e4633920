"""The output layer, which vLLM's kernels serve: they are left out while no loaded adapter has a part for it.

vLLM launches three kernels a batch there, outside its CUDA graphs, of which one reads B of the whole vocabulary; most
adapters have none.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.lora.layers import LogitsProcessorWithLoRA


class _Nobody:
    """Stands for the batch metadata where no row has an adapter."""

    def add_lora_logits(self, logits: Tensor, *rest: Any) -> Tensor:
        return logits


class Head(LogitsProcessorWithLoRA):
    """vLLM's class, which knows the slots that hold a part for it.

    ``manager`` knows which slots are in use: vLLM does not empty one that an adapter leaves.
    """

    served_by = "vLLM's LogitsProcessorWithLoRA"
    manager: Any = None
    punica_wrapper: Any
    _adapted: frozenset[int] = frozenset()

    def set_lora(self, index: int, *parts: Any, **named: Any) -> None:
        """Put an adapter's part into a slot."""
        super().set_lora(index, *parts, **named)
        self._adapted |= {index}

    def reset_lora(self, index: int) -> None:
        """Empty a slot."""
        super().reset_lora(index)
        self._adapted -= {index}

    def _idle(self) -> bool:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return False  # what is captured serves adapters that are loaded later
        return self.manager is not None and all(self.manager.lora_index_to_id[index] is None for index in self._adapted)

    def _get_logits(self, *parts: Any, **named: Any) -> Tensor | None:
        if not self._idle():
            return super()._get_logits(*parts, **named)
        wrapper, self.punica_wrapper = self.punica_wrapper, _Nobody()
        try:
            return super()._get_logits(*parts, **named)
        finally:
            self.punica_wrapper = wrapper


def tell_heads(model: nn.Module, manager: Any) -> None:
    """Give a model's output layers the manager of its adapters."""
    for module in model.modules():
        if isinstance(module, Head):
            module.manager = manager
