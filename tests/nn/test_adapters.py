"""Adapters in slots: against PEFT's unfused arithmetic on the same codes, and what must not change."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

import torch_epilora as te
from tests.nn.helpers import (
    ALL,
    adapter,
    attention,
    dequantized,
    linear_shapes,
    llama,
    phi3,
    qwen3,
    same,
    snapshot,
    sqnr,
    tokens,
    w8a8,
    weight_value,
)
from torch_epilora.nn import adapter_slots, describe
from torch_epilora.nn.linear import lora_linears

CONFIGS = {
    "plain": {"r": 8, "lora_alpha": 16},
    "rslora": {"r": 16, "lora_alpha": 32, "use_rslora": True},
    "patterns": {
        "r": 16,
        "lora_alpha": 32,
        "rank_pattern": {"q_proj": 4, "down_proj": 3},
        "alpha_pattern": {"q_proj": 64},
    },
    "bias": {"r": 5, "lora_alpha": 10, "lora_bias": True},
}


def peft_adapter(plain, targets=ALL, seed=0, **options):
    """A PEFT model with a random adapter, and the adapter as load_adapter takes it."""
    torch.manual_seed(seed)
    config = LoraConfig(target_modules=list(targets), init_lora_weights=False, **options)
    wrapped = get_peft_model(copy.deepcopy(plain), config).eval()
    state = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    for key, tensor in state.items():
        if key.endswith("lora_B.bias"):
            tensor.copy_(torch.randn_like(tensor))
    set_peft_model_state_dict(wrapped, state)
    return wrapped, (state, wrapped.peft_config["default"].to_dict())


def on_codes_of(model, wrapped):
    """The PEFT model with the patched model's dequantized weights as its base."""
    base = wrapped.get_base_model()
    for path, linear in lora_linears(model).items():
        layer = base.get_submodule(path)
        getattr(layer, "base_layer", layer).weight.data = weight_value(linear).to(linear.group.bank.dtype)
    return wrapped


@pytest.mark.parametrize("build", [llama, qwen3])
@pytest.mark.parametrize("options", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("layout", ["channel", "block"])
def test_whole_model_agrees_with_peft_on_the_same_codes(build, options, layout):
    plain = build(attention_bias=True)
    wrapped, source = peft_adapter(plain, **options)
    other, second = peft_adapter(plain, targets=("v_proj", "gate_proj"), seed=1, r=3, lora_alpha=9)
    model = te.patch(copy.deepcopy(plain), compute="w8a16", layout=layout, max_adapters=3, max_rank=16)
    assert te.load_adapter(model, "first", source) == ()
    te.load_adapter(model, "second", second)
    ids = tokens(4, 9)
    with torch.no_grad():
        first, bare = on_codes_of(model, wrapped)(ids).logits, dequantized(model, plain)(ids).logits
        want = torch.stack([first[0], bare[1], on_codes_of(model, other)(ids).logits[2], first[3]])
        with te.adapters(model, ["first", None, "second", "first"]):
            got = model(ids).logits
        outside = model(ids).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outside, bare, rtol=1e-4, atol=1e-5)
    assert sqnr(bare[0], first[0]) < 20  # the adapter matters


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_every_projection_w8a8_is_over_40_db(dtype, stored):
    plain = llama(dtype, attention_bias=True)
    state, config = adapter(plain, r=7, alpha=14, dtype=stored)
    model = te.patch(copy.deepcopy(plain), max_adapters=2, max_rank=16)
    te.load_adapter(model, "other", adapter(plain, r=16, seed=9))
    te.load_adapter(model, "a", (state, config))
    seen = {}
    for path, linear in lora_linears(model).items():
        linear.register_forward_hook(lambda _, args, y, path=path: seen.update({path: (args[0], y)}))
    with torch.no_grad(), te.adapters(model, ["a", None]):
        model(tokens(2, 6))
    assert len(seen) == 14
    for path, (x, y) in seen.items():
        a, b = (state[f"base_model.model.{path}.lora_{part}.weight"].to(dtype) for part in "AB")
        linear = lora_linears(model)[path]
        with_adapter, bare = w8a8(linear, x[0], (a, b, 2.0)), w8a8(linear, x[0])
        assert sqnr(with_adapter, y[0]) > 40 and sqnr(with_adapter, bare) < 25, path
        assert sqnr(w8a8(linear, x[1]), y[1]) > 40


