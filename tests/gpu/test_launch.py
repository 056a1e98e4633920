"""Launches past Triton's own on the GPU: the same bits, other operands of the same shape, other devices."""

from dataclasses import replace

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.cases import make_case, oracle, sqnr
from tests.gpu.paths import paths_at
from torch_epilora.ops import dispatch
from torch_epilora.ops.triton import launch

pytestmark = pytest.mark.usefixtures("nothing_kept")


@pytest.fixture
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_runs", {})
    monkeypatch.setattr(dispatch, "_last", {})
    monkeypatch.setattr(launch, "_kept", {})


def refuse(*args, **kwargs) -> None:
    raise AssertionError("Triton's own launch ran")


@pytest.mark.parametrize("layout", ["channel", "block"])
@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
@pytest.mark.parametrize("path, m", paths_at(5, 32, 300))
def test_repeated_calls_go_past_triton_with_the_same_bits(
    path: str, m: int, compute: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(m, 512, [256, 128], 24, 5, compute=compute, layout=layout, b_bias=True, device="cuda")
    other = make_case(m, 512, [256, 128], 24, 5, compute=compute, layout=layout, b_bias=True, seed=1, device="cuda")
    first = case.run(path)
    assert len(dispatch._runs) == 1
    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", refuse)
        assert torch.equal(case.run(path), first)
        got = other.run(path)
    assert len(dispatch._runs) == 1 and sqnr(got, oracle(other)) > 40
    dispatch._runs.clear()
    dispatch._last.clear()
    launch._kept.clear()
    assert torch.equal(other.run(path), got)


@pytest.mark.parametrize("path, m", paths_at(16, 300))
def test_operands_off_16_bytes_are_right_after_aligned_ones(path: str, m: int) -> None:
    case = make_case(m, 512, [256, 128], 24, 3, mixed_ranks=False, device="cuda")
    want = case.run(path)
    room = torch.empty(case.x.numel() + 1, dtype=case.x.dtype, device="cuda")
    moved = room[1:].view_as(case.x).copy_(case.x)
    assert moved.data_ptr() % 16
    for _ in range(2):
        assert torch.equal(replace(case, x=moved).run(path), want)
    assert torch.equal(case.run(path), want)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("path, m", paths_at(16, 300))
def test_another_gpu_gets_its_own_kernels(path: str, m: int) -> None:
    case = make_case(m, 512, [256, 128], 24, 3, mixed_ranks=False, device="cuda:0")
    want = case.run(path)
    elsewhere = case.to("cuda:1")
    for _ in range(2):
        assert torch.equal(elsewhere.run(path).to("cuda:0"), want)
