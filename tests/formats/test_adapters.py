"""Adapters that PEFT itself saves, against PEFT's own scaling and merged delta."""

import json
import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import load_file, save_file

from torch_epilora.formats import read_adapter
from torch_epilora.formats.adapter_config import LoraSettings
from torch_epilora.formats.name_patterns import NamePatterns

peft = pytest.importorskip("peft")

CASES = {
    "plain": dict(r=16, lora_alpha=32),
    "rslora": dict(r=16, lora_alpha=32, use_rslora=True),
    "patterns": dict(r=16, lora_alpha=32, rank_pattern={"q_proj": 4}, alpha_pattern={"q_proj": 64}),
    "one layer by its path": dict(r=3, lora_alpha=5, rank_pattern={"0.self_attn.q_proj": 7}),
    "regular expressions": dict(
        r=8, lora_alpha=8, rank_pattern={"(q|v)_proj": 5, r"^layers\.1\..*": 2}, alpha_pattern={r".*\.v_proj": 3}
    ),
    "the first pattern wins": dict(r=8, lora_alpha=8, rank_pattern={".*_proj": 2, "q_proj": 5}),
    "part of a name is no match": dict(r=8, lora_alpha=8, rank_pattern={"proj": 2, "q_pro": 3}),
    "rslora with patterns": dict(
        r=8, lora_alpha=16, use_rslora=True, rank_pattern={"k_proj": 3}, alpha_pattern={"v_proj": 7}
    ),
    "bias of B": dict(r=4, lora_alpha=12, lora_bias=True),
    "odd": dict(r=1, lora_alpha=1),
}


def build(dtype=torch.float32, **config):
    """A PeftModel of two attention blocks with random adapters, its B and biases not zero."""

    class Attention(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj = torch.nn.Linear(48, 32)
            self.k_proj = torch.nn.Linear(48, 16)
            self.v_proj = torch.nn.Linear(48, 16)
            self.qkv_proj = torch.nn.Linear(48, 64)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attn = Attention()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Block(), Block()])

    torch.manual_seed(0)
    settings = {"target_modules": ["q_proj", "k_proj", "v_proj", "qkv_proj"], **config}
    model = peft.get_peft_model(Model().to(dtype), peft.LoraConfig(**settings), autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape))
    return model


def lora_layers(model):
    return {n.removeprefix("base_model.model."): m for n, m in model.named_modules() if hasattr(m, "get_delta_weight")}


