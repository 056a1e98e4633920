"""Random projections with adapters, and their results in fp64, computed without the library's own arithmetic."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torch_epilora.ops import Groups

FP8 = torch.float8_e4m3fn


@dataclass
class Case:
    """One call of ``lora_linear`` and the slot of each row."""

    x: Tensor
    weight: Tensor
    weight_scale: Tensor
    a: list[Tensor]
    b: list[Tensor]
    row_slots: list[int]
    groups: Groups
    layout: str
    compute: str = "w8a8"
    bias: Tensor | None = None
    b_bias: list[Tensor] = field(default_factory=list)
    rank: Tensor | None = None
    scaling: Tensor | None = None
    x_codes: Tensor | None = None
    x_scale: Tensor | None = None

    def args(self) -> tuple:
        """Positional arguments of the operator."""
        return (
            self.x, self.x_codes, self.x_scale, self.weight, self.weight_scale, self.bias, self.a, self.b, self.b_bias,
            self.rank, self.scaling, *self.groups, self.compute,
        )  # fmt: skip

    def run(self, op: str = "lora_linear") -> Tensor:
        return getattr(torch.ops.epilora, op)(*self.args())

    def to(self, device: str) -> "Case":
        moved = {}
        for name, value in vars(self).items():
            if isinstance(value, Groups):
                value = Groups(*(t.to(device) for t in value[:4]), value.no_adapter)
            elif isinstance(value, list) and value and isinstance(value[0], Tensor):
                value = [t.to(device) for t in value]
            elif isinstance(value, Tensor):
                value = value.to(device)
            moved[name] = value
        return Case(**moved)


def group_rows(row_slots: list[int], num_slots: int, *, padding: int = 0, device: str = "cpu") -> Groups:
    """Metadata by a plain Python sort; the last ``padding`` rows stay out of it and find stale entries in the list."""
    real = row_slots[: len(row_slots) - padding]
    ids = list(range(-1, num_slots))
    order = sorted(range(len(real)), key=lambda i: real[i]) + [0] * padding
    counts = [real.count(i) for i in ids]
    starts = [sum(counts[:i]) for i in range(len(ids) + 1)]
    ints = [torch.tensor(v, dtype=torch.int32, device=device) for v in (order, ids, counts, starts)]
    return Groups(*ints, torch.tensor([all(s < 0 for s in real)]))


def make_case(
    m: int,
    k: int,
    widths: list[int],
    r: int,
    slots: int,
    *,
    layout: str = "channel",
    compute: str = "w8a8",
    dtype: torch.dtype = torch.bfloat16,
    popularity: str = "uniform",
    mixed_ranks: bool = True,
    rank_unit: int = 1,
    bias: bool = True,
    b_bias: bool = False,
    poison: bool = True,
    codes: str = "made",
    padding: int = 0,
    device: str = "cpu",
    seed: int = 0,
) -> Case:
    """Draw a case. ``poison`` fills what lies beyond an adapter's rank with NaN; ``codes`` is made, given or static.

    ``mixed_ranks`` are multiples of ``rank_unit``: kernels have another loop where one ends within 8.
    """
    gen = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=gen, device=device)

    n = sum(widths)
    x = (randn(m, k) * torch.exp(randn(m, 1))).to(dtype)
    if m > 1:
        x[1] = 0
    wide = randn(n, k) * torch.exp(0.5 * randn(n, 1)) * 0.05
    blocks = (-(-n // 128), -(-k // 128))
    scale = torch.exp(0.3 * randn(*{"tensor": (1,), "channel": (n, 1), "block": blocks}[layout])) * 2e-4
    weight = (wide * 4000).clamp(-448, 448).to(FP8)
    if popularity == "uniform":
        row_slots = torch.randint(-1, slots, (m,), generator=gen, device=device).tolist()
    elif popularity == "skewed":
        row_slots = [0 if u < 0.8 else slots - 1 for u in torch.rand(m, generator=gen, device=device).tolist()]
    elif popularity == "distinct":
        row_slots = [i % slots for i in range(m)]
    elif popularity == "one":
        row_slots = [slots - 1] * m
    else:
        row_slots = [-1] * m
    if padding:
        row_slots[m - padding :] = [-1] * padding
    ranks = torch.full((len(widths), slots), r, dtype=torch.int32, device=device)
    if mixed_ranks:
        most = r // rank_unit + 1
        ranks = rank_unit * torch.randint(0, most, ranks.shape, generator=gen, dtype=torch.int32, device=device)
        ranks[0, 0] = r
    a = [(randn(slots, r, k) * k**-0.5).to(dtype) for _ in widths]
    b = [(randn(slots, w, r) * r**-0.5).to(dtype) for w in widths]
    if poison:
        beyond = torch.arange(r, device=device) >= ranks[:, :, None]
        for s in range(len(widths)):
            a[s].masked_fill_(beyond[s][:, :, None], float("nan"))
            b[s].masked_fill_(beyond[s][:, None, :], float("nan"))
    case = Case(
        x, weight, scale, a, b, row_slots, group_rows(row_slots, slots, padding=padding, device=device),
        layout, compute,
        bias=randn(n).to(dtype) if bias else None,
        b_bias=[randn(slots, w).to(dtype) for w in widths] if b_bias else [],
        rank=ranks if mixed_ranks or poison else None,
        scaling=0.5 + torch.rand(len(widths), slots, generator=gen, device=device),
    )  # fmt: skip
    if compute == "w8a8" and codes == "given":
        case.x_codes, case.x_scale = exact_codes(x, layout)
        case.x_codes = (case.x_codes.float() * 0.5).to(FP8)  # not what the op would make: it must use these
    elif compute == "w8a8" and codes == "static" and layout != "block":
        case.x_scale = torch.tensor([0.02], device=device)
    return case


def exact_codes(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Activation codes and scale by the definition; tensor by tensor, so that every division is the IEEE quotient."""
    wide = x.float()
    k = wide.shape[1]
    largest = torch.full((1, 1), 448.0, device=x.device)
    if layout == "block":
        groups = [wide[:, g : g + 128] for g in range(0, k, 128)]
        scales = [g.abs().amax(1, keepdim=True).clamp_min(1e-10) / largest for g in groups]
        codes = torch.cat([g / s for g, s in zip(groups, scales, strict=True)], 1)
        return codes.clamp(-448, 448).to(FP8), torch.cat(scales, 1)
    scale = (wide.abs().amax(1, keepdim=True) / largest).clamp_min(1 / (448 * 512))
    return (wide / scale).clamp(-448, 448).to(FP8), scale


