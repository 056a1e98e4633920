"""tune: which sizes are timed, when it stops, and that only a whole run of it changes plans. The GPU is made up."""

from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn

import torch_epilora as te
from torch_epilora.nn import tuning as tune_module
from torch_epilora.ops import choice
from torch_epilora.ops.candidates import routes
from torch_epilora.ops.plan import Plan, Problem
from torch_epilora.ops.tables import Key, Measured, key_of, problem_of

GPU = "NVIDIA H000"


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.o_proj = (nn.Linear(64, n, bias=False) for n in (64, 32, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.q_proj(x))


def model(slots: int = 3, layers: int = 2) -> nn.Module:
    made = nn.Sequential(*(Attention() for _ in range(layers))).bfloat16()
    return te.patch(made, max_adapters=slots, max_rank=8)


class Trial:
    """Finds the last path of every problem in half the time of the first, and notes what it was asked."""

    asked: ClassVar[list[tuple[Key, tuple[int, ...], bool]]] = []

    def __init__(self, problem: Problem, widths: tuple[int, ...], device: torch.device) -> None:
        self.problem, self.widths = problem, widths

    def fastest(self, *, graph: bool) -> Measured:
        Trial.asked.append((key_of(self.problem), self.widths, graph))
        return Measured(routes(self.problem)[-1], 5.0, 10.0, graph)


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPILORA_CACHE", str(tmp_path))
    monkeypatch.delenv("EPILORA_TUNE", raising=False)
    monkeypatch.setattr(tune_module, "Trial", Trial)
    monkeypatch.setattr(tune_module, "_device", lambda model: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
    monkeypatch.setattr(Trial, "asked", [])
    choice._table.cache_clear()
    choice._choose.cache_clear()
    yield
    choice._table.cache_clear()
    choice._choose.cache_clear()


def path(plan: Plan) -> tuple[str, str]:
    return plan.path, plan.base


def test_each_size_is_timed_once_with_all_slots_and_bare() -> None:
    assert te.tune(model(), tokens=[1, 60, 64, 1000]) == 2 * 2 * 3
    found = {(key.tokens, key.adapters, key.n, widths): graph for key, widths, graph in Trial.asked}
    assert len(found) == len(Trial.asked) == 12
    assert {size: graph for size, graph in found.items() if size[0] != 64} == {
        (1, 1, 96, (64, 32)): True, (1, 0, 96, (96,)): True, (1, 1, 64, (64,)): True, (1, 0, 64, (64,)): True,
        (1024, 4, 96, (64, 32)): False, (1024, 0, 96, (96,)): False, (1024, 4, 64, (64,)): False,
        (1024, 0, 64, (64,)): False,
    }  # fmt: skip


def test_calls_follow_what_was_timed_and_nothing_is_timed_twice() -> None:
    one, before = model(), choice.generation()
    problem = Problem(40, 64, 64, 8, 1, 4)
    rules = choice.choose(problem, GPU)
    te.tune(one, tokens=[64])
    assert choice.generation() == before + 1
    want = routes(problem_of(key_of(problem), (9, 0)))[-1]
    assert path(choice.choose(problem, GPU)) == path(want) != path(rules)
    assert len(Trial.asked) == 4
    assert te.tune(one, tokens=[64]) == 0 and len(Trial.asked) == 4
    assert all(graph for *_, graph in Trial.asked)
    te.tune(one, tokens=[512, 513])
    assert [graph for *_, graph in Trial.asked[4:]] == [True] * 4 + [False] * 4
    # as the other kind of run it is another time
    assert te.tune(one, tokens=[64], graph_tokens=32) == 4 and not Trial.asked[-1][-1]
    assert te.tune(model(slots=9), tokens=[64]) == 4  # of these two bare, which ran outside a graph


def test_it_stops_when_the_time_is_up_and_goes_on_the_next_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # the third would take four seconds, as the second did, and three are left
    clock = iter([0.0, 1.0, 3.0, 3.0, 7.0, 7.0, 20.0, 21.0, 22.0, 22.0, 23.0])
    monkeypatch.setattr(tune_module.time, "monotonic", lambda: next(clock))
    seen: list[tuple[int, int]] = []
    assert te.tune(model(), tokens=[64], progress=lambda done, todo: seen.append((done, todo))) == 2
    assert "2 of 4 sizes were timed in 10 s" in caplog.text and caplog.records[0].levelname == "WARNING"
    assert seen == [(0, 4), (1, 4), (2, 4), (2, 4)]
    seen.clear()
    assert te.tune(model(), tokens=[64], progress=lambda done, todo: seen.append((done, todo))) == 2
    assert seen == [(0, 2), (1, 2), (2, 2)]


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError, Exception])
def test_a_size_that_does_not_run_is_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type
) -> None:
    def fastest(self: Trial, *, graph: bool) -> Measured:
        if self.problem.n == 96:
            raise error("no memory")
        return Measured(routes(self.problem)[-1], 1.0, 2.0, graph)

    monkeypatch.setattr(Trial, "fastest", fastest)
    assert te.tune(model(), tokens=[64]) == 2
    assert {key.n for key in choice.table(GPU)} == {64} and caplog.text.count("keeps the rules' plan: no memory") == 2


