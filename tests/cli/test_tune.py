"""`epilora tune`: what it refuses, which sizes it searches, and the table that it writes. The GPU is made up."""

import json
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")
from typer.testing import CliRunner

from torch_epilora.cli import machine, tune
from torch_epilora.cli.commands import app
from torch_epilora.ops import choice, tables
from torch_epilora.ops.candidates import routes
from torch_epilora.ops.plan import Plan, Problem
from torch_epilora.ops.tables import Measured, key_of

GPU = "NVIDIA H000"
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64, "dtype": "float16",
}  # fmt: skip


class Trial:
    """Finds the last path of every problem."""

    def __init__(self, problem: Problem, widths: tuple[int, ...], device: torch.device, alone: object = None) -> None:
        assert sum(widths) == problem.n
        self.problem, self.alone = problem, alone

    def search(self, *, graph: bool) -> list[Plan]:
        assert graph is (self.problem.m <= 128) and self.alone == "lock"
        return routes(self.problem)

    def fastest(self, plans: list[Plan], *, graph: bool) -> Measured:
        assert graph is (self.problem.m <= 128) and self.alone is None
        return Measured(plans[-1], 5.0, 10.0, graph)


class Pool(ThreadPoolExecutor):
    """Works in this process."""

    def __init__(self, jobs: int, context: object, begin, arguments: tuple) -> None:
        assert 1 <= jobs <= 3 and context is CONTEXT
        begin(*arguments)
        super().__init__(1)


CONTEXT = SimpleNamespace(Lock=lambda: "lock")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path / "model"


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("EPILORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    monkeypatch.setattr(tune, "Trial", Trial)
    monkeypatch.delenv("EPILORA_TUNE", raising=False)
    monkeypatch.setattr(tune, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(tune.multiprocessing, "get_context", lambda name: CONTEXT if name == "spawn" else None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)


def run(*arguments: object):
    return CliRunner().invoke(app, ["tune", *map(str, arguments)])


def test_without_a_gpu_it_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "torch finds no device")
    result = run(folder)
    assert result.exit_code == 1 and "epilora: nothing to measure: torch finds no device." in result.stderr


def test_a_table_that_could_not_be_written_is_refused_first(folder: Path, hopper: None, tmp_path: Path) -> None:
    result = run(folder, "--out", tmp_path / "no" / "table.json")
    assert result.exit_code == 1 and "expected a file in an existing folder" in result.stderr


def test_a_gpu_without_kernels_is_refused(folder: Path, hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    result = run(folder)
    assert result.exit_code == 1 and "NVIDIA H000: nothing to tune: compute capability 8.0" in result.stderr


def test_a_folder_without_a_model_is_refused(tmp_path: Path, hopper: None) -> None:
    result = run(tmp_path)
    assert result.exit_code == 1 and "config.json: not found" in result.stderr


def test_every_size_is_searched_and_written(folder: Path, hopper: None, tmp_path: Path) -> None:
    out = tmp_path / "table.json"
    kept = key_of(Problem(16, 32, 32, 8))
    plan = routes(Problem(16, 32, 32, 8))[0]
    tables.write(out, GPU, (9, 0), {kept: Measured(plan, 1.0, 2.0, True)}, {})
    options = ["--rank", 8, "--adapters", 1, "--adapters", 3, "--tokens", 16, "--tokens", 200, "--graph-tokens", 128]
    result = run(folder, *options, "--jobs", 3, "--out", out)
    assert result.exit_code == 0, result.output
    # four projections of two sizes with 1 adapter and 3, which are 4, and bare
    assert "24 sizes on NVIDIA H000" in result.output and "10.0 -> 5.0 us" in result.output
    found = tables.read(out, GPU)
    assert kept in found and len(found) == 25
    assert {(key.tokens, key.adapters) for key in found} == {(m, s) for m in (16, 256) for s in (0, 1, 4)} | {(16, 1)}
    assert {(key.n, key.slices) for key in found if key.rank and key != kept} == {(128, 3), (64, 1), (192, 2)}
    assert {key.dtype for key in found if key != kept} == {"float16"}
    assert json.loads(out.read_text())["torch"] == torch.__version__


def test_by_default_the_users_table_is_written(folder: Path, hopper: None) -> None:
    result = run(folder, "--tokens", 16, "--jobs", 1)
    assert result.exit_code == 0, result.output
    assert str(choice.cached(GPU)) in result.output.replace("\n", "")
    assert len(tables.read(choice.cached(GPU), GPU)) == 8


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "not json",
        '{"gpu": "NVIDIA H100", "capability": [9, 0], "plans": []}',
        '{"gpu": "NVIDIA H000", "plans": [1, 2]}',
    ],
)
def test_a_file_that_is_no_table_of_this_gpu_is_left_alone(
    folder: Path, hopper: None, tmp_path: Path, text: str
) -> None:
    out = tmp_path / "file.json"
    out.write_text(text)
    result = run(folder, "--tokens", 16, "--out", out)
    assert result.exit_code == 1 and "expected a new file or a table of NVIDIA H000, got another file" in result.stderr
    assert out.read_text() == text


def test_a_folder_that_cannot_be_written_is_refused_before_the_search(
    folder: Path, hopper: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("EPILORA_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(Trial, "search", lambda self, graph: pytest.fail("it searched"))
    result = run(folder, "--tokens", 16)
    assert result.exit_code == 1 and "EPILORA_CACHE: expected a folder to write measured plans to" in result.stderr


def test_plans_that_are_switched_off_are_not_searched(
    folder: Path, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EPILORA_TUNE", "off")
    result = run(folder)
    assert result.exit_code == 1 and "EPILORA_TUNE=off: measured plans are not used" in result.stderr


def test_a_size_that_does_not_run_is_left_out_and_the_others_are_kept(
    folder: Path, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fastest(self: Trial, plans: list[Plan], *, graph: bool) -> Measured:
        if self.problem.n == 128:
            raise torch.OutOfMemoryError("no memory")
        return Measured(plans[-1], 5.0, 10.0, graph)

    monkeypatch.setattr(Trial, "fastest", fastest)
    result = run(folder, "--tokens", 16, "--jobs", 1)
    assert result.exit_code == 0 and "left out: no memory" in result.output
    assert {key.n for key in tables.read(choice.cached(GPU), GPU)} == {64, 192}


def test_what_was_found_before_an_error_is_kept(folder: Path, hopper: None, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []

    def search(self: Trial, *, graph: bool) -> list[Plan]:
        searched.append(self.problem.n)
        if len(searched) > 3:
            raise BrokenProcessPool("killed")
        return routes(self.problem)

    monkeypatch.setattr(Trial, "search", search)
    result = run(folder, "--tokens", 16, "--jobs", 1)
    assert result.exit_code == 1 and "a process was killed, for want of memory? Fewer --jobs take less" in result.stderr
    assert len(tables.read(choice.cached(GPU), GPU)) == 3


def test_a_config_whose_layout_is_not_known_is_told(folder: Path, hopper: None) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": "awq"}}))
    result = run(folder, "--tokens", 16, "--jobs", 1)
    assert result.exit_code == 0 and "layout: the checkpoint's own is not known" in " ".join(result.output.split())
