"""A layer's seven linears trained with LoRA, forward and backward, beside bf16 with and without it.

    python -m benchmarks.training --tokens 8192 2048 --out /tmp/training.json

Qwen3-8B's linears as PEFT has them, rank 64, gradients to x, A and B, one adapter, bf16 activations and adapters; every
system computes the same layer, whose base is the value of the same FP8 codes. Systems, each eagerly (host time
included) and but for ``compiled`` as a replayed CUDA graph:

``bf16``      without LoRA: the gradient to x alone
``eager``     PEFT's arithmetic over the bf16 weight
``compiled``  the same under ``torch.compile``
``manual``    the same as an autograd function written by hand, whose backward has as few GEMMs as there can be
``fp8``       ``manual`` over FP8 codes, which a compiled kernel dequantizes into one piece of memory in each direction
``w8a16``     ``lora_linear_train``, a linear at a time
``grouped``   the same with q, k, v and gate, up as one projection each, whose output is split
``masters``   ``w8a16`` with fp32 adapters
``w8a8``      ``w8a16`` with a forward on the FP8 tensor cores

Gradients are first compared with fp32 autograd: a row says the lowest cosine and the norm ratio farthest from 1.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from benchmarks.layer import write
from benchmarks.models import MODELS
from benchmarks.timing import add_run_options, check_run_options, environment, need_gpu
from torch_epilora.ops import dequantize_fp8, lora_linear_train
from torch_epilora.ops.timing import capture

RANK, SCALING, TIMES = 64, 0.5, 5
Step = Callable[[], list[Tensor]]


class Linears:
    """Linears that read the same input: q, k and v, or one alone."""

    def __init__(self, m: int, k: int, widths: list[int], device: str):
        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(shape, device=device) * scale

        self.widths = widths
        self.codes, self.scale = torch.ops.epilora.quantize_fp8_weight(
            random(sum(widths), k, scale=k**-0.5).bfloat16(), "channel"
        )
        self.weight = dequantize_fp8(self.codes, self.scale, torch.bfloat16)
        self.a = [random(RANK, k, scale=k**-0.5).bfloat16().requires_grad_() for _ in widths]
        self.b = [random(n, RANK, scale=0.1).bfloat16().requires_grad_() for n in widths]
        self.masters = [t.detach().float().requires_grad_() for t in (*self.a, *self.b)]
        self.scaling = torch.full((1,), SCALING, device="cpu")
        self.x = random(m, k).bfloat16().requires_grad_()
        self.grads = [random(m, n).bfloat16() for n in widths]

    def each(self) -> list[tuple[slice, Tensor, Tensor, Tensor]]:
        """Rows of the weight, A, B and the output's gradient of each linear."""
        starts = [sum(self.widths[:i]) for i in range(len(self.widths))]
        rows = [slice(s, s + n) for s, n in zip(starts, self.widths, strict=True)]
        return list(zip(rows, self.a, self.b, self.grads, strict=True))


class Manual(torch.autograd.Function):
    """PEFT's arithmetic; ``value`` gives the weight, in forward and backward."""

    @staticmethod
    def forward(ctx, x, value, a, b):
        h = x @ a.t()
        y = x @ value().t()
        y.addmm_(h, b.t(), alpha=SCALING)
        ctx.save_for_backward(x, h, a, b)
        ctx.value = value
        return y

    @staticmethod
    def backward(ctx, grad):
        x, h, a, b = ctx.saved_tensors
        low = grad @ b
        dx = grad @ ctx.value()
        dx.addmm_(low, a, alpha=SCALING)
        return dx, None, (low.t() @ x) * SCALING, (grad.t() @ h) * SCALING


