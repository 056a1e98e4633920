"""Where vLLM builds its LoRA layers: ours are offered first, its compile cache is salted, the outcome is logged."""

import hashlib
import logging
from collections import Counter
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_epilora.integrations.vllm.settings import Settings, read_settings
from torch_epilora.ops.schemas import SCHEMAS

logger = logging.getLogger("vllm.torch_epilora")  # below vLLM's own, which decides what is shown

SALT = "torch_epilora"
"""Key of ``additional_config``, which is a part of what vLLM's compiled graphs are kept by."""


def install() -> None:
    """Wrap vLLM's ``load_lora_model``, which every runner calls between loading weights and compiling; once.

    A vLLM that lacks what this relies on stays as it is, and the log says what it lacks.
    """
    try:
        from vllm.lora.utils import _all_lora_classes  # noqa: F401
        from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

        from torch_epilora.integrations.vllm import layers  # noqa: F401
    except ImportError as error:
        logger.warning(
            "torch-epilora does not know this vLLM, whose own adapter kernels are used: %s. "
            "python -m torch_epilora.integrations.vllm.surface says what else differs.", error,
        )  # fmt: skip
        return
    original = LoRAModelRunnerMixin.load_lora_model
    if hasattr(original, "__wrapped__"):
        return

    @wraps(original)
    def load_lora_model(self: Any, model: nn.Module, vllm_config: Any, device: torch.device) -> nn.Module:
        settings = read_settings(vllm_config.additional_config)
        if not settings.enabled:
            return original(self, model, vllm_config, device)
        return build(lambda: original(self, model, vllm_config, device), vllm_config, settings)

    LoRAModelRunnerMixin.load_lora_model = load_lora_model


def build(load: Any, vllm_config: Any, settings: Settings) -> nn.Module:
    """Have vLLM build its LoRA layers with our classes among those it chooses from.

    Raises
    ------
    TypeError
        If the engine's ``additional_config`` is no dict: compiled graphs of a vLLM without the plugin could be taken
        for this one's, and run without it.
    """
    from vllm.lora import utils

    from torch_epilora.integrations.vllm.layers import classes

    if not isinstance(vllm_config.additional_config, dict):
        got = type(vllm_config.additional_config).__name__
        raise TypeError(
            f"additional_config: expected a dict, got {got}. Set EPILORA_VLLM=off to run without torch-epilora."
        )
    vllm_config.additional_config[SALT] = salt(settings)
    refused: dict[tuple[str, str], None] = {}
    originals = utils._all_lora_classes
    utils._all_lora_classes = classes(originals, settings.mode, lambda *why: refused.setdefault(why))
    try:
        model = load()
    finally:
        utils._all_lora_classes = originals
    report(model, list(refused))
    return model


def salt(settings: Settings) -> str:
    """Digest of all that changes a traced graph: the mode, the operators' schemas, and the sources of this plugin."""
    whole = hashlib.sha256(repr((settings, sorted(SCHEMAS.items()))).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]


def report(model: nn.Module, refused: list[tuple[str, str]]) -> None:
    """Log once how many layers are served by what, and why others are not."""
    from vllm.lora.layers.base import BaseLayerWithLoRA

    kinds = Counter(
        getattr(module, "served_by", f"vLLM's {type(module).__name__}")
        for module in model.modules()
        if isinstance(module, BaseLayerWithLoRA)
    )
    parts = ", ".join(f"{count} by {name}" for name, count in kinds.most_common())
    logger.info("LoRA layers of %s: %s.", type(model).__name__, parts or "none")
    for name, why in refused:
        logger.info("%s: %s.", name, why)
