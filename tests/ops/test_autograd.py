"""Gradients of ``lora_linear``: those of the dequantized layer, to every trainable argument and to nothing else."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.cases import Case, make_case
from torch_epilora.ops import adapter_groups
from torch_epilora.ops.schemas import LINEAR_OPS

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
TRAINABLE = ("x", "bias", "a", "b", "b_bias")


def trainable(case: Case) -> list[Tensor]:
    """The leaves of a case: x, bias, and every slice's A, B and bias of B."""
    leaves = [case.x, *([case.bias] if case.bias is not None else []), *case.a, *case.b, *case.b_bias]
    return [t.requires_grad_() for t in leaves]


def dequantized(case: Case) -> Tensor:
    """The weight by its definition, fp64."""
    scale = case.weight_scale.double()
    n, k = case.weight.shape
    if case.layout == "block":
        scale = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return case.weight.detach().double() * scale.reshape(scale.shape if scale.dim() == 2 else (1, 1))


def plain_layer(case: Case, leaves: list[Tensor]) -> Tensor:
    """The layer in differentiable fp64 torch, row by row."""
    wide = iter(leaves)
    x = next(wide)
    bias = next(wide) if case.bias is not None else None
    a, b = [next(wide) for _ in case.a], [next(wide) for _ in case.b]
    b_bias = [next(wide) for _ in case.b_bias]
    rows = []
    for i, slot in enumerate(case.row_slots):
        row, parts = dequantized(case) @ x[i], []
        for s in range(len(a)):
            r = int(case.rank[s, slot]) if case.rank is not None else a[s].shape[1]
            if slot < 0 or r == 0:
                parts.append(row.new_zeros(b[s].shape[1]))
                continue
            part = b[s][slot, :, :r] @ (a[s][slot, :r] @ x[i])
            parts.append(case.scaling[s, slot].double() * (part + b_bias[s][slot] if b_bias else part))
        row = row + torch.cat(parts)
        rows.append(row if bias is None else row + bias)
    return torch.stack(rows)


