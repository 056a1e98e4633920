"""Which rows ``benchmarks.tenants`` measures, and what it says of them."""

import json

import pytest

from benchmarks import layer, tenants
from benchmarks.models import MODELS


def test_every_row_is_one_that_the_layers_benchmark_can_measure() -> None:
    rows = tenants.points()
    assert len(rows) == len(set(rows)) == 28
    for model, tokens, adapters, kind, rank in rows:
        assert model in MODELS and adapters <= tokens and kind in layer.batches.KINDS and rank in (64, 128)


def test_the_ratio_is_to_the_fastest_peer() -> None:
    assert tenants.ratio({"ours": 90.0, "vllm": 300.0, "vllm_tuned": 200.0, "sglang": 100.0}) == 0.9
    assert tenants.ratio({"ours": 90.0, "vllm": 300.0, "vllm_tuned": 50.0, "sglang": 100.0}) == 1.8
    assert tenants.ratio({"ours": 90.0, "vllm": 60.0}) == 1.5
    assert tenants.ratio({"ours": 90.0}) is None and tenants.ratio({"vllm": 90.0}) is None


def test_what_is_measured_is_kept_after_every_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path, capsys: pytest.CaptureFixture
) -> None:
    done = []

    def row(model, tokens, adapters, compute, options):
        assert options.systems == ["bare", "auto", "vllm_bare", "vllm", "vllm_tuned", "sglang"]
        if done:
            kept = json.loads((tmp_path / "t.json").read_text())
            assert kept["rows"] == done
        us = {"bare": 1.0, "auto": 2.0, "ours": 2.0, "vllm": 4.0}
        done.append({"tokens": tokens, "rank": options.rank, "batch": options.batch, "us": us,
                     "projections": {"qkv": {"left_out": {"sglang": "ValueError: no"}}}})  # fmt: skip
        return done[-1]

    monkeypatch.setattr(layer, "layer_row", row)
    monkeypatch.setattr(tenants.peers, "installed", lambda: list(tenants.peers.NAMES))
    monkeypatch.setattr(tenants, "need_gpu", lambda: None)
    monkeypatch.setattr(tenants, "environment", lambda: {"gpu": "none"})
    tenants.main(["--out", str(tmp_path / "t.json"), "--repeat", "1"])
    assert len(done) == 28
    printed = capsys.readouterr().out
    assert printed.count(" 0.50\n") == 28 and "left out sglang: ValueError: no" in printed


def test_a_wrong_output_fails_the_run_at_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    wrong = {"qkv": {"left_out": {"auto": "wrong: 3.0 dB from fp64, expected over 40"}}}
    monkeypatch.setattr(layer, "layer_row", lambda *_: {"us": {}, "projections": wrong})
    monkeypatch.setattr(tenants, "need_gpu", lambda: None)
    monkeypatch.setattr(tenants, "environment", lambda: {"gpu": "none"})
    with pytest.raises(SystemExit, match="a variant's output was wrong"):
        tenants.main(["--out", str(tmp_path / "t.json")])
    assert len(json.loads((tmp_path / "t.json").read_text())["rows"]) == 28


def test_no_repeat_is_refused() -> None:
    with pytest.raises(SystemExit):
        tenants.main(["--repeat", "0"])
