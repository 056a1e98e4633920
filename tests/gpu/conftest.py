"""Everything under this folder needs a CUDA GPU: it is marked `gpu`, and deselected where torch finds none."""

import json
import os
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent


def _why_not() -> str | None:
    """Return None where these tests can run, otherwise the reason why they cannot."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark this folder's tests; deselect them, and say why, where there is no GPU."""
    here = {id(item): item for item in items if FOLDER in item.path.parents}
    for item in here.values():
        item.add_marker(pytest.mark.gpu)
    reason = _why_not()
    if here and reason is not None:
        config.hook.pytest_deselected(items=list(here.values()))
        items[:] = [item for item in items if id(item) not in here]
        config.issue_config_time_warning(pytest.PytestWarning(f"tests/gpu is deselected: {reason}"), stacklevel=2)


@pytest.fixture
def record():
    """Append a measurement as a JSON line under the folder that EPILORA_TEST_RECORD names, if it names one."""
    folder = os.environ.get("EPILORA_TEST_RECORD")

    def write(**row: object) -> None:
        if folder:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
            with open(Path(folder) / f"record_{worker}.jsonl", "a") as out:
                out.write(json.dumps(row) + "\n")

    return write