@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_bare_rows_and_untouched_slices_keep_every_bit(compute):
    plain = attention(widths=(64, 32, 32))
    for targets in (("q_proj",), ("k_proj",), ("q_proj", "v_proj")):
        model = te.patch(copy.deepcopy(plain), compute=compute)
        te.load_adapter(model, "a", adapter(plain, targets=targets, size=10.0))
        x = torch.randn(3, 5, 64)
        with torch.no_grad():
            base = {name: getattr(model, name)(x) for name in ("q_proj", "k_proj", "v_proj")}
            with te.adapters(model, ["a", None, "a"]):
                got = {name: getattr(model, name)(x) for name in base}
            with te.adapters(model, [None] * 3):
                none = {name: getattr(model, name)(x) for name in base}
        for name, y in base.items():
            assert torch.equal(none[name], y)
            assert torch.equal(got[name][1], y[1])
            assert torch.equal(got[name], y) is (name not in targets)


def test_what_lies_beyond_a_rank_or_in_another_slot_does_not_matter():
    plain = attention()
    model = te.patch(copy.deepcopy(plain), max_adapters=3, max_rank=16)
    te.load_adapter(model, "a", adapter(plain, r=5))
    x = torch.randn(2, 64)
    with torch.no_grad(), te.adapters(model, ["a", None]):
        want = model(x)
        for group in {model.q_proj.group, model.o_proj.group}:
            for a, b in zip(group.bank.a, group.bank.b, strict=True):
                a[0, 5:], b[0, :, 5:], a[1:], b[1:] = (float("nan"),) * 4
        assert all(torch.equal(g, w) for g, w in zip(model(x + 0), want, strict=True))


def test_replacing_in_place_equals_a_fresh_load_and_keeps_addresses():
    plain = llama()
    model = te.patch(copy.deepcopy(plain), compute="w8a16", max_adapters=2, max_rank=64)
    fresh = copy.deepcopy(model)
    te.load_adapter(model, "a", adapter(plain, r=64, seed=3, lora_bias=True))
    group = model.model.layers[0].self_attn.q_proj.group
    addresses = {n: b.data_ptr() for n, b in model.named_buffers()}
    version = group.state.version
    small = adapter(plain, r=8, targets=("v_proj", "down_proj"))
    te.load_adapter(model, "a", small)
    assert addresses == {n: b.data_ptr() for n, b in model.named_buffers()}
    assert group.state.version > version
    assert group.bank.rank[:, 0].tolist() == [0, 0, 8] and not group.bank.a[0].any() and not group.bank.b_bias_2.any()
    assert not group.bank.a[2][0, 8:].any() and not group.bank.b[2][0, :, 8:].any()
    te.load_adapter(fresh, "a", small)
    ids = tokens(2, 5)
    with torch.no_grad(), te.adapters(model, ["a", None]), te.adapters(fresh, ["a", None]):
        assert torch.equal(model(ids).logits, fresh(ids).logits)


def test_unloading_zeroes_and_frees_the_slot():
    plain = attention()
    model = te.patch(copy.deepcopy(plain), max_adapters=2)
    empty = snapshot(model)
    te.load_adapter(model, "a", adapter(plain))
    te.load_adapter(model, "b", adapter(plain, seed=2))
    assert adapter_slots(model) == {"a": 0, "b": 1}
    te.unload_adapter(model, "a")
    te.load_adapter(model, "c", adapter(plain, seed=3))
    assert adapter_slots(model) == {"b": 1, "c": 0}
    te.unload_adapter(model, "b")
    te.unload_adapter(model, "c")
    assert same(empty, snapshot(model))


def test_rows_follow_their_names_for_beams_and_return_sequences():
    plain = attention()
    model = te.patch(copy.deepcopy(plain))
    te.load_adapter(model, "a", adapter(plain))
    te.load_adapter(model, "b", adapter(plain, seed=2))
    x = torch.randn(2, 3, 64)
    with torch.no_grad():
        with te.adapters(model, ["a", "b"]):
            two = model.o_proj(x)
            four = model.o_proj(x.repeat_interleave(2, 0))
        torch.testing.assert_close(four, two.repeat_interleave(2, 0))
        with te.adapters(model, ["b", "a"]):
            assert not torch.allclose(model.o_proj(x), two)
        with te.adapters(model, ["a"]):
            everything = model.o_proj(x)
    torch.testing.assert_close(everything[0], two[0])
    assert not torch.allclose(everything[1], two[1])