@pytest.mark.parametrize("source", ["folder", "state dict"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
def test_scaling_and_delta_are_those_of_peft(tmp_path, case, dtype, source):
    model = build(dtype, **CASES[case])
    if source == "folder":
        model.save_pretrained(tmp_path)
        adapter = read_adapter(tmp_path)
    else:
        adapter = read_adapter((peft.get_peft_model_state_dict(model), model.peft_config["default"].to_dict()))
    layers = lora_layers(model)
    assert len(layers) == 8 and adapter.modules.keys() == layers.keys() and adapter.skipped == ()
    for name, layer in layers.items():
        pair = adapter.modules[name]
        assert pair.scaling == layer.scaling["default"] and pair.rank == layer.r["default"]
        assert pair.a.dtype == pair.b.dtype == dtype
        # PEFT multiplies half precision in fp32 on the CPU, then rounds.
        delta = (pair.b.float() @ pair.a.float()) * pair.scaling
        assert torch.equal(delta.to(dtype), layer.get_delta_weight("default"))
        theirs = layer.lora_B["default"].bias
        assert (pair.b_bias is None) == (theirs is None)
        assert theirs is None or torch.equal(pair.b_bias, theirs)
    assert adapter.rank == max(layer.r["default"] for layer in layers.values())


def test_the_bias_of_b_is_scaled_as_peft_scales_it():
    model = build(**CASES["bias of B"])
    adapter = read_adapter((peft.get_peft_model_state_dict(model), model.peft_config["default"].to_dict()))
    layer, pair = lora_layers(model)["layers.0.self_attn.q_proj"], adapter.modules["layers.0.self_attn.q_proj"]
    x = torch.randn(5, 48)
    ours = layer.base_layer(x) + pair.scaling * (x @ pair.a.T @ pair.b.T + pair.b_bias)
    assert pair.b_bias.abs().max() > 0.1 and torch.allclose(layer(x), ours, atol=1e-4)


def test_known_scalings():
    """r=16, alpha=32: 2; rsLoRA: 8; rank 4 and alpha 64 on q alone: 16."""
    assert LoraSettings(16, 32.0).scaling_of("q_proj") == 2.0
    assert LoraSettings(16, 32.0, use_rslora=True).scaling_of("q_proj") == 8.0
    mixed = LoraSettings(16, 32.0, NamePatterns({"q_proj": 4}), NamePatterns({"q_proj": 64.0}))
    assert mixed.scaling_of("model.layers.3.self_attn.q_proj") == 16.0 and mixed.scaling_of("k_proj") == 2.0


@settings(max_examples=80, deadline=None)
@given(
    patterns=st.dictionaries(
        st.sampled_from(["q_proj", "attn.q_proj", r"layers\.[01]\..*", "proj", ".*q.*", "^q_proj", "1", "(k|q)_proj"]),
        st.integers(1, 9), max_size=4,
    ),
    module=st.sampled_from(["q_proj", "layers.1.attn.q_proj", "layers.0.k_proj", "a.proj", "x.q_projs", "1"]),
    rslora=st.booleans(),
)  # fmt: skip
def test_patterns_match_as_peft_matches_them(patterns, module, rslora):
    from peft.utils.other import get_pattern_key

    found = LoraSettings(13, 6.0, NamePatterns(patterns), use_rslora=rslora)
    expected = patterns.get(get_pattern_key(patterns.keys(), module), 13)
    assert found.rank_of(module) == expected
    assert found.scaling_of(module) == 6.0 / (math.sqrt(expected) if rslora else expected)


def test_a_second_adapter_of_a_model():
    model = build(r=4, lora_alpha=8)
    model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj"]))
    state = peft.get_peft_model_state_dict(model, adapter_name="other")
    adapter = read_adapter((state, model.peft_config["other"].to_dict()))
    assert set(adapter.modules) == {f"layers.{i}.self_attn.q_proj" for i in (0, 1)}
    assert adapter.rank == 2 and adapter.modules["layers.0.self_attn.q_proj"].scaling == 1.5


def test_names_without_pefts_prefix():
    state = {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(4, 2)}
    assert list(read_adapter((state, {"peft_type": "LORA", "r": 2, "lora_alpha": 2})).modules) == ["q"]


def save(folder, **config):
    model = build(**config)
    model.save_pretrained(folder)
    return model


def test_dora_is_named_with_its_layers(tmp_path):
    save(tmp_path, r=4, use_dora=True)
    for strict in (True, False):
        with pytest.raises(NotImplementedError, match="use_dora: DoRA is not supported"):
            read_adapter(tmp_path, strict=strict)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "use_dora": False}))
    with pytest.raises(NotImplementedError, match=r"layers.0.self_attn.k_proj.lora_magnitude_vector \(DoRA\)"):
        read_adapter(tmp_path)


def test_one_layer_with_dora_is_left_out_whole(tmp_path):
    save(tmp_path, r=4)
    state = load_file(tmp_path / "adapter_model.safetensors")
    key = "base_model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"
    save_file({**state, key: torch.ones(32)}, tmp_path / "adapter_model.safetensors")
    adapter = read_adapter(tmp_path, strict=False)
    assert len(adapter.modules) == 7 and "layers.0.self_attn.q_proj" not in adapter.modules
    assert adapter.skipped == (f"{key} (DoRA)", "layers.0.self_attn.q_proj (DoRA)")


