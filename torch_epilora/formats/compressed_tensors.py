"""The compressed-tensors float-quantized config: read which scales to expect, and describe weights that we write."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from torch_epilora.formats.fp8 import Fp8Weight

FORMATS = ("float-quantized", "naive-quantized")


def read_groups(config: dict[str, Any], where: str) -> tuple[tuple[str, ...], bool | None]:
    """Read ``config_groups``.

    Parameters
    ----------
    config : dict
        A compressed-tensors ``quantization_config``.
    where : str
        What errors call it.

    Returns
    -------
    layouts : tuple of str
        Weight-scale layouts of its groups.
    static : bool or None
        Whether activations have a static scale in all groups (True), in none (False), or in some (None).

    Raises
    ------
    NotImplementedError
        If a group is not FP8 with symmetric tensor, channel or 128x128 block scales, or the weights are transformed.
    ValueError
        If a value has the wrong type or is missing.
    """
    if config.get("transform_config"):
        raise NotImplementedError(f"{where}: transform_config (rotated weights) is not supported.")
    sparsity = config.get("sparsity_config")
    if sparsity and (not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense"):
        raise NotImplementedError(f"{where}: sparsity_config (compressed sparse weights) is not supported.")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{where}: expected config_groups to be a non-empty object, got {groups!r}.")
    layouts, static = set(), set()
    for name, group in groups.items():
        spot = f"{where}: config_groups.{name}"
        if not isinstance(group, dict):
            raise ValueError(f"{spot}: expected an object, got {type(group).__name__}.")
        fmt = group.get("format") or config.get("format")
        if fmt not in FORMATS:
            raise NotImplementedError(f"{spot}: format {fmt!r} is not supported; expected one of {', '.join(FORMATS)}.")
        if group.get("output_activations"):
            raise NotImplementedError(f"{spot}: quantized output_activations are not supported.")
        layouts.add(_weight_layout(group.get("weights"), f"{spot}.weights"))
        static.add(_is_static(group.get("input_activations"), f"{spot}.input_activations"))
    return tuple(sorted(layouts)), static.pop() if len(static) == 1 else None


def _fp8_args(args: object, spot: str) -> dict[str, Any]:
    if not isinstance(args, dict):
        raise ValueError(f"{spot}: expected an object, got {type(args).__name__}.")
    kind, bits = args.get("type"), args.get("num_bits")
    if kind != "float" or bits != 8:
        raise NotImplementedError(f"{spot}: type {kind!r}, num_bits {bits!r} is not supported; expected 'float', 8.")
    if not args.get("symmetric", True):
        raise NotImplementedError(f"{spot}: asymmetric codes (zero points) are not supported.")
    return args


def _weight_layout(args: object, spot: str) -> str:
    found = _fp8_args(args, spot)
    if found.get("actorder"):
        raise NotImplementedError(f"{spot}: actorder {found['actorder']!r} is not supported.")
    strategy = found.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise NotImplementedError(f"{spot}: strategy {strategy!r} is not supported; expected tensor, channel or block.")
    if strategy == "block" and found.get("block_structure") != [128, 128]:
        raise NotImplementedError(
            f"{spot}: block_structure {found.get('block_structure')!r} is not supported; expected [128, 128]."
        )
    return strategy


def _is_static(args: object, spot: str) -> bool:
    if args is None:
        return False
    found = _fp8_args(args, spot)
    if found.get("dynamic", False) is True:
        return False
    if found.get("strategy") != "tensor" or found.get("dynamic", False) is not False:
        raise NotImplementedError(
            f"{spot}: static activations are supported with strategy 'tensor' only, got {found.get('strategy')!r}."
        )
    return True


_WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
_BLOCKS = {"block_structure": [128, 128]}


def describe(weights: Mapping[str, Fp8Weight], others: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint of ``weights``.

    Activations are dynamic per token (per token and 128-group with block scales), or static where a weight has an
    input scale. Weights of one kind form one group that targets every linear layer but those in ``others``; weights
    of several kinds are targeted by name.
    """
    kinds: dict[tuple[str, bool], list[str]] = {}
    for name, weight in weights.items():
        kinds.setdefault((weight.layout, weight.input_scale is not None), []).append(name)
    groups = {}
    for i, ((layout, static), names) in enumerate(sorted(kinds.items())):
        inputs: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": not static}
        if layout == "block":
            inputs |= {"strategy": "group", "group_size": 128}
        else:
            inputs |= {"strategy": "tensor" if static else "token"}
        groups[f"group_{i}"] = {
            "targets": ["Linear"] if len(kinds) == 1 else sorted(names),
            "weights": {**_WEIGHTS, "strategy": layout, **(_BLOCKS if layout == "block" else {})},
            "input_activations": inputs,
            "output_activations": None,
        }
    # A head tied to the embedding is a linear layer without a tensor of its own in the checkpoint.
    matrices = {k.removesuffix(".weight") for k, t in others.items() if k.endswith(".weight") and t.dim() == 2}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(({"lm_head"} | matrices) - weights.keys()),
        "kv_cache_scheme": None,
    }
