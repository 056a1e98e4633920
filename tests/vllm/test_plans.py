"""Plans are timed while an engine loads where that is asked for: of its FP8 layers and of the batches it captures."""

import logging
import threading

import pytest
import torch
from torch import nn

from tests.vllm.test_ahead import layer
from tests.vllm.test_bases import K, N
from torch_epilora.integrations.vllm import plans
from torch_epilora.integrations.vllm.layers import AfterTheBase, InTheEpilogue
from torch_epilora.ops.plan import Problem

HOPPER = (9, 0)


def model() -> nn.Module:
    return nn.Sequential(layer(InTheEpilogue), layer(InTheEpilogue), layer(InTheEpilogue, n=64), layer(AfterTheBase))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    found: list[dict] = []

    def tune_projections(projections, device, **more):
        found.append({"projections": list(projections), "device": device, "thread": threading.current_thread(), **more})
        return 7

    monkeypatch.setattr(plans, "tune_projections", tune_projections)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    monkeypatch.setenv("EPILORA_TUNE", "full")
    return found


def test_each_projection_is_timed_for_the_captured_sizes_and_powers_of_two(timed):
    assert plans.time_plans(model(), [1, 2, 4, 24], 100) == 7
    (call,) = timed
    shape = {"rank": 8, "groups": 3, "layout": "channel", "capability": HOPPER, "codes": True}
    assert call["projections"] == [(Problem(1, n, K, **shape), (n,)) for n in (N, 64)]
    assert call["tokens"] == {1, 2, 4, 8, 16, 24, 32, 64, 100} and call["graph_tokens"] == 32
    assert call["thread"] is not threading.current_thread(), "vLLM's memory pool is this thread's"


def test_an_engine_without_graphs_times_calls_launched_one_by_one(timed):
    plans.time_plans(model(), [], 4)
    assert timed[0]["graph_tokens"] == 0 and timed[0]["tokens"] == {1, 2, 4}


@pytest.mark.parametrize("error", [OSError, Exception])
def test_what_fails_is_logged_and_the_engine_goes_on(timed, monkeypatch, caplog, error):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def fails(*arguments, **more):
        raise error("no folder")

    monkeypatch.setattr(plans, "tune_projections", fails)
    assert plans.time_plans(model(), [1], 4) == 0 and "plans were not measured: no folder" in caplog.text
    assert plans.time_plans(nn.Linear(2, 2), [1], 4) == 0


@pytest.mark.parametrize("mode", ["off", "cached", None])
def test_it_is_done_only_where_it_was_asked_for(timed, monkeypatch, mode):
    monkeypatch.delenv("EPILORA_TUNE")
    if mode:
        monkeypatch.setenv("EPILORA_TUNE", mode)
    assert plans.time_plans(model(), [1], 4) == 0 and not timed
