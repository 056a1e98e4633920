"""The training sections of docs/performance.md say what their result files do."""

import re
from pathlib import Path

import pytest

from benchmarks import figure, report
from benchmarks.report_training import FIGURE, sections
from tests.docs.test_performance import tables, write


def run(system: str, seed: int, held_out: float, jobs: int = 1) -> dict:
    losses = [2.0 + seed, 1.0, 0.5 + seed]
    return {
        "system": system, "seed": seed, "steps": 3, "jobs": jobs, "step_s": 0.025, "held_out_before": 2.5,
        "held_out": held_out, "losses": losses,
    }  # fmt: skip


RUNS = [
    run("bf16", 0, 0.10), run("bf16", 1, 0.20), run("w8a16", 0, 0.13), run("w8a16", 1, 0.19), run("w8a8", 0, 0.3),
]  # fmt: skip


def test_the_losses_table_and_the_pass_line(tmp_path: Path) -> None:
    write(tmp_path / "finetune.json", RUNS)
    (text,) = sections(tmp_path)
    assert f"]({FIGURE})" in text and "finetune.json`" in text
    bf16, w8a16, w8a8 = tables(text + "\n")[0]
    assert (bf16["base"], bf16["seeds"], bf16["steps"], bf16["held-out before"]) == ("bf16", "2", "3", "2.500")
    assert (bf16["held-out, mean"], bf16["least"], bf16["most"]) == ("0.1500", "0.1000", "0.2000")
    assert (bf16["apart"], w8a16["apart"], w8a8["apart"], bf16["ms a step"]) == ("-", "0.0300", "0.2000", "25.0")
    assert "W8A16's mean, 0.1600, lies within what bf16's seeds span, 0.1000 to 0.2000." in text
    assert "W8A8's mean, 0.3000, lies above what" in text


def test_times_of_runs_side_by_side_are_not_shown(tmp_path: Path) -> None:
    write(tmp_path / "finetune.json", [run("bf16", 0, 0.1, jobs=2), run("w8a16", 0, 0.1, jobs=2)])
    assert "ms a step" not in tables(sections(tmp_path)[0] + "\n")[0][0]


def test_the_step_table(tmp_path: Path) -> None:
    sizes = {"linears": 14e9, "embeddings": 2.5e9, "rest": 1e6, "adapters": 3e8, "resting": 17e9, "peak": 25.5e9}
    head = {"sequences": 4, "length": 2048, "rank": 64, "loss": 12.0}
    write(tmp_path / "model_training.json", [
        {**head, "system": "bf16", "ms": 800.0, "bytes": sizes},
        {**head, "system": "w8a8", "ms": 600.0, "bytes": {**sizes, "linears": 7e9}},
        {"system": "w8a16", "error": "no memory"},
    ])  # fmt: skip
    (text,) = sections(tmp_path)
    bf16, w8a8 = tables(text + "\n")[0]
    assert (bf16["tokens"], bf16["/ bf16"], bf16["tokens/s"]) == ("4 x 2048", "1.00", "10,240")
    assert (w8a8["ms a step"], w8a8["/ bf16"], w8a8["linears, GB"]) == ("600", "0.75", "7.00")
    assert (bf16["peak, GB"], bf16["peak - at rest, GB"]) == ("25.5", "8.5")


def test_the_figure_has_a_line_and_a_band_a_system(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "finetune.json", RUNS)
    report.main(tmp_path, tmp_path / "page.md")
    svg = (tmp_path / FIGURE).read_text()
    assert figure.digest(tmp_path / "finetune.json") in svg and "No GPU" in svg
    assert re.findall(r'<g id="loss-(\w+)">', svg) == ["bf16", "w8a16", "w8a8"]
    assert "Training a model" in (tmp_path / "page.md").read_text()


def test_without_files_there_is_no_section(tmp_path: Path) -> None:
    assert sections(tmp_path) == []
