"""Read FP8 checkpoints that other tools wrote into one canonical form, and write checkpoints that they read."""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from torch_epilora.formats.compressed_tensors import describe
from torch_epilora.formats.files import cut, open_folder, read_json, read_safetensors, shorten
from torch_epilora.formats.fp8 import Fp8Weight, canonical_scale, check_scale_values
from torch_epilora.formats.schemes import SUPPORTED, Scheme, read_scheme

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 10**9
"""Upper bound of one file of a written checkpoint, unless a single tensor is larger."""

_KV = ("q_scale", "k_scale", "v_scale", "output_scale")
_ZERO_POINTS = ("weight_zero_point", "input_zero_point")
_REFUSED = {
    "weight_packed": "packed integer codes",
    "weight_g_idx": "activation ordering",
    "weight_scale_2": "two-level (NVFP4) scales",
    "weight_global_scale": "two-level (NVFP4) scales",
    "pre_quant_scale": "scaled inputs (AWQ)",
}


@dataclass(frozen=True, eq=False)
class Fp8Checkpoint:
    """An FP8 checkpoint in canonical form, on the CPU.

    Attributes
    ----------
    weights : dict of str to Fp8Weight
        By module name, such as ``model.layers.0.self_attn.q_proj``.
    others : dict of str to Tensor
        Everything else by its full name: norms, embeddings, biases, linear layers that were left unquantized.
    config : dict, optional
        The content of config.json, ``quantization_config`` included; None if there is none.
    method : str
        The format: "compressed-tensors", "modelopt", "fbgemm_fp8" or "fp8".
    kv_scales : dict of str to Tensor
        Scales of a quantized KV cache, which the linear layers have no use for.
    input_scale_ub : float, optional
        fbgemm_fp8's upper bound of a token's largest magnitude. The operators do not clip activations to it.
    """

    weights: dict[str, Fp8Weight]
    others: dict[str, Tensor]
    config: dict[str, Any] | None
    method: str
    kv_scales: dict[str, Tensor] = field(default_factory=dict)
    input_scale_ub: float | None = None


def read_checkpoint(path: str | os.PathLike[str]) -> Fp8Checkpoint:
    """Read a checkpoint folder in one of the FP8 formats.

    Takes compressed-tensors float-quantized (tensor, channel or 128x128 block scales), ModelOpt FP8 (static input
    scales or per channel), fbgemm_fp8, and fine-grained FP8 (``weight_scale_inv``, fp32 or e8m0), as one
    ``model.safetensors`` or as shards with an index. The canonical weights have exactly the values that the format
    defines. Files outside the folder are not read, and neither is pickle.

    Parameters
    ----------
    path : str or path
        The folder.

    Raises
    ------
    ValueError
        If a file is missing, truncated or absurd, or a scale does not fit; the message names file and tensor.
    NotImplementedError
        If the format or a variant of it is not supported.
    TypeError
        If ``path`` is not a path.
    """
    folder = open_folder("path", path)
    config = read_json(folder, "config.json") if os.path.exists(folder / "config.json") else None
    scheme = find_scheme(folder, config)
    tensors, files = _read_tensors(folder)
    return _sort(folder, tensors, files, scheme, config)


def find_scheme(folder: Path, config: dict[str, Any] | None) -> Scheme:
    """Read how a folder, whose config.json holds ``config``, stores its FP8 weights; raises as read_checkpoint does."""
    if config is not None and config.get("quantization_config") is not None:
        where = f"{folder / 'config.json'}: quantization_config"
        found = config["quantization_config"]
        if not isinstance(found, dict):
            raise ValueError(f"{where}: expected an object, got {type(found).__name__}.")
        return read_scheme(found, where)
    if os.path.exists(folder / "hf_quant_config.json"):
        return read_scheme(read_json(folder, "hf_quant_config.json"), str(folder / "hf_quant_config.json"))
    raise ValueError(
        f"{folder}: expected a quantization_config in config.json or a hf_quant_config.json, found neither. "
        f"Formats read: {', '.join(SUPPORTED)}; to quantize a plain model, use torch_epilora.patch."
    )


