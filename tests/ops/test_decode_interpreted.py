"""The decode kernel in Triton's interpreter: against fp64, and against the contract's bitwise promises.

Programs run one after the other in the order of the grid, so a program that waited for a later one would wait forever:
every call has a time limit. Inline assembly (the prefetch, and how programs wait and leave) and programmatic launch are
the GPU's: the kernel's plain form of them runs here, and no prefetch.
"""

import signal
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.cases import Case, make_case, oracle, sqnr
from tests.ops.interpreter import repaired  # noqa: F401
from tests.pairwise import pairwise
from torch_epilora.ops import dispatch, reference
from torch_epilora.ops.checks import Call
from torch_epilora.ops.plan import Decode, Problem, make_plan

pytestmark = [
    pytest.mark.usefixtures("repaired", "counters"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite runs the same kernel for real"),
    pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning"),
]
GUARD = 77
"""Value of the integers past a call's counters: nothing may be written there."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def give_up(*_: object) -> None:
        raise TimeoutError(f"a call took more than {seconds} s: a program waits for one that does not come")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """The counters that a test's calls share, as calls on one stream do; each call must find them at zero."""
    from torch_epilora.ops.triton import decode

    found = {"taken": 0, "memory": torch.full((8192,), GUARD, dtype=torch.int32), "size": 0}

    def take(device: torch.device, size: int) -> Tensor:
        check()
        found["taken"] += 1
        found["size"] = max(found["size"], size)
        found["memory"][: found["size"]] = 0
        return found["memory"]

    def check() -> None:
        assert not found["memory"][: found["size"]].any(), "a call left counters that are not zero"
        assert (found["memory"][found["size"] :] == GUARD).all(), "a call wrote past its counters"

    monkeypatch.setattr(decode, "take_signal", take)
    yield found
    check()


def config(m: int = 16, **changes: int) -> Decode:
    defaults = dict(
        block_m=16 if m <= 16 else 32 if m <= 32 else 64, block_n=64, block_k=128, num_stages=2, part=256,
        shrink_m=16, shrink_r=32, shrink_k=128, shrink_stages=2, split_k=2, together=2, b_stages=2, ahead=0,
        early=1, overlap=True, num_warps=4,
    )  # fmt: skip
    return Decode(**{**defaults, **changes})


def decoded(case: Case, tiles: Decode | None = None, *, bare: bool = False) -> Tensor:
    """Launch the kernel as ``dispatch`` does, with other tiles; ``bare`` leaves the adapters out."""
    if bare:
        case = Case(**{**vars(case), "groups": case.groups._replace(no_adapter=torch.tensor([True]))})
    plan = make_plan(Problem(*case.x.shape, case.weight.shape[0]))
    with time_limit(60), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_pdl", lambda call: False)
        call = Call(*case.args())
        return dispatch._decode(call, replace(plan, decode=tiles or config(case.x.shape[0])))(call)


def stale(case: Case, padding: int) -> None:
    """Whatever an engine may have left past the counted rows."""
    values = torch.tensor([2**31 - 1, -5, 0, 1, -(2**31)], dtype=torch.int32)
    tokens = case.groups.sorted_tokens.clone()
    if padding:
        tokens[-padding:] = values[:padding]
    case.groups = case.groups._replace(sorted_tokens=tokens)


# --- against fp64 ----------------------------------------------------------------------------------------------------

CASES = pairwise(
    {
        "m": [1, 3, 16, 17, 32, 50, 64],
        "shape": [(256, [64]), (272, [70, 33]), (144, [100]), (400, [64, 16, 20]), (208, [33, 5, 64])],
        "r": [1, 7, 24, 64, 128],
        "slots": [1, 2, 5, 32],
        "popularity": ["uniform", "skewed", "distinct", "one", "none"],
        "layout": ["tensor", "channel", "block"],
        "kind": [("w8a8", "made"), ("w8a8", "given"), ("w8a8", "static"), ("w8a16", "made")],
        "dtype": [torch.bfloat16, torch.float16],
        "bias": [False, True],
        "b_bias": [False, True],
        "mixed_ranks": [False, True],
        "padding": [0, 4],
        "part": [128, 256, 1024],
        "split_k": [1, 2, 4, 8],
        "early": [0, 2, 100],
        "block_k": [64, 128, 256],
        "shrink_r": [32, 64],
        "together": [1, 2, 4],
    }
)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_pairwise(number: int) -> None:
    p = dict(CASES[number])
    m, (k, widths) = p.pop("m"), p.pop("shape")
    tiles = config(m, **{name: p.pop(name) for name in ("part", "split_k", "early", "block_k", "shrink_r", "together")})
    if p["layout"] == "block":
        tiles = config(m, **{**vars(tiles), "block_k": 128})
    compute, codes = p.pop("kind")
    padding = p.pop("padding") if m > 4 else p.pop("padding") * 0
    case = make_case(
        m, k, widths, p.pop("r"), p.pop("slots"), compute=compute, codes=codes, padding=padding,
        seed=zlib.crc32(b"%d" % number), **p,
    )  # fmt: skip
    stale(case, padding)
    got = decoded(case, tiles)
    assert got.shape == (m, sum(widths)) and got.dtype == case.x.dtype
    assert sqnr(got, oracle(case)) > (48 if case.x.dtype == torch.bfloat16 else 60), CASES[number]


@pytest.mark.parametrize("slots", [1, 3])
def test_a_layer_without_rank_scaling_and_biases(slots: int) -> None:
    case = make_case(9, 272, [70, 33], 24, slots, bias=False, mixed_ranks=False, poison=False)
    case.rank = case.scaling = None
    assert sqnr(decoded(case), oracle(case)) > 48


@pytest.mark.parametrize("slots", [1, 4])
def test_one_rank_vector_serves_every_slice(slots: int) -> None:
    case = make_case(9, 144, [48, 20], 8, slots, popularity="distinct", mixed_ranks=False, poison=False)
    rank, scaling = torch.arange(slots, dtype=torch.int32), 0.5 + torch.rand(slots)
    case.rank, case.scaling = rank.expand(2, slots).contiguous(), scaling.expand(2, slots).contiguous()
    want = decoded(case)
    assert sqnr(want, oracle(case)) > 48
    case.rank, case.scaling = rank, scaling
    assert torch.equal(decoded(case), want)


def test_metadata_of_a_larger_capacity() -> None:
    """Unused groups have a count of 0 and anything else in their other entries."""
    case = make_case(9, 144, [32], 4, 2)
    want = decoded(case)
    grown = [torch.cat([t, torch.tensor(extra, dtype=torch.int32)]) for t, extra in zip(
        case.groups[:4], ([77, -3], [1, 40, -9], [0, 0, 0], [5, -1, 2**31 - 1]), strict=True
    )]  # fmt: skip
    case.groups = case.groups._replace(**dict(zip(("sorted_tokens", "ids", "counts", "starts"), grown, strict=True)))
    assert torch.equal(decoded(case), want)


@pytest.mark.parametrize("m", [1, 2])
def test_counts_of_a_larger_batch(m: int) -> None:
    """Rows of the list that x does not have do not exist, and their group's B is not the others'."""
    case = make_case(3, 144, [32], 4, 3, popularity="distinct", mixed_ranks=False)
    short = Case(**{**vars(case), "x": case.x[:m].contiguous(), "row_slots": case.row_slots[:m]})
    assert sqnr(decoded(short), oracle(short)) > 40


def test_a_start_before_the_list_reaches_no_row() -> None:
    case = make_case(2, 144, [32], 4, 1, popularity="one", mixed_ranks=False, padding=1)
    want = decoded(case)
    starts = case.groups.starts.clone()
    starts[1] = -1  # the padding row has no place, counted as -1, which lies in [-1, 0)
    case.groups = case.groups._replace(starts=starts)
    torch.use_deterministic_algorithms(True)  # new memory is NaN, also the row of h that nobody writes
    try:
        assert torch.equal(decoded(case)[1], want[1])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("start", [-(2**30), -1, 5, 2**30])
def test_metadata_out_of_range_reads_and_writes_nothing_outside(start: int) -> None:
    case = make_case(7, 144, [48], 8, 2, popularity="one", poison=False, mixed_ranks=False)
    case.x.normal_()
    bare = decoded(case, bare=True)
    starts = case.groups.starts.clone()
    starts[-2] = start
    case.groups = case.groups._replace(starts=starts)
    got = decoded(case)
    for row in range(7):  # a position outside its group's range is the bare base, and the others are as they were
        if not start <= row < start + 7:
            assert torch.equal(got[row], bare[row])
        else:
            assert torch.isfinite(got[row]).all() and not torch.equal(got[row], bare[row])


def test_a_slot_outside_the_bank_is_bare_base() -> None:
    """A bank that is part of a larger buffer: what lies behind it is not an adapter."""
    case = make_case(12, 144, [48], 8, 4, popularity="distinct", poison=False, mixed_ranks=False)
    case.a, case.b = [t[:3] for t in case.a], [t[:3] for t in case.b]
    case.rank = case.scaling = None
    assert case.groups.ids.tolist() == [-1, 0, 1, 2, 3]
    case.row_slots = [-1 if s == 3 else s for s in case.row_slots]
    assert sqnr(decoded(case), oracle(case)) > 48


# --- bits ------------------------------------------------------------------------------------------------------------

KINDS = [("channel", "w8a8"), ("tensor", "w8a8"), ("block", "w8a8"), ("channel", "w8a16"), ("block", "w8a16")]


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize(("layout", "compute"), KINDS)
def test_rows_without_adapter_are_bitwise_the_bare_call(layout: str, compute: str, slots: int) -> None:
    case = make_case(20, 144, [64, 33], 8, slots, layout=layout, compute=compute, b_bias=True)
    case.b[0].fill_(1e4)
    got, base = decoded(case), decoded(case, bare=True)
    bare = [i for i, slot in enumerate(case.row_slots) if slot < 0]
    assert bare and torch.equal(got[bare], base[bare]) and not torch.equal(got, base)


def test_no_row_has_an_adapter() -> None:
    case = make_case(5, 144, [48, 20], 8, 3, popularity="none", b_bias=True)
    assert torch.equal(decoded(case), decoded(case, bare=True))


@pytest.mark.parametrize("early", [0, 100])
def test_infinity_in_one_adapter_stays_there(early: int) -> None:
    case = make_case(8, 144, [48], 8, 2, popularity="distinct", poison=False, mixed_ranks=False)
    clean = decoded(case, config(early=early))
    case.b[0][1] = float("inf")
    got = decoded(case, config(early=early))
    assert torch.equal(got[::2], clean[::2]) and not torch.isfinite(got[1::2]).all()


def test_infinity_in_the_only_adapter_stays_off_bare_rows() -> None:
    case = make_case(8, 144, [48], 8, 1, poison=False, mixed_ranks=False)
    case.row_slots = [0, -1] * 4
    case.groups = case.groups._replace(
        sorted_tokens=torch.tensor([1, 3, 5, 7, 0, 2, 4, 6], dtype=torch.int32),
        counts=torch.tensor([4, 4], dtype=torch.int32), starts=torch.tensor([0, 4, 8], dtype=torch.int32),
    )  # fmt: skip
    case.b[0].fill_(float("inf"))
    got = decoded(case)
    assert torch.equal(got[1::2], decoded(case, bare=True)[1::2]) and not torch.isfinite(got[::2]).any()


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("where", ["x", "scaling"])
def test_an_infinity_stays_one_past_a_smaller_rank(where: str, slots: int) -> None:
    case = make_case(6, 272, [70, 33], 24, slots, popularity="distinct", poison=False, mixed_ranks=False)
    case.rank = torch.full((2, slots), 5, dtype=torch.int32)
    for t in (*case.a, *case.b):  # of one sign, or infinities would cancel to NaN
        t.abs_()
    if where == "x":
        case.x_scale = torch.ones(1)
        case.x[1, 3] = float("inf")
    else:
        case.scaling.fill_(float("inf"))
    got, want = decoded(case), case.run()
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.isinf(), want.isinf()) and got.isinf().any()


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(("first", "unit"), [(5, 1), (20, 4), (16, 8)])
def test_what_lies_beyond_the_rank_changes_nothing(slots: int, first: int, unit: int) -> None:
    clean = make_case(11, 272, [70, 33], 40, slots, poison=False, rank_unit=unit)
    poisoned = make_case(11, 272, [70, 33], 40, slots, rank_unit=unit)
    poisoned.rank[0, 0] = clean.rank[0, 0] = first
    for t in (poisoned.a[0][0, first:], poisoned.b[0][0, :, first:]):
        t.fill_(float("nan"))
    got = decoded(poisoned)
    assert torch.equal(got, decoded(clean)) and sqnr(got, oracle(poisoned)) > 45


