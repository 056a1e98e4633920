"""What the FP8 checkpoint formats call the parts of a linear layer, and which of their variants we can compute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch_epilora.formats.compressed_tensors import read_groups


@dataclass(frozen=True)
class Scheme:
    """How one checkpoint names and shapes the parts of its FP8 weights.

    Attributes
    ----------
    method : str
        The format's name, as ``quantization_config.quant_method`` spells it.
    layouts : tuple of str
        Scale layouts that its config allows.
    scale_keys, input_scale_keys : tuple of str
        Names beside ``weight`` under which the weight's scale and the static input scale may lie.
    static : bool, optional
        Whether each FP8 weight must have (True) or must not have (False) a static input scale; None leaves it open.
    input_scale_ub : float, optional
        fbgemm_fp8's upper bound of a token's largest magnitude.
    """

    method: str
    layouts: tuple[str, ...]
    scale_keys: tuple[str, ...] = ("weight_scale",)
    input_scale_keys: tuple[str, ...] = ("input_scale",)
    static: bool | None = None
    input_scale_ub: float | None = None


def read_scheme(config: dict[str, Any], where: str) -> Scheme:
    """Read a checkpoint's ``quantization_config``.

    Parameters
    ----------
    config : dict
        The object under ``quantization_config`` of config.json, or the content of hf_quant_config.json.
    where : str
        What errors call it.

    Raises
    ------
    NotImplementedError
        If the format, or a variant of it, is one that this library does not compute.
    ValueError
        If a value has the wrong type or is missing.
    """
    method = config.get("quant_method")
    if method is None and _producer(config) == "modelopt":
        method = "modelopt"
    if not isinstance(method, str):
        raise ValueError(f"{where}: expected quant_method to be a string, got {method!r}.")
    reader = _READERS.get(method.replace("_", "-"))
    if reader is None:
        raise NotImplementedError(
            f"{where}: quant_method {method!r} is not supported; expected one of {', '.join(SUPPORTED)}."
        )
    return reader(config, where)


def _producer(config: dict[str, Any]) -> object:
    producer = config.get("producer")
    return producer.get("name") if isinstance(producer, dict) else None


def _compressed_tensors(config: dict[str, Any], where: str) -> Scheme:
    layouts, static = read_groups(config, where)
    return Scheme("compressed-tensors", layouts, static=static)


def _modelopt(config: dict[str, Any], where: str) -> Scheme:
    """ModelOpt: per-tensor codes with an optional static input scale, or per-channel codes with per-token inputs."""
    inner = config.get("quantization", config)
    if not isinstance(inner, dict):
        raise ValueError(f"{where}: expected quantization to be an object, got {type(inner).__name__}.")
    algo = inner.get("quant_algo")
    if algo == "FP8":
        return Scheme("modelopt", ("tensor",))
    if algo == "FP8_PER_CHANNEL_PER_TOKEN":
        return Scheme("modelopt", ("channel",), static=False)
    if not isinstance(algo, str):
        raise ValueError(f"{where}: expected quant_algo to be a string, got {algo!r}.")
    raise NotImplementedError(
        f"{where}: ModelOpt's quant_algo {algo!r} is not supported; expected FP8 or FP8_PER_CHANNEL_PER_TOKEN."
    )


def _fbgemm(config: dict[str, Any], where: str) -> Scheme:
    bound = config.get("activation_scale_ub")
    if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < 1e30):
        raise ValueError(f"{where}: expected activation_scale_ub to be a positive number, got {bound!r}.")
    return Scheme("fbgemm_fp8", ("channel",), static=False, input_scale_ub=None if bound is None else float(bound))


def _fine_grained(config: dict[str, Any], where: str) -> Scheme:
    """Fine-grained FP8: multipliers named ``weight_scale_inv``, one a 128x128 block, or one a tensor without blocks."""
    fmt = config.get("fmt", "e4m3")
    if fmt != "e4m3":
        raise NotImplementedError(f"{where}: fmt {fmt!r} is not supported; expected 'e4m3'.")
    activation = config.get("activation_scheme", "dynamic")
    if activation not in ("dynamic", "static"):
        raise ValueError(f"{where}: expected activation_scheme 'dynamic' or 'static', got {activation!r}.")
    block = config.get("weight_block_size")
    if block is not None and (not isinstance(block, list | tuple) or [type(v) for v in block] != [int, int]):
        raise ValueError(f"{where}: expected weight_block_size to be two integers or null, got {block!r}.")
    if block is not None and tuple(block) != (128, 128):
        raise NotImplementedError(f"{where}: weight_block_size {list(block)} is not supported; expected [128, 128].")
    if block is not None and activation == "static":
        raise NotImplementedError(f"{where}: static activations with block scales are not supported.")
    return Scheme(
        "fp8",
        ("tensor",) if block is None else ("block",),
        scale_keys=("weight_scale_inv", "weight_scale", "scale"),
        input_scale_keys=("input_scale", "activation_scale"),
        static=activation == "static",
    )


SUPPORTED = ("compressed-tensors", "modelopt", "fbgemm_fp8", "fp8")
"""Values of ``quant_method`` that :func:`read_scheme` takes."""

_READERS: dict[str, Callable[[dict[str, Any], str], Scheme]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "fbgemm-fp8": _fbgemm,
    "fp8": _fine_grained,
}
