"""The CUDA form of ``lora_linear_train`` on the CPU: kernels in Triton's interpreter, plain torch for the vendor's."""

import itertools

import pytest
import torch

from tests.cases import group_rows
from tests.layers import Layer, close
from tests.ops.interpreter import repaired  # noqa: F401
from torch_epilora.ops import dequantize_fp8, training_cuda
from torch_epilora.ops.training import backward, train

pytestmark = [
    pytest.mark.usefixtures("repaired"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite runs the same kernels for real"),
]


@pytest.fixture
def as_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CUDA form take CPU tensors, in small pieces of the weight."""
    monkeypatch.setattr(training_cuda, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(training_cuda, "_product", lambda x, y, dtype: (x.float() @ y.float()).to(dtype))
    monkeypatch.setattr(training_cuda, "FEW", 4)
    monkeypatch.setattr(training_cuda, "SCRATCH", 1 << 15)


def arguments(layer: Layer, compute: str = "w8a16", adapter_x=None) -> tuple:
    rows = (None,) * 4 if layer.groups is None else layer.groups[:4]
    a, b = ([t.detach() for t in g] for g in (layer.a, layer.b))
    return (
        layer.x.detach(), adapter_x, None, layer.codes, layer.scale, layer.bias.detach(), a, b, layer.scaling, *rows,
        compute,
    )  # fmt: skip


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("compute", ["w8a16", "w8a8"])
def test_forward(layout: str, slots: int, compute: str) -> None:
    layer = Layer(layout=layout, slots=slots)
    given = arguments(layer, compute)
    (y, h), (want, want_h) = training_cuda._forward(*given), train(*given)
    assert close(h, want_h, 5e-3) and close(y, want, 5e-3)


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("apart", [False, True])
def test_backward(slots: int, master: torch.dtype, apart: bool) -> None:
    layer = Layer(slots=slots, master=master, m=70)
    other = torch.randn_like(layer.x) if apart else None
    given = arguments(layer, adapter_x=other)
    _, h = train(*given)
    x, adapter_x, _, weight, scale, _, *rest, _ = given
    call = (layer.grad, x, adapter_x, h, weight, scale, *rest)
    for flags in ((True, True), (True, False), (False, True)):
        got, want = training_cuda._gradients(*call, *flags), backward(*call, *flags)
        pairs = [
            (got[0], want[0]),
            (got[1], want[1]),
            *zip(got[2], want[2], strict=True),
            *zip(got[3], want[3], strict=True),
        ]
        for g, w in pairs:
            assert g.shape == w.shape and g.dtype == w.dtype
            assert close(g, w, 8e-3)


@pytest.mark.usefixtures("as_cuda")
@pytest.mark.parametrize("where", ["equal", "by slice", "none"])
def test_scaling_on_the_host(where: str) -> None:
    layer = Layer()
    if where == "equal":
        layer.scaling = torch.tensor([0.3])
    if where == "none":
        layer.scaling = None
    given = arguments(layer)
    (y, h), (want, want_h) = training_cuda._forward(*given), train(*given)
    assert close(h, want_h, 5e-3) and close(y, want, 5e-3)
    x, adapter_x, _, weight, scale, _, *rest, _ = given
    call = (layer.grad, x, adapter_x, h, weight, scale, *rest, True, True)
    got, want = training_cuda._gradients(*call), backward(*call)
    for g, w in zip((got[0], *got[2], *got[3]), (want[0], *want[2], *want[3]), strict=True):
        assert close(g, w, 8e-3)


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_dequantize_any_part(layout: str) -> None:
    from torch_epilora.ops.triton.dequantize import dequantize

    layer = Layer(layout=layout)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        want = dequantize_fp8(layer.codes, layer.scale, dtype)
        for rows, columns in (((0, 150), (0, 140)), ((17, 150), (0, 140)), ((0, 150), (128, 140)), ((5, 6), (7, 90))):
            out = torch.full((rows[1] - rows[0], columns[1] - columns[0]), float("nan"), dtype=dtype)
            dequantize(layer.codes, layer.scale, out, rows, columns)
            assert torch.equal(out, want[slice(*rows), slice(*columns)])


@pytest.mark.parametrize("by_rank", [True, False])
@pytest.mark.parametrize(("m", "r"), [(1, 3), (300, 16), (520, 70)])
def test_sums_of_outer_products(m: int, r: int, by_rank: bool) -> None:
    from torch_epilora.ops.triton.outer import outer

    slots, widths = 3, (140, 140) if by_rank else (130, 20)
    row_slots = [(i * 7) % (slots + 1) - 1 if i % 5 else 2 for i in range(m)]
    groups = group_rows(row_slots, slots)
    wide = torch.randn(m, 140 if by_rank else 150).bfloat16()
    narrow = torch.randn(m, 2, r).bfloat16()
    shapes = [(slots, r, w) if by_rank else (slots, w, r) for w in widths]
    out = [torch.full(s, float("nan")) for s in shapes]
    outer(wide, narrow, widths, groups[:4], out, by_rank=by_rank)
    parts = (slice(0, 140),) * 2 if by_rank else (slice(0, 130), slice(130, 150))
    for i, (got, columns) in enumerate(zip(out, parts, strict=True)):
        for slot in range(slots):
            mine = [j for j in range(m) if row_slots[j] == slot]
            want = narrow[mine, i].double().t() @ wide[mine][:, columns].double()
            torch.testing.assert_close(got[slot].double(), want if by_rank else want.t(), rtol=1e-4, atol=1e-3)


def test_spans_cover_a_dimension_once() -> None:
    for total in (1, 127, 128, 4096, 12288, 3420):
        for most in (1, 100, 128, 1000, 1 << 20):
            spans = list(training_cuda._spans(total, most))
            assert spans[0][0] == 0 and spans[-1][1] == total and all(0 < b - a <= most for a, b in spans)
            assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
