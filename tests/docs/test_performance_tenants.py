"""The page's tables and figure of many tenants, and its tables of prefill and of the host, from result files."""

import math
import re
from pathlib import Path

import pytest

from benchmarks import figure, report
from benchmarks.report import page
from benchmarks.report_tenants import FIGURE
from tests.docs.test_performance import tables, write

PARTS = ("qkv", "o", "gate_up", "down")
KEYS = ("model", "batch", "rank", "tokens", "adapters")


def layer_row(tokens: int, adapters: int, us: dict, *, model="qwen3-8b", batch="even", rank=64, parts=None) -> dict:
    projections = {name: {"us": times} for name, times in zip(PARTS, parts or [us] * 4, strict=True)}
    values = (model, batch, rank, tokens, adapters)
    return {**dict(zip(KEYS, values, strict=True)), "us": us, "projections": projections}


FULL = {"bare": 50.0, "vllm_bare": 40.0, "auto": 60.0, "ours": 60.0, "vllm": 240.0, "sglang": 80.0}
PARTLY = [FULL, {"ours": 30.0, "vllm": 20.0, "sglang": 40.0}, {"ours": 30.0, "vllm": 60.0}, {"vllm": 3.0}]
FEW = {"bare": 30.0, "ours": 33.0}


def tenants(results: Path) -> None:
    write(results / "tenants.json", [
        layer_row(64, 32, FULL, parts=PARTLY),
        layer_row(64, 1, {"bare": 40.0, "vllm_bare": 60.0, "ours": 44.0, "vllm": 56.0}),
        layer_row(2048, 8, FEW),
        layer_row(64, 8, FULL, model="llama-3.1-8b"),
        layer_row(256, 8, FULL, batch="zipf"),
        layer_row(256, 16, FULL, rank=128),
    ])  # fmt: skip


def test_the_tenants_tables(tmp_path: Path) -> None:
    tenants(tmp_path)
    text = page(tmp_path)
    assert "## Many tenants" in text and f"]({FIGURE})" in text and "tenants.json`" in text and "## Prefill" not in text
    layers, projections = tables(text)
    assert layers[0] == {
        "model": "qwen3-8b", "batch": "even", "rank": "64", "tokens": "64", "adapters": "32", "bare": "50",
        "vLLM bare": "40", "chosen": "60", "vLLM LoRA": "240", "SGLang LoRA": "80", "chosen / bare": "1.50",
        "chosen / vLLM": "0.25", "chosen / SGLang": "0.75",
    }  # fmt: skip
    assert [row["chosen / bare"] for row in layers] == ["1.50", "1.10", "1.10", "1.50", "1.50", "1.50"]
    assert layers[1]["chosen / vLLM"] == "0.79" and layers[1]["SGLang LoRA"] == layers[1]["chosen / SGLang"] == "-"
    assert [row["model"] for row in layers].count("llama-3.1-8b") == 1 and layers[4]["batch"] == "zipf"
    assert [projections[0][name] for name in PARTS] == ["0.75", "1.50", "0.50", "-"]
    assert projections[5]["rank"] == "128" and len(projections) == len(layers) == 6


def test_tuned_kernels_have_columns_where_they_were_measured(tmp_path: Path) -> None:
    write(tmp_path / "tenants.json", [layer_row(64, 8, FULL | {"vllm_tuned": 120.0}), layer_row(64, 32, FULL)])
    tuned, other = tables(page(tmp_path))[0]
    assert (tuned["vLLM tuned"], tuned["chosen / vLLM tuned"]) == ("120", "0.50")
    assert other["vLLM tuned"] == other["chosen / vLLM tuned"] == "-"
    assert figure.panels([layer_row(64, 8, FULL | {"vllm_tuned": 120.0})])[64]["vllm_tuned"] == [(8, 3.0)]


def test_the_figure_shows_even_batches_of_one_model_over_the_faster_bare_layer(tmp_path: Path) -> None:
    tenants(tmp_path)
    _, rows = report.read(tmp_path / "tenants.json")
    assert figure.panels(rows) == {
        64: {"ours": [(1, 1.1), (32, 1.5)], "vllm": [(1, 1.4), (32, 6.0)], "sglang": [(32, 2.0)]},
        2048: {"ours": [(8, 1.1)]},
    }


def drawn(svg: str) -> dict[str, list[tuple[float, float]]]:
    """Where each line's points lie in the figure."""
    found = {}
    for name, body in re.findall(r'<g id="(\w+-\d+)">(.*?)\n   </g>', svg, re.DOTALL):
        found[name] = [(float(x), float(y)) for x, y in re.findall(r'<use xlink:href="\S+" x="(\S+)" y="(\S+)"', body)]
    return found


