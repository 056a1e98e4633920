"""The engines' section of docs/performance.md says what its result files do."""

import json
from pathlib import Path

from benchmarks.report_engine import sections
from tests.docs.test_performance import ENV, tables


def row(system: str, slots: int, one: float, **more) -> dict:
    head = {"model": "m", "system": system, "slots": slots, "one_ms": [one, 9.0, one], "many_ms": [2 * one]}
    return {**head, "start_s": 9.6, "kv_tokens": 1000 * (slots + 1), "same_again": True, "launches": {}, **more}


def write(path: Path, rows: list[dict]) -> None:
    path.write_text(json.dumps({"environment": ENV, "rows": rows}))


def test_ratios_are_to_rows_of_the_same_file_and_slots(tmp_path: Path) -> None:
    theirs = {"_lora_shrink_kernel": 5.0, "_lora_expand_kernel": 6.0, "decode_kernel_of_another": 1.0}
    write(
        tmp_path / "engine_1.json",
        [
            row("base", 0, 4.0),
            row("vllm", 1, 8.0, launches=theirs),
            row(
                "ours",
                1,
                5.0,
                launches={"decode_kernel": 4.0, "shrink_kernel": 3.0},
                same_again=False,
                differs={"later_most": 0.1, "same_tokens": 1.0},
            ),
            {"system": "ours", "slots": 2, "error": "no memory"},
        ],
    )
    write(tmp_path / "engine_2.json", [row("ours", 1, 6.0)])
    (text,) = sections(tmp_path)
    first, second, _ = tables(text + "\n")
    base, vllm, ours = first
    assert (ours["ms a token"], ours["/ base"], ours["/ vLLM LoRA"]) == ("5.00", "1.25", "0.62")
    assert (ours["ms a step of 32"], ours["32 / base"], ours["32 / vLLM LoRA"]) == ("10.00", "1.25", "0.62")
    assert (ours["our launches"], ours["vLLM's LoRA launches"], ours["same again"]) == ("7", "0", "no")
    assert (vllm["our launches"], vllm["vLLM's LoRA launches"]) == ("0", "11")
    assert base["/ vLLM LoRA"] == "-" and ours["start, s"] == "10" and ours["KV / vLLM LoRA"] == "1.00"
    assert "same again" not in second[0], "nothing tells its engines' answers apart"
    assert len(second) == 1 and "/ base" not in second[0]


def test_answers_are_told_apart_where_they_differ(tmp_path: Path) -> None:
    alike = {"first_mean": 0.0, "first_most": 0.0, "later_mean": 0.0, "later_most": 0.0, "same_tokens": 1.0}
    apart = {**alike, "later_mean": 0.25, "later_most": 2.0, "same_tokens": 0.5}
    write(tmp_path / "engine_1.json", [row("vllm_dual", 1, 4.0, differs=alike), row("ours", 1, 4.0, differs=apart)])
    _, (found,) = tables(sections(tmp_path)[0] + "\n")
    assert (found["engine"], found["later mean"], found["later most"], found["equal tokens"]) == (
        "plugin", "0.250", "2.000", "0.50",
    )  # fmt: skip


def test_without_files_there_is_no_section(tmp_path: Path) -> None:
    assert sections(tmp_path) == []
