"""Every figure of docs/performance.md comes from a result file."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from benchmarks import figure, profile_call, report
from benchmarks.report import COLUMNS, FIGURES, PAGE, RATIOS, RESULTS, cells, page
from benchmarks.report_decode import FIGURE

ENV = {"gpu": "No GPU", "torch": "0", "triton": "0", "vllm": None, "commit": "0000000"}


def test_the_page_is_what_the_results_say() -> None:
    assert PAGE.read_text() == page(), "run python -m benchmarks.report"


def test_results_name_gpu_versions_and_commit() -> None:
    files = sorted(RESULTS.glob("*.json"))
    assert files
    for path in files:
        environment = json.loads(path.read_text())["environment"]
        assert "H200" in environment["gpu"] and environment["torch"] and environment["triton"]
        assert len(environment["commit"]) >= 7 and environment["commit"] != "unknown", path


def test_no_supported_case_is_slower_than_vllm_on_a_long_batch() -> None:
    rows = [row for path in RESULTS.glob("layer_*.json") for row in json.loads(path.read_text())["rows"]]
    long = [row for row in rows if row["tokens"] == 2048 and "vllm" in row["us"]]
    assert long
    for row in long:
        assert row["us"]["ours"] <= row["us"]["vllm"], row


def test_a_row_shows_what_it_has_and_dashes_for_the_rest() -> None:
    row = {"model": "m", "rank": 16, "tokens": 1, "adapters": 8}
    full = {"bare": 70, "vllm_bare": 76, "decode": 60, "fused": 90, "hybrid": 95, "ours": 60, "vllm": 120, "sglang": 80}
    heading = [*COLUMNS, *RATIOS]
    shown = dict(zip(heading, cells({**row, "us": full})[4:], strict=True))
    assert shown["decode"] == "60" and shown["SGLang LoRA"] == "80" and shown["chosen"] == "60"
    assert shown["chosen / vLLM"] == "0.50" and shown["chosen / SGLang"] == "0.75"
    older = {name: us for name, us in full.items() if name not in ("decode", "sglang")}
    shown = dict(zip(heading, cells({**row, "us": older})[4:], strict=True))
    assert shown["decode"] == shown["SGLang LoRA"] == shown["chosen / SGLang"] == "-"
    assert shown["chosen / vLLM"] == "0.50" and shown["hybrid"] == "95"
    assert cells({**row, "us": {}}) == ["m", "16", "1", "8", *"-" * len(heading)]


@pytest.mark.parametrize("name", FIGURES)
def test_the_figure_is_drawn_from_its_result_file(name: str) -> None:
    if (RESULTS / name).exists():
        drawn = (PAGE.parent / FIGURES[name][1]).read_text()
        assert figure.digest(RESULTS / name) in drawn, "run python -m benchmarks.report"


def test_every_result_file_is_on_the_page() -> None:
    text = PAGE.read_text()
    for path in RESULTS.glob("*.json"):
        assert f"`benchmarks/results/h200/{path.name}`" in text, path


def test_what_the_page_says_of_the_profile_is_so() -> None:
    path = RESULTS / "profile.json"
    for row in json.loads(path.read_text())["rows"] if path.exists() else []:
        profile_call.verify(row["events"], row["calls"], row["pdl"])


def write(path: Path, rows: list[dict]) -> None:
    path.write_text(json.dumps({"environment": ENV, "rows": rows}))


def tables(text: str) -> list[list[dict[str, str]]]:
    """The rows of each Markdown table, by column."""
    found = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE):
        head, _, *body = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append([dict(zip(head, line, strict=True)) for line in body])
    return found


def decode_row(compute: str, tokens: int, us: dict[str, float]) -> dict:
    head = {"model": "m", "rank": 64, "tokens": tokens, "adapters": 1, "layout": "channel", "compute": compute}
    return {**head, "us": us}


def test_a_decode_table_has_the_ratios_of_its_rows(tmp_path: Path) -> None:
    full = {
        "decode": 60, "decode_codes": 55, "bare": 58, "bare_codes": 52, "none": 59, "vllm_bare": 76, "vllm_gemm": 61,
        "vllm": 120, "sglang": 80,
    }  # fmt: skip
    rows = [decode_row("w8a8", 1, full), decode_row("w8a8", 16, {"decode": 60}), decode_row("w8a16", 1, {"decode": 90})]
    write(tmp_path / "decode_channel.json", rows)
    text = page(tmp_path)
    assert "No GPU, torch 0, Triton 0, commit `0000000`." in text and "decode_channel.json`" in text
    w8a16, w8a8 = tables(text)  # in order of their names
    assert w8a16 == [
        {"model": "m", "rank": "64", "tokens": "1", "adapters": "1", "decode": "90.0", "decode / W8A8 decode": "1.50"}
    ]
    row, bare = w8a8
    assert "decode / W8A8 decode" not in row
    assert (row["adapter"], row["decode / SGLang"], row["decode / vLLM"]) == ("3.0", "0.75", "0.50")
    assert (row["codes in / vLLM GEMM"], row["bare, codes in / vLLM GEMM"]) == ("0.90", "0.85")
    assert row["idle / faster bare"] == "1.02" and row["decode, codes in"] == "55.0"
    assert bare["adapter"] == bare["decode / SGLang"] == bare["idle / faster bare"] == "-"


def test_the_overhead_table(tmp_path: Path) -> None:
    us = {"x": 20.0, "codes": 18.0, "gemm": 15.0, "adapter": 3.0, "quantization": 2.0, "read": 10.0}
    row = {"model": "m", "rank": 16, "tokens": 4, "bytes": 50_000_000, "us": us, "ratios": {"read / x": 0.5}}
    write(tmp_path / "overhead.json", [row])
    times, parts = tables(page(tmp_path))
    head = {"model": "m", "rank": "16", "tokens": "4"}
    assert times == [{**head, "x": "20.0", "codes": "18.0", "gemm": "15.0", "read": "10.0"}]
    assert parts == [{**head, "adapter": "3.0", "quantization": "2.0", "read / x": "0.50", "x, TB/s": "2.50"}]


def exposure(results: Path) -> None:
    for_rank = {16: [(10.0, 12.0, 0.5), (12.0, 8.0, 3.0), (9.0, 9.0, 1.0)], 64: [(11.0, 5.0, 6.5)]}
    write(results / "exposure.json", [
        {"model": "m", "rank": rank, "tokens": 1, "us": {"shrink": shrink, "gemm": gemm, "exposed": exposed}}
        for rank, rows in for_rank.items() for shrink, gemm, exposed in rows
    ])  # fmt: skip


def test_the_exposure_table(tmp_path: Path) -> None:
    exposure(tmp_path)
    assert f"]({FIGURE})" in page(tmp_path)
    ((one, two),) = tables(page(tmp_path))
    assert one == {
        "model": "m", "rank": "16", "tokens": "1", "projections": "3", "shrink": "9.0 to 12.0", "GEMM": "8.0 to 12.0",
        "exposed, median": "1.0", "exposed, most": "3.0", "error": "1.0",
    }  # fmt: skip
    assert (two["projections"], two["exposed, most"], two["error"]) == ("1", "6.5", "0.5")


def test_the_figure_and_the_page_are_written_together(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    exposure(tmp_path)
    report.main(tmp_path, tmp_path / "page.md")
    first = (tmp_path / FIGURE).read_text()
    assert figure.digest(tmp_path / "exposure.json") in first
    for text in ("shrink alone - GEMM", "exposed", "rank 16", "rank 64", "No GPU"):
        assert text in first, text
    report.main(tmp_path, tmp_path / "page.md")
    assert (tmp_path / FIGURE).read_text() == first
    assert (tmp_path / "page.md").read_text() == page(tmp_path)
    (tmp_path / "exposure.json").unlink()
    assert FIGURE not in page(tmp_path)


def test_asking_for_help_writes_nothing(monkeypatch, capsys) -> None:
    monkeypatch.setattr(Path, "write_text", lambda *_: pytest.fail("the page was written"))
    for arguments, code in (["--help"], 0), (["--no-such-option"], 2):
        monkeypatch.setattr(sys, "argv", ["report", *arguments])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(report.__file__, run_name="__main__")
        assert left.value.code == code
    assert "docs/performance.md" in capsys.readouterr().out


def test_the_profile_table(tmp_path: Path) -> None:
    events = profile_call.listed([("decode_kernel", 10.0, 30.0), ("decode_kernel", 28.5, 50.0)])
    row = {"projection": "qkv", "tokens": 16, "adapters": 8, "calls": 2, "pdl": True, "events": events}
    write(tmp_path / "profile.json", [row])
    ((first, second),) = tables(page(tmp_path))
    assert (first["call"], first["start"], first["starts before the last ends"]) == ("1 of 2", "0.0", "no")
    assert (second["start"], second["duration"], second["starts before the last ends"]) == ("18.5", "21.5", "yes")
