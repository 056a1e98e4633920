"""Read LoRA adapters in PEFT's format: adapter_config.json with adapter_model.safetensors, or the two in memory."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_epilora.formats.adapter_config import LoraSettings, read_settings
from torch_epilora.formats.files import open_folder, read_json, read_safetensors, shorten
from torch_epilora.formats.name_patterns import MAX_NAME

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PARTS = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_B.bias": "b_bias"}
_MAGNITUDE = ".lora_magnitude_vector"


@dataclass(frozen=True, eq=False)
class LoraPair:
    """The adapter of one linear layer: ``y += scaling * (x A^T B^T + b_bias)``.

    Attributes
    ----------
    a : Tensor
        [r, K], fp32, fp16 or bf16 as stored.
    b : Tensor
        [N, r].
    b_bias : Tensor, optional
        [N], PEFT's ``lora_bias``.
    scaling : float
        alpha / r, or alpha / sqrt(r) for rsLoRA.
    """

    a: Tensor
    b: Tensor
    b_bias: Tensor | None
    scaling: float

    @property
    def rank(self) -> int:
        """Rank r."""
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class Adapter:
    """A LoRA adapter of a model.

    Attributes
    ----------
    modules : dict of str to LoraPair
        By module path in the base model, fused or split as in the file.
    skipped : tuple of str
        Keys and config fields left out with ``strict=False``.
    """

    modules: dict[str, LoraPair]
    skipped: tuple[str, ...] = ()

    @property
    def rank(self) -> int:
        """Largest rank of its modules."""
        return max(pair.rank for pair in self.modules.values())


def read_adapter(
    source: str | os.PathLike[str] | tuple[Mapping[str, Tensor], Mapping[str, Any]], *, strict: bool = True
) -> Adapter:
    """Read a LoRA adapter in PEFT's format.

    Honors ``r``, ``lora_alpha``, ``rank_pattern``, ``alpha_pattern``, ``use_rslora`` and ``lora_bias`` as PEFT does.
    Patterns are names or simple regular expressions, which take bounded time whatever they are; see
    ``torch_epilora.formats.name_patterns.NamePatterns``.

    Parameters
    ----------
    source : path or (state dict, config)
        A folder with adapter_config.json and adapter_model.safetensors, or what
        ``peft.get_peft_model_state_dict(model, adapter_name=...)`` and ``model.peft_config[name].to_dict()`` give.
        Tensors of a state dict are taken as they are, without a copy.
    strict : bool
        False leaves out what comes beside the adapters of linear layers (``modules_to_save``, embeddings, trained base
        biases, single layers with DoRA) and lists it in ``skipped``. Variants that change what A and B mean are
        refused all the same.

    Raises
    ------
    NotImplementedError
        If the adapter needs something that is not supported; the message names the keys or fields.
    ValueError
        If a file or value is missing, damaged or absurd: truncated files, A without B, shapes or ranks that do not fit
        each other or the config, NaN or infinity, a dtype other than fp32, fp16 and bf16, sparse or meta tensors,
        names or patterns that are too long.
    TypeError
        If ``source`` is neither a path nor such a pair.
    """
    if isinstance(source, tuple):
        state, config = _check_pair(source)
        settings = read_settings(config, "config")
        spot = where = "state_dict"
    else:
        folder = open_folder("source", source)
        where = str(folder / CONFIG)
        settings = read_settings(read_json(folder, CONFIG), where)
        if not os.path.exists(folder / WEIGHTS) and (pickled := sorted(p.name for p in folder.glob("*.bin"))):
            raise ValueError(
                f"{folder}: expected {WEIGHTS}, found pickled files ({shorten(pickled)}), which are never read. "
                "Save the adapter with safetensors (PEFT's default)."
            )
        state, spot = read_safetensors(folder, WEIGHTS), str(folder / WEIGHTS)
    parts, unsupported = _sort_keys(state, spot)
    unsupported += [f"{where}: {extra}" for extra in settings.extras]
    if unsupported and strict:
        raise NotImplementedError(
            f"{spot}: not supported: {shorten(sorted(unsupported), 12)}. Pass strict=False to load the rest."
        )
    if not parts:
        raise ValueError(f"{spot}: expected lora_A and lora_B of linear layers, found none.")
    pairs = {module: _pair(module, found, settings, spot) for module, found in sorted(parts.items())}
    return Adapter(pairs, tuple(sorted(unsupported)))


def _check_pair(source: tuple[Any, ...]) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    if len(source) != 2 or not all(isinstance(part, Mapping) for part in source):
        kinds = ", ".join(type(part).__name__ for part in source)
        raise TypeError(
            f"source: expected (state dict, config) as two mappings, got ({kinds}). A LoraConfig has to_dict()."
        )
    for key, value in source[0].items():
        if not isinstance(key, str) or not isinstance(value, Tensor):
            raise TypeError(f"state_dict[{key!r}]: expected a tensor under a string, got {type(value).__name__}.")
    return source[0], source[1]


def _sort_keys(state: Mapping[str, Tensor], spot: str) -> tuple[dict[str, dict[str, Tensor]], list[str]]:
    """Split the tensors into parts by module, and the keys that are no part of a linear layer's adapter."""
    parts: dict[str, dict[str, Tensor]] = {}
    unsupported: list[str] = []
    seen: dict[str, str] = {}
    for key in state:
        name = key.removeprefix(PREFIX)
        if len(name) > MAX_NAME or "\n" in name:
            raise ValueError(
                f"{spot}: expected names of at most {MAX_NAME} characters without line breaks, got {len(name)} in "
                f"{key[:80]!r}..."
            )
        if name in seen:
            raise ValueError(f"{spot}: {key} and {seen[name]} name the same tensor; expected one of them.")
        seen[name] = key
        suffix = next((s for s in _PARTS if name.endswith(s)), None)
        if suffix is None:
            unsupported.append(_explain(key))
        else:
            parts.setdefault(name.removesuffix(suffix), {})[_PARTS[suffix]] = state[key]
    for module in list(parts):
        # Without its magnitude vector a layer's A and B would compute something else.
        if any(f"{module}{_MAGNITUDE}{end}" in seen for end in ("", ".weight")):
            unsupported.append(f"{module} (DoRA)")
            del parts[module]
        elif any(t.dim() > 2 for t in parts[module].values()):
            unsupported.append(f"{module} (a convolution or a stack of experts)")
            del parts[module]
    return parts, unsupported


