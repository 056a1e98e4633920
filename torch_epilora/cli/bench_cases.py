"""What `epilora bench` compares: one projection with several adapters, by our paths and by plain torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_epilora.ops import Groups, adapter_groups, lora_linear
from torch_epilora.ops.dispatch import plan_of

__all__ = ["CPU_CASES", "GPU_CASES", "Case", "Operands", "oracle", "variants"]

# Enough bytes of weights in rotation that none of them is still in a cache (an H200's L2 holds 50 MiB).
ROTATED_BYTES = 256 << 20


@dataclass(frozen=True)
class Case:
    """One projection of a model and one batch.

    Attributes
    ----------
    projection : str
        Its name in the table.
    k : int
        Input features.
    slices : tuple of int
        Output features of each slice.
    tokens : int
        Rows of the batch.
    adapters : int
        Adapters in the batch, each with an equal run of rows; never more than tokens.
    rank : int
        Rank of every adapter.
    """

    projection: str
    k: int
    slices: tuple[int, ...]
    tokens: int
    adapters: int
    rank: int


# Qwen3-8B's four projections of a layer.
_QWEN3_8B = {
    "q+k+v": (4096, (4096, 1024, 1024)),
    "o": (4096, (4096,)),
    "gate+up": (4096, (12288, 12288)),
    "down": (12288, (4096,)),
}
GPU_CASES = tuple(
    Case(name, k, slices, tokens, min(8, tokens), 64)
    for tokens in (1, 16, 256, 2048)
    for name, (k, slices) in _QWEN3_8B.items()
)
CPU_CASES = tuple(Case("q+k+v", 576, (576, 192, 192), tokens, min(4, tokens), 16) for tokens in (1, 16))


class Operands:
    """Random operands of a case, several copies of the weights and adapters.

    Parameters
    ----------
    case : Case
        What to make.
    device : torch.device
        Where.
    copies : int, optional
        Copies of weights and adapters; by default so many that they do not fit a cache.
    """

    def __init__(self, case: Case, device: torch.device, copies: int | None = None):
        n = sum(case.slices)
        self.case = case
        self.copies = copies if copies is not None else max(4, -(-ROTATED_BYTES // (n * case.k)))
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int, spread: float = 1.0) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * spread).bfloat16()

        def adapters(*shape: int, spread: float) -> Tensor:
            return random(case.adapters, *shape, spread=spread)

        self.x = random(case.tokens, case.k)
        self.weights = [
            torch.ops.epilora.quantize_fp8_weight(random(n, case.k, spread=case.k**-0.5), "channel")
            for _ in range(self.copies)
        ]
        self.a = [[adapters(case.rank, case.k, spread=case.k**-0.5) for _ in case.slices] for _ in range(self.copies)]
        self.b = [[adapters(width, case.rank, spread=case.rank**-0.5) for width in case.slices] for _ in self.a]
        # Row i has adapter i * adapters // tokens: equal runs, in order, so that torch can take slices of x.
        slots = torch.arange(case.tokens, dtype=torch.int32) * case.adapters // case.tokens
        self.bounds = [int((slots < slot).sum()) for slot in range(case.adapters + 1)]
        self.groups: Groups = adapter_groups(slots.to(torch.int32).to(device), case.tokens, case.adapters)


def variants(operands: Operands) -> dict[str, Callable[[int], Tensor]]:
    """Return the ways to compute the case, each from the number of an operand copy to y [tokens, N].

    `torch` is torch._scaled_mm, then two bf16 products an adapter and slice; its activations are quantized by our
    operator, so that what is compared is the products. The others are our operator, `dispatch`, and its single paths;
    on the CPU there is one path, `reference`.
    """

    def arguments(i: int) -> tuple[Any, ...]:
        weight, scale = operands.weights[i]
        adapters: tuple[Any, ...] = (operands.a[i], operands.b[i], [], None, None, *operands.groups)
        return (operands.x, None, None, weight, scale, None, *adapters, "w8a8")

    def ours(op: Callable[..., Tensor]) -> Callable[[int], Tensor]:
        return lambda i: op(*arguments(i))

    def dispatched(i: int) -> Tensor:
        weight, scale = operands.weights[i]
        return lora_linear(operands.x, weight, scale, operands.a[i], operands.b[i], operands.groups)

    unfused = {"torch": lambda i: _torch_linear(operands, i)}
    if not operands.x.is_cuda:
        return {**unfused, "reference": dispatched}
    few = {"decode": ours(torch.ops.epilora.lora_linear_decode)} if plan_of(*arguments(0)).path == "decode" else {}
    return {
        **unfused,
        **few,
        "fused": ours(torch.ops.epilora.lora_linear_fused),
        "hybrid": ours(torch.ops.epilora.lora_linear_hybrid),
        "dispatch": dispatched,
    }


def _torch_linear(operands: Operands, i: int) -> Tensor:
    x, case = operands.x, operands.case
    weight, weight_scale = operands.weights[i]
    codes, scale = torch.ops.epilora.quantize_fp8_token(x)
    y = torch._scaled_mm(codes, weight.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=x.dtype)
    for slot in range(case.adapters):
        rows = slice(operands.bounds[slot], operands.bounds[slot + 1])
        for a, b, part in zip(operands.a[i], operands.b[i], y.split(case.slices, 1), strict=True):
            part[rows].addmm_(x[rows] @ a[slot].t(), b[slot].t())
    return y


def oracle(operands: Operands) -> Tensor:
    """Return copy 0's result in fp32, from the same codes: what every variant has to come close to."""
    x, case = operands.x.float(), operands.case
    weight, weight_scale = operands.weights[0]
    codes, scale = torch.ops.epilora.quantize_fp8_token(operands.x)
    y = (codes.float() @ weight.float().t()) * scale * weight_scale.t()
    for slot in range(case.adapters):
        rows = slice(operands.bounds[slot], operands.bounds[slot + 1])
        for a, b, part in zip(operands.a[0], operands.b[0], y.split(case.slices, 1), strict=True):
            part[rows] += x[rows] @ a[slot].float().t() @ b[slot].float().t()
    return y
