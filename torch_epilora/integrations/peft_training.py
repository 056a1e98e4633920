"""PEFT: new LoRA adapters are trained on a patched model, as PEFT's own layers over its FP8 linears.

PEFT chooses the class of a layer by the one it wraps. :func:`enable` adds ours for ``LoraLinear``: configs and
checkpoints stay plain PEFT, and ``PeftModel.from_pretrained`` on a patched model finds the class again.
"""

import logging
from dataclasses import fields
from functools import cache
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraModel
from peft.tuners.lora.layer import Linear
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from torch_epilora.nn.linear import LoraLinear, lora_linears
from torch_epilora.nn.training import train_linear

logger = logging.getLogger("torch_epilora")

_create, _prepare, _check_merge, _inject = (
    LoraModel._create_new_module,
    LoraModel._prepare_model,
    BaseTuner._check_merge_allowed,
    BaseTuner.inject_adapter,
)

_INITS = (True, False, "gaussian", "eva")
"""Ways to start an adapter that do not read the base's weight; "orthogonal" only reads its dtype, and rounds to it."""

_VARIANTS = ("alora_invocation_tokens", "arrow_config")
"""LoRA variants of PEFT that work on the base's output alone, not on its weight."""

_DEQUANTIZE = (
    "It reads or changes the base's weight, or takes its dtype, which is FP8 here. Train it on the model without "
    "patch(), or after torch_epilora.unpatch(model)."
)


class Fp8LoraLinear(Linear):
    """PEFT's LoRA layer over a patched linear: base and adapter are one call of our operator.

    That holds for one active adapter, its dropout included, and for ``adapter_names=`` with one a row. Several active
    adapters, ``lora_bias``, PEFT's variants of LoRA, forward hooks on an A or B, and dropout among ``adapter_names=``
    take PEFT's arithmetic on top of the base's output.
    """

    def update_layer(self, adapter_name: str, r: int, lora_alpha: int, config: LoraConfig, **kwargs: Any) -> None:
        """Add an adapter.

        Raises
        ------
        NotImplementedError
            If its config needs the base's weight or trains a part of the base.
        """
        _check_config(self.get_base_layer(), config)
        super().update_layer(adapter_name, r, lora_alpha, config=config, **kwargs)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Apply the base and the adapters that PEFT says: [..., K] to [..., N] in x's dtype.

        Raises
        ------
        ValueError
            If slots of ``adapters()`` are in force too, or x does not fit.
        """
        if kwargs.get("adapter_names") is None and not self.disable_adapters:
            names = [name for name in self.active_adapters if name in self.lora_A]
            if names:
                self._check_no_slots()
                reason = self._why_not_fused(names)
                if len(names) > 1:
                    reason = "several adapters are active at once"
                if reason is None:
                    dropout = self.lora_dropout[names[0]]
                    return self._fused(x, names, None, dropout(x) if _drops(dropout) else None)
                _log_once(reason)
        return super().forward(x, *args, **kwargs)

    def _mixed_batch_forward(self, x: Tensor, *args: Any, adapter_names: list[str], **kwargs: Any) -> Tensor:
        names = [name for name in dict.fromkeys(adapter_names) if name in self.lora_A]
        if names:
            self._check_no_slots()
            reason = self._why_not_fused(names)
            if any(_drops(self.lora_dropout[name]) for name in names):
                reason = "adapters in a mixed batch have dropout"
            if reason is None:
                rows = [names.index(name) if name in names else -1 for name in adapter_names]
                return self._fused(x, names, torch.tensor(rows, dtype=torch.int32, device=x.device))
            _log_once(reason)
        return super()._mixed_batch_forward(x, *args, adapter_names=adapter_names, **kwargs)

    def _fused(self, x: Tensor, names: list[str], rows: Tensor | None, adapter_x: Tensor | None = None) -> Tensor:
        return train_linear(
            self.get_base_layer(),
            x,
            [self.lora_A[name].weight for name in names],
            [self.lora_B[name].weight for name in names],
            [self.scaling[name] for name in names],
            rows,
            adapter_x,
        )

    def _why_not_fused(self, names: list[str]) -> str | None:
        for name in names:
            if name in self.lora_variant:
                return f"an adapter is a {type(self.lora_variant[name]).__name__}"
            if self.lora_bias[name]:
                return "an adapter has lora_bias"
            if any(m._forward_hooks or m._forward_pre_hooks for m in (self.lora_A[name], self.lora_B[name])):
                return "an adapter has forward hooks"
        return None

    def _check_no_slots(self) -> None:
        linear = self.get_base_layer()
        if linear.group.state.current().used:
            raise ValueError(
                f"adapters(): expected only rows on the bare base while PEFT's adapters are active on {linear.path}, "
                "got slots in force. Call the model outside of adapters(), or inside of PEFT's disable_adapter()."
            )

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Raise: there is no FP8 weight that holds base and adapter.

        Raises
        ------
        NotImplementedError
            Always; it names the ways that exist.
        """
        _refuse_merge()

    def leave_base(self) -> None:
        """Become PEFT's own layer, over the plain linear that ``unpatch`` put below this one."""
        self.__class__ = Linear

    def _get_base_layer_device_and_dtype(self, base_layer: nn.Module) -> tuple[torch.device, torch.dtype]:
        # PEFT makes adapters in the dtype of the base's weight; that of the codes is no dtype to train in.
        linear = self.get_base_layer()
        return linear.weight.device, linear.group.bank.dtype