def oracle(case: Case, *, round_h: bool = True) -> Tensor:
    """The projection in fp64 from the same codes; ``round_h`` rounds h to x's dtype, as the contract says."""
    x64, w64 = case.x.double(), case.weight.double()
    scale = case.weight_scale.double()
    n, k = w64.shape
    if case.layout == "block":
        scale = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    else:
        scale = scale.reshape(-1, 1)
    operand = x64
    if case.compute == "w8a8":
        if case.x_codes is not None:
            codes, x_scale = case.x_codes, case.x_scale
        elif case.x_scale is not None:
            inverse = torch.ones_like(case.x_scale) / case.x_scale
            codes, x_scale = (case.x.float() * inverse).clamp(-448, 448).to(FP8), case.x_scale.reshape(1, 1)
        else:
            codes, x_scale = exact_codes(case.x, case.layout)
        x_scale = x_scale.double()
        if case.layout == "block":
            x_scale = x_scale.repeat_interleave(128, 1)[:, :k]
        operand = codes.double() * x_scale
    y = operand @ (w64 * scale).t()
    for slot in sorted({s for s in case.row_slots if s >= 0}):
        rows = torch.tensor([i for i, s in enumerate(case.row_slots) if s == slot], device=y.device)
        start = 0
        for s, (down, up) in enumerate(zip(case.a, case.b, strict=True)):
            stop = start + up.shape[1]
            r = int(case.rank[s, slot]) if case.rank is not None else down.shape[1]
            scaling = float(case.scaling[s, slot]) if case.scaling is not None else 1.0
            if r:
                h = scaling * (x64[rows] @ down[slot, :r].double().t())
                if round_h:
                    h = h.to(case.x.dtype).double()
                y[rows, start:stop] += h @ up[slot, :, :r].double().t()
                if case.b_bias:
                    y[rows, start:stop] += scaling * case.b_bias[s][slot].double()
            start = stop
    return y if case.bias is None else y + case.bias.double()


def sqnr(got: Tensor, want: Tensor) -> float:
    """Signal over error in decibels; minus infinity if anything is not finite."""
    got, want = got.double(), want.double()
    if not torch.isfinite(got).all():
        return float("-inf")
    error = (got - want).square().sum()
    return float("inf") if error == 0 else float(10 * torch.log10(want.square().sum() / error))
