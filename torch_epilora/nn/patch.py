"""patch and unpatch: linears of a model to FP8 with adapter slots, in place, and back."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from torch_epilora.formats.fp8 import LAYOUTS, Fp8Weight
from torch_epilora.nn.adapters import load_adapter
from torch_epilora.nn.batch import AdapterState
from torch_epilora.nn.convert import Conversion, hand_over_hooks, prepare, swap, swap_back
from torch_epilora.nn.hooks import hook, unhook
from torch_epilora.nn.leftovers import warn_of_leftovers
from torch_epilora.nn.linear import LoraLinear, lora_linears
from torch_epilora.nn.patterns import as_patterns
from torch_epilora.nn.placing import place
from torch_epilora.nn.select import Selection, select
from torch_epilora.nn.tuning import tune_at_load
from torch_epilora.ops import dequantize_fp8
from torch_epilora.ops.checks import COMPUTES
from torch_epilora.ops.switches import tune_mode

logger = logging.getLogger("torch_epilora")
Model = TypeVar("Model", bound=nn.Module)

EXCLUDE = ("lm_head",)
"""What patch leaves out of its targets unless it is told otherwise."""


def patch(
    model: Model,
    base: str = "fp8",
    *,
    layout: str = "channel",
    compute: str = "w8a8",
    targets: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] = EXCLUDE,
    max_adapters: int = 8,
    max_rank: int = 64,
    slices: Mapping[str, Sequence[int]] | None = None,
) -> Model:
    """Make the linears of a model FP8 with adapter slots, in place (EpiLoRA section 3.1).

    Linears that read the same input under one parent (q, k and v; gate and up) run as one projection. Replaced are
    ``nn.Linear`` layers in bf16, fp16 or fp32, and subclasses that use its forward unchanged; tied weights, layers with
    a forward of their own, parametrized ones and the output embedding are left alone. ``nn.Linear`` layers under a
    module called ``experts`` become FP8 but get no slots, since a router hands them tokens in an order of its own.
    Experts that a model holds as one 3-D parameter stay as they are, and a warning names them and their share. Biases
    and adapters keep the model's dtype and are frozen. Scales have a floor: a tensor, channel or block (by layout)
    whose largest weight is below about 1e-7 loses digits, and below 4e-9 it becomes zero. With ``EPILORA_TUNE=full`` a
    model on a GPU is timed at the end, for ten seconds at most and what one size takes (``tune``).

    Parameters
    ----------
    model : nn.Module
        A transformers model, a ``PeftModel`` (its LoRA adapters move into slots, and the active one stays in effect
        outside of ``adapters()``), or any module that holds ``nn.Linear`` layers.
    base : str
        "fp8".
    layout : str
        Scales of the weights: "tensor", "channel" or "block" (128x128).
    compute : str
        "w8a8" multiplies by activations quantized per token (per 128 channels under "block"), "w8a16" by the
        activations as they are.
    targets : str or iterable of str, optional
        Which linears: whole components of their path (``q_proj``, ``layers.0``), a glob over the path (``*.mlp.*``),
        or ``re:`` and a regular expression that matches the whole path. None is all of them.
    exclude : str or iterable of str
        Which linears to leave out of ``targets``, written the same way. The default gives way to a target that ends in
        ``lm_head``.
    max_adapters : int
        Adapter slots of each linear. 0 makes a plain FP8 model.
    max_rank : int
        Largest rank that a slot holds.
    slices : mapping of str to sequence of int, optional
        Output slices of linears that are several in one, by name or pattern. ``qkv_proj`` and ``gate_up_proj`` of a
        transformers model are known from its config.

    Returns
    -------
    nn.Module
        The model itself.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        If an argument does not fit, nothing can be patched, or there is no memory for the slots. The model is then
        unchanged.
    """
    state = check_options(base, layout, compute, max_adapters, max_rank)
    chosen, excluded = read_patterns(targets, exclude)
    check_plain(model)
    root = unwrap(model)
    _check_not_quantized(root)
    if is_peft(root):
        _patch_peft(root, (chosen, excluded, slices or {}), layout, compute, state)
    else:
        selection = select(root, chosen, excluded, slices or {})
        _check_no_tuners(root, selection)
        swap(_quantize(selection, layout, compute, state))
    hook(root, state)
    base_model: Any = root
    warn_of_leftovers(base_model.get_base_model() if is_peft(root) else root, chosen, excluded)
    tune_at_load(root)
    return model


def _patch_peft(
    model: nn.Module,
    choice: tuple[Sequence[str] | None, Sequence[str], Mapping[str, Sequence[int]]],
    layout: str,
    compute: str,
    state: AdapterState,
) -> None:
    from torch_epilora.integrations.peft import SlotAdapters

    moved, max_adapters = SlotAdapters(model), state.num_slots
    with moved.plain_linears() as plain:
        selection = select(plain, *choice)
        if len(moved.adapters) > max_adapters:
            raise ValueError(
                f"max_adapters: expected at least {len(moved.adapters)} for the model's adapters, got {max_adapters}."
            )
        for name, adapter in moved.adapters.items():
            place(name, adapter, {t.path: t.spot for t in selection.targets}, state.max_rank)
        conversions = _quantize(selection, layout, compute, state)
        swap(conversions)
        try:
            for name, adapter in moved.adapters.items():
                load_adapter(plain, name, adapter)
            moved.take_over()
        except BaseException:
            swap_back(conversions)
            raise


def unwrap(model: Any) -> nn.Module:
    """Return the module inside what torch.compile returned, or the module itself."""
    return getattr(model, "_orig_mod", model)


def check_options(base: str, layout: str, compute: str, max_adapters: int, max_rank: int) -> AdapterState:
    """Check the options of patch, and what the environment says of plans; return the state of a model so patched."""
    tune_mode()
    for name, value, allowed in (("base", base, ("fp8",)), ("layout", layout, LAYOUTS), ("compute", compute, COMPUTES)):
        if value not in allowed:
            raise ValueError(f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}.")
    for name, count, least in (("max_adapters", max_adapters, 0), ("max_rank", max_rank, 1)):
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{name}: expected an integer, got {type(count).__name__}.")
        if count < least:
            raise ValueError(f"{name}: expected at least {least}, got {count}.")
    return AdapterState(max_adapters, max_rank)


def read_patterns(
    targets: str | Iterable[str] | None, exclude: str | Iterable[str]
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """Check targets and exclude of patch; return them as tuples. The default of exclude gives way to a head by name."""
    chosen = None if targets is None else as_patterns("targets", targets)
    excluded = as_patterns("exclude", exclude)
    if chosen and excluded == EXCLUDE and any(f".{name}".endswith(".lm_head") for name in chosen):
        excluded = ()
    return chosen, excluded


def check_plain(model: nn.Module) -> None:
    """Raise unless the model is a module that was not patched yet."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}.")
    if isinstance(model, nn.Linear):
        raise TypeError("model: expected a module that holds linear layers, got a linear layer by itself.")
    if lora_linears(model):
        raise ValueError("model: it is already patched. Call unpatch() first, or load adapters into it.")


