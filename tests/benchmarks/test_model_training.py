"""``benchmarks.model_training`` on a tiny shape: every system trains the same model, and its bytes are counted."""

import json

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")

from benchmarks import model_training

SHAPE = {
    **model_training.SHAPE, "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
LINEARS = 2 * (64 * 64 * 2 + 2 * 64 * 32 + 3 * 64 * 96)
OUTPUTS = 2 * (64 + 2 * 32 + 64 + 2 * 96 + 64)
ADAPTERS = 2 * 4 * (4 * 64 + 2 * 64 + 2 * 32 + 3 * (64 + 96))
COMMAND = ["--sequences", "2", "--length", "128", "--rank", "4", "--warm-up", "1", "--repeat", "3"]


def test_a_row_has_times_bytes_and_the_loss():
    options = model_training.parse(COMMAND)
    rows = {name: model_training.measure(name, options, SHAPE, "cpu") for name in model_training.SYSTEMS}
    for name, row in rows.items():
        json.dumps(row, allow_nan=False)
        assert len(row["samples_ms"]) == 3 and row["ms"] == sorted(row["samples_ms"])[1]
        masters = name.endswith("masters")
        assert row["bytes"]["adapters"] == ADAPTERS * (4 if masters else 2), name
        assert row["bytes"]["embeddings"] == 2 * 2 * 160 * 64
        assert row["bytes"]["linears"] == (2 * LINEARS if name.startswith("bf16") else LINEARS + 4 * OUTPUTS), name
        assert row["loss"] == pytest.approx(rows["bf16"]["loss"], rel=0.01)
        assert f"{name} " in model_training.told(row)
    norms = 2 * (2 * (2 * 64 + 2 * 16) + 64)
    assert norms <= rows["bf16"]["bytes"]["rest"] <= norms + 200  # and the rotary frequencies


def test_only_adapters_are_trained_and_layers_are_checkpointed():
    model = model_training.build("w8a16", 4, SHAPE, "cpu")
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2 and all("lora_" in name for name in trained)
    assert model.training and model.is_gradient_checkpointing
    first, other = (model_training.build(name, 4, SHAPE, "cpu").state_dict() for name in ("bf16", "w8a16"))
    for name in trained:
        assert torch.equal(first[name], other[name]) and first[name].dtype == torch.bfloat16, name


def test_a_system_that_fails_leaves_the_others(monkeypatch, tmp_path, capsys):
    class Alone:
        def __init__(self, *arguments):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def submit(self, measure, system, options):
            assert measure is model_training.measure
            self.system = system
            return self

        def result(self):
            if self.system == "bf16":
                raise torch.OutOfMemoryError("no room")
            return {"system": self.system, "ms": 2.0, "loss": 1.0, "bytes": {"linears": 10**9}}

    monkeypatch.setattr(model_training, "ProcessPoolExecutor", Alone)
    monkeypatch.setattr(model_training, "need_gpu", lambda: None)
    monkeypatch.setattr(model_training, "environment", lambda: {"gpu": "none"})
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit, match="a system failed"):
        model_training.main(["--systems", "bf16", "w8a8", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert rows[0] == {"system": "bf16", "error": "OutOfMemoryError: no room"} and rows[1]["ms"] == 2.0
    assert "linears 1.00 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rank", "0"], "--rank: expected at least 1, but 0 came"),
        (["--warm-up", "0"], "--warm-up: expected at least 1, but 0 came"),
        (["--sequences", "3"], "--sequences: expected a divisor of the loss's 256 positions"),
        (["--length", "255"], "which fit in them, but 1 of 255 came"),
    ],
)
def test_the_command_line_is_checked(arguments, why, capsys):
    with pytest.raises(SystemExit):
        model_training.parse(arguments)
    assert why in capsys.readouterr().err
