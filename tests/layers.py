"""A random FP8 layer with adapters to train, and what it computes in fp64, without the library's own arithmetic."""

import torch
from torch import Tensor

from tests.cases import group_rows
from torch_epilora.ops import dequantize_fp8, lora_linear_train


class Layer:
    """A random FP8 layer, its adapters, and what it is given."""

    def __init__(
        self, *, m=12, k=140, widths=(130, 20), r=6, slots=1, layout="channel", dtype=torch.bfloat16, master=None,
        device="cpu",
    ):  # fmt: skip
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        self.widths, n = widths, sum(widths)
        self.codes, self.scale = torch.ops.epilora.quantize_fp8_weight(random(n, k) * k**-0.5, layout)
        master = dtype if master is None else master
        self.a = [(random(slots, r, k) * k**-0.5).to(master).requires_grad_() for _ in widths]
        self.b = [random(slots, w, r).to(master).requires_grad_() for w in widths]
        self.scaling = torch.tensor([[0.5 + i + s for i in range(slots)] for s in range(len(widths))], device=device)
        self.bias = random(n).to(dtype).requires_grad_()
        self.x = random(m, k).to(dtype).requires_grad_()
        self.grad = random(m, n).to(dtype)
        self.row_slots = [i % (slots + 1) - 1 if slots > 1 else 0 for i in range(m)]
        self.groups = group_rows(self.row_slots, slots, device=device) if slots > 1 else None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, self.bias, *self.a, *self.b]

    def run(self, compute: str = "w8a16", **changed) -> Tensor:
        given = {"x": self.x, "a": self.a, "b": self.b, "bias": self.bias, **changed}
        x, a, b = given.pop("x"), given.pop("a"), given.pop("b")
        return lora_linear_train(
            x, self.codes, self.scale, a, b, compute=compute,
            **{"scaling": self.scaling, "groups": self.groups, **given},
        )  # fmt: skip

    def plain(self, leaves: list[Tensor]) -> Tensor:
        """The layer in differentiable fp64 torch, slot by slot."""
        x, bias, *rest = leaves
        a, b = rest[: len(self.widths)], rest[len(self.widths) :]
        y = x @ dequantize_fp8(self.codes, self.scale).double().t() + bias
        for slot in {*self.row_slots} - {-1}:
            rows = torch.tensor([i for i, s in enumerate(self.row_slots) if s == slot], device=x.device)
            parts = [
                self.scaling[s, slot].double() * (x[rows] @ a[s][slot].t()) @ b[s][slot].t() for s in range(len(a))
            ]
            y = y.index_add(0, rows, torch.cat(parts, 1))
        return y


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return bool((got.double() - want.double()).norm() <= tolerance * want.double().norm())