def gradients(case: Case, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """(the operator's gradients, those of the fp64 layer) in the order of ``trainable``."""
    leaves = trainable(case)
    got = torch.autograd.grad(case.run(), leaves, grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    want = torch.autograd.grad(plain_layer(case, wide), wide, grad.double(), allow_unused=True)
    return list(got), [torch.zeros_like(t) if g is None else g for g, t in zip(want, wide, strict=True)]


def cosine(a: Tensor, b: Tensor) -> float:
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def close(got: Tensor, want: Tensor, tolerance: float) -> bool:
    return bool((got.double() - want.double()).norm() <= tolerance * want.double().norm())


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_gradients_are_those_of_the_dequantized_layer(layout: str, dtype: torch.dtype) -> None:
    case = make_case(12, 140, [130, 20], 6, 3, layout=layout, compute="w8a16", dtype=dtype, b_bias=True, seed=3)
    assert any(t.isnan().any() for t in case.a), "nothing lies beyond a rank"
    got, want = gradients(case, torch.randn(12, 150).to(dtype))
    tolerance = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    for g, w, leaf in zip(got, want, trainable(case), strict=True):
        assert g.dtype == leaf.dtype and g.shape == leaf.shape
        assert w.abs().sum() > 0 and close(g, w, tolerance) and cosine(g, w) > 0.9999


def test_w8a8_takes_the_same_gradient_straight_through() -> None:
    """Rounding x to codes counts as the identity, whoever made the codes."""
    grads = []
    for options in ({"compute": "w8a16"}, {}, {"codes": "given"}, {"codes": "static"}):
        case = make_case(8, 140, [32, 20], 6, 3, b_bias=True, **options)
        leaves = trainable(case)
        grads.append(torch.autograd.grad(case.run(), leaves, torch.ones(8, 52, dtype=case.x.dtype)))
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


@pytest.mark.parametrize("path", LINEAR_OPS[1:])
@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_every_path_has_the_same_gradient(path: str, compute: str) -> None:
    case = make_case(8, 140, [32, 20], 6, 3, compute=compute, b_bias=True)
    leaves, grad = trainable(case), torch.randn(8, 52).bfloat16()
    want, got = (torch.autograd.grad(case.run(op), leaves, grad) for op in ("lora_linear", path))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("which", TRAINABLE)
def test_directional_differences(which: str) -> None:
    """The layer is linear in each argument alone, so a difference over a step of any size is the derivative."""
    case = make_case(
        7, 96, [24, 20], 5, 2, compute="w8a16", dtype=torch.float32, b_bias=True, poison=False, mixed_ranks=False,
        popularity="distinct",
    )  # fmt: skip
    grad = torch.randn(7, 44)
    leaves = trainable(case)
    names = ["x", "bias", "a", "a", "b", "b", "b_bias", "b_bias"]
    before = case.run()
    grads = torch.autograd.grad(before, leaves, grad)
    for leaf, g, name in zip(leaves, grads, names, strict=True):
        if name == which:
            step = torch.randn_like(leaf)
            with torch.no_grad():
                leaf += step
                change = ((case.run() - before).double() * grad).sum()
                leaf -= step
            assert abs(change - (g.double() * step).sum()) < 1e-4 * (g.double() * step).abs().sum()


def test_nothing_reaches_other_slots_or_what_lies_beyond_the_rank() -> None:
    case = make_case(6, 64, [32, 20], 8, 4, compute="w8a16", dtype=torch.float32, b_bias=True)
    rows = [0, 2, -1, 0, 2, -1]
    slots = torch.tensor(rows, dtype=torch.int32)
    case.groups, case.row_slots = adapter_groups(slots, 6, 4), rows
    leaves = trainable(case)
    torch.autograd.backward(case.run(), torch.ones(6, 52))
    assert all(torch.isfinite(t.grad).all() for t in leaves)
    for s in range(2):
        for slot in range(4):
            r = int(case.rank[s, slot]) if slot in rows else 0
            assert (case.a[s].grad[slot, r:] == 0).all() and (case.b[s].grad[slot, :, r:] == 0).all()
            assert (case.a[s].grad[slot, :r] != 0).any() if r else True
            assert bool((case.b_bias[s].grad[slot] != 0).any()) == (r > 0)
    bare = case.x.detach()[[2, 5]].clone().requires_grad_()
    (bare.double() @ dequantized(case).t()).sum().backward()
    assert close(case.x.grad[[2, 5]], bare.grad, 1e-6)


def test_a_bare_batch_trains_x_and_bias_only() -> None:
    case = make_case(6, 64, [32], 8, 2, compute="w8a16", dtype=torch.float32, popularity="none")
    got, want = gradients(case, torch.randn(6, 32))
    assert case.groups.no_adapter.item()
    for g, w in zip(got, want, strict=True):
        assert close(g, w, 1e-6)
    assert (got[2] == 0).all() and (got[3] == 0).all()


@pytest.mark.parametrize("name", ["weight_scale", "x_scale", "scaling"])
def test_scales_have_no_gradient_and_say_so(name: str) -> None:
    case = make_case(6, 64, [32], 8, 2, codes="given")
    trainable(case)
    getattr(case, name).requires_grad_()
    with pytest.raises(NotImplementedError, match=f"^{name}: lora_linear has no gradient for it"):
        case.run().float().sum().backward()


def test_other_operators_say_that_they_have_no_gradient() -> None:
    case = make_case(6, 64, [32], 8, 2)
    case.x.requires_grad_()
    h = torch.ops.epilora.shrink(case.x, case.a, case.rank, case.scaling, *case.groups[:4])
    for differentiable in (h, torch.ops.epilora.quantize_fp8_token(case.x)[1]):
        with pytest.raises(NotImplementedError, match="shrink and the quantizers have no gradient"):
            differentiable.float().sum().backward()
    y = torch.zeros(6, 32, dtype=case.x.dtype)
    with pytest.raises(NotImplementedError, match="expand_add_ has no gradient"):
        torch.ops.epilora.expand_add_(y, h, case.b, [], case.rank, case.scaling, *case.groups[:4])
    with torch.no_grad():
        torch.ops.epilora.expand_add_(y, h, case.b, [], case.rank, case.scaling, *case.groups[:4])
    assert y.abs().sum() > 0


def test_a_second_derivative_is_refused() -> None:
    case = make_case(6, 64, [32], 8, 2, compute="w8a16")
    case.x.requires_grad_()
    (dx,) = torch.autograd.grad(case.run().float().square().sum(), case.x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        dx.float().sum().backward()


@pytest.mark.parametrize("which", TRAINABLE)
def test_one_trainable_argument_at_a_time(which: str) -> None:
    def tensors(case: Case, name: str) -> list[Tensor]:
        value = getattr(case, name)
        return value if isinstance(value, list) else [value]

    def one(names: tuple[str, ...]) -> list[Tensor | None]:
        case = make_case(6, 64, [32, 8], 4, 2, compute="w8a16", b_bias=True)
        for t in (t for name in names for t in tensors(case, name)):
            t.requires_grad_()
        y = case.run()
        assert y.requires_grad
        y.float().square().sum().backward()
        return [t.grad for t in tensors(case, which)]

    alone, together = one((which,)), one(TRAINABLE)
    assert all(torch.equal(a, b) and a.abs().sum() > 0 for a, b in zip(alone, together, strict=True))


def test_without_gradients_nothing_is_recorded() -> None:
    case = make_case(6, 64, [32], 8, 2)
    assert not case.run().requires_grad
    trainable(case)
    with torch.no_grad():
        assert not case.run().requires_grad


def test_gradients_from_a_strided_output_and_of_a_strided_input() -> None:
    case = make_case(6, 64, [32], 8, 2, compute="w8a16", dtype=torch.float32)
    leaves = trainable(case)
    want = torch.autograd.grad(case.run(), leaves, torch.ones(6, 32) * torch.arange(6.0)[:, None])
    got = torch.autograd.grad(case.run().t(), leaves, (torch.ones(6, 32) * torch.arange(6.0)[:, None]).t())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    room = torch.zeros(6, 100)
    room[:, :64] = case.x.detach()
    room.requires_grad_()
    case.x = room[:, :64]
    (case.run() * torch.arange(6.0)[:, None]).sum().backward()
    assert torch.equal(room.grad[:, :64], want[0]) and (room.grad[:, 64:] == 0).all()


def stack(dtype: torch.dtype, compute: str) -> tuple[Case, Case]:
    """Two layers of one batch: 96 to 64 to 40, and the same adapters' slots in both."""
    first = make_case(10, 96, [64], 8, 2, compute=compute, dtype=dtype, poison=False, popularity="distinct", seed=5)
    second = make_case(10, 64, [40], 8, 2, compute=compute, dtype=dtype, poison=False, popularity="distinct", seed=6)
    return first, second


@pytest.mark.parametrize(("compute", "least"), [("w8a16", 0.999), ("w8a8", 0.998)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_two_stacked_layers(compute: str, least: float, dtype: torch.dtype) -> None:
    """cases.md 16: the first layer's adapters learn through the second's frozen codes."""
    first, second = stack(dtype, compute)
    grad = torch.randn(10, 40).to(dtype)
    leaves = [first.x, *first.a, *first.b]
    for t in (*leaves, first.weight):
        t.requires_grad_()
    second.x = torch.nn.functional.silu(first.run())
    torch.autograd.backward(second.run(), grad)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    hidden = plain_layer(first, [wide[0], first.bias.double(), wide[1], wide[2]])
    rest = [t.detach().double() for t in (second.bias, *second.a, *second.b)]
    plain_layer(second, [torch.nn.functional.silu(hidden), *rest]).backward(grad.double())
    for leaf, want in zip(leaves, wide, strict=True):
        assert cosine(leaf.grad, want.grad) > least
        assert 0.98 < leaf.grad.double().norm() / want.grad.norm() < 1.02
    assert first.weight.grad is None and second.weight.grad is None


@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_zero_rows_and_blocks_stay_finite(layout: str, compute: str) -> None:
    """cases.md 14: zeros in x, in the gradient, in a 128-block of x and of the weight, and B as it is initialized."""
    case = make_case(8, 300, [130, 20], 8, 2, layout=layout, compute=compute, poison=False, popularity="distinct")
    case.x[5] = 0
    case.x[2, 128:256] = 0
    case.weight.view(torch.uint8)[:128, :128] = 0
    for t in case.b:
        t.zero_()
    leaves = trainable(case)
    y = case.run()
    assert torch.isfinite(y).all() and torch.equal(y[5], case.bias)
    grad = torch.randn(8, 150).to(y.dtype)
    grad[3] = 0
    got = torch.autograd.grad(y, leaves, grad)
    assert all(torch.isfinite(g).all() for g in got)
    assert (got[0][3] == 0).all() and got[0][5].abs().sum() > 0
    assert all((g == 0).all() for g in got[2:4]), "A learns nothing while B is zero"
    assert all(g.abs().sum() > 0 for g in got[4:6]), "B must learn, or training never starts"


def test_an_empty_batch_has_zero_gradients() -> None:
    case = make_case(0, 64, [32], 8, 2)
    leaves = trainable(case)
    case.run().sum().backward()
    assert all(t.grad is None or (t.grad == 0).all() for t in leaves) and case.a[0].grad.shape == case.a[0].shape


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(reentrant: bool) -> None:
    case = make_case(8, 96, [32, 8], 6, 3, b_bias=True)
    leaves = trainable(case)
    (case.run().float().square().sum()).backward()
    want = [t.grad.clone() for t in leaves]
    for t in leaves:
        t.grad = None

    def layer(x: Tensor) -> Tensor:
        return Case(**{**vars(case), "x": x}).run()

    checkpoint(layer, case.x, use_reentrant=reentrant).float().square().sum().backward()
    assert all(torch.equal(t.grad, w) for t, w in zip(leaves, want, strict=True))


@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_a_compiled_training_step_has_the_eager_gradients(compute: str) -> None:
    torch._dynamo.reset()
    case = make_case(24, 96, [32, 8], 6, 3, compute=compute, b_bias=True, poison=False)
    leaves = trainable(case)

    def loss(x: Tensor, slots: Tensor) -> Tensor:
        groups = torch.ops.epilora.adapter_groups(slots, x.shape[0], 3)
        y = torch.ops.epilora.lora_linear(
            x, None, None, case.weight, case.weight_scale, case.bias, case.a, case.b, case.b_bias, case.rank,
            case.scaling, *groups, case.groups.no_adapter, compute,
        )  # fmt: skip
        return y.float().square().sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (24, 11):
        slots = torch.randint(-1, 3, (m,), dtype=torch.int32)
        inputs = case.x.detach()[:m].clone().requires_grad_()
        want = torch.autograd.grad(loss(inputs, slots), [inputs, *leaves[1:]])
        got = torch.autograd.grad(compiled(inputs, slots), [inputs, *leaves[1:]])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    torch._dynamo.reset()


def test_training_lowers_the_loss() -> None:
    """The gradients' signs, once more and without any formula: each adapter learns its own rows' target."""
    case = make_case(32, 64, [32], 8, 2, dtype=torch.float32, compute="w8a16", poison=False, popularity="distinct")
    case.rank, case.scaling = None, torch.full((1, 2), 2.0)
    target = case.run() + torch.randn(2, 32).repeat(16, 1) * case.x[:, :1]
    parameters = [t.requires_grad_() for t in (*case.a, *case.b)]
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (case.run() - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.2 * losses[0]


def test_codes_are_constants() -> None:
    case = make_case(6, 64, [32], 8, 2, codes="given")
    trainable(case)
    codes = [case.weight, case.x_codes]
    for t in codes:
        t.requires_grad_()
    case.run().float().sum().backward()
    assert all(t.grad is None for t in codes) and case.x.grad.abs().sum() > 0
