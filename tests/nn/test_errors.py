"""Wrong calls: each says what was expected, and leaves the model as it was, bit for bit."""

import copy

import pytest
import torch
from torch import nn

import torch_epilora as te
from tests.nn.helpers import adapter, attention, linear_shapes, llama, phi3, same, snapshot
from torch_epilora.formats.adapters import Adapter, LoraPair
from torch_epilora.nn import describe
from torch_epilora.nn.linear import lora_linears

PLAIN = attention()


def changed(**tensors):
    """The adapter of q_proj and o_proj with some tensors replaced or, with None, left out."""
    state, config = adapter(PLAIN, targets=("q_proj", "o_proj"))
    for key, tensor in tensors.items():
        name = "base_model.model." + key.replace("__", ".") + ".weight"
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    return state, config


def with_config(**config):
    state, old = adapter(PLAIN, targets=("q_proj", "o_proj"))
    return state, {**old, **config}


def both_names():
    state, config = adapter(PLAIN, targets=("q_proj",))
    state["base_model.model.qkv_proj.lora_A.weight"] = torch.ones(8, 64)
    state["base_model.model.qkv_proj.lora_B.weight"] = torch.ones(128, 8)
    return state, config


def hand_built(b_bias=None, scaling=1.0):
    return Adapter({"q_proj": LoraPair(torch.ones(2, 64), torch.ones(64, 2), b_bias, scaling)})


PATCH = {
    "model": (lambda m: te.patch("gpt"), TypeError, "model: expected an nn.Module, got str"),
    "a linear itself": (lambda m: te.patch(nn.Linear(4, 4)), TypeError, "got a linear layer by itself"),
    "base": (lambda m: te.patch(m, base="nf4"), ValueError, "base: expected one of 'fp8', got 'nf4'"),
    "layout": (lambda m: te.patch(m, layout="row"), ValueError, "layout: expected one of 'tensor', 'channel', 'block'"),
    "compute": (lambda m: te.patch(m, compute="w4a8"), ValueError, "compute: expected one of 'w8a8', 'w8a16'"),
    "max_adapters": (lambda m: te.patch(m, max_adapters=-1), ValueError, "max_adapters: expected at least 0, got -1"),
    "max_adapters type": (
        lambda m: te.patch(m, max_adapters=2.0),
        TypeError,
        "max_adapters: expected an integer, got float",
    ),
    "max_rank": (lambda m: te.patch(m, max_rank=0), ValueError, "max_rank: expected at least 1, got 0"),
    "max_rank type": (lambda m: te.patch(m, max_rank=True), TypeError, "max_rank: expected an integer, got bool"),
    "targets": (lambda m: te.patch(m, targets=["q_proj", "w_proj"]), ValueError, "targets: expected 'w_proj' to name"),
    "targets type": (
        lambda m: te.patch(m, targets=[3]),
        TypeError,
        "targets: expected module names or patterns, got an",
    ),
    "targets empty": (
        lambda m: te.patch(m, targets=""),
        ValueError,
        "targets: expected names or patterns that are not",
    ),
    "targets regex": (
        lambda m: te.patch(m, targets="re:("),
        ValueError,
        "targets: 're:\\(' is not a regular expression",
    ),
    "exclude all": (
        lambda m: te.patch(m, exclude="*"),
        ValueError,
        "expected at least one nn.Linear to patch, found none",
    ),
    "exclude none": (lambda m: te.patch(m, exclude=None), TypeError, "exclude: expected module names .* got NoneType"),
    "slices list": (lambda m: te.patch(m, slices=[64]), TypeError, "slices: expected a mapping .* got list"),
    "slices width": (lambda m: te.patch(m, slices={"q_proj": 64}), TypeError, "slices\\['q_proj'\\]: .* got 64"),
    "exclude regex": (lambda m: te.patch(m, exclude=["re:["]), ValueError, "exclude: 're:\\['"),
    "slices": (
        lambda m: te.patch(m, slices={"q_proj": (3, 4)}),
        ValueError,
        "slices\\['q_proj'\\]: expected at most 16 positive .* 64",
    ),
    "slices name": (lambda m: te.patch(m, slices={"x": (1,)}), ValueError, "slices: expected 'x' to name a layer"),
    "nothing": (lambda m: te.patch(nn.ReLU()), ValueError, "expected at least one nn.Linear to patch, found none"),
}


@pytest.mark.parametrize(("call", "error", "match"), PATCH.values(), ids=PATCH)
def test_patch_refuses(call, error, match):
    model = copy.deepcopy(PLAIN)
    before = snapshot(model)
    with pytest.raises(error, match=match):
        call(model)
    assert same(before, snapshot(model)) and not lora_linears(model) and not model._forward_hooks


