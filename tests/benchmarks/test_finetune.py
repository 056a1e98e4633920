"""``benchmarks.finetune`` on a tiny model: what is alike between systems, and the pass line."""

import json

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from benchmarks import finetune
from tests.tiny_chat import tiny_chat_model, tiny_tokenizer


@pytest.fixture
def tiny(monkeypatch):
    def load(folder, device, dtype):
        assert folder is None and dtype == torch.bfloat16
        return tiny_chat_model(dtype), tiny_tokenizer()

    monkeypatch.setattr(finetune, "load_model", load)
    monkeypatch.setattr(finetune, "PROBLEMS", 20)
    monkeypatch.setattr(finetune, "RATE", 1e-2)
    finetune.loaded.cache_clear()
    yield
    finetune.loaded.cache_clear()


@pytest.mark.usefixtures("tiny")
def test_systems_train_the_same_run_and_the_loaded_model_stays_as_it_was():
    options = finetune.parse(["--seeds", "2", "--steps", "4", "--batch", "2"])
    rows = list(finetune.measured(options, "cpu"))
    assert [(row["seed"], row["system"]) for row in rows] == [(s, n) for s in (0, 1) for n in ("bf16", "w8a16", "w8a8")]
    for row in rows:
        assert len(row["losses"]) == 4 and row["held_out"] < row["held_out_before"] and row["step_s"] > 0
        assert (row["steps"], row["batch"], row["rank"], row["jobs"]) == (4, 2, 16, 1)
        json.dumps(row, allow_nan=False)
    bf16, w8a16, w8a8, other = (rows[i] for i in range(4))
    assert w8a16["losses"] == pytest.approx(bf16["losses"], rel=0.02) and w8a16["losses"] != bf16["losses"]
    assert w8a8["losses"] == pytest.approx(bf16["losses"], rel=0.05)
    assert other["losses"][0] != bf16["losses"][0], "another order: adapters start at zero"
    assert other["held_out_before"] == bf16["held_out_before"]
    assert finetune.measure("bf16", 0, 4, 2, 1, "cpu")["losses"] == bf16["losses"]


def rows_of(**losses: list[float]) -> list[dict]:
    return [{"system": s, "seed": i, "held_out": x} for s, values in losses.items() for i, x in enumerate(values)]


def test_the_pass_line_is_bf16s_spread():
    rows = rows_of(bf16=[0.10, 0.12, 0.16], w8a16=[0.11, 0.14, 0.17], w8a8=[0.16, 0.17, 0.18])
    found = finetune.within(rows)
    assert found == {
        "mean": pytest.approx(0.14),
        "low": 0.10,
        "high": 0.16,
        "apart": pytest.approx(0.02),
        "within": True,
    }
    assert finetune.within(rows, "w8a8")["within"] is False
    assert finetune.within(rows_of(bf16=[0.1], w8a16=[0.09]))["within"] is False
    assert finetune.within(rows_of(bf16=[0.1])) is None


def test_the_command_writes_rows_in_order_and_says_the_pass_line(monkeypatch, tmp_path, capsys):
    def come(options):
        for system, seed, loss in (("w8a16", 0, 0.2), ("bf16", 1, 0.1), ("bf16", 0, 0.3)):
            yield {
                "system": system,
                "seed": seed,
                "held_out_before": 2.0,
                "held_out": loss,
                "losses": [1.0],
                "step_s": 1,
            }

    monkeypatch.setattr(finetune, "need_gpu", lambda: None)
    monkeypatch.setattr(finetune, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr(finetune, "measured", come)
    finetune.main(["--out", str(tmp_path / "out.json")])
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["system"], row["seed"]) for row in rows] == [("bf16", 0), ("bf16", 1), ("w8a16", 0)]
    assert "w8a16: mean 0.2000 is within bf16's 0.1000 to 0.3000" in capsys.readouterr().out


def test_the_command_line_is_checked(capsys):
    for name in ("--seeds", "--steps", "--batch", "--jobs"):
        with pytest.raises(SystemExit):
            finetune.parse([name, "0"])
        assert f"{name}: expected at least 1, but 0 came" in capsys.readouterr().err