def _peft(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w.t() + (x @ a.t()) @ b.t() * SCALING


class Systems:
    """Every system's gradients of a layer: of each linear those of x, A and B, without LoRA that of x."""

    def __init__(self, layer: list[Linears]):
        self.layer = layer
        largest = max(linears.codes.numel() for linears in layer)
        self._room = torch.empty(largest, dtype=torch.bfloat16, device=layer[0].x.device)
        self._compiled = torch.compile(_peft)
        self._into = torch.compile(lambda out, codes, scale: out.copy_(codes.to(torch.bfloat16) * scale))

    def _by(self, run: Callable[..., Tensor]) -> list[Tensor]:
        """Differentiate ``run`` of each linear's input, weight, A, B, codes and scale."""
        found: list[Tensor] = []
        for linears in self.layer:
            for rows, a, b, grad in linears.each():
                y = run(linears.x, linears.weight[rows], a, b, linears.codes[rows], linears.scale[rows])
                found += torch.autograd.grad(y, [linears.x, a, b], grad)
        return found

    def bf16(self) -> list[Tensor]:
        found: list[Tensor] = []
        for linears in self.layer:
            for rows, _, _, grad in linears.each():
                found += torch.autograd.grad(linears.x @ linears.weight[rows].t(), [linears.x], grad)
        return found

    def eager(self) -> list[Tensor]:
        return self._by(lambda x, w, a, b, *_: _peft(x, w, a, b))

    def compiled(self) -> list[Tensor]:
        return self._by(lambda x, w, a, b, *_: self._compiled(x, w, a, b))

    def manual(self) -> list[Tensor]:
        return self._by(lambda x, w, a, b, *_: Manual.apply(x, lambda: w, a, b))

    def fp8(self) -> list[Tensor]:
        def value(codes: Tensor, scale: Tensor) -> Tensor:
            out = self._room[: codes.numel()].view_as(codes)
            self._into(out, codes, scale)
            return out

        return self._by(lambda x, w, a, b, codes, scale: Manual.apply(x, lambda: value(codes, scale), a, b))

    def _ours(self, compute: str) -> list[Tensor]:
        scaling = self.layer[0].scaling
        return self._by(
            lambda x, w, a, b, codes, scale: lora_linear_train(
                x, codes, scale, [a[None]], [b[None]], scaling=scaling, compute=compute
            )
        )

    def w8a16(self) -> list[Tensor]:
        return self._ours("w8a16")

    def w8a8(self) -> list[Tensor]:
        return self._ours("w8a8")

    def masters(self) -> list[Tensor]:
        found: list[Tensor] = []
        for linears in self.layer:
            count = len(linears.widths)
            for i, (rows, _, _, grad) in enumerate(linears.each()):
                a, b = linears.masters[i], linears.masters[count + i]
                y = lora_linear_train(
                    linears.x, linears.codes[rows], linears.scale[rows], [a[None]], [b[None]], scaling=linears.scaling
                )
                found += torch.autograd.grad(y, [linears.x, a, b], grad)
        return found

    def grouped(self) -> list[Tensor]:
        """Gradients of x summed over linears that read the same x."""
        found: list[Tensor] = []
        for linears in self.layer:
            y = lora_linear_train(
                linears.x, linears.codes, linears.scale, [t[None] for t in linears.a], [t[None] for t in linears.b],
                scaling=linears.scaling,
            )  # fmt: skip
            parts = y.split(linears.widths, -1)
            found += torch.autograd.grad(parts, [linears.x, *linears.a, *linears.b], linears.grads)
        return found


NAMES = ("bf16", "eager", "compiled", "manual", "fp8", "w8a16", "grouped", "masters", "w8a8")
NO_GRAPH = ("compiled",)


def wanted(layer: list[Linears], name: str) -> list[Tensor]:
    """What a system has to give, by fp32 autograd over the codes' value."""
    found: list[Tensor] = []
    for linears in layer:
        parts: list[list[Tensor]] = []
        for rows, a, b, grad in linears.each():
            x, a32, b32 = (t.detach().float().requires_grad_() for t in (linears.x, a, b))
            w = dequantize_fp8(linears.codes[rows], linears.scale[rows])
            y = x @ w.t() if name == "bf16" else _peft(x, w, a32, b32)
            parts.append(list(torch.autograd.grad(y, [x] if name == "bf16" else [x, a32, b32], grad.float())))
        if name == "grouped":
            dx, da, db = zip(*parts, strict=True)
            found += [sum(dx[1:], dx[0]), *da, *db]
        else:
            found += [t for part in parts for t in part]
    return found


def agreement(got: list[Tensor], want: list[Tensor]) -> tuple[float, float]:
    """Lowest cosine, and the ratio of norms that is farthest from 1."""
    cosines, ratios = [], []
    for g, w in zip(got, want, strict=True):
        g, w = g.double().flatten(), w.double().flatten()
        cosines.append(float(g @ w / (g.norm() * w.norm())))
        ratios.append(float(g.norm() / w.norm()))
    return min(cosines), max(ratios, key=lambda r: abs(r - 1))


def interleaved(steps: dict[str, Callable[[], object]], repeat: int) -> dict[str, list[float]]:
    """Milliseconds of each step, the steps in turn."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeat):
        for name, step in steps.items():
            step()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(TIMES):
                step()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end) / TIMES)
    return found


def measure(m: int, names: list[str], repeat: int) -> dict:
    """One row: each system's median of milliseconds, eager and in a graph."""
    layer = [Linears(m, k, widths, "cuda") for k, widths in MODELS["qwen3-8b"].values()]
    systems = Systems(layer)
    agrees: dict[str, list[float]] = {}
    for name in names:
        cosine, ratio = agreement(getattr(systems, name)(), wanted(layer, name))
        agrees[name] = [round(cosine, 6), round(ratio, 4)]
    eager = {name: getattr(systems, name) for name in names}
    graphs = {
        name: capture(lambda _, step=step: step(), 1).replay for name, step in eager.items() if name not in NO_GRAPH
    }
    samples = {"eager": interleaved(eager, repeat), "graph": interleaved(graphs, repeat)}
    times = {how: {name: round(median(ms), 3) for name, ms in each.items()} for how, each in samples.items()}
    return {"model": "qwen3-8b", "tokens": m, "rank": RANK, "ms": times, "agrees": agrees}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 2048])
    parser.add_argument("--systems", nargs="+", default=list(NAMES), choices=NAMES)
    add_run_options(parser)
    options = parser.parse_args(arguments)
    check_run_options(parser, options)
    if min(options.tokens) < 1:
        parser.error(f"--tokens: expected at least 1, but {min(options.tokens)} came")
    need_gpu()
    sources, rows = environment(), []
    for m in options.tokens:
        rows.append(measure(m, options.systems, options.repeat))
        ms = rows[-1]["ms"]
        for name in options.systems:
            graph = ms["graph"].get(name)
            print(f"{m:6d} {name:9s} eager {ms['eager'][name]:7.3f} graph {graph} agrees {rows[-1]['agrees'][name]}")
        if options.out is not None:
            write(options.out, sources, rows)


if __name__ == "__main__":
    main()