def _explain(key: str) -> str:
    leaf = key.removesuffix(".weight")
    if leaf.endswith(_MAGNITUDE):
        return f"{key} (DoRA)"
    if "lora_embedding_" in key:
        return f"{key} (an embedding's adapter)"
    if ".lora_A." in key or ".lora_B." in key:
        return f"{key} (an adapter name in the key: use peft.get_peft_model_state_dict)"
    return f"{key} (not a LoRA tensor)"


def _pair(module: str, parts: dict[str, Tensor], settings: LoraSettings, spot: str) -> LoraPair:
    for part, leaf in (("a", "lora_A"), ("b", "lora_B")):
        if part not in parts:
            raise ValueError(f"{spot}: {module}: expected lora_A and lora_B, found no {leaf}.")
    a, b, b_bias = parts["a"], parts["b"], parts.get("b_bias")
    for leaf, tensor, dims in (("lora_A.weight", a, 2), ("lora_B.weight", b, 2), ("lora_B.bias", b_bias, 1)):
        if tensor is not None:
            _check_tensor(f"{spot}: {module}.{leaf}", tensor, dims)
    rank = settings.rank_of(module)
    if a.shape[0] != b.shape[1]:
        raise ValueError(f"{spot}: {module}: expected A [r, K] and B [N, r], got {_shape(a)} and {_shape(b)}.")
    if a.shape[0] != rank:
        raise ValueError(f"{spot}: {module}: expected rank {rank}, as the config says, got lora_A {_shape(a)}.")
    if (b_bias is not None) != settings.lora_bias:
        said, got = ("a", "none") if settings.lora_bias else ("no", "one")
        raise ValueError(f"{spot}: {module}: expected {said} lora_B.bias, as the config's lora_bias says, got {got}.")
    if b_bias is not None and b_bias.shape[0] != b.shape[0]:
        raise ValueError(f"{spot}: {module}: expected lora_B.bias [{b.shape[0]}], as B has rows, got {_shape(b_bias)}.")
    return LoraPair(a.detach(), b.detach(), None if b_bias is None else b_bias.detach(), settings.scaling_of(module))


def _check_tensor(spot: str, tensor: Tensor, dims: int) -> None:
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        got = "one on the meta device" if tensor.is_meta else f"a nested or sparse one ({tensor.layout})"
        raise ValueError(f"{spot}: expected a dense tensor with values, got {got}.")
    if tensor.dim() != dims or not tensor.numel():
        raise ValueError(f"{spot}: expected {dims} dimensions, none of them 0, got shape {_shape(tensor)}.")
    if tensor.dtype not in _DTYPES:
        got = str(tensor.dtype).removeprefix("torch.")
        raise ValueError(f"{spot}: expected float32, float16 or bfloat16, got {got}.")
    if not torch.isfinite(tensor).all():
        raise ValueError(f"{spot}: expected finite values, got NaN or infinity. The adapter is damaged or diverged.")


def _shape(tensor: Tensor) -> str:
    return str(list(tensor.shape))
