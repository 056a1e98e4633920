"""Time several variants of one computation side by side: rotated operands, CUDA graphs, interleaved rounds, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

__all__ = ["capture", "median_times"]

ROUNDS = 15


def median_times(
    variants: Mapping[str, Callable[[int], object]], copies: int, device: torch.device
) -> dict[str, float]:
    """Return each variant's median time of one call, in microseconds.

    Parameters
    ----------
    variants : dict of str to callable
        Each takes the number of an operand copy, 0 to ``copies - 1``; the calls go round all copies, so that weights
        come from memory and not from the cache.
    copies : int
        How many copies of the operands there are.
    device : torch.device
        On CUDA every variant's round is one CUDA graph, timed by events; elsewhere it is timed by the clock.

    Notes
    -----
    The variants take turns within every round, so a change of the GPU's clock meets all of them alike.
    """
    rounds = _cuda_rounds(variants, copies) if device.type == "cuda" else _cpu_rounds(variants, copies)
    return {name: statistics.median(times) / copies for name, times in rounds.items()}


def _cuda_rounds(variants: Mapping[str, Callable[[int], object]], copies: int) -> dict[str, list[float]]:
    graphs = {name: capture(step, copies) for name, step in variants.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in variants}
    for graph in graphs.values():
        graph.replay()
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    # Only now: the host has run ahead, so no replay waited for its launch.
    torch.cuda.synchronize()
    return {name: [1000 * start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}


def capture(step: Callable[[int], object], copies: int) -> torch.cuda.CUDAGraph:
    """Capture a step of every copy, 0 to ``copies - 1``, as one CUDA graph, warmed up before."""
    # The stream that is warmed up is the one that is captured: what a variant keeps for each stream (scratch, another
    # stream beside it) then exists. Twice, since a second call may go another way once the first has filled a cache.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(0)
        step(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # other threads may allocate meanwhile
    with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
        for copy in range(copies):
            step(copy)
    return graph


def _cpu_rounds(variants: Mapping[str, Callable[[int], object]], copies: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in variants}
    for step in variants.values():
        step(0)
    for _ in range(ROUNDS):
        for name, step in variants.items():
            start = time.perf_counter()
            for copy in range(copies):
                step(copy)
            times[name].append(1e6 * (time.perf_counter() - start))
    return times