LOAD = {
    "no path": ("/no/such/adapter", (ValueError, FileNotFoundError), "/no/such/adapter"),
    "not a source": (17, TypeError, "source"),
    "unknown module": (
        changed(q_proz__lora_A=torch.ones(8, 64), q_proz__lora_B=torch.ones(64, 8)),
        ValueError,
        "patched linears with slots, got q_proz; the model has q_proj, k_proj, v_proj, o_proj",
    ),
    "a's width": (
        changed(q_proj__lora_A=torch.ones(8, 63)),
        ValueError,
        r"q_proj.lora_A: expected \[8, 64\], got \[8, 63\]",
    ),
    "b's height": (
        changed(o_proj__lora_B=torch.ones(65, 8)),
        ValueError,
        r"o_proj.lora_B: expected \[64, 8\], got \[65, 8\]",
    ),
    "unpaired": (changed(o_proj__lora_B=None), ValueError, "found no lora_B"),
    "rank": (adapter(PLAIN, r=17), ValueError, "expected a rank of at most 16, got 17"),
    "ranks differ": (changed(o_proj__lora_B=torch.ones(64, 7)), ValueError, "o_proj"),
    "nan": (changed(o_proj__lora_B=torch.full((64, 8), torch.nan)), ValueError, "finite"),
    "dtype": (changed(o_proj__lora_B=torch.ones(64, 8, dtype=torch.int32)), ValueError, "float32, float16 or bfloat16"),
    "dora": (with_config(use_dora=True), NotImplementedError, "DoRA"),
    "method": (with_config(peft_type="LOHA"), NotImplementedError, "LOHA"),
    "no alpha": (({}, {"peft_type": "LORA", "r": 8}), ValueError, "lora_alpha"),
    "head": (changed(lm_head=torch.ones(3, 3)), NotImplementedError, "lm_head.weight"),
    "empty": (({}, adapter(PLAIN)[1]), ValueError, "found none"),
    "nan scaling": (hand_built(scaling=float("nan")), ValueError, "q_proj: expected a finite scaling, got nan"),
    "b_bias's length": (
        hand_built(b_bias=torch.ones(63)),
        ValueError,
        r"q_proj.lora_B.bias: expected \[64\], got \[63\]",
    ),
    "no modules": (Adapter({}), ValueError, "expected at least one module, found none"),
    "twice": (both_names(), ValueError, "adapt the same output of q_proj"),
    "fused height": (
        (
            {"qkv_proj.lora_A.weight": torch.ones(8, 64), "qkv_proj.lora_B.weight": torch.ones(100, 8)},
            adapter(PLAIN)[1],
        ),
        ValueError,
        r"qkv_proj.lora_B: expected \[128, 8\], got \[100, 8\]",
    ),
}


@pytest.fixture
def model():
    model = te.patch(copy.deepcopy(PLAIN), max_adapters=2, max_rank=16)
    te.load_adapter(model, "a", adapter(PLAIN))
    return model


def unchanged(model, call, error, match):
    state = model.q_proj.group.state
    before, slots, version, batch = snapshot(model), dict(state.slots), state.version, state.batch
    with pytest.raises(error, match=match):
        call()
    assert same(before, snapshot(model))
    assert (state.slots, state.version, state.batch) == (slots, version, batch)


@pytest.mark.parametrize("name", ["a", "new"])
@pytest.mark.parametrize(("source", "error", "match"), LOAD.values(), ids=LOAD)
def test_load_adapter_refuses(model, source, error, match, name):
    unchanged(model, lambda: te.load_adapter(model, name, source), error, match)


def in_context(model, names):
    with te.adapters(model, names):
        pass