def test_modules_to_save_and_trained_biases(tmp_path):
    save(tmp_path / "saved", r=4, target_modules=["q_proj"], modules_to_save=["k_proj"])
    with pytest.raises(NotImplementedError, match=r"modules_to_save=\['k_proj'\].*layers.0.self_attn.k_proj.bias"):
        read_adapter(tmp_path / "saved")
    adapter = read_adapter(tmp_path / "saved", strict=False)
    assert set(adapter.modules) == {f"layers.{i}.self_attn.q_proj" for i in (0, 1)}
    assert sum("k_proj" in s for s in adapter.skipped) == 5
    save(tmp_path / "bias", r=4, bias="lora_only")
    with pytest.raises(NotImplementedError, match="bias='lora_only'"):
        read_adapter(tmp_path / "bias")
    assert len(read_adapter(tmp_path / "bias", strict=False).modules) == 8


@pytest.mark.parametrize(
    "key, said",
    [
        ("base_model.model.lm_head.base_layer.weight", "not a LoRA tensor"),
        ("base_model.model.score.weight", "not a LoRA tensor"),
        ("base_model.model.model.embed_tokens.lora_embedding_A", "an embedding's adapter"),
        ("base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta", "not a LoRA tensor"),
        ("base_model.model.q.lora_A.default.weight", "an adapter name in the key"),
    ],
)
def test_what_lies_beside_the_adapters_of_linear_layers(tmp_path, key, said):
    save(tmp_path, r=4)
    state = load_file(tmp_path / "adapter_model.safetensors")
    save_file({**state, key: torch.ones(4, 4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(NotImplementedError) as e:
        read_adapter(tmp_path)
    assert key in str(e.value) and said in str(e.value) and "strict=False" in str(e.value)
    adapter = read_adapter(tmp_path, strict=False)
    assert len(adapter.modules) == 8 and len(adapter.skipped) == 1 and key in adapter.skipped[0]


def test_an_adapter_on_a_convolution():
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.lin = torch.nn.Conv2d(3, 8, 3), torch.nn.Linear(4, 4)

    model = peft.get_peft_model(Net(), peft.LoraConfig(r=2, target_modules=["conv", "lin"]))
    source = peft.get_peft_model_state_dict(model), model.peft_config["default"].to_dict()
    with pytest.raises(NotImplementedError, match=r"conv \(a convolution or a stack of experts\)"):
        read_adapter(source)
    assert list(read_adapter(source, strict=False).modules) == ["lin"]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"peft_type": "ADALORA"}, "peft_type 'ADALORA' is not supported"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens: activated LoRA"),
        ({"layer_replication": [[0, 2]]}, "layer_replication: layer replication"),
        ({"megatron_config": {"a": 1}}, "megatron_config: Megatron"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters: adapters on bare parameters"),
        ({"use_qalora": True}, "use_qalora: QA-LoRA"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora: block-diagonal LoRA"),
        ({"arrow_config": {"top_k": 2}}, "arrow_config: Arrow routing"),
        ({"kasa_config": {"beta": 1}}, "kasa_config: KaSA"),
        ({"velora_config": {"num_groups": 2}}, "velora_config: VeLoRA"),
        ({"monteclora_config": {"num_samples": 2}}, "monteclora_config: MonteCLoRA"),
        ({"enable_lora": [True, False]}, "enable_lora: merged linear layers"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights 'pissa_niter_4' changes the base weights"),
        ({"init_lora_weights": "olora"}, "'olora' changes the base weights"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices=\[1\]"),
    ],
)
def test_variants_are_refused_by_name(tmp_path, change, said):
    save(tmp_path, r=4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(NotImplementedError, match=said):
        read_adapter(tmp_path)


@pytest.mark.parametrize("init", [True, False, "gaussian", "eva", "orthogonal"])
def test_initializations_that_leave_the_base_alone_are_fine(tmp_path, init):
    save(tmp_path, r=4)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "init_lora_weights": init}))
    assert len(read_adapter(tmp_path).modules) == 8


def test_every_variant_field_of_this_peft_is_refused():
    """A variant that a newer PEFT adds must not be read as plain LoRA."""
    from dataclasses import fields

    from torch_epilora.formats.adapter_config import _VARIANTS

    declared = {f.name for f in fields(peft.LoraConfig) if f.metadata.get("is_lora_variant")}
    assert declared and declared <= _VARIANTS.keys()
