"""The choices that are timed again are those of the tables, beside all paths, and a miss is a miss."""

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import choices
from torch_epilora.ops.candidates import routes
from torch_epilora.ops.plan import Problem
from torch_epilora.ops.tables import Measured, key_of

P = Problem(64, 6144, 4096, 64, 3, 9)
OTHER = Problem(2048, 100, 4096, 16, 3, 2)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict:
    """A table of two sizes; times by plan are ``told["us"]``, ``told["seen"]`` has what was compiled and timed."""
    plans = {key_of(p): Measured(routes(p)[-1], 1.0, 2.0, p.m == 64) for p in (P, OTHER)}
    told: dict = {"us": lambda plan: 10.0, "seen": [], "table": plans}

    class Trial:
        def __init__(self, problem: Problem, widths: list[int], device: torch.device) -> None:
            self.size = problem.m, tuple(widths)

        def right(self, plans: list) -> None:
            told["seen"].append(("compiled", *self.size, len(plans)))

        def times(self, plans: list, *, graph: bool) -> dict:
            told["seen"].append(("timed", *self.size, len(plans), graph))
            return {plan: told["us"](plan) for plan in plans}

    class Pool:
        def __init__(self, jobs: int) -> None:
            assert jobs == 2

        def __enter__(self) -> "Pool":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def map(self, work, items, chunksize: int) -> None:
            assert chunksize == 1
            for item in items:
                work(item)

    monkeypatch.setattr(choices, "Trial", Trial)
    monkeypatch.setattr(choices, "need_gpu", lambda: None)
    monkeypatch.setattr(choices, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr(choices.choice, "table", lambda gpu: told["table"] if gpu == "NVIDIA H200" else {})
    monkeypatch.setattr(choices.multiprocessing, "get_context", lambda name: SimpleNamespace(Pool=Pool))
    for name, value in {"get_device_name": "NVIDIA H200", "get_device_capability": (9, 0), "current_device": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return told


def test_each_choice_is_timed_beside_all_paths(hopper: dict, tmp_path, capsys: pytest.CaptureFixture) -> None:
    fast = routes(P)[0]
    hopper["us"] = lambda plan: 9.0 if plan == fast else 10.0
    choices.main(["--out", str(tmp_path / "c.json")])
    sizes = [(64, (4096, 1024, 1024), len(routes(P))), (2048, (34, 33, 33), len(routes(OTHER)))]
    assert hopper["seen"] == [
        *(("compiled", *size) for size in sizes), ("timed", *sizes[0], True), ("timed", *sizes[1], False)
    ]  # fmt: skip
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [row["over_best"] for row in rows] == [1.1111, 1.0]
    assert rows[0]["us"] == 10.0 and rows[0]["paths"][f"{fast.path}/{fast.base}"] == 9.0
    assert len(rows[0]["paths"]) == len(routes(P)) - 1
    assert "1 of 2 choices are within 3 percent of the fastest" in capsys.readouterr().out


@pytest.mark.parametrize(("best", "good"), [(9.71, 2), (9.70, 1)])
def test_three_percent_is_the_limit(hopper: dict, capsys: pytest.CaptureFixture, best: float, good: int) -> None:
    hopper["us"] = lambda plan: best if plan == routes(P)[0] else 10.0
    choices.main([])
    assert f"{good} of 2 choices" in capsys.readouterr().out


def test_a_chosen_path_with_other_tiles_is_one_more(hopper: dict) -> None:
    [(name, others), *_] = [pair for pair in choices_of_tiles() if pair[1]]
    hopper["table"] = {key_of(P): Measured(others[0], 1.0, 2.0, True)} | {key_of(OTHER): hopper["table"][key_of(OTHER)]}
    choices.main([])
    assert hopper["seen"][0] == ("compiled", 64, (4096, 1024, 1024), len(routes(P)) + 1), name


def choices_of_tiles() -> list:
    from torch_epilora.ops.candidates import neighbours

    return list(neighbours(routes(P)[0], P))


def test_bare_sizes_have_one_width() -> None:
    assert choices.widths_of(key_of(Problem(64, 6144, 4096))) == [6144]


def test_without_a_table_it_says_so(
    hopper: dict, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100")
    with pytest.raises(SystemExit) as left:
        choices.main([])
    assert left.value.code == 1 and "no table has a plan for this GPU" in capsys.readouterr().err
