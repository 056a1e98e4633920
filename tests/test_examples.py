"""The examples run as they stand, on a tiny model."""

import runpy
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

from tests.tiny_chat import write_tiny_chat_model

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_finetune_trains_saves_and_serves(tmp_path, capsys):
    model, out = write_tiny_chat_model(tmp_path / "model"), tmp_path / "out"
    runpy.run_path(str(EXAMPLES / "finetune.py"))["main"]([str(out), "--model", str(model), "--steps", "2"])
    shown = capsys.readouterr().out
    assert "eval_loss" in shown and shown.count("  adapter: ") == shown.count("  base: ") == 2
    assert (out / "adapter_model.safetensors").is_file() and (out / "adapter_config.json").is_file()


def test_it_stays_short():
    lines = (EXAMPLES / "finetune.py").read_text(encoding="utf-8").splitlines()
    assert len([line for line in lines if line.strip()]) <= 80
