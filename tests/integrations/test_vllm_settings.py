"""The vLLM plugin's switches, and that its entry point is there and imports nothing of vLLM."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from torch_epilora.integrations.vllm import register
from torch_epilora.integrations.vllm.settings import MODE, VLLM, Settings, read_settings


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (VLLM, MODE):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "engine", "want"),
    [
        ({}, {}, Settings(True, "w8a8")),
        ({}, {"other": 1}, Settings(True, "w8a8")),
        ({VLLM: "on", MODE: "w8a16"}, {}, Settings(True, "w8a16")),
        ({VLLM: "", MODE: ""}, {}, Settings(True, "w8a8")),
        ({VLLM: "off"}, {}, Settings(False, "w8a8")),
        ({MODE: "w8a16"}, {"epilora": {"mode": "w8a8"}}, Settings(True, "w8a8")),
        ({}, {"epilora": {"enabled": False}}, Settings(False, "w8a8")),
        ({VLLM: "off"}, {"epilora": {"enabled": True}}, Settings(False, "w8a8")),
        ({VLLM: "off", MODE: "fp4"}, {"epilora": 3}, Settings(False, "w8a8")),
        ({}, object(), Settings(True, "w8a8")),
    ],
)
def test_an_engines_entry_counts_before_the_environment_but_off_is_final(
    monkeypatch: pytest.MonkeyPatch, environment: dict, engine: object, want: Settings
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert read_settings(engine) == want


@pytest.mark.parametrize(
    ("environment", "engine", "error", "message"),
    [
        ({VLLM: "0"}, {}, ValueError, r"EPILORA_VLLM: expected one of on, off, got '0'"),
        ({MODE: "fp4"}, {}, ValueError, r"EPILORA_VLLM_MODE: expected one of w8a8, w8a16, got 'fp4'"),
        ({}, {"epilora": "off"}, TypeError, r"additional_config\['epilora'\]: expected a dict, got str"),
        ({}, {"epilora": {"enable": True}}, ValueError, r"expected the entries enabled and mode, got enable"),
        ({}, {"epilora": {"enabled": "no"}}, TypeError, r"\['enabled'\]: expected true or false, got 'no'"),
        ({}, {"epilora": {"mode": None}}, ValueError, r"\['mode'\]: expected one of w8a8, w8a16, got None"),
    ],
)
def test_other_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict, engine: object, error: type, message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=message):
        read_settings(engine)


def test_switched_off_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VLLM, "off")
    before = set(sys.modules)
    register()
    assert "torch_epilora.integrations.vllm.load" not in set(sys.modules) - before


def test_vllm_finds_it() -> None:
    (found,) = (point for point in entry_points(group="vllm.general_plugins") if point.name == "epilora")
    assert found.load() is register


def test_importing_it_imports_nothing_of_vllm() -> None:
    script = (
        "import sys, torch_epilora.integrations.vllm as plugin\n"
        "names = [name for name in sys.modules if name.split('.')[0] == 'vllm']\n"
        "assert not names and plugin.register, names\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
