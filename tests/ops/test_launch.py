"""Launches past Triton's own: the kernel it found for the same values, and its own launch where they could differ."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

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

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*arguments, **constants) -> Compiled:
            compiled = Compiled()
            self.launches.append((grid, arguments, constants, compiled))
            return compiled

        return run


def shape(m: int, widths: tuple[int, ...], config: int) -> launch.Shape:
    # the constants stand in another order than the kernel's parameters do
    return (m, 2), (m, widths), {"SPLIT": config + 1, "BM": config, "num_warps": 4}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    monkeypatch.setattr(launch, "_kept", {})
    active = SimpleNamespace(get_current_stream=lambda device: 100 + device)
    monkeypatch.setattr(launch.triton.runtime.driver, "_active", active, raising=False)
    yield Kernel()


def tensors(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    x, a0, a1, y = (torch.empty(64, dtype=dtype) for _ in range(4))
    return x, (a0, a1), y


def call(kernel: Kernel, pointers: tuple, *, device: int = 0, m: int = 3, widths=(5, 6), config: int = 7) -> None:
    launch._launch(kernel, device, pointers, shape, (m, widths, config))


def test_the_second_call_launches_what_triton_found(kernel: Kernel) -> None:
    first, second = tensors(), tensors()
    call(kernel, first)
    ((grid, arguments, constants, compiled),) = kernel.launches
    assert grid == (3, 2) and constants == {"SPLIT": 8, "BM": 7, "num_warps": 4} and not compiled.runs
    assert arguments == (*first, 3, (5, 6))
    call(kernel, second, device=0)
    x, a, y = second
    addresses = x.data_ptr(), tuple(t.data_ptr() for t in a), y.data_ptr()
    # Triton's launcher: grid, stream, kernel, its metadata, no hooks, then all parameters in order
    assert compiled.runs == [(3, 2, 1, 100, "function", "metadata", None, None, None, *addresses, 3, (5, 6), 7, 8)]
    assert len(kernel.launches) == 1


@pytest.mark.parametrize(
    "other",
    [dict(m=4), dict(widths=(5, 7)), dict(config=8), dict(device=1), dict(dtype=torch.float16), dict(mixed=True)],
    ids=lambda other: next(iter(other)),
)
def test_what_could_be_another_kernel_is_left_to_triton(kernel: Kernel, other: dict) -> None:
    call(kernel, tensors())
    pointers = tensors(other.pop("dtype", torch.bfloat16))
    if other.pop("mixed", False):
        pointers = (*pointers[:2], pointers[2].view(torch.float16))
    call(kernel, pointers, **other)
    assert len(kernel.launches) == 2 and not any(compiled.runs for *_, compiled in kernel.launches)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_pointer_off_16_bytes_is_left_to_triton(kernel: Kernel, which: int) -> None:
    pointers = list(tensors())
    pointers[which] = (pointers[1][0], pointers[1][1][1:]) if which == 1 else pointers[which][1:]
    for _ in range(2):
        call(kernel, tuple(pointers))
    assert len(kernel.launches) == 2 and not launch._kept
    call(kernel, tensors())
    call(kernel, tuple(pointers))
    assert len(kernel.launches) == 4 and not any(compiled.runs for *_, compiled in kernel.launches)


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_every_launch(kernel: Kernel, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call(kernel, tensors())
    monkeypatch.setattr(launch.triton.knobs.runtime, name, lambda metadata: None)
    call(kernel, tensors())
    assert len(kernel.launches) == 2
    monkeypatch.undo()


def test_what_is_kept_is_bounded(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_MOST", 3)
    for m in range(10):
        call(kernel, tensors(), m=m)
        assert 1 <= len(launch._kept) <= 3
