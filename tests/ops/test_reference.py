"""The CPU reference of every operator against fp64 oracles that share no arithmetic with it, and vLLM's bits."""

import zlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.cases import FP8, Case, exact_codes, group_rows, make_case, oracle, sqnr
from tests.pairwise import pairwise
from torch_epilora.ops import adapter_groups, dequantize_fp8, lora_linear
from torch_epilora.ops.reference import widen
from torch_epilora.ops.schemas import LINEAR_OPS

EPILORA = torch.ops.epilora
GOLDEN = Path(__file__).parents[1] / "golden" / "vllm_fp8_quant.safetensors"
FLOATS = [torch.bfloat16, torch.float16, torch.float32]
LAYOUTS = ["tensor", "channel", "block"]
DECIBELS = {torch.bfloat16: 50, torch.float16: 68, torch.float32: 120}
"""What one rounding of the output leaves: about 6 dB a bit of the mantissa; fp32 is bounded by its sums."""


def bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def matrix(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of every size: zeros, values under the smallest scale, values near fp16's limit."""
    sizes = torch.tensor([0.0, 1e-9, 1e-7, 1e-5, 1e-3, 1.0, 50.0, 1e4])
    x = torch.randn(rows, k) * sizes.repeat(-(-rows // len(sizes)))[:rows, None]
    x[-1] = 0
    return x.to(dtype)


# --- lora_linear ---------------------------------------------------------------------------------------------------

KINDS = [("w8a8", "made"), ("w8a8", "given"), ("w8a8", "static"), ("w8a16", "made")]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("compute", "codes"), KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_lora_linear_every_layout_compute_dtype_and_codes(
    layout: str, compute: str, codes: str, dtype: torch.dtype
) -> None:
    if layout == "block" and codes == "static":
        pytest.skip("block-scaled weights take no static scale; test_errors has the refusal")
    for bias in (False, True):
        for b_bias in (False, True):
            case = make_case(
                21, 300, [130, 70, 60], 9, 3, layout=layout, compute=compute, dtype=dtype, codes=codes, bias=bias,
                b_bias=b_bias,
            )  # fmt: skip
            assert any(t.isnan().any() for t in (*case.a, *case.b)), "nothing lies beyond a rank"
            got = case.run()
            assert got.dtype == dtype and sqnr(got, oracle(case)) > DECIBELS[dtype]


PAIRWISE = pairwise(
    {
        "m": [1, 2, 7, 33, 100],
        "shape": [(15, [32]), (130, [200]), (1280, [342]), (256, [256, 64, 64]), (64, [16, 24, 8, 8, 48, 16, 5, 3])],
        "r": [1, 3, 8, 17, 64, 130],
        "slots": [1, 2, 8, 40],
        "popularity": ["uniform", "skewed", "distinct", "one", "none"],
        "layout": LAYOUTS,
        "compute": ["w8a8", "w8a16"],
        "dtype": FLOATS,
        "codes": ["made", "given", "static"],
        "bias": [False, True],
        "b_bias": [False, True],
        "mixed_ranks": [False, True],
    }
)


def unfused(case: Case) -> Tensor:
    """PEFT's arithmetic on the same codes: base, A and B each rounded to the activations' dtype."""
    dtype = case.x.dtype
    bare = Case(**{**vars(case), "row_slots": [-1] * len(case.row_slots)})
    y = oracle(bare).to(dtype)
    for row, slot in enumerate(case.row_slots):
        start = 0
        for s, (down, up) in enumerate(zip(case.a, case.b, strict=True)):
            stop = start + up.shape[1]
            r = int(case.rank[s, slot]) if case.rank is not None else down.shape[1]
            if slot >= 0 and r:
                delta = (case.x[row] @ down[slot, :r].t()) @ up[slot, :, :r].t()
                if case.b_bias:
                    delta = delta + case.b_bias[s][slot]
                y[row, start:stop] += delta * float(case.scaling[s, slot])
            start = stop
    return y


@pytest.mark.parametrize("number", range(len(PAIRWISE)))
def test_lora_linear_pairwise_and_twice_rule(number: int) -> None:
    options = dict(PAIRWISE[number])
    k, widths = options.pop("shape")
    case = make_case(
        options.pop("m"), k, widths, options.pop("r"), options.pop("slots"), seed=zlib.crc32(b"%d" % number), **options
    )
    got = case.run()
    assert sqnr(got, oracle(case)) > DECIBELS[case.x.dtype] - 2
    real = oracle(case, round_h=False)
    error, allowed = (got.double() - real).norm(), 2 * (unfused(case).double() - real).norm()
    # fp32's own sums differ by their order alone, which says nothing about roundings
    assert error <= allowed + (1e-5 * real.norm() if case.x.dtype == torch.float32 else 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_output_is_rounded_once(layout: str, dtype: torch.dtype) -> None:
    """With an h that the dtype holds exactly, y is the rounded exact sum, but for ties that fp32's error decides."""
    case = make_case(
        40, 192, [160, 96], 8, 2, layout=layout, compute="w8a16", dtype=dtype, b_bias=True, popularity="distinct",
        poison=False, mixed_ranks=False,
    )  # fmt: skip
    case.x = torch.randint(-1, 2, case.x.shape).to(dtype)
    case.a = [torch.randint(-1, 2, t.shape).to(dtype) for t in case.a]
    case.rank, case.scaling = torch.full((2, 2), 8, dtype=torch.int32), torch.tensor([[0.5, 2.0], [1.0, 0.25]])
    assert torch.equal(shrunk(case).to(dtype).double(), shrunk(case))
    assert (case.run() != oracle(case).to(dtype)).double().mean() < 0.005


@pytest.mark.parametrize("padding", [0, 1, 5])
def test_padding_rows_and_stale_entries_are_bare_base(padding: int) -> None:
    case = make_case(12, 130, [48], 8, 3, padding=padding)
    if padding:
        stale = case.groups.sorted_tokens.clone()
        stale[-padding:] = torch.tensor([2**31 - 1, -5, 0, 12, -(2**31)], dtype=torch.int32)[:padding]
        case.groups = case.groups._replace(sorted_tokens=stale)
    assert sqnr(case.run(), oracle(case)) > 50


def test_metadata_of_a_larger_capacity() -> None:
    """Fixed-capacity tensors: unused groups have a count of 0 and anything else in their other entries."""
    case = make_case(9, 64, [32], 4, 2)
    want = case.run()
    grown = [torch.cat([t, torch.tensor(extra, dtype=torch.int32)]) for t, extra in zip(
        case.groups[:4], ([77, -3], [1, 40, -9], [0, 0, 0], [5, -1, 2**31 - 1]), strict=True
    )]  # fmt: skip
    case.groups = case.groups._replace(**dict(zip(("sorted_tokens", "ids", "counts", "starts"), grown, strict=True)))
    assert torch.equal(case.run(), want)


def test_a_slot_outside_the_bank_is_bare_base() -> None:
    case = make_case(12, 130, [48], 8, 3, popularity="distinct")
    ids = case.groups.ids.clone()
    ids[ids == 1] = 99
    case.groups = case.groups._replace(ids=ids)
    case.row_slots = [-1 if s == 1 else s for s in case.row_slots]
    assert sqnr(case.run(), oracle(case)) > 50


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_empty_batch(layout: str, compute: str) -> None:
    case = make_case(0, 200, [130, 60], 8, 2, layout=layout, compute=compute, b_bias=True)
    assert case.run().shape == (0, 190)
    assert EPILORA.shrink(case.x, case.a, case.rank, case.scaling, *case.groups[:4]).shape == (0, 2, 8)


@pytest.mark.parametrize("flag", [False, True])
def test_a_batch_without_adapters_is_bitwise_the_layer_without_slots(flag: bool) -> None:
    case = make_case(10, 130, [48, 20], 8, 3, popularity="none", b_bias=True)
    case.groups = case.groups._replace(no_adapter=torch.tensor([flag]))
    got = case.run()
    case.a, case.b, case.b_bias, case.rank, case.scaling = [], [], [], None, None
    assert torch.equal(got, case.run())


def test_the_flag_alone_makes_every_row_bare() -> None:
    case = make_case(10, 130, [48], 8, 3)
    with_adapters = case.run()
    case.groups = case.groups._replace(no_adapter=torch.tensor([True]))
    case.row_slots = [-1] * 10
    assert sqnr(case.run(), oracle(case)) > 50 and not torch.equal(case.run(), with_adapters)


def test_rank_and_scaling_of_one_vector_serve_every_slice() -> None:
    case = make_case(10, 130, [48, 20], 8, 3, popularity="distinct", poison=False, mixed_ranks=False)
    rank, scaling = torch.tensor([3, 0, 8], dtype=torch.int32), torch.tensor([0.5, 3.0, 1.25])
    case.rank, case.scaling = rank.expand(2, 3).contiguous(), scaling.expand(2, 3).contiguous()
    want = case.run()
    assert sqnr(want, oracle(case)) > 50
    case.rank, case.scaling = rank, scaling
    assert torch.equal(case.run(), want)


def test_without_rank_and_scaling_all_columns_count_once() -> None:
    case = make_case(10, 130, [48, 20], 8, 3, popularity="distinct", poison=False, mixed_ranks=False, b_bias=True)
    case.rank = case.scaling = None
    assert sqnr(case.run(), oracle(case)) > 50
    want = case.run()
    case.rank, case.scaling = torch.full((3,), 8, dtype=torch.int32), torch.ones(3)
    assert torch.equal(case.run(), want)


def test_a_rank_above_the_slots_is_the_slots() -> None:
    case = make_case(6, 64, [32], 8, 2, poison=False, mixed_ranks=False)
    case.rank = None
    want = case.run()
    case.rank = torch.tensor([8, 1000], dtype=torch.int32)
    assert torch.equal(case.run(), want)


def test_a_row_with_nan_or_infinity_stays_alone() -> None:
    case = make_case(8, 130, [48], 8, 2, mixed_ranks=False)
    clean = case.run()
    case.x[3, 5], case.x[6, 7] = float("nan"), float("inf")
    got = case.run()
    others = [0, 1, 2, 4, 5, 7]
    assert torch.equal(got[others], clean[others])
    assert not torch.isfinite(got[3]).any() and not torch.isfinite(got[6]).any()


def test_the_function_for_people_is_the_operator() -> None:
    case = make_case(8, 130, [48, 20], 8, 2, b_bias=True, codes="given")
    got = lora_linear(
        case.x, case.weight, case.weight_scale, case.a, case.b, case.groups, bias=case.bias, b_bias=case.b_bias,
        rank=case.rank, scaling=case.scaling, x_codes=case.x_codes, x_scale=case.x_scale,
    )  # fmt: skip
    assert torch.equal(got, case.run())
    case.compute, case.x_codes, case.x_scale = "w8a16", None, None
    got = lora_linear(case.x, case.weight, case.weight_scale, [], [], case.groups, compute="w8a16")
    case.a, case.b, case.b_bias, case.rank, case.scaling, case.bias = [], [], [], None, None, None
    assert torch.equal(got, case.run())


@pytest.mark.parametrize("path", LINEAR_OPS[1:])
def test_every_path_is_the_reference_on_the_cpu(path: str) -> None:
    case = make_case(8, 130, [48, 20], 8, 2)
    assert torch.equal(case.run(path), case.run())


# --- shrink and expand_add_ ------------------------------------------------------------------------------------------


def shrunk(case: Case) -> Tensor:
    """h in fp64; zero in rows without adapter and beyond the rank."""
    h = torch.zeros(case.x.shape[0], len(case.a), case.a[0].shape[1], dtype=torch.float64)
    for row, slot in enumerate(case.row_slots):
        for s, down in enumerate(case.a):
            if slot >= 0:
                r = int(case.rank[s, slot])
                h[row, s, :r] = case.scaling[s, slot].double() * (down[slot, :r].double() @ case.x[row].double())
    return h


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_shrink(dtype: torch.dtype) -> None:
    case = make_case(20, 300, [48, 20, 8], 12, 3, dtype=dtype)
    h = EPILORA.shrink(case.x, case.a, case.rank, case.scaling, *case.groups[:4])
    want = shrunk(case)
    assert h.dtype == dtype and sqnr(h, want) > DECIBELS[dtype]
    assert torch.equal(h != 0, want != 0), "a row without adapter, or a column beyond the rank, is not zero"


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("b_bias", [False, True])
def test_expand_add(dtype: torch.dtype, b_bias: bool) -> None:
    case = make_case(20, 300, [48, 20, 8], 12, 3, dtype=dtype, b_bias=b_bias)
    h = torch.randn(20, 3, 12).to(dtype)
    y = torch.randn(20, 76).to(dtype)
    want, before = y.double(), y.clone()
    for row, slot in enumerate(case.row_slots):
        for s, start in enumerate((0, 48, 68)):
            r = int(case.rank[s, slot])
            if slot >= 0 and r:
                delta = case.b[s][slot, :, :r].double() @ h[row, s, :r].double()
                if b_bias:
                    delta += case.scaling[s, slot].double() * case.b_bias[s][slot].double()
                want[row, start : start + len(delta)] += delta
    assert EPILORA.expand_add_(y, h, case.b, case.b_bias, case.rank, case.scaling, *case.groups[:4]) is None
    assert sqnr(y, want) > DECIBELS[dtype]
    bare = [i for i, slot in enumerate(case.row_slots) if slot < 0]
    assert bare and torch.equal(bits(y[bare]), bits(before[bare]))


def test_expand_add_into_a_view_leaves_what_lies_around_it() -> None:
    case = make_case(6, 64, [16, 8], 4, 2, popularity="distinct")
    h = torch.randn(6, 2, 4).to(torch.bfloat16)
    plain = torch.zeros(6, 24, dtype=torch.bfloat16)
    room = torch.zeros(8, 40, dtype=torch.bfloat16)
    for y in (plain, room[1:7, 8:32]):
        EPILORA.expand_add_(y, h, case.b, [], case.rank, case.scaling, *case.groups[:4])
    assert plain.abs().sum() > 0 and torch.equal(room[1:7, 8:32], plain)
    room[1:7, 8:32] = 0
    assert room.abs().sum() == 0


@pytest.mark.parametrize("b_bias", [False, True])
def test_lora_add_is_shrink_and_expand(b_bias: bool) -> None:
    case = make_case(20, 300, [48, 20, 8], 12, 3, b_bias=b_bias)
    y, rows = torch.randn(20, 76).to(torch.bfloat16), case.groups[:4]
    want, before = y.clone(), y.clone()
    h = EPILORA.shrink(case.x, case.a, case.rank, case.scaling, *rows)
    EPILORA.expand_add_(want, h, case.b, case.b_bias, case.rank, case.scaling, *rows)
    adapters = (case.a, case.b, case.b_bias, case.rank, case.scaling)
    assert EPILORA.lora_add_(y, case.x, *adapters, *rows, torch.tensor([True])) is None
    assert torch.equal(y, before)
    EPILORA.lora_add_(y, case.x, *adapters, *rows, torch.tensor([False]))
    assert torch.equal(y, want) and not torch.equal(y, before)


# --- quantizers ------------------------------------------------------------------------------------------------------


def test_quantizer_bits_are_vllms() -> None:
    golden = load_file(GOLDEN)
    numbers = sorted({name.split(".")[0] for name in golden})
    assert len(numbers) >= 3
    for i in numbers:
        x = golden[f"{i}.x"]
        codes, scale = EPILORA.quantize_fp8_token(x)
        assert torch.equal(scale, golden[f"{i}.per_token.scale"])
        assert torch.equal(bits(codes), golden[f"{i}.per_token.codes"])
        codes, scale = EPILORA.quantize_fp8_tensor(x)
        assert torch.equal(scale, golden[f"{i}.per_tensor.scale"].reshape(1))
        assert torch.equal(bits(codes), golden[f"{i}.per_tensor.codes"])
        codes = EPILORA.quantize_fp8_static(x, torch.tensor([0.37]))
        assert torch.equal(bits(codes), golden[f"{i}.static_0.37.codes"])


@pytest.mark.parametrize("k", [1, 15, 128, 300, 2048])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_activation_quantizers_by_definition(dtype: torch.dtype, k: int) -> None:
    x = matrix(160, k, dtype)  # many rows: only some scales have quotients that fall between two codes
    for op, layout in ((EPILORA.quantize_fp8_token, "channel"), (EPILORA.quantize_fp8_group, "block")):
        (codes, scale), (want, want_scale) = op(x), exact_codes(x, layout)
        assert torch.equal(scale, want_scale) and torch.equal(bits(codes), bits(want)), layout
        assert not codes.isnan().any() and (scale > 0).all()


@pytest.mark.parametrize("shape", [(1, 1), (5, 300), (130, 15), (200, 257)])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_weight_quantizer_by_definition(shape: tuple[int, int], dtype: torch.dtype) -> None:
    n, k = shape
    weight = matrix(n, k, dtype)
    weight[:128, :128] = 0  # a whole block of zeros
    codes, scale = EPILORA.quantize_fp8_weight(weight, "channel")
    want, want_scale = exact_codes(weight, "channel")
    assert torch.equal(bits(codes), bits(want)) and torch.equal(scale, want_scale)
    codes, scale = EPILORA.quantize_fp8_weight(weight, "block")
    assert scale.shape == (-(-n // 128), -(-k // 128))
    floor = torch.tensor(1 / (448 * 512))
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            rows, columns = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            block = weight[rows, columns].float()
            want_scale = (block.abs().amax() / torch.tensor(448.0)).maximum(floor)
            assert scale[i, j] == want_scale
            want = (block / want_scale.expand_as(block)).clamp(-448, 448).to(FP8)
            assert torch.equal(bits(codes[rows, columns]), bits(want))
    codes, scale = EPILORA.quantize_fp8_weight(weight, "tensor")
    want_scale = (weight.float().abs().amax() / torch.tensor(448.0)).maximum(floor).reshape(1)
    want = (weight.float() * (torch.ones(1) / want_scale)).clamp(-448, 448).to(FP8)
    assert torch.equal(scale, want_scale) and torch.equal(bits(codes), bits(want))


def test_codes_saturate_under_a_static_scale() -> None:
    x = torch.tensor([[1e6, -1e6, 448.0, 0.0]])
    assert EPILORA.quantize_fp8_static(x, torch.tensor([1.0])).float().tolist() == [[448.0, -448.0, 448.0, 0.0]]


@pytest.mark.parametrize("name", ["token", "group", "tensor"])
def test_quantizing_nothing(name: str) -> None:
    for shape in ((0, 7), (3, 0)):
        codes, scale = getattr(EPILORA, f"quantize_fp8_{name}")(torch.empty(shape))
        assert codes.shape == shape and torch.isfinite(scale).all()


def test_nan_reaches_its_own_scale_only() -> None:
    x = torch.ones(3, 256)
    x[1, 200] = float("nan")
    codes, scale = EPILORA.quantize_fp8_token(x)
    assert codes[1].isnan().all() and scale.isnan().flatten().tolist() == [False, True, False]
    codes, scale = EPILORA.quantize_fp8_group(x)
    assert scale.isnan().tolist() == [[False, False], [False, True], [False, False]]
    assert not codes[1, :128].isnan().any() and codes[1, 128:].isnan().all()


# --- values of codes -------------------------------------------------------------------------------------------------


def value(code: int) -> float:
    """An e4m3fn code by the format's definition: sign, four bits of exponent (bias 7), three of mantissa."""
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def test_widen_is_exact_for_every_code() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    got, want = widen(codes), torch.tensor([value(i) for i in range(256)])
    assert got.dtype == torch.float32
    assert torch.equal(got.isnan(), want.isnan()) and want.isnan().sum() == 2
    finite = ~want.isnan()
    assert torch.equal(got[finite].view(torch.int32), want[finite].view(torch.int32)), "a bit differs, or a zero's sign"
    square = widen(codes.view(16, 16).t()).t().flatten()
    assert torch.equal(square[finite], want[finite]), "strides were ignored"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_dequantize(layout: str, dtype: torch.dtype) -> None:
    case = make_case(1, 300, [200], 1, 1, layout=layout)
    got = dequantize_fp8(case.weight, case.weight_scale, dtype)
    assert got.dtype == dtype
    for n, k in ((0, 0), (127, 128), (128, 127), (199, 299), (3, 256)):
        scale = {
            "tensor": lambda n, k: case.weight_scale[0],
            "channel": lambda n, k: case.weight_scale[n, 0],
            "block": lambda n, k: case.weight_scale[n // 128, k // 128],
        }[layout](n, k)
        assert got[n, k] == (torch.tensor(value(int(case.weight[n, k].view(torch.uint8)))) * scale).to(dtype)


# --- adapter_groups --------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 9), st.integers(1, 5))
def test_adapter_groups_is_a_stable_sort(data: st.DataObject, num_slots: int, repeat: int) -> None:
    slots = data.draw(st.lists(st.integers(-1, num_slots - 1), max_size=20))
    rows = [s for s in slots for _ in range(repeat)]
    got = adapter_groups(torch.tensor(slots, dtype=torch.int32), len(rows), num_slots)
    want = group_rows(rows, num_slots)
    for a, b in zip(got[:4], want[:4], strict=True):
        assert a.dtype == torch.int32 and torch.equal(a, b)


def test_adapter_groups_drives_the_projection() -> None:
    case = make_case(12, 64, [32], 4, 3)
    slots = torch.tensor([2, -1, 0], dtype=torch.int32)
    case.groups, case.row_slots = adapter_groups(slots, 12, 3), [2] * 4 + [-1] * 4 + [0] * 4
    assert not case.groups.no_adapter.item() and sqnr(case.run(), oracle(case)) > 50
    case.groups, case.row_slots = adapter_groups(slots, 12, 3, any_adapter=False), [-1] * 12
    assert case.groups.no_adapter.item() and sqnr(case.run(), oracle(case)) > 50
