"""These tests start real vLLM engines: `make test-vllm` runs them, where vLLM is; elsewhere none is collected.

Asked for by name without vLLM, pytest finds no test and exits with status 5, so that `make test-vllm` fails.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A tiny model in bf16, which an engine quantizes itself, and its FP8 checkpoint that this library writes."""
    from tests.vllm import tiny  # not at the top: transformers may be missing where nothing is collected

    folder = tmp_path_factory.mktemp("models")
    plain = tiny.write_model(folder / "plain")
    return {"plain": plain, "fp8": tiny.write_fp8(plain, folder / "fp8")}


@pytest.fixture(scope="session")
def adapters(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """PEFT folders by adapter name."""
    from tests.vllm import tiny

    return tiny.write_adapters(checkpoints["plain"], tmp_path_factory.mktemp("adapters"))