def _check_not_quantized(model: Any) -> None:
    config = getattr(getattr(model, "config", None), "quantization_config", None)
    if config is not None:
        method = config.get("quant_method") if isinstance(config, Mapping) else getattr(config, "quant_method", None)
        raise ValueError(
            f"model: expected 16-bit weights, it is already quantized ({getattr(method, 'value', method)} in "
            "config.quantization_config). Use torch_epilora.load_quantized(path) with the folder of an FP8 checkpoint, "
            "or patch the model it was quantized from."
        )


def is_peft(model: nn.Module) -> bool:
    """Say whether a model is a PeftModel, without importing PEFT."""
    return any(c.__name__ == "PeftModel" and c.__module__.startswith("peft.") for c in type(model).__mro__)


def is_tuner(module: nn.Module) -> bool:
    """Say whether a module is a layer of PEFT's, without importing PEFT."""
    return any(c.__name__ == "BaseTunerLayer" and c.__module__.startswith("peft.") for c in type(module).__mro__)


def _check_no_tuners(model: nn.Module, selection: Selection) -> None:
    """Refuse PEFT's layers outside of a PeftModel: their A and B are linears too, and their adapters would not move."""
    parents = {id(parent) for target in selection.targets for parent, _ in target.places}
    for name, module in model.named_modules():
        if is_tuner(module):
            if any(id(part) in parents for part in module.modules()):
                raise NotImplementedError(
                    f"model: expected a PeftModel or a model without adapters, {name} is PEFT's "
                    f"{type(module).__name__} in another model. Build the model without its adapters and give them to "
                    "torch_epilora.load_adapter."
                )


