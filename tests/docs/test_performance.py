"""Every figure of docs/performance.md comes from a result file."""

import json

from benchmarks.report import PAGE, RESULTS, page


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
