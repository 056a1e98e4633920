"""Wrong calls: each raises an error that names the argument, what was expected and what came, and changes nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.cases import FP8, Case, make_case
from torch_epilora.ops import scale_layout
from torch_epilora.ops.schemas import LINEAR_OPS

EPILORA = torch.ops.epilora
Wrong = tuple[str, Callable[[Case], None], type[Exception], str]


def right(**options) -> Case:
    """A valid call: x [4, 256], weight [192, 256] in two slices of 128 and 64, three slots of rank 8."""
    return make_case(4, 256, [128, 64], 8, 3, b_bias=True, **options)


def put(**fields: object) -> Callable[[Case], None]:
    """Replace arguments."""

    def change(case: Case) -> None:
        for name, new in fields.items():
            setattr(case, name, new)

    return change


def edit(name: str, f: Callable[[Tensor], Tensor], index: int | None = None) -> Callable[[Case], None]:
    """Replace an argument, or one entry of a list, by a function of it."""

    def change(case: Case) -> None:
        if name in case.groups._fields:
            case.groups = case.groups._replace(**{name: f(getattr(case.groups, name))})
        elif index is None:
            setattr(case, name, f(getattr(case, name)))
        else:
            tensors = list(getattr(case, name))
            tensors[index] = f(tensors[index])
            setattr(case, name, tensors)

    return change


def both(*changes: Callable[[Case], None]) -> Callable[[Case], None]:
    def change(case: Case) -> None:
        for one in changes:
            one(case)

    return change


def columns_first(t: Tensor) -> Tensor:
    """The same values with the last dimension strided."""
    return t.mT.contiguous().mT


def every_other(t: Tensor) -> Tensor:
    """The same vector with a stride of two."""
    return torch.stack([t, t], 1)[:, 0]


def codes_of(shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape).to(FP8)


LINEAR: list[Wrong] = [
    ("x_vector", edit("x", lambda t: t[0]), ValueError, r"x: expected a matrix \[M, K\], got shape \(256,\)\. Flatten"),
    ("x_3d", edit("x", lambda t: t[None]), ValueError, r"x: expected a matrix \[M, K\], got shape \(1, 4, 256\)"),
    ("x_dtype", edit("x", lambda t: t.double()), TypeError,
     r"x: expected dtype bfloat16 or float16 or float32, got float64"),
    ("x_codes_as_x", edit("x", lambda t: t.to(FP8)), TypeError, r"x: expected dtype .*, got float8_e4m3fn"),
    ("x_strides", edit("x", columns_first), ValueError,
     r"x: expected a contiguous last dimension, got strides \(1, 4\).*contig"),
    ("weight_vector", edit("weight", lambda t: t[0]), ValueError,
     r"weight: expected codes \[N, K\], got shape \(256,\)"),
    ("weight_dtype", edit("weight", lambda t: t.to(torch.bfloat16)), TypeError,
     r"weight: expected dtype float8_e4m3fn, got bfloat16\. Quantize it with"),
    ("weight_e5m2", edit("weight", lambda t: t.float().to(torch.float8_e5m2)), TypeError,
     r"weight: expected dtype float8_e4m3fn, got float8_e5m2"),
    ("weight_width", edit("weight", lambda t: t[:, :128].contiguous()), ValueError,
     r"weight: expected \[N, 256\] to match x \[M, 256\], got shape \(192, 128\)"),
    ("weight_strides", edit("weight", columns_first), ValueError,
     r"weight: expected a contiguous last dimension, got strides \(1, 192\)"),
    ("weight_device", edit("weight", lambda t: t.to("meta")), ValueError,
     r"weight: expected a tensor on cpu, where x is, got one on meta"),
    ("scale_dtype", edit("weight_scale", lambda t: t.half()), TypeError,
     r"weight_scale: expected dtype float32, got float16"),
    ("scale_shape", edit("weight_scale", lambda t: t[:-1]), ValueError,
     r"weight_scale: expected one element, \[192\] or \[192, 1\] \(per channel\) or \[2, 2\] .*got shape \[191, 1\]"),
    ("scale_blocks_transposed", put(weight_scale=torch.ones(2, 3)), ValueError,
     r"weight_scale: expected one element.*\[2, 2\] \(128x128 blocks\).*got shape \[2, 3\]"),
    ("scale_row", edit("weight_scale", lambda t: t.t().contiguous()), ValueError,
     r"weight_scale: expected .*got shape \[1, 192\]"),
    ("scale_strides", put(weight_scale=torch.ones(192, 2)[:, :1]), ValueError,
     r"weight_scale: expected a contiguous tensor, got strides \(2, 1\)"),
    ("scale_device", edit("weight_scale", lambda t: t.to("meta")), ValueError,
     r"weight_scale: expected a tensor on cpu.*got one on meta"),
    ("compute", put(compute="w4a4"), ValueError, r"compute: expected one of \('w8a8', 'w8a16'\), got 'w4a4'"),
    ("codes_alone", put(x_codes=codes_of((4, 256))), ValueError, r"x_scale: expected the scale of x_codes, got None"),
    ("codes_for_w8a16", put(compute="w8a16", x_codes=codes_of((4, 256)), x_scale=torch.ones(4, 1)), ValueError,
     r"x_codes and x_scale: expected None with compute='w8a16'"),
    ("static_for_w8a16", put(compute="w8a16", x_scale=torch.ones(1)), ValueError,
     r"x_codes and x_scale: expected None with compute='w8a16'"),
    ("codes_dtype", put(x_codes=torch.zeros(4, 256), x_scale=torch.ones(4, 1)), TypeError,
     r"x_codes: expected dtype float8_e4m3fn, got float32"),
    ("codes_shape", put(x_codes=codes_of((3, 256)), x_scale=torch.ones(4, 1)), ValueError,
     r"x_codes: expected shape \(4, 256\), that of x, got \(3, 256\)"),
    ("codes_strides", put(x_codes=codes_of((256, 4)).t(), x_scale=torch.ones(4, 1)), ValueError,
     r"x_codes: expected a contiguous last dimension"),
    ("codes_device", put(x_codes=codes_of((4, 256)).to("meta"), x_scale=torch.ones(4, 1)), ValueError,
     r"x_codes: expected a tensor on cpu"),
    ("x_scale_dtype", put(x_codes=codes_of((4, 256)), x_scale=torch.ones(4, 1).half()), TypeError,
     r"x_scale: expected dtype float32, got float16"),
    ("x_scale_shape", put(x_codes=codes_of((4, 256)), x_scale=torch.ones(4, 2)), ValueError,
     r"x_scale: expected shape \(4, 1\) for x \(4, 256\) and a channel weight, got \(4, 2\)"),
    ("x_scale_not_static", put(x_scale=torch.ones(4, 1)), ValueError,
     r"x_scale: expected one element \(a static scale\) when x_codes is None, got shape \(4, 1\)"),
    ("x_scale_strides", put(x_codes=codes_of((4, 256)), x_scale=torch.ones(4, 2)[:, :1]), ValueError,
     r"x_scale: expected a contiguous tensor, got strides \(2, 1\)"),
    ("x_scale_device", put(x_codes=codes_of((4, 256)), x_scale=torch.ones(4, 1, device="meta")), ValueError,
     r"x_scale: expected a tensor on cpu"),
    ("bias_dtype", edit("bias", lambda t: t.float()), TypeError, r"bias: expected dtype bfloat16, got float32"),
    ("bias_width", edit("bias", lambda t: t[:128]), ValueError,
     r"bias: expected a contiguous \[192\], got shape \(128,\)"),
    ("bias_strides", edit("bias", every_other), ValueError, r"bias: expected a contiguous \[192\]"),
    ("bias_device", edit("bias", lambda t: t.to("meta")), ValueError, r"bias: expected a tensor on cpu"),
    ("a_missing", put(a=[]), ValueError, r"a: expected 1 to 16 tensors, one a slice, got 0"),
    ("a_too_many", edit("a", lambda t: t * 9), ValueError, r"a: expected 1 to 16 tensors, one a slice, got 18"),
    ("a_matrix", edit("a", lambda t: t[0], 0), ValueError,
     r"a\[0\]: expected \[slots, rank, 256\], got shape \(8, 256\)"),
    ("a_dtype", edit("a", lambda t: t.float(), 1), TypeError,
     r"a\[1\]: expected dtype bfloat16, got float32\. Adapters are stored in x's dtype"),
    ("a_width", edit("a", lambda t: t[..., :128].contiguous(), 0), ValueError,
     r"a\[0\]: expected \[slots, rank, 256\] to match x, got shape \(3, 8, 128\)"),
    ("a_alike", edit("a", lambda t: t[:, :4].contiguous(), 1), ValueError,
     r"a\[1\]: expected the shape of a\[0\], \(3, 8, 256\), got \(3, 4, 256\)"),
    ("a_strides", edit("a", lambda t: torch.cat([t, t], 1)[:, :8], 1), ValueError,
     r"a\[1\]: expected the strides of a\[0\], \(2048, 256, 1\), got \(4096, 256, 1\)\. Call \.clone\(memory"),
    ("a_no_rank", edit("a", lambda ts: [t[:, :0].contiguous() for t in ts]), ValueError,
     r"a\[0\]: expected at least one slot and rank 1, got shape \(3, 0, 256\)"),
    ("a_no_slots", edit("a", lambda ts: [t[:0] for t in ts]), ValueError,
     r"a\[0\]: expected at least one slot and rank 1, got shape \(0, 8, 256\)"),
    ("a_inner_strides", edit("a", lambda ts: [columns_first(t) for t in ts]), ValueError,
     r"a\[0\]: expected a contiguous last dimension"),
    ("a_device", edit("a", lambda t: t.to("meta"), 1), ValueError, r"a\[1\]: expected a tensor on cpu"),
    ("b_missing", put(b=[]), ValueError, r"b: expected 2 tensors, one a slice as in a, got 0"),
    ("b_fewer", edit("b", lambda ts: ts[:1]), ValueError, r"b: expected 2 tensors, one a slice as in a, got 1"),
    ("b_matrix", edit("b", lambda t: t[0], 1), ValueError, r"b\[1\]: expected \[3, width, 8\], got shape \(64, 8\)"),
    ("b_dtype", edit("b", lambda t: t.half(), 0), TypeError, r"b\[0\]: expected dtype bfloat16, got float16"),
    ("b_slots", edit("b", lambda t: t[:2], 0), ValueError,
     r"b\[0\]: expected \[3, width, 8\] to match a, got shape \(2, 128, 8\)"),
    ("b_rank", edit("b", lambda t: t[..., :4].contiguous(), 0), ValueError,
     r"b\[0\]: expected \[3, width, 8\] to match a, got shape \(3, 128, 4\)"),
    ("b_widths", both(edit("b", lambda t: t[:, :32].contiguous(), 1), put(b_bias=[])), ValueError,
     r"b: expected slice widths that sum to the output width 192, got \[128, 32\]"),
    ("b_empty_slice", edit("b", lambda t: t[:, :0], 1), ValueError,
     r"b\[1\]: expected \[3, width, 8\] to match a, got shape \(3, 0, 8\)"),
    ("b_inner_strides", edit("b", columns_first, 1), ValueError, r"b\[1\]: expected a contiguous last dimension"),
    ("b_row_strides", put(b=[torch.zeros(3, 128, 8).bfloat16(), torch.ones(3, 64, 16).bfloat16()[..., :8]]), ValueError,
     r"b\[1\]: expected row stride 8, that of b\[0\], got 16\. Call \.clone\(memory"),
    ("b_device", edit("b", lambda t: t.to("meta"), 0), ValueError, r"b\[0\]: expected a tensor on cpu"),
    ("b_bias_fewer", edit("b_bias", lambda ts: ts[:1]), ValueError,
     r"b_bias: expected no tensors or 2, one a slice, got 1"),
    ("b_bias_dtype", edit("b_bias", lambda t: t.float(), 1), TypeError,
     r"b_bias\[1\]: expected dtype bfloat16, got float32"),
    ("b_bias_width", edit("b_bias", lambda t: t[:, :32].contiguous(), 1), ValueError,
     r"b_bias\[1\]: expected a contiguous \[3, 64\], got shape \(3, 32\)"),
    ("b_bias_alone", put(a=[], b=[], rank=None, scaling=None), ValueError,
     r"b_bias: expected no tensors when a and b are empty, got 2"),
    ("rank_dtype", edit("rank", lambda t: t.long()), TypeError, r"rank: expected dtype int32, got int64"),
    ("rank_shape", edit("rank", lambda t: t.t().contiguous()), ValueError,
     r"rank: expected a contiguous \[3\] or \[2, 3\], got shape \(3, 2\)"),
    ("rank_strides", edit("rank", columns_first), ValueError, r"rank: expected a contiguous \[3\] or \[2, 3\]"),
    ("rank_device", edit("rank", lambda t: t.to("meta")), ValueError, r"rank: expected a tensor on cpu"),
    ("scaling_dtype", edit("scaling", lambda t: t.bfloat16()), TypeError,
     r"scaling: expected dtype float32, got bfloat16"),
    ("scaling_shape", put(scaling=torch.ones(4)), ValueError,
     r"scaling: expected a contiguous \[3\] or \[2, 3\], got shape \(4,\)"),
    ("sorted_dtype", edit("sorted_tokens", lambda t: t.long()), TypeError,
     r"sorted_tokens: expected dtype int32, got int64"),
    ("sorted_short", edit("sorted_tokens", lambda t: t[:3]), ValueError,
     r"sorted_tokens: expected an entry for each of x's 4 rows, got 3 entries"),
    ("ids_matrix", edit("ids", lambda t: t[None]), ValueError,
     r"ids: expected a contiguous vector, got shape \(1, 4\)"),
    ("counts_short", edit("counts", lambda t: t[:-1]), ValueError,
     r"counts: expected 4 entries, as ids has, got 3 entries"),
    ("counts_strides", edit("counts", every_other), ValueError,
     r"counts: expected a contiguous vector, got shape \(4,\), strides \(2,\)"),
    ("starts_short", edit("starts", lambda t: t[:3]), ValueError,
     r"starts: expected at least 4 entries, as ids has, got 3 entries"),
    ("starts_device", edit("starts", lambda t: t.to("meta")), ValueError, r"starts: expected a tensor on cpu"),
    ("no_adapter_dtype", edit("no_adapter", lambda t: t.int()), TypeError,
     r"no_adapter: expected dtype bool, got int32"),
    ("no_adapter_size", edit("no_adapter", lambda t: t.repeat(2)), ValueError,
     r"no_adapter: expected one bool on the CPU, read on the host, got 2 on cpu"),
]  # fmt: skip


def storages(*values: object) -> list[Tensor]:
    """Copies of the bytes of every tensor with storage among the arguments."""
    found = []
    for value in values:
        if isinstance(value, list | tuple):
            found += storages(*value)
        elif isinstance(value, Tensor) and value.device.type != "meta":
            found.append(value.detach().clone().contiguous().view(-1).view(torch.uint8))
    return found


def refuses(op: Callable, arguments: tuple, error: type[Exception], message: str) -> None:
    before = storages(*arguments)
    with pytest.raises(error, match=message):
        op(*arguments)
    after = storages(*arguments)
    assert len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize(("change", "error", "message"), [w[1:] for w in LINEAR], ids=[w[0] for w in LINEAR])
def test_lora_linear_refuses(change: Callable[[Case], None], error: type[Exception], message: str) -> None:
    case = right()
    case.run()
    change(case)
    for op in LINEAR_OPS:
        refuses(getattr(EPILORA, op), case.args(), error, message)


@pytest.mark.parametrize(("change", "error", "message"), [w[1:] for w in LINEAR], ids=[w[0] for w in LINEAR])
def test_the_fake_refuses_alike(change: Callable[[Case], None], error: type[Exception], message: str) -> None:
    """A wrong call is found while a graph is traced, with the same words."""
    case = right()
    change(case)
    if any(t.device.type == "meta" for t in flat(case.args())):
        pytest.skip("FakeTensorMode refuses devices that differ by itself")
    with FakeTensorMode() as mode:
        arguments = tuple(fake(mode, value) for value in case.args())
        with pytest.raises(error, match=message):
            EPILORA.lora_linear(*arguments)


def flat(values: tuple) -> list[Tensor]:
    return [t for v in values for t in (v if isinstance(v, list) else [v]) if isinstance(t, Tensor)]


def fake(mode: FakeTensorMode, value: object) -> object:
    if isinstance(value, list):
        return [mode.from_tensor(t) for t in value]
    return mode.from_tensor(value) if isinstance(value, Tensor) else value


BLOCK: list[Wrong] = [
    ("static", put(x_scale=torch.ones(1)), ValueError,
     r"x_scale: a static scale was given with a block-scaled weight, which quantizes per group"),
    ("per_token", put(x_codes=codes_of((4, 256)), x_scale=torch.ones(4, 1)), ValueError,
     r"x_scale: expected shape \(4, 2\) for x \(4, 256\) and a block weight, got \(4, 1\)"),
    ("vector", put(x_codes=codes_of((4, 256)), x_scale=torch.ones(4)), ValueError,
     r"x_scale: expected shape \(4, 2\) .*got \(4,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), [w[1:] for w in BLOCK], ids=[w[0] for w in BLOCK])
def test_block_scaled_weights_refuse(change: Callable[[Case], None], error: type[Exception], message: str) -> None:
    case = right(layout="block")
    change(case)
    refuses(EPILORA.lora_linear, case.args(), error, message)


def matrix(*shape: int) -> Tensor:
    return torch.randn(*shape)


QUANTIZERS = [
    ("token_vector", "quantize_fp8_token", (matrix(8),), ValueError,
     r"x: expected a matrix \[M, K\], got shape \(8,\)"),
    ("token_dtype", "quantize_fp8_token", (matrix(2, 8).double(),), TypeError, r"x: expected dtype .*got float64"),
    ("token_strides", "quantize_fp8_token", (matrix(8, 2).t(),), ValueError,
     r"x: expected a contiguous last dimension"),
    ("group_3d", "quantize_fp8_group", (matrix(1, 2, 8),), ValueError,
     r"x: expected a matrix \[M, K\], got shape \(1, 2, 8\)"),
    ("group_integers", "quantize_fp8_group", (torch.ones(2, 8, dtype=torch.int32),), TypeError,
     r"x: expected dtype .*got int32"),
    ("tensor_scalar", "quantize_fp8_tensor", (torch.tensor(1.0),), ValueError,
     r"x: expected a matrix \[M, K\], got shape \(\)"),
    ("static_scales", "quantize_fp8_static", (matrix(2, 8), torch.ones(2, 1)), ValueError,
     r"scale: expected one element, got shape \(2, 1\)"),
    ("static_dtype", "quantize_fp8_static", (matrix(2, 8), torch.ones(1).double()), TypeError,
     r"scale: expected dtype float32, got float64"),
    ("static_device", "quantize_fp8_static", (matrix(2, 8), torch.ones(1, device="meta")), ValueError,
     r"scale: expected a tensor on cpu, where x is, got one on meta"),
    ("weight_layout", "quantize_fp8_weight", (matrix(2, 8), "row"), ValueError,
     r"layout: expected one of \('tensor', 'channel', 'block'\), got 'row'"),
    ("weight_empty", "quantize_fp8_weight", (matrix(0, 8), "tensor"), ValueError,
     r"weight: expected at least one row and one column, got shape \(0, 8\)"),
    ("weight_vector", "quantize_fp8_weight", (matrix(8), "tensor"), ValueError, r"weight: expected a matrix"),
    ("weight_codes", "quantize_fp8_weight", (codes_of((2, 8)), "tensor"), TypeError,
     r"weight: expected dtype .*got float8_e4m3fn"),
    ("slots_dtype", "adapter_groups", (torch.tensor([0, 1]), 2, 2), TypeError,
     r"slots: expected dtype int32, got int64"),
    ("slots_matrix", "adapter_groups", (torch.zeros(2, 2, dtype=torch.int32), 4, 2), ValueError,
     r"slots: expected a vector, one entry a sequence or a token, got shape \(2, 2\)"),
    ("slots_high", "adapter_groups", (torch.tensor([0, 2], dtype=torch.int32), 2, 2), ValueError,
     r"slots: expected values from -1 to 1, got 0 to 2"),
    ("slots_low", "adapter_groups", (torch.tensor([0, -2], dtype=torch.int32), 2, 2), ValueError,
     r"slots: expected values from -1 to 1, got -2 to 0"),
    ("slots_none", "adapter_groups", (torch.empty(0, dtype=torch.int32), 2, 2), ValueError,
     r"rows: expected a multiple of the 0 entries of slots, got 2"),
    ("rows", "adapter_groups", (torch.tensor([0, 1], dtype=torch.int32), 5, 2), ValueError,
     r"rows: expected a multiple of the 2 entries of slots, got 5"),
    ("num_slots", "adapter_groups", (torch.tensor([-1], dtype=torch.int32), 2, 0), ValueError,
     r"num_slots: expected at least 1, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "arguments", "error", "message"), [w[1:] for w in QUANTIZERS], ids=[w[0] for w in QUANTIZERS]
)
def test_quantizers_and_groups_refuse(op: str, arguments: tuple, error: type[Exception], message: str) -> None:
    refuses(getattr(EPILORA, op), arguments, error, message)


def shrink_args(case: Case) -> tuple:
    return (case.x, case.a, case.rank, case.scaling, *case.groups[:4])


SHRINK = [w for w in LINEAR if w[0] in (
    "x_vector", "x_dtype", "x_strides", "a_missing", "a_dtype", "a_width", "a_alike", "rank_dtype", "scaling_shape",
    "sorted_short", "counts_short",
)]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), [w[1:] for w in SHRINK], ids=[w[0] for w in SHRINK])
def test_shrink_refuses(change: Callable[[Case], None], error: type[Exception], message: str) -> None:
    case = right()
    change(case)
    refuses(EPILORA.shrink, shrink_args(case), error, message)


def expand_args(case: Case, y: Tensor, h: Tensor) -> tuple:
    return (y, h, case.b, case.b_bias, case.rank, case.scaling, *case.groups[:4])


Y, H = torch.zeros(4, 192, dtype=torch.bfloat16), torch.zeros(4, 2, 8, dtype=torch.bfloat16)
EXPAND = [
    ("y_vector", Y[0], H, ValueError, r"y: expected a matrix \[M, K\], got shape \(192,\)"),
    ("y_dtype", Y.double(), H, TypeError, r"y: expected dtype .*got float64"),
    ("y_strides", columns_first(Y), H, ValueError, r"y: expected a contiguous last dimension"),
    ("y_shared", Y[:1].expand(4, 192), H, ValueError, r"y: expected rows with memory of their own"),
    ("h_matrix", Y, H[:, 0], ValueError,
     r"h: expected a contiguous \[4, slices, rank\] from shrink, got shape \(4, 8\)"),
    ("h_rows", Y, H[:3], ValueError,
     r"h: expected a contiguous \[4, slices, rank\] from shrink, got shape \(3, 2, 8\)"),
    ("h_strides", Y, columns_first(H), ValueError, r"h: expected a contiguous \[4, slices, rank\] from shrink"),
    ("h_dtype", Y, H.float(), TypeError, r"h: expected dtype bfloat16, got float32"),
    ("h_slices", Y, H.repeat(1, 2, 1), ValueError, r"b: expected 4 tensors, one a slice as in a, got 2"),
    ("h_rank", Y, H[..., :4].contiguous(), ValueError,
     r"b\[0\]: expected \[3, width, 4\] to match a, got shape \(3, 128, 8\)"),
    ("y_width", Y[:, :100], H, ValueError,
     r"b: expected slice widths that sum to the output width 100, got \[128, 64\]"),
]  # fmt: skip


@pytest.mark.parametrize(("y", "h", "error", "message"), [w[1:] for w in EXPAND], ids=[w[0] for w in EXPAND])
def test_expand_add_refuses(y: Tensor, h: Tensor, error: type[Exception], message: str) -> None:
    refuses(EPILORA.expand_add_, expand_args(right(), y, h), error, message)


def test_expand_add_without_b() -> None:
    case = right()
    case.b, case.b_bias = [], []
    refuses(EPILORA.expand_add_, expand_args(case, Y, H), ValueError, r"b: expected 1 to 16 tensors .*got 0")


ADD = [
    ("y_rows", Y[:3], {}, ValueError, r"y: expected 4 rows, as x has, got 3"),
    ("y_dtype", Y.half(), {}, TypeError, r"y: expected dtype bfloat16, got float16"),
    ("y_width", Y[:, :100], {}, ValueError, r"b: expected slice widths that sum to the output width 100"),
    ("y_shared", Y[:1].expand(4, 192), {}, ValueError, r"y: expected rows with memory of their own, got strides \(0,"),
    ("flag", Y, {"no_adapter": torch.tensor([0])}, TypeError, r"no_adapter: expected dtype bool, got int64"),
    ("two_flags", Y, {"no_adapter": torch.tensor([True, False])}, ValueError,
     r"no_adapter: expected one bool on the CPU"),
]  # fmt: skip


@pytest.mark.parametrize(("y", "changed", "error", "message"), [w[1:] for w in ADD], ids=[w[0] for w in ADD])
def test_lora_add_refuses(y: Tensor, changed: dict, error: type[Exception], message: str) -> None:
    case = right()
    groups = case.groups._replace(**changed)
    adapters = (case.a, case.b, case.b_bias, case.rank, case.scaling)
    refuses(EPILORA.lora_add_, (y, case.x, *adapters, *groups), error, message)


@pytest.mark.parametrize("name", ["x", "scaling"])
def test_lora_add_has_no_gradient(name: str) -> None:
    case = right()
    getattr(case, name).requires_grad_()
    arguments = (Y, case.x, case.a, case.b, case.b_bias, case.rank, case.scaling, *case.groups)
    refuses(EPILORA.lora_add_, arguments, NotImplementedError, r"lora_add_ has no gradient")


def test_scale_layout_names_the_three_shapes() -> None:
    assert scale_layout((192, 256), torch.ones(1, 1)) == "tensor"
    assert scale_layout((192, 256), torch.ones(192)) == "channel"
    assert scale_layout((192, 256), torch.ones(2, 2)) == "block"
    with pytest.raises(ValueError, match=r"weight_scale: .*for a weight \[192, 256\], got shape \[256\]"):
        scale_layout((192, 256), torch.ones(256))


def test_enough_distinct_messages_are_asserted() -> None:
    messages = {w[-1] for table in (LINEAR, BLOCK, QUANTIZERS, EXPAND) for w in table}
    assert len(messages) >= 45
