"""Timing that every benchmark shares: CUDA graphs over rotated weights, interleaved variants, medians."""

import os
import subprocess
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import triton


def capture(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """Warm up and capture all calls, one a copy of the weights, into one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def interleaved_us(variants: dict[str, Sequence[Callable[[], object]]], *, rounds: int = 11) -> dict[str, float]:
    """Median microseconds a call of each variant.

    Each variant is a list of calls, one for each copy of the weights, so that no weight comes from L2 when the copies
    together exceed it. Rounds go through the variants in turn, so that drift meets all of them alike.
    """
    graphs = {name: capture(calls) for name, calls in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(rounds + 2):
        for name, graph in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            if i >= 2:
                times[name].append(begin.elapsed_time(end) * 1e3 / len(variants[name]))
    return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


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
