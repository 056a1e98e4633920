"""The plans of the table that ships for this GPU compute what the rules' plans do, with the same bits each time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.cases import make_case, oracle, sqnr
from tests.gpu.test_decode import bits, capture
from torch_epilora.ops import choice, dispatch, tables
from torch_epilora.ops.checks import Call
from torch_epilora.ops.tables import Key, Measured, problem_of
from torch_epilora.ops.triton import pdl

GPU = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
SHIPPED = tables.read(choice.shipped(GPU), GPU) if GPU else {}
SMALL = [pair for pair in SHIPPED.items() if pair[0].tokens <= 256]

pytestmark = pytest.mark.skipif(not SHIPPED, reason="no table ships for this GPU")


def name(value: object) -> str:
    return f"{value.tokens}-{value.adapters}-{value.k}-{value.n}" if isinstance(value, Key) else ""


def launch(call: Call, measured: Measured, *, dependent: bool) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        if not dependent:
            patch.setattr(pdl, "pdl_works", lambda device: False)
        return dispatch.prepare(call, measured.plan)(call)


@pytest.mark.parametrize(("key", "measured"), SMALL, ids=name)
def test_a_shipped_plan_is_right_and_its_bits_do_not_change(key: Key, measured: Measured) -> None:
    p = problem_of(key, torch.cuda.get_device_capability())
    slots, slices = max(key.adapters, 1), key.slices
    widths = [key.n - (slices - 1) * 1024, *[1024] * (slices - 1)]
    case = make_case(p.m - 3, key.k, widths, max(key.rank, 1), slots, poison=False, device="cuda")
    if not key.rank:
        case = replace(case, a=[], b=[], rank=None, scaling=None, row_slots=[-1] * (p.m - 3))
    call = Call(*case.args())
    want = launch(call, measured, dependent=False)
    assert sqnr(want, oracle(case)) > 40
    for _ in range(20):
        assert torch.equal(bits(launch(call, measured, dependent=True)), bits(want))
    run = dispatch.prepare(call, measured.plan)
    graph, y = capture(lambda: run(call))
    for _ in range(20):
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(bits(y), bits(want))


def test_calls_follow_the_shipped_table() -> None:
    key, measured = next((k, m) for k, m in SHIPPED.items() if k.rank and m.us < m.rules_us)
    problem = problem_of(key, torch.cuda.get_device_capability())
    plan = choice.choose(problem, GPU)
    assert replace(plan, reason="") == replace(measured.plan, reason="") and "when measured on" in plan.reason
