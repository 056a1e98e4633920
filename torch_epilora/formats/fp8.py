"""The canonical form of an FP8 weight: e4m3 codes, fp32 scales in one of three layouts, maybe a static input scale."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_epilora.ops import BLOCK, dequantize_fp8, scale_layout

LAYOUTS = ("tensor", "channel", "block")
"""Scale layouts: one scale a weight, one an output channel, one a 128x128 block."""


@dataclass(frozen=True, eq=False)
class Fp8Weight:
    """An FP8 weight [N, K]; its value is ``codes * scale`` (EpiLoRA section 3.1).

    Attributes
    ----------
    codes : Tensor
        float8_e4m3fn [N, K], contiguous.
    scale : Tensor
        fp32, dequantization multipliers: [1] (per tensor), [N, 1] (per channel) or [ceil(N/128), ceil(K/128)] (per
        block). [], [1, 1] and [N] are accepted and reshaped. A weight with one scale counts as per tensor, whatever
        its shape, since all three layouts then say the same.
    input_scale : Tensor, optional
        fp32 [1], a checkpoint's static scale of the activations; None means that they are quantized as they come.

    Raises
    ------
    TypeError
        If a part is not a tensor or has another dtype.
    ValueError
        If shapes or devices do not fit together, or a scale is negative or not finite.
    """

    codes: Tensor
    scale: Tensor
    input_scale: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the parts and bring the scales into their canonical shapes."""
        _check_tensor("codes", self.codes, torch.float8_e4m3fn)
        _check_tensor("scale", self.scale, torch.float32)
        if self.codes.dim() != 2 or not self.codes.numel():
            raise ValueError(f"codes: expected a matrix [N, K] that is not empty, got shape {list(self.codes.shape)}.")
        if self.scale.device != self.codes.device:
            raise ValueError(f"scale: expected it on {self.codes.device}, where codes is, got {self.scale.device}.")
        layout = scale_layout(self.codes.shape, self.scale)
        check_scale_values("scale", self.scale)
        shape = {"tensor": (1,), "channel": (self.codes.shape[0], 1)}.get(layout, tuple(self.scale.shape))
        object.__setattr__(self, "codes", self.codes.contiguous())
        object.__setattr__(self, "scale", self.scale.reshape(shape).contiguous())
        if self.input_scale is not None:
            object.__setattr__(self, "input_scale", self._canonical_input_scale(self.input_scale, layout))

    def _canonical_input_scale(self, scale: Tensor, layout: str) -> Tensor:
        _check_tensor("input_scale", scale, torch.float32)
        if layout == "block":
            raise ValueError("input_scale: expected None with a block scale, which quantizes activations by groups.")
        if scale.numel() != 1:
            raise ValueError(f"input_scale: expected one element, got shape {list(scale.shape)}.")
        if scale.device != self.codes.device:
            raise ValueError(f"input_scale: expected it on {self.codes.device}, where codes is, got {scale.device}.")
        check_scale_values("input_scale", scale, zero=False)
        return scale.reshape(1)

    @property
    def layout(self) -> str:
        """Layout of the scale: "tensor", "channel" or "block"."""
        return scale_layout(self.codes.shape, self.scale)

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return ``codes * scale`` [N, K], computed in fp32 and rounded once to ``dtype``."""
        return dequantize_fp8(self.codes, self.scale, dtype)

    @classmethod
    def quantize(cls, weight: Tensor, layout: str = "channel") -> "Fp8Weight":
        """Quantize a weight [N, K] (bf16, fp16 or fp32) to the nearest codes under the largest magnitude's scale.

        Parameters
        ----------
        weight : Tensor
            [N, K], finite.
        layout : str
            "tensor", "channel" or "block".

        Raises
        ------
        ValueError
            If the weight holds NaN or infinity, or the layout is unknown.
        """
        if layout not in LAYOUTS:
            raise ValueError(f"layout: expected one of {LAYOUTS}, got {layout!r}.")
        if not weight.is_meta and not torch.isfinite(weight).all():
            raise ValueError("weight: expected finite values, got NaN or infinity, which FP8 cannot hold.")
        codes, scale = torch.ops.epilora.quantize_fp8_weight(weight, layout)
        return cls(codes, scale)


def canonical_scale(
    scale: Tensor, weight_shape: tuple[int, int], layouts: Collection[str] = LAYOUTS, name: str = "scale"
) -> Tensor:
    """Bring a weight scale as checkpoints store it into its canonical shape, without changing a value.

    Parameters
    ----------
    scale : Tensor
        fp32, bf16, fp16 or float8_e8m0fnu multipliers; uint8 is taken as e8m0 exponents, 2^(e - 127). One element of
        any shape is per tensor; [N], [N, 1] or [1, N] per channel; [ceil(N/128), ceil(K/128)] or its transpose per
        block.
    weight_shape : (int, int)
        (N, K) of the codes.
    layouts : collection of str
        The layouts that the checkpoint's config allows. A shape that fits two of them as it stands or transposed is
        read in the first that fits untransposed.
    name : str
        What errors call it.

    Returns
    -------
    Tensor
        fp32, contiguous, in the shape that ``Fp8Weight`` describes.

    Raises
    ------
    ValueError
        If the dtype or the shape is none of these, or a value is negative, NaN or infinite.
    """
    n, k = weight_shape
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    shapes = {"tensor": (1, 1), "channel": (n, 1), "block": blocks}
    allowed = [shapes[layout] for layout in LAYOUTS if layout in layouts]
    value = _widen(scale, name)
    shape = tuple(value.shape)
    if value.numel() == 1 and (1, 1) in allowed:
        result = value.reshape(1)
    elif shape in allowed:
        result = value
    elif shape == (n,) and "channel" in layouts:
        result = value.reshape(n, 1)
    elif shape[::-1] in allowed and len(shape) == 2:
        result = value.t()
    else:
        forms = {
            "tensor": "one element",
            "channel": f"[{n}, 1] (channels)",
            "block": f"{list(blocks)} (128x128 blocks)",
        }
        expected = " or ".join(forms[layout] for layout in LAYOUTS if layout in layouts)
        raise ValueError(f"{name}: expected {expected} for a weight [{n}, {k}], got shape {list(shape)}.")
    check_scale_values(name, result)
    return result.contiguous()


def _widen(scale: Tensor, name: str) -> Tensor:
    """Return the scale in fp32; every accepted dtype widens without rounding."""
    if scale.dtype == torch.uint8:
        scale = scale.contiguous().view(torch.float8_e8m0fnu)
    if scale.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu):
        raise ValueError(
            f"{name}: expected float32, bfloat16, float16, float8_e8m0fnu or uint8 exponents, got {_name(scale.dtype)}."
        )
    return scale.to(torch.float32)


def check_scale_values(name: str, scale: Tensor, zero: bool = True) -> None:
    """Raise ValueError unless every value is finite and positive (or zero, if ``zero``)."""
    if scale.is_meta:
        return
    bad = ~(torch.isfinite(scale) & ((scale >= 0) if zero else (scale > 0)))
    if bad.any():
        positive = "finite and not negative" if zero else "finite and positive"
        raise ValueError(f"{name}: expected values {positive}, got {scale[bad].reshape(-1)[0].item()}.")


def _check_tensor(name: str, value: object, dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name}: expected a tensor, got {type(value).__name__}.")
    if value.dtype != dtype:
        raise TypeError(f"{name}: expected dtype {_name(dtype)}, got {_name(value.dtype)}.")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
