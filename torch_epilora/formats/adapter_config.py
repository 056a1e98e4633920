"""PEFT's adapter_config.json: the rank and scaling of each module, and the variants of LoRA that we do not compute."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch_epilora.formats.name_patterns import NamePatterns

V = TypeVar("V")
# Fields that, when set, make the stored A and B mean something else than scaling * B A on the unchanged base.
_VARIANTS = {
    "use_dora": "DoRA",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA (aLoRA)",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "layer_replication": "layer replication",
    "megatron_config": "Megatron parallel layers",
    "target_parameters": "adapters on bare parameters",
    "enable_lora": "merged linear layers",
}
# Initializations that change the base weights, so that the adapter alone does not describe the model.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraSettings:
    """What an adapter_config.json says about ranks and scaling.

    Attributes
    ----------
    rank, alpha : int, float
        Defaults for all modules.
    rank_pattern, alpha_pattern : NamePatterns
        Overrides by a module name, a suffix of it, or a regular expression.
    use_rslora : bool
        Scaling is alpha / sqrt(rank) instead of alpha / rank.
    lora_bias : bool
        B has a bias.
    extras : tuple of str
        Fields that add tensors which are not adapters of linear layers, with what they are set to.
    """

    rank: int
    alpha: float
    rank_pattern: NamePatterns[int] = field(default_factory=lambda: NamePatterns({}))
    alpha_pattern: NamePatterns[float] = field(default_factory=lambda: NamePatterns({}))
    use_rslora: bool = False
    lora_bias: bool = False
    extras: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """Return the rank of ``module``."""
        return self.rank_pattern.find(module, self.rank)

    def scaling_of(self, module: str) -> float:
        """Return the factor that PEFT multiplies B A with in ``module``."""
        rank = self.rank_of(module)
        return self.alpha_pattern.find(module, self.alpha) / (math.sqrt(rank) if self.use_rslora else rank)


def read_settings(config: Mapping[str, Any], where: str) -> LoraSettings:
    """Check an adapter_config.json and return what matters of it.

    Parameters
    ----------
    config : mapping
        Its content.
    where : str
        What errors call it.

    Raises
    ------
    NotImplementedError
        If it describes another method than LoRA, or a variant of LoRA; the message names it.
    ValueError
        If a value is missing, has the wrong type, or is out of range.
    """
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        raise ValueError(f"{where}: expected peft_type 'LORA', got {kind!r}.")
    kind = str(getattr(kind, "value", kind))
    if kind != "LORA":
        raise NotImplementedError(f"{where}: peft_type {kind!r} is not supported; expected 'LORA'.")
    for name, meaning in _VARIANTS.items():
        # An empty list of invocation tokens or parameters is as good as none.
        if config.get(name):
            raise NotImplementedError(f"{where}: {name}: {meaning} is not supported.")
    init = config.get("init_lora_weights", True)
    if isinstance(init, str) and init.lower().startswith(_CHANGED_BASE):
        raise NotImplementedError(
            f"{where}: init_lora_weights {init!r} changes the base weights. Convert the adapter to plain LoRA as it is "
            "saved (PEFT: save_pretrained with path_initial_model_for_weight_conversion)."
        )
    for name in ("r", "lora_alpha"):
        if name not in config:
            raise ValueError(f"{where}: expected {name}, found none.")
    return LoraSettings(
        rank=_positive_int(config["r"], f"{where}: r"),
        alpha=_number(config["lora_alpha"], f"{where}: lora_alpha"),
        rank_pattern=_pattern(config, "rank_pattern", _positive_int, where),
        alpha_pattern=_pattern(config, "alpha_pattern", _number, where),
        use_rslora=_flag(config, "use_rslora", where),
        lora_bias=_flag(config, "lora_bias", where),
        extras=_extras(config, where),
    )


def _extras(config: Mapping[str, Any], where: str) -> tuple[str, ...]:
    bias = config.get("bias", "none")
    if bias not in ("none", "all", "lora_only"):
        raise ValueError(f"{where}: expected bias 'none', 'all' or 'lora_only', got {bias!r}.")
    found = [f"bias={bias!r}"] * (bias != "none")
    for name in ("modules_to_save", "trainable_token_indices"):
        if config.get(name):
            found.append(f"{name}={config[name]!r}")
    return tuple(found)


def _positive_int(value: object, spot: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{spot}: expected a positive integer, got {value!r}.")
    return value


def _number(value: object, spot: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise ValueError(f"{spot}: expected a finite number, got {value!r}.")
    return float(value)


def _flag(config: Mapping[str, Any], name: str, where: str) -> bool:
    value = config.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{where}: {name}: expected true or false, got {value!r}.")
    return bool(value)


def _pattern(config: Mapping[str, Any], name: str, check: Callable[[object, str], V], where: str) -> NamePatterns[V]:
    patterns = config.get(name) or {}
    if not isinstance(patterns, Mapping):
        raise ValueError(f"{where}: {name}: expected an object, got {type(patterns).__name__}.")
    checked = {str(p): check(value, f"{where}: {name}[{str(p)[:40]!r}]") for p, value in patterns.items()}
    return NamePatterns(checked, f"{where}: {name}")
