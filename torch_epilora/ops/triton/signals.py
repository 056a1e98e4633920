"""Counters by which programs wait for each other or find the last one: zero before a call, and zero after it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from torch_epilora.ops.triton.launch import raw_stream

COUNTERS, BESIDE, HEADER = 3, 4, 8
"""A decode kernel's counters are the first integers of a signal, or those from BESIDE on where it runs beside K1 and so
does not wait for the kernel before. From HEADER on stands one for each tile of h."""

_ALIGNED = 32  # integers: calls in flight at once do not share a cache line
_POOL = 1 << 18  # integers of a pool: 1 MiB, 8,192 captured signals of up to 24 tiles of h, some 2,000 of 100
_PER_THREAD = 2  # the handle of cudaStreamPerThread

_lock = threading.Lock()
_of_streams: dict[tuple[torch.device, int, int], Tensor] = {}
_pools: dict[torch.device, tuple[Tensor, int]] = {}
_kept: list[Tensor] = []


def take_signal(device: torch.device, size: int) -> Tensor:
    """Return zeroed int32 counters that no call running at the same time uses.

    Calls on one stream run one after the other and share that stream's counters. A call that is being captured into a
    CUDA graph gets counters of its own, for good: its graph may be replayed on any stream, but two executables made of
    one graph must not run at the same time.

    Parameters
    ----------
    device : torch.device
        Where the kernel runs: the current one.
    size : int
        Integers needed.

    Returns
    -------
    Tensor
        int32, at least ``size`` long, all zero whenever no kernel is using it.
    """
    if device.type != "cuda":
        return torch.zeros(size, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _captured(device, size)
    stream = raw_stream(device.index)
    # one handle names another stream in each thread
    key = device, stream, threading.get_ident() if stream == _PER_THREAD else 0
    signal = _of_streams.get(key)
    if signal is None or signal.shape[0] < size or _pools[device][1] > _POOL // 2:
        with _lock:
            _refill(device)
            signal = _zeros(max(size, 1024), device)
            _of_streams[key] = signal
    return signal


def _zeros(size: int, device: torch.device) -> Tensor:
    """Zeroed counters of the ordinary allocator: a memory pool that the caller has set holds for its thread alone."""
    stream = torch.cuda.current_stream(device)

    def make() -> Tensor:
        with torch.cuda.stream(stream):
            return torch.zeros(size, dtype=torch.int32, device=device)

    with ThreadPoolExecutor(1) as other:
        return other.submit(make).result()


def _refill(device: torch.device) -> None:
    """Keep a pool for captures that is at least half free: memory cannot be zeroed just once during a capture."""
    pool, used = _pools.get(device, (None, _POOL))
    if used > _POOL // 2:
        fresh = _zeros(_POOL, device)
        torch.cuda.current_stream(device).synchronize()  # a graph on any stream must find it zeroed
        if pool is not None:
            _kept.append(pool)  # graphs hold parts of it
        _pools[device] = (fresh, 0)


def _captured(device: torch.device, size: int) -> Tensor:
    rounded = -(-size // _ALIGNED) * _ALIGNED
    with _lock:
        pool, used = _pools.get(device, (None, _POOL))
        if pool is not None and used + rounded <= _POOL:
            _pools[device] = (pool, used + rounded)
            return pool[used : used + size]
    # nothing prepared: counters in the graph's own memory, which each replay zeroes first
    return torch.zeros(size, dtype=torch.int32, device=device)
