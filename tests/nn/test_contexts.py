"""Contexts of adapters(): in any order of their ends, over unloads, in CUDA graphs and on several streams."""

import copy
import logging
import threading

import pytest
import torch

import torch_epilora as te
from tests.nn.helpers import adapter, attention
from torch_epilora.nn import batch as batches
from torch_epilora.nn.batch import AdapterBatch

PLAIN = attention()


@pytest.fixture
def model():
    model = te.patch(copy.deepcopy(PLAIN), max_adapters=2)
    for seed, name in enumerate(("alice", "bob"), 1):
        te.load_adapter(model, name, adapter(PLAIN, seed=seed))
    return model


@torch.no_grad()
def under(model, names):
    with te.adapters(model, names):
        return model.o_proj(torch.ones(1, 64))


@torch.no_grad()
def now(model):
    return model.o_proj(torch.ones(1, 64))


def test_contexts_that_end_in_any_order_leave_the_one_that_is_open(model):
    bare, alice, bob = now(model), under(model, ["alice"]), under(model, ["bob"])

    def tenant(name):
        with te.adapters(model, [name]):
            yield

    first, second = tenant("alice"), tenant("bob")
    next(first), next(second)
    first.close()
    assert torch.equal(now(model), bob)
    second.close()
    assert torch.equal(now(model), bare)
    first, second = tenant("alice"), tenant("bob")
    next(first), next(second)
    second.close()
    assert torch.equal(now(model), alice)
    first.close()
    assert torch.equal(now(model), bare) and not torch.equal(alice, bob)


def test_a_thread_that_ends_later_takes_only_its_own_context_away(model):
    bare, entered, leave = now(model), threading.Event(), threading.Event()

    def other():
        with te.adapters(model, ["bob"]):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with te.adapters(model, ["alice"]):
        thread.start()
        entered.wait(10)
    leave.set()
    thread.join()
    assert torch.equal(now(model), bare)


def test_a_context_is_entered_once(model):
    state = model.q_proj.group.state
    context = te.adapters(model, ["alice"])
    with context, pytest.raises(RuntimeError, match="this context was entered before"):
        with context:
            pass
    assert state.batch is state.base
    with pytest.raises(RuntimeError, match="this context was entered before"):
        with context:
            pass
    assert state.batch is state.base


def test_as_a_decorator_it_is_a_new_context_every_call(model):
    state = model.q_proj.group.state

    @te.adapters(model, ["alice"])
    def chosen():
        return state.batch.chosen

    assert chosen() == chosen() == {"alice": 0} and state.batch is state.base


def test_an_adapter_of_an_outer_context_is_not_unloaded(model):
    with te.adapters(model, ["alice"]), te.adapters(model, ["bob"]):
        with pytest.raises(ValueError, match="'alice' is chosen for rows right now"):
            te.unload_adapter(model, "alice")
    te.unload_adapter(model, "alice")


@pytest.mark.parametrize("form", ["names", "slots"])
def test_a_context_made_early_follows_its_name(model, form):
    context = te.adapters(model, ["alice"] if form == "names" else torch.tensor([0]))
    te.unload_adapter(model, "alice")
    te.load_adapter(model, "mallory", adapter(PLAIN, seed=3))
    with pytest.raises(ValueError, match="got 'alice'; loaded are 'bob', 'mallory'"), context:
        pass
    context = te.adapters(model, ["bob"])
    te.unload_adapter(model, "bob")
    te.unload_adapter(model, "mallory")
    te.load_adapter(model, "bob", adapter(PLAIN, seed=2))
    with context:
        got = now(model)
    assert model.o_proj.group.state.slots == {"bob": 0} and torch.equal(got, under(model, ["bob"]))


def test_a_batch_whose_adapter_was_unloaded_is_not_entered_again(model):
    state = model.o_proj.group.state
    with te.adapters(model, ["alice"]):
        batch = state.batch
    te.unload_adapter(model, "alice")
    te.load_adapter(model, "mallory", adapter(PLAIN, seed=3))
    with pytest.raises(RuntimeError, match=r"\['alice'\] were unloaded since"):
        state.enter(batch)
    assert state.batch is state.base


def test_what_a_capture_used_lives_as_long_as_the_model(model, monkeypatch):
    state = model.o_proj.group.state
    with te.adapters(model, ["alice"]):
        now(model)
        monkeypatch.setattr(batches, "capturing", lambda device: True)
        now(model)
        monkeypatch.undo()
        batch = state.batch
        kept = batch.groups(torch.ones(1, 64))
        with torch.no_grad():
            for rows in range(2, 30):
                model.o_proj(torch.ones(rows, 64))
    assert state.captured == [batch]
    assert batch.groups(torch.ones(1, 64)).sorted_tokens is kept.sorted_tokens
    assert copy.deepcopy(model).o_proj.group.state.captured == []


def test_a_capture_uses_what_was_made_before_on_any_stream_and_keeps_nothing_it_makes(model, monkeypatch):
    batch = AdapterBatch([0], 2)
    before = batch.groups(torch.ones(2, 64))
    monkeypatch.setattr(batches, "capturing", lambda device: True)
    monkeypatch.setattr(batches, "_stream", lambda device: 7)
    assert batch.groups(torch.ones(2, 64)).sorted_tokens is before.sorted_tokens
    first, second = (batch.groups(torch.ones(3, 64)).sorted_tokens for _ in range(2))
    assert first is not second and torch.equal(first, second)


def test_streams_share_no_metadata(monkeypatch):
    batch, x = AdapterBatch([0, -1], 2), torch.ones(4, 64)
    first = batch.groups(x)
    monkeypatch.setattr(batches, "_stream", lambda device: 7)
    other = batch.groups(x)
    assert other.sorted_tokens is not first.sorted_tokens and torch.equal(other.starts, first.starts)
    assert batch.groups(x).sorted_tokens is other.sorted_tokens


def test_slots_go_to_a_gpu_from_pinned_memory_without_waiting(monkeypatch):
    seen = []

    class Host:
        def is_pinned(self):
            return "pinned" in seen

        def pin_memory(self):
            seen.append("pinned")
            return self

        def to(self, device, non_blocking=False):
            seen.append((device, non_blocking))
            return torch.zeros(1)

    monkeypatch.setattr(batches, "_stream", lambda device: 0)
    batch, device = AdapterBatch([0], 2), torch.device("cuda", 0)
    batch._host = Host()
    batch.prepare(device)
    batch.prepare(device)
    assert seen == ["pinned", (device, True)] and device in batch.slots


def test_the_bias_of_b_is_passed_only_while_an_adapter_has_one(model, monkeypatch, caplog):
    bank, biased = model.o_proj.group.bank, adapter(PLAIN, seed=3, lora_bias=True)
    te.load_adapter(model, "alice", biased)
    te.load_adapter(model, "bob", biased)
    te.load_adapter(model, "alice", adapter(PLAIN))
    assert bank.has_b_bias and len(bank.b_bias) == 1
    te.unload_adapter(model, "bob")
    assert not bank.has_b_bias and bank.b_bias == []
    with caplog.at_level(logging.WARNING):
        te.load_adapter(model, "bob", biased)
        assert not caplog.text
        te.unload_adapter(model, "bob")
        with te.adapters(model, ["alice"]):
            monkeypatch.setattr(batches, "capturing", lambda device: True)
            now(model)
            monkeypatch.undo()
        te.load_adapter(model, "bob", biased)
    assert caplog.text.count("is not in the CUDA graphs captured so far") == 1
