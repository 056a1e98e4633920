"""Launches past Triton's own: the kernel it found for the same values, and its own launch where they could differ."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from torch_epilora.ops import memory
from torch_epilora.ops.compiling import compiling_only
from torch_epilora.ops.triton import launch


class Compiled:
    """A compiled kernel that writes down what it is launched with."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple] = []

    def run(self, *arguments) -> None:
        self.runs.append(arguments)


class Kernel:
    """A kernel of three pointers, two integers and two constants; Triton compiles it at each of its own launches."""

    arg_names = ("x_ptr", "a_ptrs", "y_ptr", "M", "widths", "BM", "SPLIT")

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.compiled: list[tuple] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments, **constants) -> Compiled:
            compiled = Compiled()
            self.launches.append((grid, arguments, constants, compiled))
            return compiled

        return run

    def warmup(self, *arguments, **constants) -> None:
        self.compiled.append((arguments, constants))


def shape(m: int = 3, widths: tuple[int, ...] = (5, 6), config: int = 7) -> launch.Shape:
    # the constants stand in another order than the kernel's parameters do
    return (m, 2), (m, widths), {"SPLIT": config + 1, "BM": config, "num_warps": 4}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    active = SimpleNamespace(get_current_stream=lambda device: 100 + device)
    monkeypatch.setattr(launch.triton.runtime.driver, "_active", active, raising=False)
    return Kernel()


def tensors(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    x, a0, a1, y = (torch.empty(64, dtype=dtype) for _ in range(4))
    return x, (a0, a1), y


# --- one launch -------------------------------------------------------------------------------------------------------


def test_the_second_time_what_triton_found_is_launched(kernel: Kernel) -> None:
    one = launch.Launch(kernel, shape())
    first, second = tensors(), tensors()
    one._on(2, first)
    ((grid, arguments, constants, compiled),) = kernel.launches
    assert grid == (3, 2) and constants == {"SPLIT": 8, "BM": 7, "num_warps": 4} and not compiled.runs
    assert arguments == (*first, 3, (5, 6))
    one._on(2, second)
    x, a, y = second
    addresses = x.data_ptr(), tuple(t.data_ptr() for t in a), y.data_ptr()
    # Triton's launcher: grid, stream, kernel, its metadata, no hooks, then all parameters in order
    assert compiled.runs == [(3, 2, 1, 102, "function", "metadata", None, None, None, *addresses, 3, (5, 6), 7, 8)]
    assert len(kernel.launches) == 1


def test_a_thread_that_only_compiles_launches_nothing_and_keeps_nothing(kernel: Kernel) -> None:
    one, given = launch.Launch(kernel, shape()), tensors()
    with compiling_only():
        one._on(2, given)
        assert kernel.compiled == [((*given, 3, (5, 6)), {"grid": (3, 2), "SPLIT": 8, "BM": 7, "num_warps": 4})]
        assert launch.stream_for(0, [16, 32]) is None, "launches by address would follow"
        with compiling_only():
            pass
        assert launch.stream_for(0, [16, 32]) is None
        other = threading.Thread(target=one._on, args=(2, given))
        other.start()
        other.join()
        assert len(kernel.launches) == 1 and len(kernel.compiled) == 1, "another thread launches"
        one._on(2, given)
    ((*_, compiled),) = kernel.launches
    assert len(kernel.compiled) == 2 and not compiled.runs
    one._on(2, given)
    assert len(compiled.runs) == 1 and launch.stream_for(0, [16, 32]) == 100


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_pointer_off_16_bytes_is_left_to_triton(kernel: Kernel, which: int) -> None:
    pointers = list(tensors())
    pointers[which] = (pointers[1][0], pointers[1][1][1:]) if which == 1 else pointers[which][1:]
    one = launch.Launch(kernel, shape())
    for off in (True, True, False, True):  # neither kept, nor launched as what is kept
        one._on(0, tuple(pointers) if off else tensors())
    assert len(kernel.launches) == 4 and not any(compiled.runs for *_, compiled in kernel.launches)
    one._on(0, tensors())
    assert len(kernel.launches) == 4 and len(kernel.launches[2][3].runs) == 1


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_every_launch(kernel: Kernel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = launch.Launch(kernel, shape())
    one._on(0, tensors())
    with monkeypatch.context() as patch:
        patch.setattr(launch.triton.knobs.runtime, name, lambda metadata: None)
        one._on(0, tensors())
    assert len(kernel.launches) == 2


def test_the_interpreter_has_every_launch(kernel: Kernel) -> None:
    one = launch.Launch(kernel, shape())
    for _ in range(2):
        x, *others = tensors()
        one(x, x, *others)
    assert len(kernel.launches) == 2


def test_on_a_stream_addresses_are_launched_as_they_are(kernel: Kernel) -> None:
    one = launch.Launch(kernel, shape())
    one._on(2, tensors())
    stream = launch.stream_for(2, [16, 160])
    assert stream == 102
    one(stream, 16, (32, 48), 64)
    ((*_, compiled),) = kernel.launches
    assert compiled.runs[0][3:] == (102, "function", "metadata", None, None, None, 16, (32, 48), 64, 3, (5, 6), 7, 8)


def test_no_stream_is_found_where_triton_has_to_look(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch.stream_for(0, [16, 32]) == 100
    assert launch.stream_for(0, [16, 24, 32]) is None, "an address off 16 bytes"
    assert launch.stream_for(-1, [16, 32]) is None, "the CPU"
    monkeypatch.setattr(launch.triton.knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert launch.stream_for(0, [16, 32]) is None, "a profiler"


# --- launches by what they depend on ----------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[launch.Shape]:
    """Shapes of the launches that are made anew."""
    found: list[launch.Shape] = []

    class Counted(launch.Launch):
        def __init__(self, kernel, shape: launch.Shape) -> None:
            found.append(shape)
            super().__init__(kernel, shape)

    monkeypatch.setattr(launch, "_kept", {})
    monkeypatch.setattr(launch, "Launch", Counted)
    return found


def call(kernel: Kernel, pointers: tuple, *, m: int = 3, widths: tuple[int, ...] = (5, 6), config: int = 7) -> None:
    kinds = 0, *(t.dtype for t in (pointers[0], *pointers[1], pointers[2]))
    launch.kept(kernel, kinds, shape, m, widths, config)._on(0, pointers)


@pytest.mark.parametrize(
    "other",
    [{}, {"m": 4}, {"widths": (5, 7)}, {"config": 8}, {"dtype": torch.float16}, {"mixed": True}],
    ids=lambda other: next(iter(other), "same"),
)
def test_only_the_same_values_and_types_share_a_launch(kernel: Kernel, made: list, other: dict) -> None:
    call(kernel, tensors())
    same, other = not other, dict(other)
    pointers = tensors(other.pop("dtype", torch.bfloat16))
    if other.pop("mixed", False):
        pointers = (*pointers[:2], pointers[2].view(torch.float16))
    call(kernel, pointers, **other)
    assert len(made) == (1 if same else 2)


def test_what_is_kept_is_bounded(kernel: Kernel, made: list, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "MOST", 3)
    for m in range(10):
        call(kernel, tensors(), m=m)
        assert 1 <= len(launch._kept) <= 3
    assert len(made) == 10
