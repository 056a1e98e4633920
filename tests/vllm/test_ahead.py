"""What is compiled while an engine loads: each kind of layer once for each bucket of batches."""

import logging
from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from tests.vllm.test_bases import K, N, base
from torch_epilora.integrations.vllm.ahead import compile_ahead
from torch_epilora.integrations.vllm.layers import AfterTheBase, InTheEpilogue
from torch_epilora.ops.compiling import compiles_only

SLOTS, RANK = 2, 8


@cache
def vllms(kind: type) -> type:
    return type(kind.__name__, (kind, nn.Module), {})


def layer(kind: type, *, k: int = K, n: int = N) -> nn.Module:
    made = kind.__new__(vllms(kind))
    nn.Module.__init__(made)
    made.base_layer = base(weight=torch.zeros(n, k).to(torch.float8_e4m3fn).t(), scales=n)
    made.lora_a_stacked = (torch.zeros(SLOTS, 1, RANK, k, dtype=torch.bfloat16),)
    made._ranks = torch.zeros(1, SLOTS, dtype=torch.int32)
    made.lora_b_stacked = (torch.zeros(SLOTS, 1, n, RANK, dtype=torch.bfloat16),)
    return made


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Counter:
    """Rows, and whether none is said to have an adapter, by operator."""
    found: Counter = Counter()
    for name, at in (("lora_linear", 0), ("lora_add_", 1)):
        operator = getattr(torch.ops.epilora, name)

        def counted(*arguments, name=name, at=at, operator=operator):
            flag = next(t for t in arguments if isinstance(t, torch.Tensor) and t.dtype == torch.bool)
            found[name, len(arguments[at]), bool(flag)] += compiles_only()  # several threads must not launch
            return operator(*arguments)

        monkeypatch.setattr(torch.ops.epilora, name, counted)
    return found


def test_each_kind_runs_once_for_each_bucket_with_adapters_and_without(ran):
    model = nn.Sequential(*(layer(InTheEpilogue) for _ in range(3)), layer(InTheEpilogue, n=64), layer(AfterTheBase))
    assert compile_ahead(model, 100) == 3 * 8 * 2
    buckets = [1, 2, 4, 8, 16, 32, 64, 100]
    want = {("lora_linear", m, bare): 2 for m in buckets for bare in (False, True)}
    assert ran == want | {("lora_add_", m, bare): 1 for m in buckets for bare in (False, True)}


def test_without_our_layers_nothing_runs(ran):
    assert compile_ahead(nn.Linear(2, 2), 100) == 0 and not ran


@pytest.mark.parametrize("error", [RuntimeError, TypeError])
def test_what_fails_is_logged_and_left_out(monkeypatch, caplog, error):
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)

    def fails(*arguments):
        raise error("no memory")

    monkeypatch.setattr(torch.ops.epilora, "lora_linear", fails)
    assert compile_ahead(nn.Sequential(layer(InTheEpilogue), layer(AfterTheBase)), 3) == 6
    assert "InTheEpilogue, 3 tokens: no memory" in caplog.text
