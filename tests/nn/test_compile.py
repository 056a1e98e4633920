"""torch.compile without graph breaks, and few compilations over everything that changes in serving."""

import copy

import pytest
import torch
from torch import nn

import torch_epilora as te
from tests.nn.helpers import adapter, attention, llama, tokens
from torch_epilora.nn.linear import lora_linears


class Graphs:
    def __init__(self):
        self.all = []

    def __call__(self, graph, example_inputs):
        self.all.append(graph)
        return graph

    def count(self, op):
        return sum(node.target is op for node in self.all[-1].graph.nodes)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_at_most_two_compilations_over_ranks_scalings_names_and_lengths():
    plain = llama()
    model = te.patch(copy.deepcopy(plain), max_adapters=4)
    for name, r, alpha in (("a", 8, 8), ("b", 16, 8), ("c", 64, 128)):
        te.load_adapter(model, name, adapter(plain, r=r, alpha=alpha, seed=r, size=0.1))
    graphs = Graphs()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=graphs)
    names = ["a", "b", "c", None]
    with torch.no_grad():
        for length in (7, 1, 2, 33, 64, 1):
            names = names[1:] + names[:1]
            with te.adapters(model, names):
                ids = tokens(4, length)
                assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
        assert len(graphs.all) == 2
        te.load_adapter(model, "a", adapter(plain, r=64, alpha=32, seed=5, size=0.1))
        with te.adapters(model, ["a"] * 4):
            got = compiled(ids, use_cache=False).logits
            assert torch.equal(got, model(ids, use_cache=False).logits)
        with te.adapters(model, [None] * 4):
            assert not torch.equal(compiled(ids, use_cache=False).logits, got)
    assert len(graphs.all) == 2
    assert graphs.count(torch.ops.epilora.lora_linear) == 2 * 4
    assert graphs.count(torch.ops.epilora.adapter_groups) == 1
    assert (
        all(m.group._pending is None for m in lora_linears(model).values())
        and not model.model.layers[0].mlp.up_proj.group.state.traced
    )


@torch._functorch.config.patch(enable_autograd_cache=False)  # not what another version left on the disk
def test_inductor_with_gradients():
    plain = attention()
    model = te.patch(copy.deepcopy(plain), compute="w8a16", max_adapters=2, max_rank=8)
    te.load_adapter(model, "a", adapter(plain))
    bank = model.o_proj.group.bank
    bank.a[0].requires_grad_(True)
    compiled = torch.compile(model, fullgraph=True)
    gradients = []
    x = torch.randn(4, 64)
    for m in (model, compiled):
        bank.a[0].grad = None
        own = x.clone().requires_grad_()
        with te.adapters(model, ["a", None]):
            sum(y.square().sum() for y in m(own)).backward()
        gradients.append((own.grad, bank.a[0].grad))
    for eager, traced in zip(*gradients, strict=True):
        assert eager.abs().sum() > 0
        torch.testing.assert_close(traced, eager, rtol=1e-4, atol=1e-4)


class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x):
        x = x * 1
        q = self.q_proj(x)
        x.mul_(2)
        return q, self.k_proj(x)


def test_an_input_that_changes_between_members_is_refused_then_unfused():
    model = te.patch(Changing())
    x = torch.randn(2, 64)
    with torch.no_grad():
        with pytest.raises(Exception, match="modified in place between two linears"):
            torch.compile(model, fullgraph=True, backend="eager")(x)
        torch._dynamo.reset()
        want = model(x)
        got = torch.compile(model, fullgraph=True, backend="eager")(x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_rows_that_do_not_fit_raise_under_compile_too():
    model = te.patch(attention())
    with te.adapters(model, [None] * 3), pytest.raises(Exception, match="3 entries were given"):
        torch.compile(model, backend="eager")(torch.randn(4, 64))


class Breaking(Changing):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        x = x * 1
        q = self.q_proj(x)
        torch._dynamo.graph_break()
        if self.change:
            x.mul_(2)
        return q, self.k_proj(x)


@pytest.mark.parametrize("change", [False, True])
def test_a_graph_break_between_members(change):
    plain = Breaking(change)
    model = te.patch(copy.deepcopy(plain))
    te.load_adapter(model, "a", adapter(plain, targets=("q_proj", "k_proj")))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        for i in range(4):
            x = torch.randn(2, 64)
            with te.adapters(model, ["a", None]), te.adapters(eager, ["a", None]):
                for got, want in zip(compiled(x), eager(x), strict=True):
                    torch.testing.assert_close(got, want, msg=f"call {i}")