def _check_finite(selection: Selection) -> None:
    for target in selection.targets:
        weight = target.module.weight
        if not weight.is_meta and not torch.isfinite(weight).all():
            raise ValueError(f"{target.path}.weight: expected finite values, got NaN or infinity.")


def _quantize(selection: Selection, layout: str, compute: str, state: AdapterState) -> list[Conversion]:
    _check_finite(selection)
    for path, reason in selection.skipped.items():
        logger.info("%s is left as it is: %s.", path, reason)
    return prepare(
        selection.families,
        lambda t: Fp8Weight.quantize(t.module.weight.detach(), layout),
        lambda t: t.module.bias,
        state,
        compute,
    )


def unpatch(model: Model) -> Model:
    """Put plain ``nn.Linear`` layers back, in place.

    Their weights are the dequantized ones: what FP8 rounded away does not come back. Loaded adapters are dropped, hooks
    stay. Adapters that PEFT made on the patched model stay too, over frozen linears, into which PEFT can merge them.

    Parameters
    ----------
    model : nn.Module
        A patched model.

    Returns
    -------
    nn.Module
        The model itself.

    Raises
    ------
    ValueError
        If the model is not patched.
    NotImplementedError
        If it was a PeftModel before patch(): its adapters live in the slots.
    """
    if not lora_linears(model):
        raise ValueError("model: expected a patched model, found no patched layer in it.")
    trained = any(is_tuner(module) for module in model.modules())
    if is_peft(unwrap(model)) and not trained:
        raise NotImplementedError(
            "model: a PeftModel's adapters live in the slots. Save them and unpatch model.get_base_model() instead."
        )
    with torch.inference_mode(False), torch.no_grad():
        plain: dict[int, nn.Linear] = {}
        for parent in list(model.modules()):
            for name, child in list(parent._modules.items()):
                if isinstance(child, LoraLinear):
                    if id(child) not in plain:
                        plain[id(child)] = _plain(child).requires_grad_(not trained)
                    setattr(parent, name, plain[id(child)])
                    leave_base: Any = getattr(parent, "leave_base", None)  # of our layer for PEFT
                    if leave_base is not None:
                        leave_base()
        unhook(model)
        _forget_quantizer(unwrap(model))
    return model


def _forget_quantizer(model: Any) -> None:
    """Let a model that transformers loaded with EpiLoraConfig pass for the plain one that it is from now on."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.remove_quantization_config(model)


def _plain(linear: LoraLinear) -> nn.Linear:
    dtype, bias = linear.group.bank.dtype, linear.bias
    plain = nn.Linear(linear.in_features, linear.out_features, bias is not None, device="meta", dtype=dtype)
    plain.weight = nn.Parameter(dequantize_fp8(linear.weight, linear.weight_scale, dtype))
    if bias is not None:
        plain.bias = nn.Parameter(bias.clone())
    plain.train(linear.training)
    hand_over_hooks(linear, plain)
    return plain
