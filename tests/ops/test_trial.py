"""What is timed is right first, and the fastest is kept: candidates run in Triton's interpreter, times are made up."""

import pytest
import torch

from tests.cases import sqnr
from tests.ops.interpreter import repaired  # noqa: F401
from torch_epilora.ops import dispatch
from torch_epilora.ops import trial as trial_module
from torch_epilora.ops.candidates import routes
from torch_epilora.ops.checks import Call, check_call
from torch_epilora.ops.compiling import compiling_only
from torch_epilora.ops.plan import Plan, Problem, make_plan
from torch_epilora.ops.tables import Measured
from torch_epilora.ops.trial import Trial
from torch_epilora.ops.triton import pdl

pytestmark = [
    pytest.mark.usefixtures("repaired"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU suite runs the same code for real"),
]

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_gpu", lambda device: "none")
    monkeypatch.setattr(pdl, "pdl_works", lambda device: False)
    monkeypatch.setattr(trial_module, "ROTATED_BYTES", 0)


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Microseconds of plans by a function of them, in ``times["of"]``; ``times["seen"]`` has what was timed how."""
    told: dict = {"of": lambda plan: 10.0, "seen": []}

    def measured(self: Trial, plans: list[Plan], *, graph: bool) -> dict[Plan, float]:
        told["seen"].append((len(plans), graph))
        return {plan: told["of"](plan) for plan in plans}

    monkeypatch.setattr(Trial, "times", measured)
    return told


@pytest.mark.parametrize(
    "problem",
    [
        Problem(8, 48, 32, 8, 2, 3),
        Problem(128, 144, 256, 16, 2, 3),
        Problem(16, 48, 32, compute="w8a16"),
        Problem(8, 48, 32, 8, 2, 3, codes=True),
        Problem(8, 256, 128, layout="block", codes=True),
    ],
)
def test_all_paths_compute_the_same(problem: Problem, caplog: pytest.LogCaptureFixture) -> None:
    widths = [problem.n - 16, 16] if problem.slices == 2 else [problem.n]
    plans = routes(problem)
    assert len({(plan.path, plan.base) for plan in plans}) == len(plans) > 1
    assert len(Trial(problem, widths, CPU).right(plans)) == len(plans) and not caplog.records


def test_what_is_wrong_or_raises_is_left_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    problem = Problem(8, 48, 32, 8, 2, 3)
    plans, prepare = routes(problem)[:3], dispatch.prepare

    def broken(call: Call, plan: Plan) -> dispatch.Run:
        if plan == plans[1]:
            return lambda call: prepare(call, plans[0])(call) * 1.1
        if plan == plans[2]:
            raise RuntimeError("out of resources")
        return prepare(call, plan)

    monkeypatch.setattr(dispatch, "prepare", broken)
    trial = Trial(problem, [32, 16], CPU)
    assert list(trial.right(plans)) == [plans[0]]
    assert "its output is another" in caplog.text and "out of resources" in caplog.text
    with pytest.raises(RuntimeError, match="the rules' plan does not run: out of resources"):
        trial.right(plans[2:])


def test_what_is_prepared_by_a_thread_that_only_compiles_multiplies_later() -> None:
    problem = Problem(16, 48, 32, 8, 2, 3)
    call = Trial(problem, [32, 16], CPU).calls[0]
    vendor = next(plan for plan in routes(problem) if plan.base == "vendor")
    other = next(plan for plan in routes(problem) if plan.base == "own")
    with compiling_only():
        run = dispatch.prepare(call, vendor)
        assert run(call).shape == (16, 48)
    check_call(call)
    assert sqnr(run(call), dispatch.prepare(call, other)(call)) > 40


def test_codes_are_those_of_the_operands() -> None:
    for layout, by in (("channel", "token"), ("block", "group")):
        call = Trial(Problem(3, 256, 128, layout=layout, codes=True), [256], CPU).calls[0]
        codes, scale = getattr(torch.ops.epilora, f"quantize_fp8_{by}")(call.x)
        assert torch.equal(call.x_codes.float(), codes.float()) and torch.equal(call.x_scale, scale)
        assert dispatch._problem(call).codes and not dispatch._problem(call._replace(x_codes=None)).codes


def test_every_adapter_has_rows_and_every_copy_is_called() -> None:
    trial = Trial(Problem(8, 48, 32, 8, 2, 4), [32, 16], CPU)
    counts = trial.calls[0].counts.tolist()
    assert sum(counts) == 8 and sorted(counts)[-3:] == [2, 3, 3]
    assert len({call.weight.data_ptr() for call in trial.calls}) == len(trial.calls) == 2
    assert not trial.calls[0].no_adapter.item() and not Trial(Problem(8, 48, 32), [48], CPU).calls[0].has_adapters


def test_small_weights_have_few_copies_and_one_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_module, "ROTATED_BYTES", 200 << 20)
    trial = Trial(Problem(8, 2, 64), [2], CPU)
    assert len(trial.calls) == trial_module.MOST_COPIES and len({call.x.data_ptr() for call in trial.calls}) == 1


def test_operands_do_not_depend_on_the_default_dtype() -> None:
    problem = Problem(8, 48, 32, 8, 2, 3)
    torch.set_default_dtype(torch.bfloat16)
    try:
        call = Trial(problem, [32, 16], CPU).calls[0]
    finally:
        torch.set_default_dtype(torch.float32)
    check_call(call)
    # as a patched model hands them in, or another variant of the kernels would be timed
    assert call.rank is not None and call.rank.tolist() == [[8, 8]] * 2
    assert call.scaling is not None and call.scaling.tolist() == [[1.0, 1.0]] * 2


def test_paths_are_timed_as_they_run_while_nothing_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, held = Problem(8, 48, 32, 8, 2, 3), []
    monkeypatch.setattr(trial_module, "EAGER_CALLS", 3)
    monkeypatch.setattr(trial_module, "EAGER_ROUNDS", 1)

    class Lock:
        def __enter__(self) -> None:
            held.append("taken")

        def __exit__(self, *_: object) -> None:
            held.append("freed")

    trial = Trial(problem, [32, 16], CPU, Lock())
    plans = routes(problem)[:2]
    monkeypatch.setattr(trial_module, "median_times", lambda steps, copies, device: {
        name: held.append((copies, step(1).shape)) or float(name) + 1 for name, step in steps.items()
    })  # fmt: skip
    assert trial.times(plans, graph=True) == {plans[0]: 1.0, plans[1]: 2.0}
    assert held == ["taken", (2, (8, 48)), (2, (8, 48)), "freed"]
    held.clear()
    clock = iter(range(10_000))
    monkeypatch.setattr(trial_module.time, "perf_counter", lambda: next(clock) * 1e-5)
    assert trial.times(plans, graph=False) == pytest.approx({plans[0]: 10 / 3, plans[1]: 10 / 3})
    assert held == ["taken", "freed"]


P = Problem(64, 6144, 4096, 64, 3, 9)


@pytest.fixture
def big(monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A trial of a problem too large to run here."""
    monkeypatch.setattr(Trial, "__init__", lambda self: setattr(self, "problem", P))
    return Trial()  # type: ignore[call-arg]


def test_the_rules_plan_stays_unless_another_is_clearly_faster(big: Trial, times: dict) -> None:
    rules = make_plan(P)
    times["of"] = lambda plan: 10.0 if plan == rules else 9.96
    assert big.fastest(graph=True) == Measured(rules, 10.0, 10.0, True)
    times["of"] = lambda plan: 10.0 if plan == rules else 8.0 if plan.base == "vendor" else 9.0
    found = big.fastest(graph=False)
    assert (found.plan.path, found.plan.base) == ("hybrid", "vendor")
    assert (found.us, found.rules_us, found.graph) == (8.0, 10.0, False)
    assert times["seen"] == [(len(routes(P)), True), (len(routes(P)), False)]


def test_a_search_climbs_the_two_fastest_paths_field_by_field(big: Trial, times: dict) -> None:
    def of(plan: Plan) -> float:
        if plan.path == "decode":
            return 10.0 - (plan.decode.num_stages == 4)
        if plan.base == "decode":
            return 11.0 - 2 * (plan.expand.run == 2) - 2 * (plan.shrink.split_k == 1) * (plan.expand.run == 2)
        return 1.0 if plan.expand.run == 4 else 20.0

    times["of"] = of
    plans = big.search(graph=True)
    assert plans[:-2] == routes(P) and plans[0] == make_plan(P)
    found = big.fastest(plans, graph=True)
    assert (found.plan.path, found.plan.base) == ("hybrid", "decode")
    assert (found.plan.expand.run, found.plan.shrink.split_k) == (2, 1)
    assert (found.us, found.rules_us) == (7.0, 10.0)
