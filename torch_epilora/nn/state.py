"""save_quantized and load_quantized: the FP8 base of a model as a checkpoint."""

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torch_epilora.formats.checkpoints import Fp8Checkpoint, read_checkpoint, write_checkpoint
from torch_epilora.formats.fp8 import Fp8Weight
from torch_epilora.nn.adapters import patched_parts
from torch_epilora.nn.convert import prepare, swap
from torch_epilora.nn.hooks import hook
from torch_epilora.nn.linear import LoraLinear
from torch_epilora.nn.patch import check_options, check_plain, is_peft, is_tuner, unwrap
from torch_epilora.nn.select import Selection, plain_path, select
from torch_epilora.nn.tuning import tune_at_load

logger = logging.getLogger("torch_epilora")


def save_quantized(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a patched model's base as a compressed-tensors checkpoint, in the layout that vLLM and transformers read.

    A transformers model's config and generation config are written beside the weights; adapters and the tokenizer are
    not. transformers needs compressed-tensors 0.15 or later to load it, and rounds the scales to the model's dtype.

    Parameters
    ----------
    model : nn.Module
        A patched model, a PeftModel included.
    path : path
        Folder to write to; created if missing.

    Raises
    ------
    TypeError, ValueError
        If the model is not patched or on the meta device, or the path is a file. Nothing is then written.
    NotImplementedError
        If PEFT's layers lie over its linears.
    """
    _, linears = patched_parts(model)
    root: Any = unwrap(model)
    if any(is_tuner(module) for module in root.modules()):
        raise NotImplementedError(
            "model: expected no PEFT layers over the base, which training does not change. Save it before "
            "get_peft_model(), or save model.unload(), which drops the adapters; save_pretrained() saves these."
        )
    root = root.get_base_model() if is_peft(root) else root
    weights: dict[str, Fp8Weight] = {}
    others = {plain_path(key): tensor for key, tensor in root.state_dict().items()}
    for key, module in root.named_modules(remove_duplicate=False):
        if isinstance(module, LoraLinear):
            name = plain_path(key)
            weights[name] = Fp8Weight(module.weight, module.weight_scale, module.input_scale)
            for leaf in ("weight", "weight_scale", "input_scale"):
                others.pop(f"{name}.{leaf}", None)
    for name in _tied_names(root):
        others.pop(name, None)
    config: Any = getattr(root, "config", None)
    described = config.to_dict() if hasattr(config, "to_dict") else None
    if described is not None:
        # What was built with from_config has no dtype in its config; without one it would load as another.
        described["dtype"] = str(next(iter(linears.values())).group.bank.dtype).removeprefix("torch.")
    write_checkpoint(path, weights, others, described)
    generation = getattr(root, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(path)


def _tied_names(model: Any) -> set[str]:
    """Names of an output embedding that is the input embedding, which the model ties again as it loads."""
    if not hasattr(model, "get_output_embeddings") or not hasattr(model, "tie_weights"):
        return set()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or embedding is None or head.weight is not embedding.weight:
        return set()
    return {f"{name}.weight" for name, module in model.named_modules() if module is head}


def load_quantized(
    path: str | os.PathLike[str],
    model: Any = None,
    *,
    compute: str = "w8a8",
    max_adapters: int = 8,
    max_rank: int = 64,
    slices: Mapping[str, Sequence[int]] | None = None,
) -> Any:
    """Load an FP8 checkpoint into a patched model.

    Parameters
    ----------
    path : path
        A folder in any format that ``torch_epilora.formats.read_checkpoint`` reads.
    model : nn.Module, optional
        A plain model to patch and fill, in place, with real or meta weights. None builds the transformers causal LM
        that config.json describes, without ever allocating 16-bit weights for its FP8 layers.
    compute : str
        "w8a8" or "w8a16", as for ``patch``.
    max_adapters : int
        Adapter slots of each linear, as for ``patch``.
    max_rank : int
        Largest rank that a slot holds.
    slices : mapping of str to sequence of int, optional
        Output slices of linears that are several in one, as for ``patch``.

    Returns
    -------
    nn.Module
        The model, on the devices it had (the CPU if it was built or on the meta device).

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        If the checkpoint cannot be read or does not fit the model, or there is no memory for the slots. The model is
        then unchanged.
    """
    state = check_options("fp8", "channel", compute, max_adapters, max_rank)
    if model is not None:
        check_plain(model)
        if is_peft(unwrap(model)):
            raise NotImplementedError("model: expected a base model, got a PeftModel. Load before PEFT wraps it.")
    checkpoint = read_checkpoint(path)
    if model is None:
        if checkpoint.config is None:
            raise ValueError(f"{path}: expected a config.json to build a model from, found none. Pass model= instead.")
        from torch_epilora.integrations.transformers import build_skeleton

        model = build_skeleton(path)
    root: Any = unwrap(model)
    selection = select(root, None, (), slices or {}, exact=checkpoint.weights.keys())
    check_weights(checkpoint.weights, selection)
    others = _fit_others(root, checkpoint, selection)
    _warn_about(checkpoint)
    conversions = prepare(
        selection.families,
        lambda target: _on(checkpoint.weights.pop(target.path), target.module.weight.device),
        lambda target: others.get(f"{target.path}.bias", target.module.bias),
        state,
        compute,
    )
    root.load_state_dict(others, strict=False, assign=True)
    swap(conversions)
    if hasattr(root, "tie_weights"):
        root.tie_weights()
    hook(root, state)
    tune_at_load(root)
    return model


def _on(weight: Fp8Weight, device: torch.device) -> Fp8Weight:
    if device.type == "meta" or device == weight.codes.device:
        return weight
    static = None if weight.input_scale is None else weight.input_scale.to(device)
    return Fp8Weight(weight.codes.to(device), weight.scale.to(device), static)


def check_weights(weights: Mapping[str, Fp8Weight], selection: Selection) -> None:
    """Raise ValueError unless every FP8 weight has a linear of its shape among those selected."""
    found = {target.path: target.module for target in selection.targets}
    for name, weight in weights.items():
        if name not in found:
            reason = selection.skipped.get(name, "the model has no such layer")
            raise ValueError(f"{name}: the checkpoint has FP8 codes for it, which cannot be loaded: {reason}.")
        shape = (found[name].out_features, found[name].in_features)
        if tuple(weight.codes.shape) != shape:
            got = list(weight.codes.shape)
            raise ValueError(f"{name}.weight: the model expects {list(shape)}, the checkpoint has {got}.")


def _fit_others(model: nn.Module, checkpoint: Fp8Checkpoint, selection: Selection) -> dict[str, Tensor]:
    """Check the tensors beside the FP8 weights, and cast them and move them to where the model has them."""
    own = model.state_dict(keep_vars=True)
    codes = {f"{name}.weight" for name in checkpoint.weights}
    tied = {id(own[key]) for key in checkpoint.others if key in own}
    missing = [key for key, t in own.items() if key not in codes | checkpoint.others.keys() and id(t) not in tied]
    missing = [key for key in missing if key not in _tied_by_config(model)]
    if missing:
        names = ", ".join(sorted(missing)[:5])
        raise ValueError(f"checkpoint: expected every tensor of the model, missing are {names}.")
    fitted: dict[str, Tensor] = {}
    for key, tensor in checkpoint.others.items():
        target = own.get(key)
        if target is None:
            logger.warning("%s: the model has no such tensor; it is not loaded.", key)
            continue
        if target.shape != tensor.shape:
            raise ValueError(f"{key}: the model expects {list(target.shape)}, the checkpoint has {list(tensor.shape)}.")
        device = tensor.device if target.is_meta else target.device
        value = tensor.to(device=device, dtype=target.dtype)
        fitted[key] = nn.Parameter(value, target.requires_grad) if isinstance(target, nn.Parameter) else value
    return fitted


def _tied_by_config(model: Any) -> set[str]:
    """Names of the output embedding where a skeleton's config ties it, whether or not it is tied already."""
    config = getattr(model, "config", None)
    if not getattr(config, "tie_word_embeddings", False) or not hasattr(model, "get_output_embeddings"):
        return set()
    head = model.get_output_embeddings()
    return {f"{name}.weight" for name, module in model.named_modules() if module is head}


def _warn_about(checkpoint: Fp8Checkpoint) -> None:
    if checkpoint.kv_scales:
        logger.warning("scales of a quantized KV cache are not used: %d tensors.", len(checkpoint.kv_scales))
    if checkpoint.input_scale_ub is not None:
        bound = checkpoint.input_scale_ub
        logger.warning("input_scale_ub=%g is not applied: activations are not clipped to it.", bound)
