"""What every benchmark does before it measures: it refuses what cannot be written, and says that it needs a GPU."""

import importlib
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import timing

MODULES = ("layer", "tenants", "large", "overhead", "exposure", "choices", "host", "profile_call", "read_rate",
           "finetune", "model_training")  # fmt: skip


@pytest.fixture
def started(monkeypatch):
    """Start a benchmark's command, on a machine without a GPU; return what it leaves with."""

    def start(name, *arguments):
        monkeypatch.setattr(timing, "why_no_gpu", lambda: "torch finds no device")
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with pytest.raises(SystemExit) as left:
            importlib.import_module(f"benchmarks.{name}").main()
        return left.value.code

    return start


@pytest.mark.parametrize("name", MODULES)
def test_without_a_gpu_it_says_so(started, name):
    assert started(name) == (
        "nothing to measure: torch finds no device. A benchmark needs a CUDA GPU; "
        "`epilora bench --quick --cpu` times the reference on the CPU."
    )


@pytest.mark.parametrize("name", MODULES)
def test_a_result_file_that_cannot_be_written_is_refused_first(started, name, tmp_path, capsys):
    out = tmp_path / "no" / "out.json"
    assert started(name, "--out", str(out)) == 2
    said = f"--out: expected a file in an existing folder, but {out} came: make {out.parent} first"
    assert said in capsys.readouterr().err
    assert started(name, "--out", str(tmp_path)) == 2
    assert f"--out: expected a file, but the folder {tmp_path} came: name a file in it" in capsys.readouterr().err


def test_results_hold_the_commands_arguments(monkeypatch):
    gpu = SimpleNamespace(name="No GPU", multi_processor_count=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setenv("EPILORA_COMMIT", "0000000")
    monkeypatch.setattr(sys, "argv", ["layer.py", "--tokens", "16", "--out", "/tmp/a b.json", "--batch", "a b"])
    found = timing.environment()
    assert found["command"] == "--tokens 16 --batch 'a b'" and found["commit"] == "0000000"