@pytest.mark.parametrize("form", ["names", "int32", "int64"])
def test_packed_input_has_an_adapter_a_token(form):
    plain = llama()
    model = te.patch(copy.deepcopy(plain))
    te.load_adapter(model, "a", adapter(plain))
    te.load_adapter(model, "b", adapter(plain, seed=2))
    first, second, third = tokens(1, 4), tokens(1, 3, seed=1), tokens(1, 2, seed=2)
    names = ["a"] * 4 + [None] * 3 + ["b"] * 2
    slots = torch.tensor([0] * 4 + [-1] * 3 + [1] * 2, dtype=torch.int64 if form == "int64" else torch.int32)
    x = torch.randn(1, 9, 64)
    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        with te.adapters(model, names if form == "names" else slots):
            packed = layer(x)
            ids = torch.cat([first, second, third], 1)
            positions = torch.cat([torch.arange(n) for n in (4, 3, 2)])[None]
            logits = model(ids, position_ids=positions, use_cache=False).logits
        for name, part, ids, start in (
            ("a", x[:, :4], first, 0),
            (None, x[:, 4:7], second, 4),
            ("b", x[:, 7:], third, 7),
        ):
            with te.adapters(model, [name]):
                stop = start + part.shape[1]
                torch.testing.assert_close(packed[:, start:stop], layer(part))
                assert torch.equal(logits[:, start:stop].argmax(-1), model(ids).logits.argmax(-1))


def test_contexts_nest_and_survive_exceptions():
    plain = attention()
    model = te.patch(copy.deepcopy(plain))
    te.load_adapter(model, "a", adapter(plain))
    te.load_adapter(model, "b", adapter(plain, seed=2))
    x = torch.randn(2, 64)
    with torch.no_grad():
        bare = model.o_proj(x)
        with te.adapters(model, ["a", "a"]):
            a = model.o_proj(x)
            with pytest.raises(KeyError), te.adapters(model, ["b", None]):
                b = model.o_proj(x)
                raise KeyError
            assert torch.equal(model.o_proj(x), a)
            with te.adapters(model, [None, None]):
                assert torch.equal(model.o_proj(x), bare)
            with pytest.raises(ValueError, match="got 'c'; loaded are 'a', 'b'"), te.adapters(model, ["c", "a"]):
                pass
            assert torch.equal(model.o_proj(x), a)
        assert torch.equal(model.o_proj(x), bare)
    assert not torch.equal(a, bare) and not torch.equal(a[0], b[0]) and torch.equal(b[1], bare[1])


@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_fused_names_load_onto_split_linears(compute):
    plain = llama()
    split = te.patch(copy.deepcopy(plain), compute=compute)
    state, fused = {}, {}
    for path, (_, k) in linear_shapes(plain).items():
        prefix, leaf = path.rsplit(".", 1)
        family = {"q_proj": ("qkv_proj", 128), "gate_proj": ("gate_up_proj", 192)}.get(leaf)
        if family:
            a, b = torch.randn(4, k), torch.randn(family[1], 4)
            key = f"base_model.model.{prefix}.{family[0]}"
            fused |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
            start = 0
            for member in ("q_proj", "k_proj", "v_proj") if leaf == "q_proj" else ("gate_proj", "up_proj"):
                width = linear_shapes(plain)[f"{prefix}.{member}"][0]
                key = f"base_model.model.{prefix}.{member}"
                state |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b[start : start + width]}
                start += width
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4}
    te.load_adapter(split, "split", (state, config))
    te.load_adapter(split, "fused", (fused, config))
    for linear in lora_linears(split).values():
        bank = linear.group.bank
        assert all(torch.equal(t[0], t[1]) for t in (*bank.a, *bank.b, bank.rank.t(), bank.scaling.t()))
    assert [i.bank.rank[:, 0].tolist() for i in (q_group(split), o_group(split))] == [[4, 4, 4], [0]]
    ids = tokens(2, 5)
    with torch.no_grad(), te.adapters(split, ["split", "fused"]):
        two = split(ids[:1].repeat(2, 1)).logits
    if compute == "w8a16":  # w8a8 turns the order of a sum into other codes
        torch.testing.assert_close(two[0], two[1], rtol=1e-4, atol=1e-5)