def test_a_row_does_not_depend_on_the_others() -> None:
    """cases.md 20: other tenants, other contents and NaN in other rows leave a row's bits alone."""
    case = make_case(16, 272, [70, 33], 24, 6, popularity="distinct")
    want = decoded(case)
    other = make_case(16, 272, [70, 33], 24, 6, popularity="distinct")
    keep = [i for i, slot in enumerate(case.row_slots) if slot == 2]
    other.x[[i for i in range(16) if i not in keep]] = float("nan")
    for slot in (0, 1, 3, 4, 5):
        other.a[0][slot], other.b[1][slot] = 3.0, float("inf")
    got = decoded(other)
    assert keep and torch.equal(got[keep], want[keep]) and not torch.equal(got, want)


@pytest.mark.parametrize(("layout", "codes"), [("channel", "made"), ("block", "made"), ("channel", "static")])
@pytest.mark.parametrize("part", [128, 1024])
def test_codes_made_give_the_bits_of_the_same_codes_handed_in(layout: str, codes: str, part: int) -> None:
    case = make_case(7, 400, [64, 20], 8, 3, layout=layout, codes=codes)
    case.x *= torch.tensor([1.0, 1e-6, 1e-3, 30.0, 1e3, 1.0, 1.0])[:, None]
    case.x[5] = 0
    made = decoded(case, config(part=part))
    if codes == "static":
        scale = case.x_scale
        case.x_codes, case.x_scale = reference.quantize_fp8_static(case.x, scale), scale.expand(7, 1).contiguous()
    else:
        name = "group" if layout == "block" else "token"
        case.x_codes, case.x_scale = getattr(reference, f"quantize_fp8_{name}")(case.x)
    assert torch.equal(decoded(case), made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_w8a16_has_every_codes_value_at_its_own_input(dtype: torch.dtype) -> None:
    """One input of each row is 1, the others 0: the output is a column of the weights, bit for bit."""
    case = make_case(32, 128, [256], 8, 1, layout="tensor", compute="w8a16", dtype=dtype, popularity="none", bias=False)
    codes = (torch.arange(256)[:, None] + torch.arange(128)[None, :]) % 256
    codes[codes % 128 == 127] = 0  # NaN
    case.weight, case.weight_scale = codes.to(torch.uint8).view(torch.float8_e4m3fn), torch.ones(1)
    for first in range(0, 128, 32):
        case.x = torch.eye(128)[first : first + 32].to(dtype).contiguous()
        got = decoded(case, bare=True)
        assert torch.equal(got, case.weight[:, first : first + 32].float().t().to(dtype)), first


@triton.jit
def parts_kernel(
    x_ptr, codes_ptr, scale_ptr, K, stride_sm, quantize_part: tl.constexpr, MODE: tl.constexpr, TERMS: tl.constexpr,
    CHUNKS: tl.constexpr, BQ: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0), tl.program_id(1)
    quantize_part(
        x_ptr + row * K, codes_ptr + row * K, scale_ptr + row * stride_sm, part, K, tl.num_programs(0) * K,
        MODE, TERMS, CHUNKS, BQ, PART,
    )  # fmt: skip


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("mode", ["token", "group", "static"])
@pytest.mark.parametrize("part", [128, 512])
def test_a_row_in_parts_has_the_quantizers_codes_and_scales(mode: str, part: int, bad: float | None) -> None:
    from torch_epilora.ops.triton import quantize as q

    x = (torch.randn(7, 400) * torch.tensor([0.0, 1e-9, 1e-7, 1e-3, 1.0, 50.0, 1e4])[:, None]).bfloat16()
    if bad is not None:
        x[4, 300] = bad
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    scale = torch.tensor([0.37]) if mode == "static" else torch.full((7, 4 if mode == "group" else 1), -1.0)
    number = {"token": q.TOKEN, "group": q.GROUP, "static": q.STATIC}[mode]
    parts_kernel[(7, triton.cdiv(400, part))](
        x, codes, scale, 400, 0 if mode == "static" else scale.stride(0), q.quantize_part, number, 1, 4, 128, part
    )
    if mode == "static":
        want, want_scale = reference.quantize_fp8_static(x, scale), scale
    else:
        want, want_scale = getattr(reference, f"quantize_fp8_{mode}")(x)
    torch.testing.assert_close(scale, want_scale, rtol=0, atol=0, equal_nan=True)
    nan = want.float().isnan()
    assert torch.equal(codes.float().isnan(), nan), "what is not finite is gone"
    assert torch.equal(codes.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])