def _read_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return all tensors and, for errors, the file that each came from."""
    if os.path.exists(folder / SINGLE):
        tensors = read_safetensors(folder, SINGLE)
        return tensors, dict.fromkeys(tensors, str(folder / SINGLE))
    if not os.path.exists(folder / INDEX):
        pickled = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
        also = f" It holds pickled files ({shorten(pickled)}), which are never read: convert them." if pickled else ""
        raise ValueError(f"{folder}: expected {SINGLE} or {INDEX}, found neither.{also}")
    where = folder / INDEX
    listed = read_json(folder, INDEX).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise ValueError(f"{where}: expected weight_map to be a non-empty object, got {listed!r}.")
    shards: dict[str, list[str]] = {}
    for key, name in listed.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: expected a file name for {key}, got {name!r}.")
        shards.setdefault(name, []).append(key)
    tensors, files = {}, {}
    for name, keys in shards.items():
        tensors.update(read_safetensors(folder, name, only=keys))
        files.update(dict.fromkeys(keys, str(folder / name)))
    return tensors, files


def _sort(
    folder: Path, tensors: dict[str, Tensor], files: dict[str, str], scheme: Scheme, config: dict[str, Any] | None
) -> Fp8Checkpoint:
    weights: dict[str, Fp8Weight] = {}
    kv_scales: dict[str, Tensor] = {}
    for name in _fp8_layers(tensors, files):
        weights[name] = take_weight(name, tensors, files, scheme)
    for key in list(tensors):
        _, leaf = _split(key)
        if leaf in _KV:
            kv_scales[key] = tensors.pop(key)
        elif leaf == "input_scale_ub" and scheme.input_scale_ub is not None:
            del tensors[key]
        else:
            _check_other(key, tensors, files)
    if not weights:
        raise _no_codes(folder, scheme)
    return Fp8Checkpoint(weights, tensors, config, scheme.method, kv_scales, scheme.input_scale_ub)


def find_weights(
    folder: Path, tensors: Mapping[str, Tensor], files: Mapping[str, str], scheme: Scheme
) -> dict[str, list[str]]:
    """Find the FP8 layers among a folder's tensors, which may be on the meta device.

    Returns
    -------
    dict of str to list of str
        Each layer's name with the keys that :func:`take_weight` needs of it.

    Raises
    ------
    ValueError, NotImplementedError
        As read_checkpoint does for tensors of such names, shapes and dtypes.
    """
    leaves = ("weight", *scheme.scale_keys, *scheme.input_scale_keys, *_ZERO_POINTS, *_REFUSED)
    found = {
        name: [_join(name, leaf) for leaf in leaves if _join(name, leaf) in tensors]
        for name in _fp8_layers(tensors, files)
    }
    if not found:
        raise _no_codes(folder, scheme)
    taken = {key for keys in found.values() for key in keys}
    for key in tensors.keys() - taken:
        if _split(key)[1] not in _KV:
            _check_other(key, tensors, files)
    return found


def _fp8_layers(tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> list[str]:
    names = []
    for key, tensor in tensors.items():
        if tensor.dtype == torch.float8_e4m3fn:
            name, leaf = _split(key)
            if leaf != "weight" or tensor.dim() != 2:
                raise NotImplementedError(
                    f"{files[key]}: {key}: expected FP8 codes in a linear layer's weight [N, K] only, got shape "
                    f"{list(tensor.shape)}."
                )
            names.append(name)
    return names


def _no_codes(folder: Path, scheme: Scheme) -> ValueError:
    return ValueError(f"{folder}: expected float8_e4m3fn weights, as {scheme.method} has, found none.")


def _split(key: str) -> tuple[str, str]:
    name, _, leaf = key.rpartition(".")
    return name, leaf


def _join(name: str, leaf: str) -> str:
    return f"{name}.{leaf}" if name else leaf


def take_weight(name: str, tensors: dict[str, Tensor], files: Mapping[str, str], scheme: Scheme) -> Fp8Weight:
    """Move one weight and what belongs to it out of ``tensors``; ``files`` says for errors where each came from."""
    key = _join(name, "weight")
    spot = f"{files[key]}: {key}"
    codes = tensors.pop(key)
    if not codes.numel():
        raise ValueError(f"{spot}: expected a matrix that is not empty, got shape {list(codes.shape)}.")
    # A NaN code is the byte 0x7f or 0xff.
    if ((codes.view(torch.uint8) & 0x7F) == 0x7F).any():
        raise ValueError(f"{spot}: expected finite codes, got NaN. The file is damaged.")
    for leaf, meaning in _REFUSED.items():
        if _join(name, leaf) in tensors:
            raise NotImplementedError(f"{files[_join(name, leaf)]}: {_join(name, leaf)}: {meaning} are not supported.")
    for leaf in _ZERO_POINTS:
        zero = tensors.pop(_join(name, leaf), None)
        if zero is not None and zero.float().count_nonzero():
            raise NotImplementedError(f"{spot}: zero points other than 0 ({leaf}) are not supported.")
    scale_key = _only(name, scheme.scale_keys, tensors, spot)
    if scale_key is None:
        raise ValueError(f"{spot}: expected its scale as {' or '.join(scheme.scale_keys)} beside it, found none.")
    shape = (codes.shape[0], codes.shape[1])
    scale = canonical_scale(tensors.pop(scale_key), shape, scheme.layouts, f"{files[scale_key]}: {scale_key}")
    return Fp8Weight(codes, scale, _take_input_scale(name, tensors, files, scheme, spot))


def _take_input_scale(
    name: str, tensors: dict[str, Tensor], files: Mapping[str, str], scheme: Scheme, spot: str
) -> Tensor | None:
    key = _only(name, scheme.input_scale_keys, tensors, spot)
    if key is None:
        if scheme.static:
            raise ValueError(f"{spot}: expected a static {' or '.join(scheme.input_scale_keys)} beside it, found none.")
        return None
    if scheme.static is False:
        raise ValueError(f"{files[key]}: {key}: a static input scale, but the config says that inputs are dynamic.")
    scale = canonical_scale(tensors.pop(key), (1, 1), ("tensor",), f"{files[key]}: {key}")
    check_scale_values(f"{files[key]}: {key}", scale, zero=False)
    return scale


def _only(name: str, leaves: tuple[str, ...], tensors: dict[str, Tensor], spot: str) -> str | None:
    """Return the one key among ``leaves`` of the module, or None."""
    found = [_join(name, leaf) for leaf in leaves if _join(name, leaf) in tensors]
    if len(found) > 1:
        raise ValueError(f"{spot}: expected one scale beside it, got {' and '.join(found)}.")
    return found[0] if found else None


def _check_other(key: str, tensors: Mapping[str, Tensor], files: Mapping[str, str]) -> None:
    """Refuse what is left of a quantized layer whose codes are not e4m3: read as a plain tensor it would be wrong."""
    name, leaf = _split(key)
    dtype = str(tensors[key].dtype).removeprefix("torch.")
    if leaf in ("weight_scale", "weight_scale_inv", "input_scale", *_ZERO_POINTS, *_REFUSED):
        codes = tensors.get(_join(name, "weight"))
        got = "no weight" if codes is None else str(codes.dtype).removeprefix("torch.")
        raise ValueError(f"{files[key]}: {key}: expected float8_e4m3fn codes in {_join(name, 'weight')}, got {got}.")
    if "float8" in dtype or "float4" in dtype:
        raise ValueError(f"{files[key]}: {key}: expected float8_e4m3fn codes or a plain tensor, got {dtype}.")


def write_checkpoint(
    path: str | os.PathLike[str],
    weights: Mapping[str, Fp8Weight],
    others: Mapping[str, Tensor],
    config: Mapping[str, Any] | None,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a compressed-tensors float-quantized checkpoint, in the layout that vLLM and transformers read.

    A model in the folder is replaced once all new files are complete; other files stay. A transformers model in bf16
    or fp16 rounds the fp32 scales to its own dtype as it loads them; ``read_checkpoint`` does not.

    Parameters
    ----------
    path : str or path
        Folder to write to; created if missing.
    weights : mapping of str to Fp8Weight
        By module name.
    others : mapping of str to Tensor
        All other tensors of the model by their full names. Tensors that share memory are written out each.
    config : mapping, optional
        The model's configuration (``model.config.to_dict()``); its ``quantization_config`` is replaced.
    shard_bytes : int
        Largest file, in bytes.

    Raises
    ------
    TypeError, ValueError
        If an argument is not what is described above; nothing is then written.
    """
    tensors = _flatten(weights, others)
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ValueError(f"shard_bytes: expected a positive integer, got {shard_bytes!r}.")
    if config is not None and not isinstance(config, Mapping):
        raise TypeError(f"config: expected a mapping or None, got {type(config).__name__}.")
    try:
        text = json.dumps({**(config or {}), "quantization_config": describe(weights, others)}, indent=2)
    except (TypeError, ValueError) as e:
        raise TypeError(f"config: expected values that JSON can hold, got one that it cannot ({e}).") from e
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected the path of a folder, got {type(path).__name__}.")
    folder = Path(path)
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise ValueError(f"path: expected a folder, got the file {str(path)!r}.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"path: expected a folder that can be made, got {cut(str(path))!r} ({e.strerror}).") from e
    draft = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
    try:
        _write_tensors(draft, tensors, shard_bytes)
        (draft / "config.json").write_text(text + "\n", encoding="utf-8")
        new = sorted(p.name for p in draft.iterdir())
        for name in new:
            os.replace(draft / name, folder / name)
    finally:
        shutil.rmtree(draft)
    for stale in {*folder.glob("model-*-of-*.safetensors"), folder / SINGLE, folder / INDEX}:
        if stale.name not in new:
            stale.unlink(missing_ok=True)


def _flatten(weights: Mapping[str, Fp8Weight], others: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return all tensors under the names of the file; copies those that overlap another in memory."""
    if not weights:
        raise ValueError("weights: expected at least one FP8 weight, got none.")
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if not isinstance(weight, Fp8Weight):
            raise TypeError(f"weights[{name!r}]: expected an Fp8Weight, got {type(weight).__name__}.")
        tensors[_join(name, "weight")] = weight.codes
        tensors[_join(name, "weight_scale")] = weight.scale
        if weight.input_scale is not None:
            tensors[_join(name, "input_scale")] = weight.input_scale
    for key, tensor in others.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"others[{key!r}]: expected a tensor, got {type(tensor).__name__}.")
        if key in tensors:
            raise ValueError(f"others[{key!r}]: expected a name that weights does not use already.")
        tensors[key] = tensor
    taken: dict[int, list[tuple[int, int]]] = {}
    for key, tensor in tensors.items():
        if tensor.is_meta or tensor.layout is not torch.strided:
            got = "one on the meta device" if tensor.is_meta else f"a sparse one ({tensor.layout})"
            raise ValueError(f"{key}: expected a tensor with values, got {got}.")
        value = tensor.detach().contiguous()
        start, end = value.data_ptr(), value.data_ptr() + value.nbytes
        spans = taken.setdefault(value.untyped_storage().data_ptr(), [])
        if any(start < e and s < end for s, e in spans):
            value = value.clone()
        else:
            spans.append((start, end))
        tensors[key] = value
    return tensors


def _write_tensors(folder: Path, tensors: dict[str, Tensor], shard_bytes: int) -> None:
    shards: list[dict[str, Tensor]] = [{}]
    size = total = 0
    for key, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][key] = tensor
        size += tensor.nbytes
        total += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / SINGLE, metadata={"format": "pt"})
        return
    listed = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, metadata={"format": "pt"})
        listed.update(dict.fromkeys(shard, name))
    index = {"metadata": {"total_size": total}, "weight_map": listed}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