def q_group(model):
    return model.model.layers[0].self_attn.q_proj.group


def o_group(model):
    return model.model.layers[0].self_attn.o_proj.group


def test_split_and_fused_names_load_onto_fused_linears():
    plain = phi3()
    wrapped, source = peft_adapter(plain, targets=("qkv_proj", "gate_up_proj", "o_proj"), r=4, lora_alpha=8)
    model = te.patch(copy.deepcopy(plain), compute="w8a16")
    te.load_adapter(model, "fused", source)
    state, config = {}, source[1]
    widths = {"qkv_proj": {"q_proj": 64, "k_proj": 32, "v_proj": 32}, "gate_up_proj": {"gate_proj": 96, "up_proj": 96}}
    for key, tensor in source[0].items():
        path, part = key.split(".lora_")
        prefix, leaf = path.rsplit(".", 1)
        cuts = widths.get(leaf, {leaf: tensor.shape[0]})
        pieces = tensor.split(list(cuts.values())) if part == "B.weight" else [tensor] * len(cuts)
        state |= {f"{prefix}.{name}.lora_{part}": piece for name, piece in zip(cuts, pieces, strict=True)}
    te.load_adapter(model, "split", (state, config))
    te.load_adapter(model, "v only", ({k: v for k, v in state.items() if ".v_proj." in k}, config))
    ids = tokens(1, 5).repeat(4, 1)
    layer, x = model.model.layers[0].self_attn.qkv_proj, torch.randn(4, 3, 64)
    with torch.no_grad(), te.adapters(model, ["fused", "split", None, "v only"]):
        got, y = model(ids).logits, layer(x[:1].repeat(4, 1, 1))
        want = on_codes_of(model, wrapped)(ids).logits
    torch.testing.assert_close(got[0], want[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got[0], got[1], rtol=1e-4, atol=1e-5)
    assert torch.equal(y[3, :, :96], y[2, :, :96]) and torch.allclose(y[3, :, 96:], y[0, :, 96:], atol=1e-5)
    assert not torch.allclose(y[2, :, 96:], y[0, :, 96:])


def test_lenient_loading_reports_what_it_left_out():
    plain = attention()
    state, config = adapter(plain, targets=("q_proj",))
    state["base_model.model.missing.lora_A.weight"] = torch.ones(8, 64)
    state["base_model.model.missing.lora_B.weight"] = torch.ones(8, 8)
    state["base_model.model.score.weight"] = torch.ones(8, 8)
    model = te.patch(copy.deepcopy(plain))
    left_out = te.load_adapter(model, "a", (state, config), strict=False)
    assert len(left_out) == 2 and any("missing" in k for k in left_out) and any("score.weight" in k for k in left_out)
    assert model.q_proj.group.bank.rank[:, 0].tolist() == [8, 0, 0]


def test_tp_like_partial_models_and_zero_rows_stay_finite():
    plain = attention(bias=True)
    model = te.patch(copy.deepcopy(plain))
    state, config = adapter(plain)
    te.load_adapter(model, "a", ({k: v * ("lora_A" in k) for k, v in state.items()}, config))
    x = torch.zeros(2, 64)
    with torch.no_grad(), te.adapters(model, ["a", None]):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear = getattr(model, name)
            assert torch.equal(linear(x), linear.bias.expand(2, -1))


@pytest.mark.parametrize("rank", [1, 3, 16, 17, 64, 128, 320])
def test_any_rank(rank):
    plain = attention()
    state, config = adapter(plain, r=rank, alpha=rank, size=0.1)
    model = te.patch(copy.deepcopy(plain), compute="w8a16", max_rank=320, max_adapters=2)
    te.load_adapter(model, "a", (state, config))
    x = torch.randn(2, 64)
    with torch.no_grad(), te.adapters(model, ["a", "a"]):
        got = model.q_proj(x)
    a, b = state["base_model.model.q_proj.lora_A.weight"], state["base_model.model.q_proj.lora_B.weight"]
    want = x.double() @ weight_value(model.q_proj).t() + x.double() @ a.double().t() @ b.double().t()
    assert sqnr(want, got) > 100
    assert describe(model)[0].max_rank == 320
