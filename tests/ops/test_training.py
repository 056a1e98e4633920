"""``lora_linear_train`` on the CPU: values and gradients against plain torch in fp64 over the dequantized base."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.cases import group_rows
from tests.layers import Layer, close
from torch_epilora.ops import dequantize_fp8

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("slots", [1, 3])
def test_values_and_gradients(layout: str, dtype: torch.dtype, slots: int) -> None:
    layer = Layer(layout=layout, dtype=dtype, slots=slots)
    y = layer.run()
    got = torch.autograd.grad(y, layer.leaves, layer.grad)
    wide = [t.detach().double().requires_grad_() for t in layer.leaves]
    expected = layer.plain(wide)
    want = torch.autograd.grad(expected, wide, layer.grad.double())
    assert close(y, expected, TOLERANCE[dtype])
    for g, w, leaf in zip(got, want, layer.leaves, strict=True):
        assert (g.dtype, g.shape) == (leaf.dtype, leaf.shape)
        assert w.norm() > 0 and close(g, w, TOLERANCE[dtype])
        assert abs(g.double().norm() / w.norm() - 1) < 0.02


@pytest.mark.parametrize("slots", [1, 2])
def test_gradcheck_in_double(slots: int) -> None:
    layer = Layer(m=5, k=24, r=3, slots=slots, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, bias, *rest: layer.run(x=x, bias=bias, a=list(rest[:2]), b=list(rest[2:])), layer.leaves
    )


def test_masters_are_fp32_and_so_are_their_gradients() -> None:
    layer = Layer(master=torch.float32)
    for t in (*layer.a, *layer.b):
        assert t.dtype == torch.float32
    got = torch.autograd.grad(layer.run(), [*layer.a, *layer.b], layer.grad)
    narrow = [[t.detach().bfloat16().requires_grad_() for t in group] for group in (layer.a, layer.b)]
    rounded = torch.autograd.grad(layer.run(a=narrow[0], b=narrow[1]), [*narrow[0], *narrow[1]], layer.grad)
    for g, r in zip(got, rounded, strict=True):
        assert g.dtype == torch.float32 and torch.equal(g.bfloat16(), r)
        assert not torch.equal(g, r.float()), "the fp32 gradient holds no more than its rounding"


def test_adapters_in_one_batch_equal_separate_runs() -> None:
    layer = Layer(m=15, slots=4)
    whole = layer.run()
    got = torch.autograd.grad(whole, layer.leaves, layer.grad)
    for slot in range(4):
        rows = [i for i, s in enumerate(layer.row_slots) if s == slot]
        a, b = ([t.detach()[slot : slot + 1].requires_grad_() for t in g] for g in (layer.a, layer.b))
        alone = layer.x.detach()[rows].requires_grad_()
        scaling = layer.scaling[:, slot : slot + 1].contiguous()
        y = layer.run(x=alone, a=a, b=b, scaling=scaling, groups=None)
        assert close(y, whole[rows], 3e-3)  # another number of rows is another order of a CPU's sums
        gx, *rest = torch.autograd.grad(y, [alone, *a, *b], layer.grad[rows])
        assert close(gx, got[0][rows], 3e-3)
        for g, t in zip(rest, got[2:], strict=True):
            assert close(g[0], t[slot], 3e-3)
    bare = [i for i, s in enumerate(layer.row_slots) if s < 0]
    want = layer.grad[bare].float() @ dequantize_fp8(layer.codes, layer.scale)
    assert bare and close(got[0][bare], want, 3e-3)


def test_a_slot_without_rows_has_zero_gradients() -> None:
    layer = Layer(m=6, slots=3)
    groups = group_rows([0, 2, 0, 2, -1, 0], 3)
    for g in torch.autograd.grad(layer.run(groups=groups), [*layer.a, *layer.b], layer.grad):
        assert not g[1].any() and g[0].any() and g[2].any()


def test_what_adapters_read_in_place_of_x() -> None:
    layer = Layer(dtype=torch.float32)
    other = torch.randn_like(layer.x).requires_grad_()
    y = layer.run(adapter_x=other)
    base = layer.run(b=[torch.zeros_like(t) for t in layer.b])
    swapped = layer.run(x=other) - layer.run(x=other, b=[torch.zeros_like(t) for t in layer.b])
    torch.testing.assert_close(y, base + swapped, rtol=1e-4, atol=1e-4)
    gx, go = torch.autograd.grad(y, [layer.x, other], layer.grad)
    (both,) = torch.autograd.grad(layer.run(), [layer.x], layer.grad)
    torch.testing.assert_close(gx + go, both, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(gx, layer.grad @ dequantize_fp8(layer.codes, layer.scale), rtol=1e-4, atol=1e-4)


def test_rounded_activations_count_as_the_identity() -> None:
    layer = Layer()
    y, plain = layer.run("w8a8"), layer.run("w8a16")
    assert not torch.equal(y, plain) and close(y, plain, 0.05)
    for g, w in zip(*(torch.autograd.grad(t, layer.leaves, layer.grad) for t in (y, plain)), strict=True):
        assert torch.equal(g, w)


def test_adapters_read_activations_before_they_are_rounded() -> None:
    layer = Layer()
    rows = (None,) * 4
    given = layer.x, None, None, layer.codes, layer.scale, None, layer.a, layer.b, layer.scaling, *rows
    h = [torch.ops.epilora.lora_linear_train(*given, compute)[1] for compute in ("w8a16", "w8a8")]
    assert torch.equal(*h) and h[0].any()


def test_an_adapter_below_half_a_step_of_the_codes_counts() -> None:
    layer = Layer(dtype=torch.float64)
    with torch.no_grad():
        for t in layer.b:
            t.mul_(1e-8)
    update = torch.cat([layer.scaling[s] * b[0] @ a[0] for s, (a, b) in enumerate(zip(layer.a, layer.b, strict=True))])
    weight = dequantize_fp8(layer.codes, layer.scale)
    merged = (((weight + update) / layer.scale).to(torch.float8_e4m3fn).float() * layer.scale).detach()
    assert torch.equal(merged, weight), "merging would keep it"
    bare = layer.run(b=[torch.zeros_like(t) for t in layer.b])
    delta = layer.run() - bare
    scalings = torch.cat([layer.scaling[s].expand(w) for s, w in enumerate(layer.widths)])
    want = torch.cat([layer.x @ a[0].t() @ b[0].t() for a, b in zip(layer.a, layer.b, strict=True)], 1) * scalings
    assert delta.norm() > 0 and close(delta, want, 0.05)


def test_zeros_stay_finite() -> None:
    layer = Layer(layout="block")
    with torch.no_grad():
        layer.x[3:6] = 0
        for t in layer.b:
            t.zero_()
    codes, scale = torch.ops.epilora.quantize_fp8_weight(torch.zeros(150, 140), "block")
    layer.codes[:, :64] = 0
    for weight in ((layer.codes, layer.scale), (codes, scale)):
        layer.codes, layer.scale = weight
        for compute in ("w8a16", "w8a8"):
            y = layer.run(compute)
            for g in (y, *torch.autograd.grad(y, layer.leaves, layer.grad)):
                assert g.isfinite().all()


def test_only_what_is_asked_for_is_computed() -> None:
    layer = Layer()
    assert torch.autograd.grad(layer.run(x=layer.x.detach()), layer.a, layer.grad)[0].any()
    frozen = [[t.detach() for t in g] for g in (layer.a, layer.b)]
    assert torch.autograd.grad(layer.run(a=frozen[0], b=frozen[1]), [layer.x], layer.grad)[0].any()
    assert not layer.run(x=layer.x.detach(), a=frozen[0], b=frozen[1], bias=layer.bias.detach()).requires_grad


def test_checkpointing_changes_no_bit() -> None:
    layer = Layer(slots=2)
    plain = torch.autograd.grad(layer.run(), layer.leaves, layer.grad)
    again = torch.autograd.grad(checkpoint(layer.run, use_reentrant=False), layer.leaves, layer.grad)
    assert all(torch.equal(g, w) for g, w in zip(plain, again, strict=True))


@pytest.mark.parametrize("slots", [1, 2])
def test_compiled_whole_changes_no_bit(slots: int) -> None:
    layer = Layer(slots=slots)
    compiled = torch.compile(lambda x: layer.run(x=x).float().square().sum(), fullgraph=True, backend="aot_eager")
    want = torch.autograd.grad(layer.run().float().square().sum(), layer.leaves)
    got = torch.autograd.grad(compiled(layer.x), layer.leaves)
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("slots", [1, 2])
def test_opcheck(slots: int) -> None:
    layer = Layer(m=4, k=16, r=2, slots=slots, dtype=torch.float32)
    rows = (None,) * 4 if layer.groups is None else layer.groups[:4]
    shared = layer.a, layer.b, layer.scaling, *rows
    torch.library.opcheck(
        torch.ops.epilora.lora_linear_train.default,
        (layer.x, None, None, layer.codes, layer.scale, layer.bias, *shared, "w8a16"),
        test_utils=("test_faketensor", "test_aot_dispatch_dynamic"),
    )
    _, h = torch.ops.epilora.lora_linear_train(layer.x, None, None, layer.codes, layer.scale, None, *shared, "w8a16")
    before = [t.clone() for t in (layer.x, h, *layer.a, *layer.b)]
    torch.library.opcheck(
        torch.ops.epilora.lora_linear_train_backward.default,
        (layer.grad, layer.x.detach(), None, h.detach(), layer.codes, layer.scale,
         [t.detach() for t in layer.a], [t.detach() for t in layer.b], layer.scaling, *rows, True, True),
        test_utils=("test_faketensor",),
    )  # fmt: skip
    assert all(torch.equal(t, old) for t, old in zip((layer.x, h, *layer.a, *layer.b), before, strict=True))


BAD = {
    "adapter_x": (lambda v: {"adapter_x": v.x[:3]}, ValueError, "adapter_x: expected x's shape"),
    "a dtype": (lambda v: {"a": [t.half() for t in v.a]}, TypeError, r"a\[0\]: expected dtype"),
    "b dtype": (lambda v: {"b": [t.float() for t in v.b]}, TypeError, r"b\[0\]: expected dtype"),
    "none": (lambda v: {"a": [], "b": []}, ValueError, "use lora_linear"),
    "slots": (
        lambda v: {"a": [torch.cat([t, t]) for t in v.a], "b": [torch.cat([t, t]) for t in v.b], "scaling": None},
        ValueError, "Call adapter_groups",
    ),
    "scaling": (lambda v: {"scaling": torch.ones(3)}, ValueError, "scaling: expected"),
    "bias": (lambda v: {"bias": v.bias[:-1]}, ValueError, "bias: expected"),
    "widths": (lambda v: {"b": [t[:, :-1].contiguous() for t in v.b]}, ValueError, "b: expected slice widths"),
    "x_scale": (lambda v: {"x_scale": torch.ones(1)}, ValueError, "w8a16"),
    "compute": (lambda v: {"compute": "w4"}, ValueError, "compute: expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_bad_arguments(name: str) -> None:
    change, error, text = BAD[name]
    layer = Layer()
    with pytest.raises(error, match=text):
        layer.run(**change(layer))


@pytest.mark.parametrize("name", ["scaling", "weight_scale"])
def test_no_gradient_to_scales(name: str) -> None:
    layer = Layer()
    target = layer.scaling if name == "scaling" else layer.scale
    target.requires_grad_()
    with pytest.raises(NotImplementedError, match=f"{name}: lora_linear_train has no gradient"):
        layer.run().sum().backward()


def test_no_second_derivative() -> None:
    layer = Layer()
    (g,) = torch.autograd.grad(layer.run(), [layer.x], layer.grad.requires_grad_(), create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        g.sum().backward()


def test_no_rows() -> None:
    layer = Layer(m=0)
    y = layer.run()
    assert y.shape == (0, 150)
    for g in torch.autograd.grad(y, [*layer.a, *layer.b], layer.grad):
        assert not g.any()
