"""State dicts, save_quantized and load_quantized."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import torch_epilora as te
from tests.nn.helpers import adapter, attention, dequantized, llama, phi3, qwen3, same, snapshot, tokens
from torch_epilora.formats.checkpoints import read_checkpoint, write_checkpoint
from torch_epilora.formats.fp8 import Fp8Weight
from torch_epilora.nn import describe
from torch_epilora.nn.linear import lora_linears


def bits(model):
    return {n: t.contiguous().view(torch.uint8) for n, t in model.state_dict().items() if t.numel()}


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize("build", [llama, qwen3, phi3])
def test_strict_round_trip_is_bit_exact(layout, build):
    model = te.patch(build(), layout=layout)
    te.load_adapter(model, "a", adapter(build()))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    assert not any("group" in k or "bank" in k for k in state)
    if build is not phi3:
        key = "model.layers.0.self_attn.v_proj"
        assert state[f"{key}.weight"].dtype == torch.float8_e4m3fn
        # a weight within one block has one scale, which is per tensor
        assert state[f"{key}.weight_scale"].shape == (
            (state[f"{key}.weight"].shape[0], 1) if layout == "channel" else (1,)
        )
    torch.manual_seed(5)
    other = te.patch(type(model)(model.config).eval(), layout=layout)
    ids = tokens(2, 5)
    with torch.no_grad():
        assert not torch.equal(other(ids).logits, model(ids).logits)
        assert str(other.load_state_dict(state)) == "<All keys matched successfully>"
        assert torch.equal(other(ids).logits, model(ids).logits)
    assert same(bits(other), bits(model))


def test_a_state_dict_that_does_not_fit_is_reported():
    plain = llama(attention_bias=True)
    model = te.patch(copy.deepcopy(plain))
    before = snapshot(model)
    state = dict(model.state_dict())
    key = "model.layers.0.self_attn.q_proj."
    with pytest.raises(RuntimeError, match=r"q_proj.weight: expected float8_e4m3fn \[64, 64\], got float32"):
        model.load_state_dict({**state, key + "weight": plain.state_dict()[key + "weight"]})
    with pytest.raises(RuntimeError, match=r"weight_scale: expected float32 \[64, 1\], got float32 \[1\]"):
        model.load_state_dict({**state, key + "weight_scale": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*q_proj\.bias"):
        model.load_state_dict({k: v for k, v in state.items() if k != key + "bias"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_proj\.other"):
        model.load_state_dict({**state, key + "other": torch.ones(1)})
    with pytest.raises(RuntimeError, match="expected both or neither"):
        model.load_state_dict({k: v for k, v in state.items() if k != key + "weight"}, strict=False)
    assert same(before, snapshot(model))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_scales_that_are_none_are_refused(value):
    model = te.patch(llama())
    before, state = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
    key = "model.layers.0.self_attn.q_proj.weight_scale"
    state[key][3] = value
    with pytest.raises(RuntimeError, match=f"{key}: expected values finite and not negative, got {value}"):
        model.load_state_dict({k: v for k, v in state.items() if "q_proj" in k}, strict=False)
    assert same(before, snapshot(model))


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize(("build", "tied"), [(llama, False), (qwen3, True), (phi3, False)])
def test_saved_and_loaded_is_the_same_model(tmp_path, layout, build, tied):
    plain = build(tie_word_embeddings=tied)
    model = te.patch(copy.deepcopy(plain), layout=layout)
    model.generation_config.max_new_tokens = 7
    te.load_adapter(model, "a", adapter(plain))
    te.save_quantized(model, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert ("lm_head.weight" in stored) is not tied and not any("lora" in k or "bank" in k for k in stored)
    loaded = te.load_quantized(tmp_path / "out", max_adapters=2, max_rank=8)
    assert type(loaded) is type(model) and loaded.dtype == torch.float32 and not loaded.training
    assert not any(t.is_meta for t in [*loaded.parameters(), *loaded.buffers()])
    assert loaded.generation_config.max_new_tokens == 7
    ids = tokens(2, 5)
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    assert describe(loaded)[0].slots == 2 and same(bits(loaded), bits(model))
    te.load_adapter(loaded, "a", adapter(plain))
    filled = te.load_quantized(tmp_path / "out", copy.deepcopy(plain))
    assert same(bits(filled), bits(model))


def test_16_bit_weights_are_never_made(tmp_path):
    model = te.patch(llama(torch.bfloat16), max_adapters=0)
    te.save_quantized(model, tmp_path)
    big = 96 * 64
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else (out,):
                if isinstance(t, torch.Tensor) and not t.is_meta and t.numel() == big and t.dtype == torch.bfloat16:
                    seen.append(func)
            return out

    with Watch():
        loaded = te.load_quantized(tmp_path, max_adapters=0)
    assert not seen and loaded.dtype == torch.bfloat16


def test_transformers_reads_what_is_saved(tmp_path):
    from transformers import AutoModelForCausalLM

    plain = llama()
    model = te.patch(copy.deepcopy(plain), compute="w8a16")
    te.save_quantized(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["quantization_config"]["format"] == "float-quantized" and config["dtype"] == "float32"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    want = dequantized(model, plain)
    for name, linear in lora_linears(model).items():
        module = theirs.get_submodule(name)
        assert torch.equal(
            module.weight.float()
            if module.weight.dtype != torch.float8_e4m3fn
            else module.weight.float() * module.weight_scale,
            want.get_submodule(name).weight,
        ), name
        assert linear.weight_scale.dtype == torch.float32


def test_static_input_scales_are_kept_and_used(tmp_path):
    plain = attention()
    torch.manual_seed(1)
    weights = {n: Fp8Weight.quantize(m.weight.detach(), "tensor") for n, m in plain.named_children()}

    def write(scales):
        static = {
            n: Fp8Weight(w.codes, w.scale, torch.tensor([s])) for (n, w), s in zip(weights.items(), scales, strict=True)
        }
        write_checkpoint(tmp_path, static, {}, {})

    write([0.01, 0.01, 0.01, 0.02])
    model = te.load_quantized(tmp_path, copy.deepcopy(plain))
    assert describe(model)[0].fused and model.k_proj.input_scale.item() == pytest.approx(0.01)
    x = torch.randn(3, 64)
    codes = (x * (1 / torch.tensor(0.01))).clamp(-448, 448).to(torch.float8_e4m3fn).float() * 0.01
    with torch.no_grad():
        want = codes @ weights["k_proj"].dequantize().t()
        torch.testing.assert_close(model.k_proj(x), want, rtol=1e-4, atol=1e-5)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        assert state["k_proj.input_scale"].shape == (1,)
        model.load_state_dict({k: v * 3 if "input_scale" in k else v for k, v in state.items()})
        assert describe(model)[0].fused
        state["k_proj.input_scale"].mul_(300)
        model.load_state_dict(state)
        assert not describe(model)[0].fused  # codes now differ between the members
        assert not torch.allclose(model.k_proj(x), want, rtol=1e-4, atol=1e-5)
    write([0.01, 0.02, 0.01, 0.02])
    assert [i.fused for i in describe(te.load_quantized(tmp_path, copy.deepcopy(plain)))] == [False] * 4
    again = tmp_path / "again"
    te.save_quantized(model, again)
    assert read_checkpoint(again).weights["k_proj"].input_scale.item() == pytest.approx(3.0)


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "modelopt"])
def test_checkpoints_of_other_tools_load(tmp_path, method):
    plain = llama()
    tensors = {k: v for k, v in plain.state_dict().items() if not k.endswith("proj.weight")}
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            layout = {"fp8": "block", "fbgemm_fp8": "channel", "modelopt": "tensor"}[method]
            weight = Fp8Weight.quantize(module.weight.detach(), layout)
            tensors[f"{name}.weight"] = weight.codes
            tensors[f"{name}.weight_scale_inv" if method == "fp8" else f"{name}.weight_scale"] = (
                weight.scale.reshape(()) if method == "modelopt" else weight.scale
            )
            if method == "modelopt":
                tensors[f"{name}.input_scale"] = torch.tensor(0.02)
    quantization = {
        "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
        "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    }[method]
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, tmp_path / "model.safetensors")
    config = {**plain.config.to_dict(), "dtype": "float32", "quantization_config": quantization}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = te.load_quantized(tmp_path, compute="w8a16")
    ids = tokens(2, 5)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, dequantized(model, plain)(ids).logits, rtol=1e-4, atol=1e-5)
    weight = model.model.layers[0].mlp.up_proj
    assert weight.input_scale is None if method != "modelopt" else weight.input_scale.item() == pytest.approx(0.02)
    error = (weight.weight.float() * (weight.weight_scale if method != "fp8" else 1)).isfinite().all()
    assert error


def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path):
    plain = llama()
    te.save_quantized(te.patch(copy.deepcopy(plain)), tmp_path)

    def refused(model, match):
        before = snapshot(model)
        with pytest.raises(ValueError, match=match):
            te.load_quantized(tmp_path, model)
        assert same(before, snapshot(model)) and not lora_linears(model)

    refused(
        llama(intermediate_size=128), r"down_proj.weight: the model expects \[64, 128\], the checkpoint has \[64, 96\]"
    )
    refused(llama(num_hidden_layers=1), "model.layers.1.*the model has no such layer")
    refused(llama(vocab_size=101), r"weight: the model expects \[101, 64\]")
    refused(llama(attention_bias=True), "missing are .*bias")
    with pytest.raises(ValueError, match="already patched"):
        te.load_quantized(tmp_path, te.patch(llama()))
    (tmp_path / "config.json").write_text(
        json.dumps({"quantization_config": json.loads((tmp_path / "config.json").read_text())["quantization_config"]})
    )
    with pytest.raises(ValueError, match="transformers cannot build a causal LM"):
        te.load_quantized(tmp_path)
