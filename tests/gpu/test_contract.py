"""Bitwise promises on the GPU: run to run, graph replay, bare rows, padding, and vLLM's quantizer bits."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cases import group_rows, make_case, oracle, sqnr
from tests.gpu.paths import paths_at
from torch_epilora.ops import adapter_groups

GOLDEN = Path(__file__).parent.parent / "golden" / "vllm_fp8_quant.safetensors"


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.uint8)


def test_quantizer_bits_are_vllms() -> None:
    golden = load_file(GOLDEN)
    cases = sorted({name.split(".")[0] for name in golden})
    assert cases
    for i in cases:
        x = golden[f"{i}.x"].cuda()
        codes, scale = torch.ops.epilora.quantize_fp8_token(x)
        assert torch.equal(scale.cpu(), golden[f"{i}.per_token.scale"])
        assert torch.equal(bits(codes).cpu(), golden[f"{i}.per_token.codes"])
        codes, scale = torch.ops.epilora.quantize_fp8_tensor(x)
        assert torch.equal(scale.cpu(), golden[f"{i}.per_tensor.scale"].reshape(1))
        assert torch.equal(bits(codes).cpu(), golden[f"{i}.per_tensor.codes"])
        codes = torch.ops.epilora.quantize_fp8_static(x, torch.tensor([0.37], device="cuda"))
        assert torch.equal(bits(codes).cpu(), golden[f"{i}.static_0.37.codes"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [15, 128, 576, 4096, 12288])
def test_quantizers_equal_the_cpu(dtype: torch.dtype, k: int) -> None:
    x = (torch.randn(37, k) * torch.logspace(-7, 4, 37)[:, None]).to(dtype)
    x[0] = 0
    for name in ("token", "group", "tensor"):
        op = getattr(torch.ops.epilora, f"quantize_fp8_{name}")
        (codes, scale), (want, want_scale) = op(x.cuda()), op(x)
        assert torch.equal(scale.cpu(), want_scale), name
        assert torch.equal(bits(codes).cpu(), bits(want)), name
    for layout in ("tensor", "channel", "block"):
        codes, scale = torch.ops.epilora.quantize_fp8_weight(x.cuda(), layout)
        want, want_scale = torch.ops.epilora.quantize_fp8_weight(x, layout)
        assert torch.equal(scale.cpu(), want_scale) and torch.equal(bits(codes).cpu(), bits(want)), layout


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(bad: float) -> None:
    x = torch.randn(3, 300)
    x[1, 200] = bad
    for name in ("token", "group"):
        op = getattr(torch.ops.epilora, f"quantize_fp8_{name}")
        for got, want in zip(op(x.cuda()), op(x), strict=True):
            torch.testing.assert_close(got.float().cpu(), want.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("path", "m"), paths_at(1, 7, 24, 64, 300))
def test_run_to_run(path: str, m: int) -> None:
    case = make_case(m, 4096, [1024, 256, 256], 32, 4, device="cuda")
    first = case.run(path)
    for _ in range(100):
        assert torch.equal(bits(case.run(path)), bits(first))


@pytest.mark.parametrize(("path", "m"), paths_at(4, 24, 40, 300))
def test_rows_without_adapter_are_bitwise_the_base(path: str, m: int) -> None:
    case = make_case(m, 1024, [512, 256], 16, 1, device="cuda")
    case.b[0].fill_(1e4)
    got = case.run(path)
    bare = [i for i, slot in enumerate(case.row_slots) if slot < 0]
    none = case.groups._replace(no_adapter=torch.tensor([True]))
    case.groups = none
    base = case.run(path)
    assert bare and torch.equal(got[bare], base[bare])
    lora = [i for i, slot in enumerate(case.row_slots) if slot >= 0]
    assert not torch.equal(got[lora], base[lora])


@pytest.mark.parametrize(("path", "m"), paths_at(16, 300))
def test_another_tenants_rank_does_not_change_a_rows_bits(path: str, m: int) -> None:
    """A rank that is no multiple of 8 sends the whole batch, or tile, through another loop."""
    case = make_case(m, 1024, [512, 256], 64, 4, device="cuda", popularity="distinct", poison=False, rank_unit=8)
    case.rank[:] = 16
    want = case.run(path)
    case.rank[:, 1] = 13
    got = case.run(path)
    others = [i for i, slot in enumerate(case.row_slots) if slot != 1]
    assert torch.equal(got[others], want[others]) and not torch.equal(got, want)


@pytest.mark.parametrize("unit", [1, 4, 8])
@pytest.mark.parametrize(("path", "m"), paths_at(1, 8, 32, 33, 300))
def test_what_lies_beyond_the_rank_changes_nothing(path: str, m: int, unit: int) -> None:
    clean = make_case(m, 1024, [512, 256], 64, 4, device="cuda", poison=False, rank_unit=unit)
    poisoned = make_case(m, 1024, [512, 256], 64, 4, device="cuda", rank_unit=unit)
    got = poisoned.run(path)
    assert any(t.isnan().any() for t in poisoned.a) and torch.equal(got, clean.run(path))
    assert sqnr(got, oracle(poisoned)) > 40


@pytest.mark.parametrize(("path", "m"), paths_at(8, 32, 64))
def test_infinity_in_one_adapter_stays_there(path: str, m: int) -> None:
    case = make_case(m, 512, [256], 8, 2, device="cuda", popularity="distinct", poison=False, mixed_ranks=False)
    clean = case.run(path)
    case.b[0][1] = float("inf")
    got = case.run(path)
    assert torch.equal(got[::2], clean[::2]) and not torch.isfinite(got[1::2]).all()


@pytest.mark.parametrize(("path", "m"), paths_at(20))
def test_untouched_slices_are_bitwise_the_base(path: str, m: int) -> None:
    """cases.md 6: an adapter on some slices only."""
    case = make_case(m, 512, [256, 64, 64], 8, 1, device="cuda", popularity="one", poison=False, mixed_ranks=False)
    base = make_case(
        m, 512, [256, 64, 64], 8, 1, device="cuda", popularity="none", poison=False, mixed_ranks=False
    ).run(path)
    for touched in ([0], [1], [0, 2]):
        case.rank = torch.tensor([[8 if s in touched else 0] for s in range(3)], dtype=torch.int32, device="cuda")
        got = case.run(path).split([256, 64, 64], 1)
        for s, part in enumerate(base.split([256, 64, 64], 1)):
            assert torch.equal(got[s], part) == (s not in touched)


@pytest.mark.parametrize(("path", "m"), paths_at(12, 24, 200))
def test_padding_and_stale_entries_are_harmless(path: str, m: int) -> None:
    case = make_case(m, 512, [256], 8, 3, device="cuda", padding=9)
    stale = case.groups.sorted_tokens.clone()
    stale[-9:] = torch.tensor([2**31 - 1, -5, 0, 0, 1, m, 10**6, 3, -(2**31)], dtype=torch.int32)
    case.groups = case.groups._replace(sorted_tokens=stale)
    assert sqnr(case.run(path), oracle(case)) > 40
    ids = case.groups.ids.clone()
    ids[-1] = 99  # a slot the bank does not have: bare base
    other = make_case(m, 512, [256], 8, 3, device="cuda", padding=9)
    other.groups = case.groups._replace(ids=ids)
    other.row_slots = [-1 if s == 2 else s for s in other.row_slots]
    assert sqnr(other.run(path), oracle(other)) > 40


@pytest.mark.parametrize(("path", "m"), paths_at(1, 8, 16, 32, 48, 256))
def test_a_thousand_replays_follow_the_metadata(path: str, m: int) -> None:
    slots = 6
    case = make_case(m, 1024, [512, 256], 16, slots, device="cuda")
    static = [t.clone() for t in case.groups[:4]]
    case.groups = case.groups._replace(**dict(zip(("sorted_tokens", "ids", "counts", "starts"), static, strict=True)))
    case.groups = case.groups._replace(no_adapter=torch.tensor([False]))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.run(path)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.run(path)
    gen = torch.Generator().manual_seed(1)
    for i in range(1000):
        rows = torch.randint(-1, slots, (m,), generator=gen).tolist() if i % 7 else [i % slots] * m
        for target, source in zip(static, group_rows(rows, slots)[:4], strict=True):
            target.copy_(source)
        case.x.normal_()
        if i % 10 == 0:
            case.a[0].normal_()
            case.rank[0, i % slots] = i % 17
            case.b[0].normal_()
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(bits(y), bits(case.run(path))), i


def test_groups_are_made_without_a_synchronization() -> None:
    slots = torch.tensor([2, -1, 0, 2], dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = adapter_groups(slots, 12, 3)
        case_free = torch.ops.epilora.quantize_fp8_token(torch.randn(4, 64, device="cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = group_rows([2, 2, 2, -1, -1, -1, 0, 0, 0, 2, 2, 2], 3)
    for a, b in zip(got[:4], want[:4], strict=True):
        assert torch.equal(a.cpu(), b)
    assert case_free[0].shape == (4, 64)


@pytest.mark.parametrize(("path", "m"), [("lora_linear", 16), ("lora_linear", 300), *paths_at(16, 300)])
def test_no_synchronization_on_the_forward_path(path: str, m: int) -> None:
    case = make_case(m, 512, [256], 8, 3, device="cuda")
    case.run(path)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = case.run(path)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sqnr(got, oracle(case)) > 40


def test_compiled_with_dynamic_tokens() -> None:
    """cases.md 18: no graph breaks, and no compile a rank, a scaling or a token count."""
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    case = make_case(64, 512, [256], 64, 3, device="cuda", bias=False, poison=False)

    def f(x, slots):
        g = torch.ops.epilora.adapter_groups(slots, x.shape[0], 3)
        return torch.ops.epilora.lora_linear(
            x, None, None, case.weight, case.weight_scale, None, case.a, case.b, [], case.rank, case.scaling, *g,
            case.groups.no_adapter, "w8a8",
        )  # fmt: skip

    compiled = torch.compile(f, fullgraph=True, backend=counter, dynamic=True)
    for m in (2, 3, 17, 64):
        slots = torch.randint(-1, 3, (m,), dtype=torch.int32, device="cuda")
        assert torch.equal(compiled(case.x[:m], slots), f(case.x[:m], slots))
    for r, scale in ((8, 1.0), (16, 0.5), (64, 2.0)):
        case.rank.fill_(r)
        case.scaling.fill_(scale)
        slots = torch.randint(-1, 3, (m,), dtype=torch.int32, device="cuda")
        assert torch.equal(compiled(case.x, slots), f(case.x, slots))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_gradients_equal_the_dequantized_layers(layout: str) -> None:
    from torch_epilora.ops import dequantize_fp8

    case = make_case(
        40,
        256,
        [128, 64],
        8,
        2,
        layout=layout,
        compute="w8a16",
        popularity="one",
        mixed_ranks=False,
        poison=False,
        device="cuda",
    )
    leaves = [case.x, *case.a, *case.b]
    for t in leaves:
        t.requires_grad_()
    weights = torch.randn(40, 192, device="cuda")
    got = torch.autograd.grad((case.run().float() * weights).sum(), leaves)
    wide = [t.detach().float().requires_grad_() for t in leaves]
    x, a, b = wide[0], wide[1:3], wide[3:]
    y = x @ dequantize_fp8(case.weight, case.weight_scale).t()
    delta = [case.scaling[s, 1] * (x @ a[s][1].t()) @ b[s][1].t() for s in range(2)]
    want = torch.autograd.grad(((y + torch.cat(delta, 1)) * weights).sum(), wide)
    for g, w in zip(got, want, strict=True):
        assert sqnr(g, w) > 40