USE = {
    "plain model": (lambda m: te.load_adapter(PLAIN, "a", {}), ValueError, "found no patched layer in it. Call patch"),
    "no model": (lambda m: te.adapters(3, ["a"]), TypeError, "expected a patched nn.Module, got int"),
    "name type": (lambda m: te.load_adapter(m, 3, adapter(PLAIN)), TypeError, "name: expected a string, got int"),
    "name empty": (lambda m: te.load_adapter(m, "", adapter(PLAIN)), ValueError, "name that is not empty"),
    "unload unknown": (
        lambda m: te.unload_adapter(m, "b"),
        ValueError,
        "^name: expected a loaded adapter, got 'b'; loaded are 'a'",
    ),
    "unload type": (lambda m: te.unload_adapter(m, None), TypeError, "name: expected a string, got NoneType"),
    "unknown": (
        lambda m: in_context(m, ["a", "zed"]),
        ValueError,
        "names: expected loaded adapters, got 'zed'; loaded are 'a'",
    ),
    "a string": (lambda m: in_context(m, "a"), TypeError, r"expected a list.*got str. Use \['a'\]"),
    "none": (lambda m: in_context(m, None), TypeError, "names: expected a list.*got NoneType"),
    "an int": (
        lambda m: in_context(m, ["a", 0]),
        TypeError,
        "expected adapter names or None, got an entry of type int",
    ),
    "no names": (lambda m: in_context(m, []), ValueError, "at least one entry"),
    "float slots": (lambda m: in_context(m, torch.zeros(2)), TypeError, "slots as an integer tensor, got float32"),
    "meta slots": (
        lambda m: in_context(m, torch.zeros(2, dtype=torch.int32, device="meta")),
        TypeError,
        "names: expected slots as a tensor with values, got one on the meta device",
    ),
    "matrix slots": (
        lambda m: in_context(m, torch.zeros(2, 2, dtype=torch.int32)),
        ValueError,
        r"vector \[n\].*\[2, 2\]",
    ),
    "free slot": (lambda m: in_context(m, torch.tensor([0, 1])), ValueError, r"slots of loaded adapters .*got \[1\]"),
    "slot below": (lambda m: in_context(m, torch.tensor([-2])), ValueError, r"or -1, got \[-2\]"),
    "patched": (lambda m: te.patch(m), ValueError, "already patched"),
    "unpatch plain": (lambda m: te.unpatch(PLAIN), ValueError, "expected a patched model"),
    "save plain": (lambda m: te.save_quantized(PLAIN, "/tmp/x"), ValueError, "expected a patched model"),
    "load nothing": (
        lambda m: te.load_quantized("/no/such/folder"),
        (ValueError, FileNotFoundError),
        "/no/such/folder",
    ),
    "load compute": (lambda m: te.load_quantized("/no", compute="fast"), ValueError, "compute: expected one of"),
    "describe plain": (lambda m: describe(PLAIN), ValueError, "expected a patched model"),
    "features": (
        lambda m: m.q_proj(torch.ones(2, 65)),
        ValueError,
        r"x: expected \[..., 64\] for q_proj, got shape \[2, 65\]",
    ),
    "0-d": (
        lambda m: m.q_proj(torch.tensor(1.0)),
        ValueError,
        r"x: expected \[..., 64\] for q_proj, got shape \[\]",
    ),
    "activations": (
        lambda m: m.q_proj(torch.ones(2, 64).half()),
        TypeError,
        "x: expected float32, the dtype of q_proj, got float16",
    ),
}


@pytest.mark.parametrize(("call", "error", "match"), USE.values(), ids=USE)
def test_use_refuses(model, call, error, match):
    unchanged(model, lambda: call(model), error, match)


def test_rows_that_do_not_fit_the_names(model):
    with te.adapters(model, ["a", None, "a"]):
        for x, rows in ((torch.ones(4, 64), 4), (torch.ones(2, 6, 64), 2), (torch.ones(64), 1)):
            with pytest.raises(
                ValueError, match=rf"names: 3 entries were given to adapters\(\), but a layer got {rows} rows"
            ):
                model.o_proj(x)


def test_all_slots_taken(model):
    te.load_adapter(model, "b", adapter(PLAIN))
    unchanged(
        model,
        lambda: te.load_adapter(model, "c", adapter(PLAIN)),
        ValueError,
        r"a free slot for 'c', all 2 hold adapters: \['a', 'b'\]",
    )
    te.load_adapter(model, "b", adapter(PLAIN, seed=4))


def test_an_adapter_in_use_is_not_unloaded(model):
    with te.adapters(model, ["a", None]):
        unchanged(model, lambda: te.unload_adapter(model, "a"), ValueError, "'a' is chosen for rows right now")
    te.unload_adapter(model, "a")


def test_values_that_the_models_dtype_cannot_hold():
    model = te.patch(attention().half(), max_adapters=1)
    big = adapter(PLAIN, size=1e6)
    with pytest.raises(ValueError, match="expected values that float16 can hold"):
        te.load_adapter(model, "a", big)
    assert not model.q_proj.group.bank.a[0].any()


def test_two_models_patched_by_themselves():
    both = nn.ModuleList([te.patch(attention()), te.patch(attention())])
    with pytest.raises(ValueError, match="found 2 parts patched by themselves"):
        te.load_adapter(both, "a", adapter(PLAIN))


def test_split_names_need_the_slices_of_a_fused_linear():
    plain = phi3()
    del plain.config.num_key_value_heads, plain.config.num_attention_heads
    model = te.patch(plain, targets="qkv_proj")
    pair = LoraPair(torch.ones(2, 64), torch.ones(32, 2), None, 1.0)
    source = Adapter({"model.layers.0.self_attn.v_proj": pair})
    with pytest.raises(ValueError, match="qkv_proj has 1 output slices, expected 3"):
        te.load_adapter(model, "a", source)


def test_a_failure_in_the_last_layer_leaves_the_first_alone():
    plain = llama()
    model = te.patch(copy.deepcopy(plain), max_adapters=1)
    state, config = adapter(plain)
    last = list(linear_shapes(plain))[-1]
    state[f"base_model.model.{last}.lora_A.weight"] = torch.ones(8, 1)
    before = snapshot(model)
    with pytest.raises(ValueError, match=last):
        te.load_adapter(model, "a", (state, config))
    assert same(before, snapshot(model))
