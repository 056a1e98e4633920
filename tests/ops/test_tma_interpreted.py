"""K2 for more tokens than a decode batch, in Triton's interpreter, against fp64 and the contract's bitwise promises."""

import pytest
import torch

from tests.cases import make_case, oracle, sqnr
from tests.ops.interpreter import repaired  # noqa: F401
from torch_epilora.ops.plan import Shrink, Tma

pytestmark = [
    pytest.mark.usefixtures("repaired"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite runs the same kernels for real"),
]

TILES = Tma(16, 32, 64, 16, 4, 1, 1)


def run(case, *, bare: bool = False):
    """K2 after the quantizer and K1."""
    from torch_epilora.ops.triton import quantize as q
    from torch_epilora.ops.triton.shrink import shrink
    from torch_epilora.ops.triton.tma import prepare_tma

    codes, scale = case.x_codes, case.x_scale
    if codes is None:
        mode = q.TOKEN if scale is None else q.STATIC
        codes, scale = q.quantize(case.x, mode, scale)
    adapters = ([], [], None, None, None)
    h = None
    if not bare:
        h = shrink(case.x, case.a, case.rank, case.scaling, case.groups, Shrink(16, 16, 64, 2, 4, 1))
        adapters = (case.b, case.b_bias, case.rank, case.scaling, case.groups)
    stride_sm = scale.stride(0) if scale.shape[0] == case.x.shape[0] else 0
    k2 = prepare_tma(case.x, codes.stride(0), stride_sm, case.weight, case.bias, case.layout, TILES, *adapters)
    return k2(codes, scale, case.weight, case.weight_scale, case.bias, h, *adapters)


@pytest.mark.parametrize("layout", ["tensor", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layouts(layout: str, dtype: torch.dtype) -> None:
    case = make_case(40, 144, [64, 48, 16], 9, 3, layout=layout, dtype=dtype, b_bias=True)
    assert sqnr(run(case), oracle(case)) > 48


@pytest.mark.parametrize(
    ("m", "k", "widths", "r"), [(1, 16, [32], 7), (33, 272, [100, 60, 40], 40), (17, 128, [7], 17)]
)
def test_odd_shapes(m: int, k: int, widths: list[int], r: int) -> None:
    case = make_case(m, k, widths, r, 2)
    assert sqnr(run(case), oracle(case)) > 48


@pytest.mark.parametrize("codes", ["given", "static"])
def test_the_codes_handed_in_are_used(codes: str) -> None:
    case = make_case(20, 128, [48], 8, 2, codes=codes)
    assert sqnr(run(case), oracle(case)) > 48


def test_padding_rows_are_bare_base() -> None:
    case = make_case(30, 128, [48], 8, 3, padding=11)
    assert sqnr(run(case), oracle(case)) > 48


def test_a_bias_of_b_is_added_once_however_many_ranks_there_are() -> None:
    case = make_case(20, 128, [48], 40, 2, b_bias=True)
    assert sqnr(run(case), oracle(case)) > 48


def test_more_row_tiles_than_walk_the_columns_together() -> None:
    case = make_case(150, 64, [40, 24], 8, 3)
    assert sqnr(run(case), oracle(case)) > 48


def test_a_tile_of_many_adapters() -> None:
    case = make_case(32, 128, [64], 20, 16, popularity="distinct")
    assert sqnr(run(case), oracle(case)) > 48


@pytest.mark.parametrize("unit", [1, 4, 8])
def test_what_lies_beyond_a_rank_changes_nothing(unit: int) -> None:
    poisoned = make_case(40, 128, [48, 32], 40, 5, rank_unit=unit)
    clean = make_case(40, 128, [48, 32], 40, 5, rank_unit=unit, poison=False)
    got = run(poisoned)
    assert torch.equal(got, run(clean)) and sqnr(got, oracle(poisoned)) > 48


def test_eight_slices() -> None:
    case = make_case(18, 128, [16, 32, 16, 48, 16, 16, 5, 11], 8, 2)
    assert sqnr(run(case), oracle(case)) > 48


def test_infinity_in_one_adapter_stays_there() -> None:
    case = make_case(24, 128, [48], 8, 2, popularity="distinct", poison=False, mixed_ranks=False)
    clean = run(case)
    case.b[0][1] = float("inf")
    got = run(case)
    assert torch.equal(got[::2], clean[::2])
    assert not torch.isfinite(got[1::2]).all()


def test_rows_without_adapter_are_bitwise_the_base() -> None:
    case = make_case(40, 256, [64, 32], 8, 2)
    case.b[0].fill_(1e4)
    bare = [i for i, slot in enumerate(case.row_slots) if slot < 0]
    assert bare and torch.equal(run(case)[bare], run(case, bare=True)[bare])


def test_metadata_out_of_range_reads_and_writes_nothing_outside() -> None:
    case = make_case(20, 128, [48], 8, 2, popularity="one", poison=False, mixed_ranks=False)
    starts = case.groups.starts.clone()
    starts[-2] = -(2**30)
    case.groups = case.groups._replace(starts=starts)
    assert torch.equal(run(case), run(case, bare=True))
