"""What a vLLM layer's base is: FP8 codes that our operator multiplies, or something that vLLM computes."""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear

_FORWARDS = {layer.forward for layer in (ColumnParallelLinear, ReplicatedLinear, RowParallelLinear)}
"""Of layers that only multiply: a subclass with a forward of its own computes something else."""


_SCHEMES = "CompressedTensorsLinearMethod"
_METHODS = (_SCHEMES, "Fp8LinearMethod", "Fp8PerTensorOnlineLinearMethod", "Fp8PtpcOnlineLinearMethod")
"""Quantizers that do no more than quantize activations and multiply; others, such as one that transforms them first,
may have the same kernel."""


def _kernel(layer: nn.Module) -> Any:
    """Find the object that quantizes activations and multiplies: of the layer's scheme, or of its quantizer."""
    method = layer.quant_method
    return getattr(layer.scheme if type(method).__name__ == _SCHEMES else method, "fp8_linear", None)


def fp8_refusal(layer: nn.Module) -> str | None:
    """Say why our operator cannot multiply a base layer's weights itself, or None if it can.

    Parameters
    ----------
    layer : nn.Module
        A linear layer of vLLM whose weights are loaded.

    Returns
    -------
    str or None
        The reason, for the log.
    """
    method = type(layer.quant_method).__name__
    kernel = _kernel(layer) if method in _METHODS else None
    if not isinstance(kernel, FP8ScaledMMLinearKernel):
        return f"its base is no FP8 matrix with scales per tensor or channel ({method})"
    if type(kernel).apply_weights is not FP8ScaledMMLinearKernel.apply_weights:
        return f"{type(kernel).__name__} keeps its weights in a layout of its own"
    if type(layer).forward not in _FORWARDS:
        return f"{type(layer).__name__} has a forward of its own"
    weight, scale = (getattr(layer, name) for name in kernel.layer_param_names[:2])
    if weight.dtype != torch.float8_e4m3fn or weight.stride(0) != 1:
        return f"its codes are {weight.dtype} with strides {tuple(weight.stride())}, not e4m3 with rows of inputs"
    k = getattr(layer, "input_size_per_partition", layer.input_size)
    n = getattr(layer, "output_size_per_partition", layer.output_size)
    if tuple(weight.shape) != (k, n):
        return f"its codes are padded from {k} x {n} to {tuple(weight.shape)}"
    if scale.dtype != torch.float32 or scale.numel() not in (1, n):
        return f"its {scale.numel()} scales are neither one nor one for each of {n} outputs"
    return None


def weights(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Codes [N, K] and scale of a layer that is not refused; read anew at each call, since reloads replace them."""
    weight, scale = (getattr(layer, name) for name in _kernel(layer).layer_param_names[:2])
    return weight.t(), scale.reshape(-1)


def codes(layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Make x's codes [M, K] and scale [M, 1] by vLLM's own quantizer.

    It stays outside the operator, where vLLM's compiler fuses it with what makes x.
    """
    kernel, m = _kernel(layer), x.shape[0]
    static, bound = (getattr(layer, name, None) for name in kernel.layer_param_names[2:])
    made, scale = kernel.quant_fp8(x, static, bound)
    if scale.dim() < 2:  # one of all rows
        return made[:m], scale.reshape(1, 1).expand(m, 1).contiguous()
    return made[:m], scale[:m]  # some kernels have rows added
