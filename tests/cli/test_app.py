"""The command as a whole: its help, an unknown command, and what it says without its libraries."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner

from torch_epilora.cli import app as entry
from torch_epilora.cli.commands import app


def test_help_lists_the_commands():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "doctor", "bench", "finetune"):
        assert command in result.output


def test_version_is_the_packages():
    import torch_epilora

    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.output.strip() == f"torch-epilora {torch_epilora.__version__}"


def test_without_arguments_it_shows_its_help():
    result = CliRunner().invoke(app, [])
    assert "doctor" in result.output
    assert "Traceback" not in result.output


def test_unknown_command_is_refused():
    result = CliRunner().invoke(app, ["train"])
    assert result.exit_code == 2
    assert "No such command 'train'" in result.output


def test_demo_refuses_a_folder_that_is_not_there():
    result = CliRunner().invoke(app, ["demo", "--adapters", "no/such/folder"])
    assert result.exit_code == 2
    assert "does not exist" in " ".join(result.output.replace("│", " ").split())


def test_demo_is_called_with_its_folder(monkeypatch, tmp_path):
    from torch_epilora.cli import demo

    seen = {}
    monkeypatch.setattr(demo, "run_demo", lambda **arguments: seen.update(arguments))
    assert CliRunner().invoke(app, ["demo", "--adapters", str(tmp_path)]).exit_code == 0
    assert seen == {"adapters_folder": tmp_path}


def test_demo_names_the_library_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_epilora.cli.demo", None)
    real = __import__

    def missing(name, *args, **kwargs):
        if name == "torch_epilora.cli.demo":
            raise ModuleNotFoundError("No module named 'peft'", name="peft")
        return real(name, *args, **kwargs)

    monkeypatch.setattr("builtins.__import__", missing)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert "peft is not installed; the demo needs the extra demo: run `make demo`, or" in result.output


def test_demo_names_the_library_that_it_lacks_once_it_runs(monkeypatch):
    from torch_epilora.cli import demo

    def run(**arguments):
        import no_such_library_here  # noqa: F401

    monkeypatch.setattr(demo, "run_demo", run)
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.output.strip() == (
        "epilora: no_such_library_here is not installed; the demo needs the extra demo: run `make demo`, or "
        "`pip install '.[demo]'` in the checkout"
    )


def test_demo_hides_no_fault_of_its_own(monkeypatch):
    from torch_epilora.cli import demo

    def run(**arguments):
        raise ModuleNotFoundError("No module named 'torch_epilora.x'", name="torch_epilora.x")

    monkeypatch.setattr(demo, "run_demo", run)
    assert isinstance(CliRunner().invoke(app, ["demo"]).exception, ModuleNotFoundError)


def test_without_typer_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch_epilora.cli.commands", None)
    real = __import__

    def missing(name, *args, **kwargs):
        if name == "torch_epilora.cli.commands":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
        return real(name, *args, **kwargs)

    monkeypatch.setattr("builtins.__import__", missing)
    with pytest.raises(SystemExit) as stopped:
        entry.main()
    assert stopped.value.code == (
        "epilora: typer is not installed; the command needs the extra cli: run `pip install '.[cli]'` in the checkout"
    )


def test_the_module_runs_as_the_command():
    command = [sys.executable, "-m", "torch_epilora.cli.app", "--help"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "200"})
    assert run.returncode == 0, run.stderr
    assert "bench" in run.stdout


def test_importing_the_command_imports_no_model_library():
    code = "import sys, torch_epilora.cli.commands; print(sorted({'transformers', 'peft', 'vllm'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "[]", run.stderr
