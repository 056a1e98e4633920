"""Every figure of docs/performance.md comes from a result file."""

import json

from benchmarks.report import COLUMNS, PAGE, RATIOS, RESULTS, cells, page


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
    rows = [row for path in RESULTS.glob("*.json") for row in json.loads(path.read_text())["rows"]]
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