def test_the_figures_points_lie_where_the_results_say(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tenants(tmp_path)
    report.main(tmp_path, tmp_path / "page.md")
    svg = (tmp_path / FIGURE).read_text()
    assert figure.digest(tmp_path / "tenants.json") in svg and (tmp_path / "page.md").read_text() == page(tmp_path)
    for text in ("this library", "vLLM LoRA", "SGLang LoRA", "no adapters", "64 tokens", "2,048 tokens", "No GPU"):
        assert text in svg, text
    assert "vLLM tuned" not in svg and "256 tokens" not in svg
    points = drawn(svg)
    assert {name: len(places) for name, places in points.items()} == {
        "ours-64": 2, "vllm-64": 2, "sglang-64": 1, "ours-2048": 1
    }  # fmt: skip
    # both axes are logarithmic and one scale serves all panels: two points say where all the others lie
    (left, low), (right, high) = points["ours-64"][0], points["vllm-64"][1]
    octave = (high - low) / math.log2(6.0 / 1.1)
    assert right > left and high < low  # an SVG counts downward
    for name, (x, ratio) in {"ours-64": (right, 1.5), "sglang-64": (right, 2.0)}.items():
        assert points[name][-1] == pytest.approx((x, low + octave * math.log2(ratio / 1.1)), abs=0.01), name
    assert points["vllm-64"][0] == pytest.approx((left, low + octave * math.log2(1.4 / 1.1)), abs=0.01)
    assert points["ours-2048"][0][1] == pytest.approx(low, abs=0.01)
    report.main(tmp_path, tmp_path / "page.md")
    assert (tmp_path / FIGURE).read_text() == svg


def shrink(us: dict, parts: list[dict]) -> dict:
    return {"us": us, "projections": {name: {"us": part} for name, part in zip(PARTS, parts, strict=True)}}


def test_the_prefills_tables(tmp_path: Path) -> None:
    parts = [{"ours": 10.0, "vllm": 40.0}, {"ours": 30.0, "vllm": 20.0}, {"ours": 10.0, "vllm": 20.0}, {"ours": 6.0}]
    write(tmp_path / "large.json", [
        layer_row(2048, 8, FULL) | {"shrink": shrink({"ours": 56.0, "vllm": 140.0}, parts)},
        layer_row(16384, 1, FEW) | {"shrink": shrink({"ours": 9.0}, [{"ours": 2.0}] * 4)},
    ])  # fmt: skip
    text = page(tmp_path)
    assert "## Prefill" in text and "### The shrink alone" in text and "large.json`" in text
    assert "## Many tenants" not in text and FIGURE not in text
    layers, shrinks = tables(text)
    assert (layers[0]["tokens"], layers[0]["chosen / bare"], layers[0]["chosen / SGLang"]) == ("2048", "1.50", "0.75")
    assert layers[1]["chosen / bare"] == "1.10" and layers[1]["chosen / vLLM"] == "-"
    head = {"model": "qwen3-8b", "rank": "64"}
    assert shrinks == [
        {**head, "tokens": "2048", "adapters": "8", "K1": "56.0", "vLLM shrink": "140.0", "K1 / vLLM": "0.40",
         "qkv": "0.25", "o": "1.50", "gate_up": "0.50", "down": "-"},
        {**head, "tokens": "16384", "adapters": "1", "K1": "9.0", "vLLM shrink": "-", "K1 / vLLM": "-",
         **dict.fromkeys(PARTS, "-")},
    ]  # fmt: skip


def test_the_hosts_table(tmp_path: Path) -> None:
    us = {"ours": 500.0, "triton": 900.0, "vllm_bare": 350.0, "vllm": 2000.0}
    write(tmp_path / "host.json", [{"model": "m", "rank": 64, "tokens": 512, "adapters": 8, "us": us}])
    text = page(tmp_path)
    assert "### What the host spends" in text and "host.json`" in text
    ((row,),) = tables(text)
    assert row == {
        "model": "m", "rank": "64", "tokens": "512", "adapters": "8", "lora_linear": "500", "by Triton": "900",
        "vLLM bare": "350", "vLLM LoRA": "2000", "lora_linear / vLLM LoRA": "0.25",
    }  # fmt: skip


def choice_row(k: int, over_best: float) -> dict:
    sizes = {"tokens": 64, "adapters": 8, "k": k, "n": 4096}
    return {**sizes, "choice": "hybrid/tma", "us": 12.5, "paths": {}, "over_best": over_best}


def test_the_choices_that_miss_are_shown_and_counted(tmp_path: Path) -> None:
    misses = [1.0, 1.0301, 1.03, 1.2, 1.001]
    write(tmp_path / "choices.json", [choice_row(128 * (i + 1), miss) for i, miss in enumerate(misses)])
    text = page(tmp_path)
    assert "## Measured plans" in text and "choices.json`" in text
    assert "3 of 5 are within 3 percent of the fastest" in text
    rows = tables(text)[0]
    assert [(row["k"], row["us / fastest"]) for row in rows] == [("512", "1.200"), ("256", "1.030"), ("384", "1.030")]
    assert (rows[0]["tokens"], rows[0]["adapters"], rows[0]["n"], rows[0]["choice"], rows[0]["us"]) == (
        "64", "8", "4096", "hybrid/tma", "12.5"
    )  # fmt: skip