def test_what_was_timed_before_an_interrupt_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def fastest(self: Trial, *, graph: bool) -> Measured:
        Trial.asked.append((key_of(self.problem), self.widths, graph))
        if len(Trial.asked) > 2:
            raise KeyboardInterrupt
        return Measured(routes(self.problem)[-1], 1.0, 2.0, graph)

    monkeypatch.setattr(Trial, "fastest", fastest)
    with pytest.raises(KeyboardInterrupt):
        te.tune(model(), tokens=[64])
    assert len(choice.table(GPU)) == 2


def test_linears_that_run_apart_are_timed_apart() -> None:
    one = model(layers=1)
    q = one[0].q_proj
    q.group.fused = False
    te.tune(one, tokens=[64])
    found = {(key.n, key.slices, key.adapters) for key, *_ in Trial.asked}
    assert found == {(64, 1, 4), (64, 1, 0), (32, 1, 4), (32, 1, 0)}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tokens": [0]}, r"tokens: expected positive integers, got \[0\]"),
        ({"tokens": []}, r"tokens: expected positive integers, got \[\]"),
        ({"tokens": [1.5]}, r"tokens: expected integers, got \[1.5\]"),
        ({"tokens": ["64"]}, r"tokens: expected integers, got \['64'\]"),
        ({"tokens": 64}, "tokens: expected integers, got 64"),
        ({"graph_tokens": -1}, "graph_tokens: expected at least 0, got -1"),
        ({"graph_tokens": None}, "graph_tokens: expected a number, got NoneType"),
        ({"seconds": "5"}, "seconds: expected a number, got str"),
        ({"seconds": float("nan")}, "seconds: expected at least 0, got nan"),
        ({"progress": 3}, "progress: expected a function of two counts, got int"),
    ],
)
def test_bad_arguments_are_refused(given: dict, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        te.tune(model(), **given)
    assert not Trial.asked


def test_it_needs_a_patched_model_on_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(ValueError, match="found no patched layer"):
        te.tune(Attention())
    with pytest.raises(ValueError, match="expected all projections on one GPU, got them on cpu"):
        te.tune(model())


def test_measured_plans_that_are_switched_off_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPILORA_TUNE", "off")
    with pytest.raises(ValueError, match="EPILORA_TUNE=off: measured plans are not used"):
        te.tune(model())


def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ValueError, match="expected one on a GPU that runs the kernels, got NVIDIA H000: compute cap"):
        te.tune(model())


@pytest.mark.parametrize(("mode", "timed"), [("", False), ("cached", False), ("off", False), ("full", True)])
def test_loading_a_model_tunes_it_where_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch, mode: str, timed: bool
) -> None:
    monkeypatch.setenv("EPILORA_TUNE", mode)
    called: list[nn.Module] = []
    monkeypatch.setattr(tune_module, "tune", lambda model, progress: called.append(model))
    on_cpu = model()
    assert not called
    monkeypatch.setattr(nn.Module, "parameters", lambda self: iter([torch.nn.Parameter(torch.empty(1, device="meta"))]))
    tune_module.tune_at_load(on_cpu)
    assert not called
    fakes = [SimpleNamespace(device=torch.device("cuda", i)) for i in (0, 1)]
    monkeypatch.setattr(nn.Module, "parameters", lambda self: iter(fakes))
    tune_module.tune_at_load(on_cpu)
    assert not called
    monkeypatch.setattr(nn.Module, "parameters", lambda self: iter(fakes[:1]))
    tune_module.tune_at_load(on_cpu)
    assert called == [on_cpu] * timed


@pytest.mark.parametrize("error", [OSError, RuntimeError, ValueError])
def test_loading_a_model_goes_on_where_tuning_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: type
) -> None:
    def fails(model: nn.Module, progress: object) -> None:
        raise error("no place")

    monkeypatch.setenv("EPILORA_TUNE", "full")
    monkeypatch.setattr(tune_module, "tune", fails)
    on_cpu = model()
    monkeypatch.setattr(nn.Module, "parameters", lambda self: iter([SimpleNamespace(device=torch.device("cuda", 0))]))
    tune_module.tune_at_load(on_cpu)
    assert "EPILORA_TUNE=full: plans were not measured: no place" in caplog.text


def test_an_unknown_mode_is_refused_before_a_model_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPILORA_TUNE", "always")
    plain = Attention()
    with pytest.raises(ValueError, match="EPILORA_TUNE: expected one of off, cached, full, got 'always'"):
        te.patch(plain)
    assert type(plain.q_proj) is nn.Linear
