"""Slots that do not fit in memory: a named error, and the model as it was."""

import copy
import sys

import pytest
import torch
from torch import nn

import torch_epilora as te
from tests.nn.helpers import llama, same, snapshot, tokens
from tests.nn.test_peft import wrapped
from torch_epilora.nn import bank as banks
from torch_epilora.nn.linear import lora_linears

HUGE = {"max_rank": 2**40}
MATCH = (
    r"max_adapters, max_rank: expected slots that fit in memory, got 8 of rank 1099511627776, which take [\d,]+ bytes"
)


@pytest.fixture
def fails_late(monkeypatch):
    """Let the fifth bank find no memory."""
    zeros, calls = torch.zeros, []

    def limited(*args, **kwargs):
        calls.append(args)
        if len(calls) > 40:
            raise torch.OutOfMemoryError("no memory")
        return zeros(*args, **kwargs)

    class Torch:
        zeros = staticmethod(limited)

        def __getattr__(self, name):
            return getattr(torch, name)

    monkeypatch.setattr(banks, "torch", Torch())
    return calls


def test_patch_names_the_bytes():
    model = llama()
    before = snapshot(model)
    with pytest.raises(ValueError, match=MATCH):
        te.patch(model, **HUGE)
    assert same(before, snapshot(model)) and not lora_linears(model) and not model._forward_hooks
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


def test_patch_that_fails_midway_changes_nothing(fails_late):
    model = llama()
    before = snapshot(model)
    with pytest.raises(ValueError, match="expected slots that fit in memory"):
        te.patch(model)
    assert len(fails_late) > 40 and same(before, snapshot(model)) and not lora_linears(model)


@pytest.mark.parametrize("where", ["slots", "loading"])
def test_a_peft_model_keeps_its_adapters(where, monkeypatch):
    model = wrapped()
    before, ids = snapshot(model), tokens(1, 4)
    with torch.no_grad():
        want = model(ids).logits
    if where == "slots":
        with pytest.raises(ValueError, match=MATCH):
            te.patch(model, **HUGE)
    else:
        module = sys.modules["torch_epilora.nn.patch"]  # its name in the package is that of the function
        monkeypatch.setattr(module, "load_adapter", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            te.patch(model)
    assert same(before, snapshot(model)) and not lora_linears(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, want)
        with model.disable_adapter():
            assert not torch.equal(model(ids).logits, want)


@pytest.mark.parametrize("way", ["huge", "midway"])
def test_load_quantized_writes_nothing_before_there_is_memory(tmp_path, way, request):
    source = llama(attention_bias=True)
    for name, parameter in source.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    te.save_quantized(te.patch(copy.deepcopy(source)), tmp_path)
    model = llama(attention_bias=True)
    before = snapshot(model)
    if way == "midway":
        request.getfixturevalue("fails_late")
    with pytest.raises(ValueError, match="expected slots that fit in memory"):
        te.load_quantized(tmp_path, model, **(HUGE if way == "huge" else {}))
    assert same(before, snapshot(model)) and not lora_linears(model)
    request.getfixturevalue("monkeypatch").undo()
    te.load_quantized(tmp_path, model)
    want = source.model.layers[1].self_attn.k_proj.bias
    assert torch.equal(model.model.layers[1].self_attn.k_proj.bias, want) and want.abs().sum() > 0