@pytest.mark.parametrize(
    ("dtype", "terms", "size"),
    [(torch.bfloat16, 2, 0), (torch.bfloat16, 2, -100), (torch.bfloat16, 2, -123), (torch.float16, 3, 0)],
    ids=str,
)
def test_the_terms_of_w8a16_add_up_to_x(dtype: torch.dtype, terms: int, size: int) -> None:
    """Exactly, down to 2^-13 of a row's largest; below that to 2^-22 of it. What is not finite stays so."""
    from torch_epilora.ops.triton import quantize as q

    spread = torch.exp2(torch.randint(-40, 1, (8, 400)).float())
    x = (torch.randn(8, 400) * spread * torch.tensor([0.0, 1e-4, 1e-3, 1.0, 50.0, 1e3, 2e4, 1.0])[:, None]).to(dtype)
    x *= 2.0**size
    x[3, :3], x[7, 5], x[7, 6] = torch.tensor([448.0, -511.0, 0.0]).to(dtype), float("inf"), float("nan")
    codes, scale = torch.empty((terms * 8, 400), dtype=torch.float8_e4m3fn), torch.full((8, 1), -1.0)
    parts_kernel[(8, 4)](x, codes, scale, 400, 1, q.quantize_part, q.TERMS, terms, 4, 128, 128)
    share = torch.exp2(-5.0 * torch.arange(terms)).double()[:, None, None]
    got = (codes.double().view(terms, 8, 400) * share).sum(0) * scale.double()
    assert not got[7, 5:7].isfinite().any() and got[7, :5].isfinite().all()
    got, x = got[:7], x[:7].double()
    largest = x.abs().amax(1, keepdim=True)
    exact = x.abs() >= largest * 2.0**-13
    assert torch.equal(got[exact], x[exact]) and exact.sum() > 200
    assert ((got - x).abs() <= largest * 2.0**-22).all()


# --- counters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("split", [1, 4])
def test_calls_of_every_size_share_the_counters(counters: dict, split: int) -> None:
    """Fewer and more tiles than the call before, an adapter or none: whatever ran, the next call finds zeros."""
    for m, widths, r, slots in ((32, [20, 16], 24, 8), (1, [64], 8, 1), (17, [33], 40, 3), (3, [64, 16], 16, 2)):
        case = make_case(m, 144, widths, r, slots, popularity="distinct")
        for _ in range(2):
            assert sqnr(decoded(case, config(m, split_k=split)), oracle(case)) > 48
        decoded(case, config(m), bare=True)
    assert counters["taken"] == 12


def test_a_call_that_waits_for_nothing_takes_no_counters(counters: dict) -> None:
    case = make_case(5, 144, [48], 8, 2, codes="given")
    decoded(case, bare=True)
    assert counters["taken"] == 0
