"""`epilora bench`: what it refuses, that its variants compute the same thing, and that a wrong one is not timed."""

import json

import pytest
import torch

pytest.importorskip("typer")
from rich.console import Console
from typer.testing import CliRunner

from torch_epilora.cli import bench, bench_cases, machine
from torch_epilora.cli.bench_cases import Case, Operands
from torch_epilora.cli.commands import app
from torch_epilora.cli.sqnr import sqnr_db
from torch_epilora.ops import timing

CASE = Case("q+k", 160, (96, 48), tokens=7, adapters=3, rank=5)
CPU = torch.device("cpu")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "torch finds no device")


def test_without_quick_it_says_what_is_there():
    result = CliRunner().invoke(app, ["bench"])
    assert result.exit_code == 2
    assert "epilora bench --quick" in result.output


def test_without_a_gpu_it_says_why_and_what_to_do(no_gpu):
    result = CliRunner().invoke(app, ["bench", "--quick"])
    assert result.exit_code == 1
    assert result.output.strip() == (
        "epilora: nothing to measure: torch finds no device. "
        "`epilora bench --quick --cpu` times the reference on the CPU."
    )


def test_json_in_a_folder_that_is_not_there_is_refused_before_measuring(tmp_path):
    result = CliRunner().invoke(app, ["bench", "--quick", "--cpu", "--json", str(tmp_path / "no" / "out.json")])
    assert result.exit_code == 1
    assert "expected a file in an existing folder" in result.output


def test_json_that_is_a_folder_is_refused(tmp_path):
    result = CliRunner().invoke(app, ["bench", "--quick", "--cpu", "--json", str(tmp_path)])
    assert result.exit_code == 2


def test_cpu_table_is_marked_and_its_figures_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "CPU_CASES", (CASE,))
    monkeypatch.setattr(timing, "ROUNDS", 2)
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["bench", "--quick", "--cpu", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert "CPU, plain-torch reference: no figure for a GPU" in " ".join(result.output.split())
    assert "gain" not in result.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert found["versions"]["torch"] == machine.versions()["torch"]
    (row,) = found["cases"]
    assert (row["k"], row["slices"], row["tokens"], row["adapters"], row["rank"]) == (160, [96, 48], 7, 3, 5)
    assert set(row["us"]) == {"torch", "reference"}
    assert all(time > 0 for time in row["us"].values())
    assert row["failed"] == {}


def test_variants_agree_with_fp32_on_every_copy():
    operands = Operands(CASE, CPU, copies=2)
    reference = bench_cases.oracle(operands)
    for name, step in bench_cases.variants(operands).items():
        assert sqnr_db(reference, step(0)) > bench.LEAST_SQNR, name
        assert sqnr_db(reference, step(1)) < 5, f"{name} computes copy 0 whatever copy it is asked for"


def test_oracle_adds_each_rows_own_adapter():
    operands = Operands(CASE, CPU, copies=1)
    assert operands.bounds == [0, 3, 5, 7]
    with_adapters = bench_cases.oracle(operands)
    for b in operands.b[0]:
        b[1] = 0
    without_one = bench_cases.oracle(operands)
    changed = (with_adapters != without_one).any(1)
    assert changed.tolist() == [False, False, False, True, True, False, False]


def test_more_adapters_than_tokens_never_in_a_case():
    for case in (*bench_cases.GPU_CASES, *bench_cases.CPU_CASES):
        assert 1 <= case.adapters <= case.tokens


def test_gain_is_torch_over_the_best_of_ours():
    times = {"torch": 30.0, "fused": 20.0, "hybrid": 12.0}
    row = {"projection": "o", "k": 1, "slices": [2], "tokens": 3, "adapters": 4, "rank": 5}
    rows = [row | {"us": times, "sqnr": dict.fromkeys(times, 50.0), "failed": {}}]
    table = bench._table(rows, "a GPU", gain=True)
    assert [column.header for column in table.columns][-1] == "gain" and list(table.columns[-1].cells) == ["2.50x"]
    without = bench._table(rows, "CPU", gain=False)
    assert [column.header for column in without.columns] == [column.header for column in table.columns][:-1]


def test_a_wrong_or_failing_variant_is_not_timed_and_fails_the_command(monkeypatch):
    real = bench_cases.variants

    def broken(operands):
        steps = real(operands)

        def raises(i):
            raise NotImplementedError("no FP8 here\nsecond line")

        return {**steps, "wrong": lambda i: steps["torch"](i) * 1.1, "raises": raises}

    monkeypatch.setattr(timing, "ROUNDS", 1)
    monkeypatch.setattr(bench, "variants", broken)
    monkeypatch.setattr(bench, "CPU_CASES", (CASE,))
    row = bench.measure(CASE, CPU, copies=1)
    assert set(row["us"]) == {"torch", "reference"}
    assert row["failed"]["wrong"].startswith("wrong result: 20.0 dB against fp32")
    assert row["failed"]["raises"] == "NotImplementedError: no FP8 here"
    console = Console(width=200, record=True)
    assert bench.run_bench(console, cpu=True) is False
    text = console.export_text()
    assert "not timed: raises: NotImplementedError: no FP8 here" in text


def test_sqnr_of_a_result_with_nan_is_the_worst():
    reference = torch.ones(4)
    assert sqnr_db(reference, torch.tensor([1, 1, 1, float("nan")])) == float("-inf")
    assert sqnr_db(reference, reference) == float("inf")
    assert sqnr_db(reference, reference * 0.9) == pytest.approx(20, abs=1e-3)


def test_times_are_medians_of_one_call(monkeypatch):
    clock = iter([0.0, 3.0, 0.0, 9.0, 0.0, 4.5])
    monkeypatch.setattr(timing, "ROUNDS", 3)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(clock))
    calls = []
    times = timing.median_times({"a": calls.append}, 3, CPU)
    assert times == {"a": pytest.approx(1.5e6)}
    assert calls == [0] + 3 * [0, 1, 2]
