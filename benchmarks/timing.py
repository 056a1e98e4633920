"""What every benchmark shares beside ``torch_epilora.cli.timing``: how often to copy a weight, and where it ran."""

import os
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import triton


def copies(weight_bytes: int, *, at_least: int = 400_000_000) -> int:
    """Copies of a weight that exceed the L2 cache several times over."""
    return max(3, -(-at_least // weight_bytes))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, object]:
    """GPU, versions and commit, for the head of a result."""
    commit = os.environ.get("EPILORA_COMMIT")
    if commit is None:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
        )
        commit = git.stdout.strip() or "unknown"
    gpu = torch.cuda.get_device_properties(0)
    return {
        "gpu": gpu.name,
        "sms": gpu.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "vllm": _version("vllm"),
        "commit": commit,
    }
