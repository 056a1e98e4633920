"""transformers: build a model's skeleton from its folder without allocating its weights."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig


class _WeightsOnMeta(TorchFunctionMode):
    """Let ``torch.empty``, with which layers allocate their weights, answer on the meta device.

    Buffers that a model computes (rotary frequencies) are made otherwise and stay real.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_skeleton(path: str | os.PathLike[str]) -> nn.Module:
    """Build the causal LM that a folder's config.json describes, its linear and embedding weights on the meta device.

    Parameters
    ----------
    path : path
        A model's folder.

    Returns
    -------
    nn.Module
        In the config's dtype (bf16 if it says none), in evaluation mode.

    Raises
    ------
    ValueError
        If transformers cannot build a causal LM from the config.
    """
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        dtype = getattr(config, "dtype", None) or torch.bfloat16
        with _WeightsOnMeta():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception as error:
        # transformers raises whatever it likes on configs that it does not expect
        raise ValueError(f"path: transformers cannot build a causal LM from {path}: {error}") from error
    if (Path(path) / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model.eval()
