"""Gradients: to inputs and to the slots, through stacked layers, with and without gradient checkpointing."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_epilora as te
from tests.nn.helpers import adapter, attention, dequantized, llama, tokens
from torch_epilora.nn.linear import lora_linears

NAMES = ["a", None, "b", "a"]


def trainable(compute="w8a16"):
    plain = llama()
    model = te.patch(copy.deepcopy(plain), compute=compute, max_adapters=2, max_rank=8)
    te.load_adapter(model, "a", adapter(plain, r=8, seed=1))
    te.load_adapter(model, "b", adapter(plain, r=4, seed=2))
    for linear in lora_linears(model).values():
        for tensor in (*linear.group.bank.a, *linear.group.bank.b):
            tensor.requires_grad_(True)
    return plain, model.train()


def slot_gradients(model):
    return {
        f"{path}.{kind}{i}": tensor.grad
        for path, linear in lora_linears(model).items()
        if linear.index == 0
        for kind, tensors in (("a", linear.group.bank.a), ("b", linear.group.bank.b))
        for i, tensor in enumerate(tensors)
    }


def loss_of(model, ids):
    return model(ids, labels=ids).loss


def cosine(a, b):
    return nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


class Reference(nn.Module):
    """The same layer with plain fp32 autograd over dequantized weights and per-row adapters."""

    def __init__(self, linear, names):
        super().__init__()
        member, bank, state = linear.group.members[linear.index], linear.group.bank, linear.group.state
        self.slots = [state.slots.get(name, -1) for name in names]
        self.weight = (linear.weight.float() * linear.weight_scale).detach()
        self.a, self.b = (t[member.slice].detach().clone().requires_grad_() for t in (bank.a, bank.b))
        self.scaling = bank.scaling[member.slice]

    def forward(self, x):
        y = x @ self.weight.t()
        deltas = [
            self.scaling[s] * (x[i] @ self.a[s].t()) @ self.b[s].t() if s >= 0 else torch.zeros_like(y[i])
            for i, s in enumerate(self.slots)
        ]
        return y + torch.stack(deltas)


@pytest.mark.parametrize(("compute", "least"), [("w8a16", 0.999), ("w8a8", 0.99)])
def test_gradients_reach_both_layers_and_the_embedding(compute, least):
    _, model = trainable(compute)
    ids = tokens(4, 6)
    with te.adapters(model, NAMES):
        loss_of(model, ids).backward()
    reference = copy.deepcopy(model)
    reference.zero_grad()
    layers = {path: Reference(linear, NAMES) for path, linear in lora_linears(model).items()}
    for path, layer in layers.items():
        parent, _, name = path.rpartition(".")
        setattr(reference.get_submodule(parent), name, layer)
    loss_of(reference, ids).backward()
    for path, linear in lora_linears(model).items():
        member, bank = linear.group.members[linear.index], linear.group.bank
        for got, want in (
            (bank.a[member.slice].grad, layers[path].a.grad),
            (bank.b[member.slice].grad, layers[path].b.grad),
        ):
            assert got.abs().sum() > 0
            assert cosine(got, want) > least, path
            assert 0.98 < (got.norm() / want.norm()).item() < 1.02, path
        assert linear.weight.grad is None
    for name in ("embed_tokens", "norm"):
        got, want = (m.model.get_submodule(name).weight.grad for m in (model, reference))
        assert cosine(got, want) > least


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
def test_checkpointing_changes_no_gradient(reentrant, inside):
    _, model = trainable()
    other = copy.deepcopy(model)
    other.gradient_checkpointing_enable({"use_reentrant": reentrant})
    first, second = tokens(4, 6), tokens(4, 6, seed=1)
    gradients = []
    for m in (model, other):
        if reentrant:
            m.enable_input_require_grads()
        with te.adapters(m, NAMES):
            loss = loss_of(m, first)
            if inside:
                loss.backward()
        with te.adapters(m, NAMES[::-1]):
            other_loss = loss_of(m, second)
        if not inside:
            loss.backward()  # the batch of its own forward, not the last one
        other_loss.backward()
        gradients.append(slot_gradients(m) | {"embedding": m.model.embed_tokens.weight.grad})
    assert gradients[0].keys() == gradients[1].keys() and len(gradients[0]) == 2 * 2 * 7 + 1
    for name, want in gradients[0].items():
        assert want.abs().sum() > 0 and torch.equal(gradients[1][name], want), name
    assert all(layer.self_attn.q_proj.group.fused for layer in other.model.layers)


def test_own_checkpointing_outside_of_the_context_raises_and_inside_is_right():
    plain = attention()
    model = te.patch(copy.deepcopy(plain), compute="w8a16")
    te.load_adapter(model, "a", adapter(plain))
    x = torch.randn(2, 64, requires_grad=True)
    with te.adapters(model, ["a", None]):
        model.o_proj(x).sum().backward()
        want, x.grad = x.grad, None
        y = checkpoint(model.o_proj, x, use_reentrant=False)
        y.sum().backward()
        assert torch.equal(x.grad, want)
        y = checkpoint(model.o_proj, x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="recomputed outside of the adapters"):
        y.sum().backward()
    x.grad = None
    bare = checkpoint(model.o_proj, x, use_reentrant=False)
    bare.sum().backward()
    with te.adapters(model, [None, None]):
        torch.testing.assert_close(x.grad[1], want[1])


def checkpointed(reentrant):
    """A model with two adapters, its input, and a forward that the caller checkpoints under given names."""
    plain = attention()
    model = te.patch(copy.deepcopy(plain), compute="w8a16")
    for seed, name in enumerate(("alice", "bob")):
        te.load_adapter(model, name, adapter(plain, seed=seed))
    x = torch.randn(2, 64, requires_grad=True)

    def run(names):
        with te.adapters(model, names):
            return checkpoint(model.o_proj, x, use_reentrant=reentrant).sum()

    return model, x, run


@pytest.mark.parametrize("reentrant", [False, True])
def test_own_checkpointing_recomputed_under_another_adapter_raises(reentrant):
    model, x, run = checkpointed(reentrant)
    loss = run(["alice"])
    with te.adapters(model, ["bob"]), pytest.raises(RuntimeError, match="its adapters are not known"):
        loss.backward()
    assert x.grad is None
    with te.adapters(model, ["bob"]):
        checkpoint(model.o_proj, x, use_reentrant=reentrant).sum().backward()
        got, x.grad = x.grad, None
        model.o_proj(x).sum().backward()
    assert torch.equal(got, x.grad)


@pytest.mark.parametrize("between", [None, "bob"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_own_checkpointing_after_another_forward_raises(reentrant, between):
    model, x, run = checkpointed(reentrant)
    loss = run(["alice"])
    with te.adapters(model, [between]):
        checkpoint(model.o_proj, x, use_reentrant=reentrant)
        with pytest.raises(RuntimeError, match="its adapters are not known"):
            loss.backward()
    loss = run(["alice"])
    checkpoint(model.o_proj, x, use_reentrant=reentrant)
    with pytest.raises(RuntimeError, match="its adapters are not known"):
        loss.backward()
    assert x.grad is None


def test_own_checkpointing_goes_on_over_evaluations_and_steps():
    model, x, _ = checkpointed(reentrant=False)
    for name in ("alice", "bob", "alice"):
        with te.adapters(model, [name]):
            first, second = (checkpoint(model.o_proj, x, use_reentrant=False).sum() for _ in range(2))
            first.backward()
            with torch.no_grad(), te.adapters(model, [None]):
                model.o_proj(x)
            x.grad = None
            second.backward()
            got, x.grad = x.grad, None
            model.o_proj(x).sum().backward()
        assert torch.equal(got, x.grad)


def test_a_checkpoint_around_the_whole_model_does_not_change_its_batch():
    _, model = trainable()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with te.adapters(model, NAMES):
        loss = checkpoint(loss_of, model, tokens(4, 6), use_reentrant=False)
    with te.adapters(model, NAMES[::-1]), pytest.raises(RuntimeError, match="its adapters are not known"):
        loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_enabled_inside_the_context_follows_it(reentrant):
    _, model = trainable()
    other = copy.deepcopy(model)
    gradients = []
    for m in (model, other):
        m.enable_input_require_grads()
        with te.adapters(m, NAMES):
            if m is other:
                m.gradient_checkpointing_enable({"use_reentrant": reentrant})
            loss = loss_of(m, tokens(4, 6))
        with te.adapters(m, NAMES[::-1]):
            loss.backward()
        gradients.append(slot_gradients(m))
    for name, want in gradients[0].items():
        assert want.abs().sum() > 0 and torch.equal(gradients[1][name], want), name


def test_a_recomputation_does_not_use_the_slot_of_an_unloaded_adapter():
    _, model = trainable()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with te.adapters(model, NAMES):
        loss = loss_of(model, tokens(4, 6))
    te.unload_adapter(model, "b")
    te.load_adapter(model, "mallory", adapter(llama(), r=4, seed=5))
    with pytest.raises(RuntimeError, match=r"\['b'\] were unloaded since"):
        loss.backward()


def test_two_stacked_fp8_layers_pass_gradients_to_the_first():
    plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model = te.patch(copy.deepcopy(plain), compute="w8a16")
    for i in range(2):
        plain[i].weight.data = (model[i].weight.float() * model[i].weight_scale).data
    x = torch.randn(3, 64)
    x1, x2 = x.clone().requires_grad_(), x.clone().requires_grad_()
    model(x1).square().sum().backward()
    plain(x2).square().sum().backward()
    torch.testing.assert_close(x1.grad, x2.grad, rtol=1e-4, atol=1e-4)


def test_a_training_step_changes_only_the_rows_it_saw():
    _, model = trainable()
    bank = model.model.layers[1].mlp.down_proj.group.bank
    before = bank.a[0].detach().clone()
    optimizer = torch.optim.SGD([bank.a[0], bank.b[0]], lr=0.5)
    ids = tokens(2, 6)
    with te.adapters(model, ["a", "a"]):
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, ids)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert torch.equal(bank.a[0][1], before[1]) and not torch.equal(bank.a[0][0], before[0])


def test_a_module_cast_keeps_its_slots_trainable():
    _, model = trainable()
    model.to(torch.bfloat16)
    bank = model.model.layers[0].mlp.down_proj.group.bank
    assert bank.a[0].requires_grad and bank.a[0].is_leaf and bank.a[0].dtype == torch.bfloat16
    assert not bank.rank.requires_grad


def test_base_without_context_trains_the_rest_like_the_dequantized_model():
    plain, model = trainable()
    want = dequantized(model, plain).train()
    ids = tokens(2, 6)
    loss_of(model, ids).backward()
    loss_of(want, ids).backward()
    assert cosine(model.model.embed_tokens.weight.grad, want.model.embed_tokens.weight.grad) > 0.9999
