"""Where vLLM builds its LoRA layers: ours are offered first, its compile cache is salted, the outcome is logged."""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_epilora.integrations.vllm.settings import Settings, read_settings
from torch_epilora.ops.schemas import SCHEMAS
from torch_epilora.ops.switches import DISABLE_PDL, disabled_by

logger = logging.getLogger("vllm.torch_epilora")  # below vLLM's own, which decides what is shown

_MARK = "_epilora"


def install() -> None:
    """Wrap what builds vLLM's LoRA layers, and what its compiled graphs are kept by; once.

    Every runner calls ``load_lora_model`` between loading weights and compiling. A vLLM that lacks what this relies on
    stays as it is, and the log says what it lacks.
    """
    try:
        from vllm.config import VllmConfig
        from vllm.lora.utils import _all_lora_classes  # noqa: F401
        from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

        from torch_epilora.integrations.vllm import layers  # noqa: F401
        from torch_epilora.integrations.vllm.head import tell_heads

        original, hash_of = LoRAModelRunnerMixin.load_lora_model, VllmConfig.compute_hash
    except (ImportError, AttributeError) as error:
        logger.warning(
            "torch-epilora does not know this vLLM, whose own adapter kernels are used: %s. "
            "python -m torch_epilora.integrations.vllm.surface says what else differs.", error,
        )  # fmt: skip
        return
    if hasattr(original, _MARK):
        return

    @wraps(original)
    def load_lora_model(self: Any, model: nn.Module, vllm_config: Any, device: torch.device) -> nn.Module:
        built = build(lambda: original(self, model, vllm_config, device), vllm_config)
        tell_heads(built, getattr(self.lora_manager, "_adapter_manager", None))
        return built

    @wraps(hash_of)
    def compute_hash(self: Any, *args: Any, **more: Any) -> str:
        # not an entry of additional_config: vLLM compiles parts of a model under copies of its configuration
        whole, settings = hash_of(self, *args, **more), read_settings(self.additional_config)
        if self.lora_config is None or not settings.enabled:
            return whole
        return hashlib.sha256(f"{whole}{salt(settings)}".encode()).hexdigest()[: len(whole)]

    setattr(load_lora_model, _MARK, True)
    LoRAModelRunnerMixin.load_lora_model, VllmConfig.compute_hash = load_lora_model, compute_hash


def build(load: Callable[[], nn.Module], vllm_config: Any) -> nn.Module:
    """Have vLLM build its LoRA layers with our classes among those it chooses from."""
    from torch._inductor import config as inductor_config
    from vllm.lora import utils
    from vllm.platforms import current_platform

    from torch_epilora.integrations.vllm.ahead import compile_ahead
    from torch_epilora.integrations.vllm.head import Head
    from torch_epilora.integrations.vllm.layers import Rows, classes
    from torch_epilora.integrations.vllm.plans import time_plans

    settings = read_settings(vllm_config.additional_config)
    if not settings.enabled:
        return load()
    shapes = getattr(vllm_config.compilation_config, "dynamic_shapes_config", None)
    if getattr(getattr(shapes, "type", None), "value", None) == "unbacked":
        logger.warning("Unbacked dynamic shapes: vLLM's own adapter kernels are used, ours compare numbers of rows.")
        return load()
    refused: dict[tuple[str, str], None] = {}
    originals = utils._all_lora_classes, utils.LogitsProcessorWithLoRA
    ours = classes(originals[0], settings.mode, lambda *why: refused.setdefault(why))
    utils._all_lora_classes, utils.LogitsProcessorWithLoRA = ours, Head
    try:
        model = load()
    finally:
        utils._all_lora_classes, utils.LogitsProcessorWithLoRA = originals
    report(model, list(refused))
    if current_platform.is_cuda():
        if any(isinstance(module, Rows) for module in model.modules()):
            launch_early(tuple(current_platform.get_device_capability()), inductor_config.triton)
        most_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        time_plans(model, vllm_config.compilation_config.cudagraph_capture_sizes or (), most_tokens)
        compile_ahead(model, most_tokens)
    return model


def launch_early(capability: tuple[int, ...], options: Any) -> None:
    """Have torch.compile's kernels let the one after them start while they end, as ours do.

    It changes no bit of a result. ``options`` are torch.compile's for Triton, which are the process's; who set
    ``TORCHINDUCTOR_ENABLE_PDL`` has chosen, and a torch without that option goes without.
    """
    if capability < (9, 0) or disabled_by(DISABLE_PDL) or "TORCHINDUCTOR_ENABLE_PDL" in os.environ:
        return
    if hasattr(options, "enable_pdl"):
        options.enable_pdl = True


def salt(settings: Settings) -> str:
    """Digest of all that changes a compiled graph: the switches, the operators' schemas, and this plugin's sources."""
    whole = hashlib.sha256(repr((settings, disabled_by(DISABLE_PDL), sorted(SCHEMAS.items()))).encode())
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
