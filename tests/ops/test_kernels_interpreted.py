"""The kernels in Triton's interpreter against fp64 and against the contract's bitwise promises."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tests.cases import make_case, oracle, sqnr
from tests.ops.interpreter import repaired  # noqa: F401
from torch_epilora.ops import reference
from torch_epilora.ops.plan import Expand, Gemm, Shrink

pytestmark = [
    pytest.mark.usefixtures("repaired"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite runs the same kernels for real"),
]

GEMM = Gemm(16, 64, 128, 16, 4, 1)


def fused(case, *, split: int = 1, gemm: Gemm = GEMM):
    from torch_epilora.ops.triton import quantize as q
    from torch_epilora.ops.triton.linear import linear
    from torch_epilora.ops.triton.shrink import shrink

    mode = -1
    if case.compute == "w8a8" and case.x_codes is None:
        mode = q.STATIC if case.x_scale is not None else q.GROUP if case.layout == "block" else q.TOKEN
    config = Shrink(16, 16, 64, split, 4, 1)
    h = shrink(case.x, case.a, case.rank, case.scaling, case.groups, config)
    x, scale = q.quantize(case.x, mode, case.x_scale) if mode >= 0 else (case.x, None)
    if case.x_codes is not None:
        x, scale = case.x_codes, case.x_scale
    if case.compute == "w8a16":
        scale = None
    return linear(
        x, scale, case.weight, case.weight_scale, case.bias, case.layout, case.x.dtype, gemm,
        h=h, b=case.b, b_bias=case.b_bias, rank=case.rank, scaling=case.scaling, groups=case.groups,
    )  # fmt: skip


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_fused_layouts(layout: str, compute: str) -> None:
    case = make_case(7, 256, [64, 16, 16], 9, 3, layout=layout, compute=compute, b_bias=True)
    assert sqnr(fused(case), oracle(case)) > 48


@pytest.mark.parametrize("split", [2, 4])
def test_fused_split_k(split: int) -> None:
    case = make_case(20, 512, [128], 24, 4)
    assert sqnr(fused(case, split=split), oracle(case)) > 48


@pytest.mark.parametrize(("m", "k", "widths", "r"), [(1, 15, [32], 7), (17, 342, [128], 5), (3, 130, [100, 60, 40], 9)])
@pytest.mark.parametrize("layout", ["channel", "block"])
def test_fused_odd_shapes(m: int, k: int, widths: list[int], r: int, layout: str) -> None:
    case = make_case(m, k, widths, r, 2, layout=layout)
    assert sqnr(fused(case), oracle(case)) > 48


@pytest.mark.parametrize("codes", ["given", "static"])
def test_fused_uses_the_codes_handed_in(codes: str) -> None:
    case = make_case(5, 128, [48], 8, 2, codes=codes)
    assert sqnr(fused(case), oracle(case)) > 48


def test_fused_padding_rows_are_bare_base() -> None:
    case = make_case(12, 128, [48], 8, 3, padding=5)
    assert sqnr(fused(case), oracle(case)) > 48


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_fused_dtypes(dtype: torch.dtype) -> None:
    case = make_case(5, 128, [48], 8, 2, dtype=dtype)
    assert sqnr(fused(case), oracle(case)) > (60 if dtype == torch.float16 else 90)


def test_eight_slices() -> None:
    case = make_case(6, 128, [16, 32, 16, 48, 16, 16, 5, 11], 8, 2)
    assert sqnr(fused(case), oracle(case)) > 48


def test_infinity_in_one_adapter_stays_there() -> None:
    case = make_case(8, 128, [48], 8, 2, popularity="distinct", poison=False, mixed_ranks=False)
    clean = fused(case)
    case.b[0][1] = float("inf")
    got = fused(case)
    assert torch.equal(got[::2], clean[::2])
    assert not torch.isfinite(got[1::2]).all()


def test_rows_without_adapter_are_bitwise_the_base() -> None:
    from torch_epilora.ops.triton.linear import linear
    from torch_epilora.ops.triton.quantize import TOKEN, quantize

    case = make_case(9, 256, [64, 32], 8, 2)
    case.b[0].fill_(1e4)
    x, scale = quantize(case.x, TOKEN)
    base = linear(x, scale, case.weight, case.weight_scale, case.bias, case.layout, case.x.dtype, GEMM)
    bare = [i for i, slot in enumerate(case.row_slots) if slot < 0]
    assert bare and torch.equal(fused(case)[bare], base[bare])


@pytest.mark.parametrize(("r", "unit"), [(12, 1), (20, 4), (24, 8)])
def test_expand_after_shrink(r: int, unit: int) -> None:
    from torch_epilora.ops.triton.expand import expand_add
    from torch_epilora.ops.triton.shrink import shrink

    case = make_case(11, 256, [48, 20], r, 3, b_bias=True, rank_unit=unit)
    for split, run in ((1, 1), (2, 2), (4, 4)):
        config = Shrink(16, 16, 64, split, 4, 1)
        want = reference.shrink(case.x, case.a, case.rank, case.scaling, *case.groups[:4])
        got = shrink(
            case.x, case.a, case.rank, case.scaling, case.groups, config, out=torch.zeros(11, 2, r, dtype=case.x.dtype)
        )  # fmt: skip
        assert sqnr(got, want) > 45
        y = torch.randn(11, 68).to(torch.bfloat16)
        expected = y.clone()
        reference.expand_add_(expected, want, case.b, case.b_bias, case.rank, case.scaling, *case.groups[:4])
        before = y.clone()
        expand_add(y, got, case.b, case.b_bias, case.rank, case.scaling, case.groups, Expand(16, 32, 16, run, 4, 1))
        assert sqnr(y, expected) > 45
        bare = [i for i, slot in enumerate(case.row_slots) if slot < 0]
        assert torch.equal(y[bare], before[bare])


def test_adapters_are_added_to_what_another_base_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA runs for ``lora_add_``, with tiles that the interpreter is quick with."""
    from torch_epilora.ops import dispatch

    tiles = {"shrink": Shrink(16, 16, 64, 2, 4, 1), "expand": Expand(16, 32, 16, 1, 4, 1)}
    make_plan = dispatch.make_plan
    monkeypatch.setattr(dispatch, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "make_plan", lambda problem: replace(make_plan(problem), **tiles))
    case = make_case(11, 256, [48, 20], 20, 3, b_bias=True)
    arguments = (case.x, case.a, case.b, case.b_bias, case.rank, case.scaling, *case.groups[:4])
    y = torch.randn(11, 68).to(torch.bfloat16)
    want, idle, before = y.clone(), y.clone(), y.clone()
    reference.lora_add_(want, *arguments, torch.tensor([False]))
    dispatch._cuda_add(y, *arguments, torch.tensor([False]))
    assert sqnr(y, want) > 45 and not torch.equal(y, before)
    dispatch._cuda_add(idle, *arguments, torch.tensor([True]))
    assert torch.equal(idle, before)


