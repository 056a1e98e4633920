"""What every benchmark shares beside ``torch_epilora.ops.timing``: what it needs, copies of a weight, where it ran."""

import argparse
import os
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import triton

from torch_epilora.cli.machine import why_no_gpu


def copies(weight_bytes: int, *, at_least: int = 400_000_000) -> int:
    """Copies of a weight that exceed the L2 cache several times over."""
    return max(3, -(-at_least // weight_bytes))


def need_gpu() -> None:
    """Leave with an error where torch finds no CUDA device: call it once the command line has been read."""
    reason = why_no_gpu()
    if reason is not None:
        sys.exit(
            f"nothing to measure: {reason}. A benchmark needs a CUDA GPU; "
            "`epilora bench --quick --cpu` times the reference on the CPU."
        )


def check_out(parser: argparse.ArgumentParser, out: Path | None) -> None:
    """Refuse a result file that could not be written, before anything is measured."""
    if out is None:
        return
    if not out.parent.is_dir():
        parser.error(f"--out: expected a file in an existing folder, but {out} came: make {out.parent} first")
    if out.is_dir():
        parser.error(f"--out: expected a file, but the folder {out} came: name a file in it")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add how often to measure, and where to write."""
    parser.add_argument("--repeat", type=int, default=3, help="repeats of each projection's measurement")
    parser.add_argument("--out", type=Path)


def check_run_options(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse what ``add_run_options`` does not take."""
    if options.repeat < 1:
        parser.error(f"--repeat: expected at least 1, but {options.repeat} came")
    check_out(parser, options.out)


def wrong(where: str, left_out: dict[str, str]) -> bool:
    """Print what was left out; say whether any of it was a wrong result."""
    for system, reason in left_out.items():
        print(f"  {where}: left out {system}: {reason}", flush=True)
    return any(reason.startswith("wrong") for reason in left_out.values())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _command(arguments: list[str]) -> str:
    """The command's arguments, but for where this machine was to write the result."""
    if "--out" in arguments:
        at = arguments.index("--out")
        arguments = arguments[:at] + arguments[at + 2 :]
    return shlex.join(arguments)


def environment() -> dict[str, object]:
    """GPU, versions, commit and the command's arguments, for the head of a result."""
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
        "command": _command(sys.argv[1:]),
    }
