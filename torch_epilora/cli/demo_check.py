"""The demo's check: each projection of a patched model against PEFT's own unfused arithmetic, same codes and input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torch_epilora.cli.sqnr import sqnr_db
from torch_epilora.ops.reference import dequantize_fp8

__all__ = ["MIN_SQNR_DB", "ProjectionCheck", "check_projections", "fp8_projections", "peft_reference"]

MIN_SQNR_DB = 40.0
"""Below this a projection counts as wrong; one rounding to bf16 alone leaves some 55 dB."""
MAX_GAIN_ERROR = 0.1
PEFT_BASE = "__base__"  # PEFT's name for a row without an adapter

Reference = Callable[[Tensor, Sequence[str | None]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class ProjectionCheck:
    """How far one projection is from the reference.

    Attributes
    ----------
    name : str
        Path of the module in the model.
    sqnr_db : float
        Of the row that is furthest off, in dB.
    gain : float or None
        How much of the adapter's part is in the result: the least-squares factor, 1 where it is right and 0 where it
        is missing. Of the row that is furthest from 1; None where no row's adapter has this projection. Where an
        adapter moves a projection by less than a hundredth, the SQNR alone would not notice its absence.
    """

    name: str
    sqnr_db: float
    gain: float | None

    @property
    def kind(self) -> str:
        """Last part of the name, such as `q_proj`."""
        return self.name.rpartition(".")[2]

    @property
    def passed(self) -> bool:
        """Whether the SQNR is at least `MIN_SQNR_DB` and the gain within `MAX_GAIN_ERROR` of 1."""
        return self.sqnr_db >= MIN_SQNR_DB and (self.gain is None or abs(self.gain - 1) <= MAX_GAIN_ERROR)


def fp8_projections(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linears of a patched model whose weight is FP8 codes, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module.weight.dtype == torch.float8_e4m3fn
    }


class _DequantizedLinear(nn.Module):
    """Base layer of the reference: dequantized weight codes times dequantized per-token activation codes, in fp32."""

    def __init__(self, projection: Any) -> None:
        super().__init__()
        self.codes = projection.weight
        self.scale = projection.weight_scale
        self.bias = projection.bias

    def forward(self, x: Tensor) -> Tensor:
        codes, scale = torch.ops.epilora.quantize_fp8_token(x.reshape(-1, x.shape[-1]))
        weight = dequantize_fp8(self.codes, self.scale)
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(codes.float() * scale, weight, bias).view(*x.shape[:-1], -1)


def peft_reference(model: Any, directories: Mapping[str, Path]) -> dict[str, Reference]:
    """Let PEFT itself read the adapters and compute each projection, without fusing anything.

    PEFT wraps a copy of the model without its weights; its LoRA layers get the FP8 codes of the patched model as
    their base. Thus ranks, alpha patterns and rsLoRA are PEFT's own reading of the files.

    Parameters
    ----------
    model : transformers model
        Already patched, with per-channel or per-tensor scales and "w8a8".
    directories : mapping of str to Path
        The directory of each adapter, by the name that rows use.

    Returns
    -------
    dict
        For each FP8 projection a function of (x [rows, tokens, K], one adapter name or None a row), which returns
        the outputs [rows, tokens, N] in fp32 with and without the adapters.
    """
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

    with torch.device("meta"):
        skeleton = type(model)(model.config)
    # Memory is only reserved: no weight of it is written or read, but PEFT puts the adapters on its device.
    skeleton.to_empty(device=model.device)
    (first, directory), *others = directories.items()
    wrapped = PeftModel.from_pretrained(skeleton, directory, adapter_name=first)
    for name, directory in others:
        wrapped.load_adapter(directory, adapter_name=name)
    wrapped.eval()
    return {
        name: _reference(wrapped.get_base_model().get_submodule(name), _DequantizedLinear(projection), LoraLayer)
        for name, projection in fp8_projections(model).items()
    }


def _reference(layer: Any, base: _DequantizedLinear, lora_layer: type) -> Reference:
    wrapped = isinstance(layer, lora_layer)
    if wrapped:
        layer.base_layer = base

    def run(x: Tensor, names: Sequence[str | None]) -> tuple[Tensor, Tensor]:
        bare = base(x)
        if not wrapped:
            return bare, bare
        return layer(x, adapter_names=[PEFT_BASE if name is None else name for name in names]), bare

    return run


def _gain(actual: Tensor, expected: Tensor, bare: Tensor) -> float:
    part = (expected - bare).double()
    return (((actual - bare).double() * part).sum() / part.square().sum()).item()


def _compare(name: str, actual: Tensor, expected: Tensor, bare: Tensor) -> ProjectionCheck:
    rows = list(zip(actual, expected, bare, strict=True))
    worst = min(sqnr_db(expected, actual) for actual, expected, _ in rows)
    gains = [_gain(*row) for row in rows if not torch.equal(row[1], row[2])]
    return ProjectionCheck(name, worst, max(gains, key=lambda gain: abs(gain - 1), default=None))


@torch.inference_mode()
def check_projections(
    model: Any,
    inputs: Mapping[str, Tensor],
    names: Sequence[str | None],
    references: Mapping[str, Reference],
    advance: Callable[[], None] = lambda: None,
) -> list[ProjectionCheck]:
    """Run one forward of the patched model and compare every projection's output with its reference.

    Each projection is compared on the very input it got, so errors do not add up over layers.

    Parameters
    ----------
    model : transformers model
        Patched; the caller has chosen its rows' adapters.
    inputs : mapping of str to Tensor
        Keyword arguments of its forward, [rows, tokens].
    names : sequence of str or None
        The adapter of each row, as chosen.
    references : mapping
        From `peft_reference`.
    advance : callable
        Called after each projection.

    Returns
    -------
    list of ProjectionCheck
        One a projection, in the order they ran.
    """
    checks: list[ProjectionCheck] = []

    def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def compare(_: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            expected, bare = references[name](arguments[0], names)
            checks.append(_compare(name, output, expected, bare))
            advance()

        return compare

    projections = fp8_projections(model)
    handles = [projections[name].register_forward_hook(hook(name)) for name in references]
    try:
        model(**inputs, use_cache=False, logits_to_keep=1)
    finally:
        for handle in handles:
            handle.remove()
    missing = set(references) - {check.name for check in checks}
    if missing:
        raise RuntimeError(f"expected every projection to run, these did not: {sorted(missing)}")
    return checks