@pytest.mark.parametrize("mode", ["token", "group", "static"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_quantizer_bits_equal_the_reference(mode: str, dtype: torch.dtype) -> None:
    from torch_epilora.ops.triton import quantize as q

    x = (torch.randn(6, 300) * torch.tensor([0.0, 1e-7, 1e-3, 1.0, 50.0, 1e4])[:, None]).to(dtype)
    if mode == "static":
        scale = torch.tensor([0.37])
        assert torch.equal(
            q.quantize(x, q.STATIC, scale)[0].view(torch.uint8),
            reference.quantize_fp8_static(x, scale).view(torch.uint8),
        )
        return
    codes, scale = q.quantize(x, q.TOKEN if mode == "token" else q.GROUP)
    want, want_scale = getattr(reference, f"quantize_fp8_{mode}")(x)
    assert torch.equal(scale, want_scale)
    assert torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("k", [4100, 20000])
def test_rows_of_several_pieces_are_quantized_alike(k: int) -> None:
    """Up to four pieces stay in registers, more are read again."""
    from torch_epilora.ops.triton import quantize as q

    x = torch.randn(2, k).bfloat16()
    x[1, -1] = 9.0
    codes, scale = q.quantize(x, q.TOKEN)
    want, want_scale = reference.quantize_fp8_token(x)
    assert torch.equal(scale, want_scale) and torch.equal(codes.view(torch.uint8), want.view(torch.uint8))


@triton.jit
def divide_kernel(x_ptr, scale_ptr, y_ptr, divide: tl.constexpr, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y_ptr + at, divide(tl.load(x_ptr + at), tl.load(scale_ptr + tl.program_id(0)), DTYPE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_division_without_branches_is_the_ieee_division(dtype: torch.dtype) -> None:
    """Where the quotient is not too small for any code, bit for bit, the sign of a zero too."""
    from torch_epilora.ops.triton.quantize import divide

    rows, size = 600, 1024
    amax = torch.exp2(torch.empty(rows, 1).uniform_(-20, 127))
    x = amax * torch.randn(rows, size).clamp(-1, 1) * torch.exp2(torch.empty(rows, size).uniform_(-24, 0))
    x[:, :2] = torch.tensor([0.0, -0.0])
    x[::2] = x[::2].bfloat16().float()
    if dtype == torch.float16:  # its significands, at any exponent
        x = x.view(torch.int32).bitwise_and(-(1 << 13)).view(torch.float32)
    elif dtype == torch.bfloat16:
        x = x.bfloat16().float()
    scale = (x.abs().amax(1) / 448).clamp_min(reference.MIN_SCALE)
    scale[:3] = torch.tensor([float("inf"), float("nan"), 448.0])
    x[0, 5] = float("inf")
    got = torch.empty_like(x)
    kind = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[dtype]
    divide_kernel[(rows,)](x, scale, got, divide, kind, size)
    want = x / scale[:, None]
    assert torch.equal(got.isnan(), want.isnan()) and got.isnan().sum() == size + 1
    whole = ~want.isnan()
    assert torch.equal(got[whole].view(torch.int32), want[whole].view(torch.int32))


@pytest.mark.parametrize("mode", ["token", "group", "static"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(mode: str, bad: float) -> None:
    from torch_epilora.ops.triton import quantize as q

    x = torch.randn(3, 300)
    x[1, 200] = bad
    given = torch.tensor([0.37]) if mode == "static" else None
    codes, scale = q.quantize(x, {"token": q.TOKEN, "group": q.GROUP, "static": q.STATIC}[mode], given)
    if given is not None:
        want, want_scale = reference.quantize_fp8_static(x, given), given
    else:
        want, want_scale = getattr(reference, f"quantize_fp8_{mode}")(x)
    torch.testing.assert_close(scale, want_scale, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(codes.float(), want.float(), rtol=0, atol=0, equal_nan=True)
    assert mode == "static" or codes[1].isnan().any()


def test_metadata_out_of_range_reads_and_writes_nothing_outside() -> None:
    case = make_case(4, 128, [48], 8, 2, popularity="one", poison=False, mixed_ranks=False)
    starts = case.groups.starts.clone()
    starts[-2] = -(2**30)
    bad = case.groups._replace(starts=starts)
    want = reference.shrink(case.x, case.a, case.rank, case.scaling, *bad[:4])
    from torch_epilora.ops.triton.shrink import shrink

    got = shrink(case.x, case.a, case.rank, case.scaling, bad, Shrink(16, 16, 64, 1, 4, 1), out=torch.zeros_like(want))
    assert torch.equal(got, want) and not want.any()


def test_a_count_below_zero_is_a_group_without_rows() -> None:
    from torch_epilora.ops.triton.shrink import shrink

    case = make_case(40, 64, [48], 8, 3, popularity="distinct", poison=False, mixed_ranks=False)
    counts = case.groups.counts.clone()
    counts[1] = 0
    want = torch.zeros(40, 1, 8, dtype=case.x.dtype)
    got = torch.zeros_like(want)
    config = Shrink(16, 16, 64, 1, 4, 1)
    shrink(case.x, case.a, case.rank, case.scaling, case.groups._replace(counts=counts), config, out=want)
    counts[1] = -32
    shrink(case.x, case.a, case.rank, case.scaling, case.groups._replace(counts=counts), config, out=got)
    assert want.any() and torch.equal(got, want)


def test_host_arithmetic_is_tritons() -> None:
    from torch_epilora.ops.arithmetic import cdiv, next_power_of_2

    for n in [*range(1, 70), 4095, 4096, 4097, 10**9]:
        assert next_power_of_2(n) == triton.next_power_of_2(n)
        assert all(cdiv(n, by) == triton.cdiv(n, by) for by in (1, 2, 3, 64, 128, 4097))