def _drops(dropout: nn.Module) -> bool:
    return dropout.training and not isinstance(dropout, nn.Identity)


def _check_config(linear: LoraLinear, config: LoraConfig) -> None:
    """Refuse what would be wrong over FP8 codes, before anything is changed."""
    if config.init_lora_weights not in _INITS:
        allowed = ", ".join(map(repr, _INITS))
        raise NotImplementedError(
            f"init_lora_weights: expected one of {allowed} over an FP8 base, got {config.init_lora_weights!r}. "
            f"{_DEQUANTIZE}"
        )
    for field in fields(config):
        if field.metadata.get("is_lora_variant") and getattr(config, field.name) and field.name not in _VARIANTS:
            value = getattr(config, field.name)
            raise NotImplementedError(f"{field.name}: expected none over an FP8 base, got {value!r}. {_DEQUANTIZE}")
    if config.bias != "none" and linear.bias is not None:
        raise NotImplementedError(
            f"bias: expected 'none', as the bias of {linear.path} is frozen with its base, got {config.bias!r}. Use "
            "lora_bias=True, which trains a bias of the adapter."
        )
    if config.fan_in_fan_out:
        raise ValueError(f"fan_in_fan_out: expected False, as the codes of {linear.path} are [N, K], got True.")


def _refuse_merge() -> None:
    raise NotImplementedError(
        "merge: an adapter cannot be merged into FP8 codes; rounding to them would erase most of it. Save the adapter "
        "(save_pretrained) and merge it into the 16-bit model it was patched from, or serve it unmerged with "
        "torch_epilora.load_adapter. After torch_epilora.unpatch(model), which gives 16-bit weights without what FP8 "
        "rounded away, merging works."
    )


@cache
def _log_first(reason: str) -> None:
    logger.warning("PEFT's arithmetic follows the FP8 base in calls of its own, which is slower: %s.", reason)


def _log_once(reason: str) -> None:
    if not torch.compiler.is_compiling():
        _log_first(reason)


def _create_new_module(lora_config: LoraConfig, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
    """Make a LoRA layer: ours over a patched linear, else PEFT's choice."""
    if isinstance(target, LoraLinear):
        return Fp8LoraLinear(target, adapter_name, config=lora_config, **kwargs)
    return _create(lora_config, adapter_name, target, **kwargs)


def _prepare_model(self: LoraModel, peft_config: LoraConfig, model: nn.Module) -> None:
    """Refuse the parts of a config that name patched linears as what is trained itself; PEFT's own steps follow."""
    for path in lora_linears(model):
        above = [path[:end] for end, character in enumerate(path) if character == "."]
        for field, wholes in (("modules_to_save", [path, *above]), ("target_parameters", [f".{path}.weight"])):
            for name in getattr(peft_config, field) or ():
                # PEFT takes the end of a module's path, and whole components of a parameter's.
                if any(whole.endswith(name if field == "modules_to_save" else f".{name}") for whole in wholes):
                    raise NotImplementedError(
                        f"{field}: expected no linear whose base is FP8, got {name!r}, which names or holds {path}. "
                        "Its codes cannot be trained: give it an adapter with target_modules, or leave it out of "
                        "patch() with exclude=."
                    )
    _prepare(self, peft_config, model)


def _check_merge_allowed(self: BaseTuner) -> None:
    """Refuse a merge before its first layer, by any of PEFT's methods, where adapters lie over patched linears."""
    layers = (module for module in self.modules() if isinstance(module, BaseTunerLayer))
    if any(isinstance(layer.get_base_layer(), LoraLinear) for layer in layers):
        _refuse_merge()
    _check_merge(self)


def _inject_adapter(self: BaseTuner, *args: Any, **kwargs: Any) -> None:
    """Let PEFT lay its layers over a model, and every patched linear under one compute itself from now on.

    Its siblings may have none, and what some of PEFT's methods add to in place may not be a part of a shared result.
    """
    _inject(self, *args, **kwargs)
    for module in self.modules():
        if isinstance(module, BaseTunerLayer) and isinstance(linear := module.get_base_layer(), LoraLinear):
            linear.group.separate()


@cache
def enable() -> None:
    """Let PEFT make :class:`Fp8LoraLinear` over patched linears, from now on in this process."""
    LoraModel._create_new_module = staticmethod(_create_new_module)
    LoraModel._prepare_model = _prepare_model
    BaseTuner._check_merge_allowed = _check_merge_allowed
    BaseTuner.inject_adapter = _inject_adapter
