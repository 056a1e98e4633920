"""The projections of a model, read from its config.json alone: no weights are read and no memory is taken."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch_epilora.formats.schemes import read_scheme
from torch_epilora.nn import ProjectionInfo, describe, patch

__all__ = ["choose_layout", "read_dtype", "read_projections"]

# More layers than any model has: a config that says so is a mistake, and building it would take for ever.
MAX_LAYERS = 1024
MAX_CONFIG_BYTES = 16 << 20
DTYPES = ("bfloat16", "float16", "float32")
DEFAULT_LAYOUT = "channel"
MAX_REASON = 300


def read_projections(folder: Path, *, layout: str, compute: str, rank: int, slots: int) -> Counter[ProjectionInfo]:
    """Patch the skeleton of a transformers causal LM, and count its projections.

    Parameters
    ----------
    folder : Path
        A model's folder; only its config.json is read.
    layout : str
        Layout of the weight scales, "tensor", "channel" or "block".
    compute : str
        "w8a8" or "w8a16".
    rank : int
        Rank that the adapter slots hold.
    slots : int
        Adapter slots.

    Returns
    -------
    Counter of ProjectionInfo
        How many the model has of each, in the order of its first layer; names are the last part of the linears' paths.

    Raises
    ------
    ValueError
        Where there is no config.json, or it is no JSON object, or transformers cannot build a causal LM from it, or
        there is nothing in it to patch.
    """
    model = _skeleton(folder, _read_config(folder))
    patch(model, layout=layout, compute=compute, max_rank=rank, max_adapters=slots)
    return Counter(
        replace(info, names=tuple(path.rpartition(".")[2] for path in info.names)) for info in describe(model)
    )


def read_dtype(folder: Path) -> str:
    """Read the dtype of a model's activations from its config.json: "bfloat16" where it names none of ours.

    Parameters
    ----------
    folder : Path
        A model's folder.

    Returns
    -------
    str
        "bfloat16", "float16" or "float32".

    Raises
    ------
    ValueError
        Where there is no readable config.json.
    """
    config = _read_config(folder)
    named = config.get("dtype", config.get("torch_dtype"))
    return named if named in DTYPES else "bfloat16"


def choose_layout(folder: Path, asked: str | None) -> tuple[str, str | None]:
    """Choose the layout of a model's weight scales: the one asked for, else the checkpoint's own, else "channel".

    Parameters
    ----------
    folder : Path
        A model's folder; only its config.json is read.
    asked : str or None
        "tensor", "channel" or "block"; None leaves the choice to the checkpoint.

    Returns
    -------
    str
        The layout.
    str or None
        What to say of the checkpoint's own quantization_config; None where it has none.

    Raises
    ------
    ValueError
        Where there is no readable config.json.
    """
    found = _read_config(folder).get("quantization_config")
    if found is None:
        return asked or DEFAULT_LAYOUT, None
    shown = f"--layout {asked} is shown" if asked else f"shown as patched with {DEFAULT_LAYOUT} scales, see --layout"
    try:
        if not isinstance(found, dict):
            raise ValueError(f"quantization_config: expected an object, got {type(found).__name__}.")
        scheme = read_scheme(found, "quantization_config")
    except (ValueError, NotImplementedError) as error:
        reason = str(error)[:MAX_REASON].removesuffix(".")
        return asked or DEFAULT_LAYOUT, f"layout: the checkpoint's own is not known ({reason}); {shown}"
    own = f"layout: the checkpoint ({scheme.method}) has {' and '.join(scheme.layouts)} scales"
    if len(scheme.layouts) > 1:
        return asked or DEFAULT_LAYOUT, f"{own}, by module; {shown}"
    return asked or scheme.layouts[0], own if asked in (None, scheme.layouts[0]) else f"{own}; {shown}"


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ValueError(f"{path}: expected a model's config, got {path.stat().st_size} bytes")
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: not found; expected the folder of a transformers model") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: expected a JSON file, got {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ValueError(f"{path}: expected a JSON object with a model_type, as transformers writes it")
    layers = config.get("num_hidden_layers", 1)
    if not isinstance(layers, int) or not 0 < layers <= MAX_LAYERS:
        raise ValueError(f"{path}: expected num_hidden_layers from 1 to {MAX_LAYERS}, got {layers!r}")
    return config


def _skeleton(folder: Path, config: dict[str, Any]) -> Any:
    """Return the model on the meta device, which holds shapes only."""
    import torch

    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; a model's shapes need: pip install transformers") from error
    # auto_map names code that comes with a model; none is run here. The shapes are those of the model before anybody
    # quantized it.
    plain = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain))
    except Exception as error:
        # transformers' configs and models raise whatever they like on values they do not expect.
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"{folder / 'config.json'}: transformers cannot build a causal LM from it: "
            f"{type(error).__name__}: {reason[0][:200] if reason else 'no message'}"
        ) from error
