"""Whose counters a decode call gets, with a stand-in for CUDA's streams, and when launches are dependent."""

import itertools
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from torch_epilora.ops.triton import pdl, signals

GPU, OTHER = torch.device("cuda", 0), torch.device("cuda", 1)
POOL = 1024


class Streams:
    """The parts of ``torch`` that the module uses; memory is the CPU's, and a new tensor is counted."""

    int32 = torch.int32

    def __init__(self) -> None:
        self.stream, self.capturing, self.synchronized, self.made = 7, False, 0, []
        self.cuda = SimpleNamespace(
            is_current_stream_capturing=lambda: self.capturing,
            current_stream=lambda device: SimpleNamespace(synchronize=self.wait),
            stream=lambda stream: nullcontext(),
        )
        self.makers, self.full = [], False

    def wait(self) -> None:
        assert not self.capturing, "a capture cannot be synchronized"
        self.synchronized += 1

    def zeros(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.full:
            raise torch.OutOfMemoryError("no memory left")
        self.makers.append(threading.get_ident())
        self.made.append(torch.zeros(size, dtype=dtype))
        return self.made[-1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    found = Streams()
    for name, value in (("torch", found), ("_of_streams", {}), ("_pools", {}), ("_kept", []), ("_POOL", POOL)):
        monkeypatch.setattr(signals, name, value)
    monkeypatch.setattr(signals, "raw_stream", lambda device: found.stream)
    yield found


def capture(streams: Streams, size: int, device: torch.device = GPU) -> Tensor:
    streams.capturing = True
    try:
        return signals.take_signal(device, size)
    finally:
        streams.capturing = False


def span(t: Tensor) -> range:
    """The bytes a tensor holds."""
    return range(t.data_ptr(), t.data_ptr() + 4 * t.numel())


def apart(tensors: list[Tensor]) -> bool:
    spans = sorted((span(t) for t in tensors), key=lambda s: s.start)
    return all(a.stop <= b.start for a, b in itertools.pairwise(spans))


def test_calls_on_one_stream_share_counters_and_others_do_not(streams: Streams) -> None:
    first = signals.take_signal(GPU, 10)
    assert first.dtype == torch.int32 and first.numel() >= 10 and not first.any()
    made = len(streams.made)
    for size in (1, 10, 1024):
        assert signals.take_signal(GPU, size) is first
    assert len(streams.made) == made and streams.synchronized == 1, "a call on a known stream made something"
    streams.stream = 8
    second = signals.take_signal(GPU, 10)
    third = signals.take_signal(OTHER, 10)
    assert apart([first, second, third])
    streams.stream = 7
    assert signals.take_signal(GPU, 10) is first


def test_counters_do_not_come_from_a_pool_that_the_caller_has_set(streams: Streams) -> None:
    """Such a pool holds for its thread alone, and its owner may reuse what lies in it."""
    signals.take_signal(GPU, 10)
    assert streams.makers and threading.get_ident() not in streams.makers


def test_a_call_without_memory_leaves_the_stream_usable(streams: Streams) -> None:
    streams.full = True
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            signals.take_signal(GPU, 10)
    streams.full = False
    assert not signals.take_signal(GPU, 10).any() and not capture(streams, 10).any()
    assert signals._kept == []


def test_a_streams_handle_may_mean_another_stream_in_each_thread(streams: Streams) -> None:
    streams.stream = signals._PER_THREAD
    mine = signals.take_signal(GPU, 10)
    with ThreadPoolExecutor(1) as other:
        theirs = other.submit(signals.take_signal, GPU, 10).result()
    assert mine is signals.take_signal(GPU, 10) and theirs is not mine


def test_a_larger_call_gets_more_and_keeps_it(streams: Streams) -> None:
    signals.take_signal(GPU, 10)
    large = signals.take_signal(GPU, 5000)
    assert large.numel() >= 5000 and not large.any()
    assert signals.take_signal(GPU, 10) is large


def test_captured_calls_have_counters_of_their_own(streams: Streams) -> None:
    eager = signals.take_signal(GPU, 10)
    made = len(streams.made)
    taken = [capture(streams, size) for size in (3, 40, 32, 33, 1)]
    assert [t.numel() for t in taken] == [3, 40, 32, 33, 1] and not any(t.any() for t in taken)
    assert apart([eager, *taken]) and len(streams.made) == made, "memory was zeroed inside a capture"
    assert {(t.data_ptr() - taken[0].data_ptr()) % 128 for t in taken} == {0}, "two calls share a cache line"
    streams.stream = 8
    assert apart([eager, *taken, capture(streams, 3), signals.take_signal(GPU, 3)])


def test_a_capture_before_any_call_zeroes_its_own(streams: Streams) -> None:
    one, two = capture(streams, 10), capture(streams, 10)
    assert len(streams.made) == 2 and one is streams.made[0] and apart([one, two])
    assert streams.synchronized == 0


def test_a_spent_pool_is_right_and_is_filled_by_the_next_call(streams: Streams) -> None:
    signals.take_signal(GPU, 10)
    made = len(streams.made)
    pooled = [capture(streams, 32) for _ in range(POOL // 32)]
    assert len(streams.made) == made
    beyond = [capture(streams, 32) for _ in range(3)]
    assert len(streams.made) == made + 3 and apart([*pooled, *beyond])
    eager = signals.take_signal(GPU, 10)
    assert streams.synchronized == 2
    made = len(streams.made)
    fresh = [capture(streams, 32) for _ in range(5)]
    assert len(streams.made) == made and apart([*pooled, *beyond, *fresh, eager])
    assert not any(t.any() for t in fresh)
    kept = [t.untyped_storage().data_ptr() for t in signals._kept]
    assert kept == [pooled[0].untyped_storage().data_ptr()], "a graph's counters may be freed"


def test_a_pool_that_is_half_spent_is_replaced_outside_captures(streams: Streams) -> None:
    signals.take_signal(GPU, 10)
    for _ in range(POOL // 64 + 1):
        capture(streams, 32)
    signals.take_signal(GPU, 10)
    made = len(streams.made)
    for _ in range(POOL // 64):
        capture(streams, 32)
    assert len(streams.made) == made
    signals.take_signal(GPU, 10)
    assert len(streams.made) == made, "the pool is replaced although half of it is left"


def test_devices_have_pools_of_their_own(streams: Streams) -> None:
    signals.take_signal(GPU, 10)
    made = len(streams.made)
    capture(streams, 3, OTHER)
    assert len(streams.made) == made + 1, "counters of another GPU"
    signals.take_signal(OTHER, 10)
    made = len(streams.made)
    assert apart([capture(streams, 3, OTHER), capture(streams, 3)]) and len(streams.made) == made


def test_threads_that_capture_at_once_share_nothing(streams: Streams) -> None:
    signals.take_signal(GPU, 10)
    streams.capturing = True
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda size: signals.take_signal(GPU, size), [1, 2, 33, 5] * 5))
    assert apart(taken)


def test_the_cpu_has_counters_for_one_call() -> None:
    one, two = (signals.take_signal(torch.device("cpu"), 5) for _ in range(2))
    assert one.shape == (5,) and not one.any() and one.dtype == torch.int32 and apart([one, two])


# --- programmatic dependent launch ---------------------------------------------------------------------------------


class Probe:
    """Stands in for the kernel that is compiled to find out."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.calls = error, []

    def warmup(self, **options: object) -> None:
        self.calls.append(options)
        if self.error:
            raise self.error


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    found = Probe()
    monkeypatch.setattr(pdl, "probe_kernel", found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("EPILORA_DISABLE_PDL", raising=False)
    pdl.pdl_works.cache_clear()
    yield found
    pdl.pdl_works.cache_clear()


CPU = torch.device("cpu")  # the kernel is compiled for the current device: here nothing is


def test_the_probe_is_compiled_once_with_the_launch_it_asks_about(probe: Probe) -> None:
    assert pdl.pdl_works(CPU) and pdl.pdl_works(CPU)
    assert probe.calls == [{"grid": (1,), "launch_pdl": True}]


def test_a_compiler_that_fails_means_no_and_says_so(probe: Probe, caplog: pytest.LogCaptureFixture) -> None:
    """vllm#30872: "PassManager::run failed" on one architecture stopped every LoRA kernel."""
    probe.error = RuntimeError("PassManager::run failed")
    with caplog.at_level(logging.WARNING, logger=pdl.__name__):
        assert not pdl.pdl_works(CPU) and not pdl.pdl_works(CPU)
    assert len(caplog.records) == len(probe.calls) == 1
    assert "PassManager::run failed" in caplog.text and "no programmatic dependent launch" in caplog.text


@pytest.mark.parametrize(("value", "works"), [("1", False), ("0", True), ("", True)])
def test_the_environment_switches_it_off(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, value: str, works: bool
) -> None:
    monkeypatch.setenv("EPILORA_DISABLE_PDL", value)
    assert pdl.pdl_works(CPU) == works and bool(probe.calls) == works


@pytest.mark.parametrize(("capability", "works"), [((8, 9), False), ((9, 0), True), ((10, 0), True), ((12, 0), True)])
def test_gpus_before_hopper_have_no_such_launch(
    probe: Probe, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], works: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert pdl.pdl_works(CPU) == works and bool(probe.calls) == works
