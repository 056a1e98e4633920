"""Patched transformers models: what their own methods refuse, and what patch says about the layers it leaves."""

import copy
import logging

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

import torch_epilora as te
from tests.nn.helpers import SIZES, VOCAB, adapter, llama, same, snapshot, tokens, weight_value
from torch_epilora.nn import LoraLinear

SAVE = "save_pretrained is not supported by a patched model.*torch_epilora.save_quantized"
LORA = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)


@pytest.mark.parametrize("form", ["itself", "copy", "compiled", "compiled first", "body", "loaded", "peft"])
def test_save_pretrained_is_refused_and_writes_nothing(form, tmp_path):
    if form == "compiled first":
        model = te.patch(torch.compile(llama(), backend="eager"))
    elif form == "peft":
        model = te.patch(get_peft_model(llama(), LORA)).get_base_model()
    else:
        model = te.patch(llama())
    if form == "copy":
        model = copy.deepcopy(model)
    if form == "compiled":
        model = torch.compile(model, backend="eager")
    if form == "body":
        model = model.model
    if form == "loaded":
        te.save_quantized(model, tmp_path / "base")
        model = te.load_quantized(tmp_path / "base")
    with pytest.raises(NotImplementedError, match=SAVE):
        model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert model(tokens(1, 3))[0].isfinite().all()


def test_unpatch_lets_the_model_save_again(tmp_path):
    model = te.unpatch(te.patch(llama()))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(again(tokens(2, 4)).logits, model(tokens(2, 4)).logits)
    model.add_adapter(LORA)


def test_parts_without_patched_layers_still_save(tmp_path):
    both = torch.nn.ModuleDict({"plain": llama(), "fp8": llama()})
    te.patch(both, targets="fp8")
    both["plain"].save_pretrained(tmp_path / "plain")
    assert (tmp_path / "plain/config.json").exists()
    with pytest.raises(NotImplementedError, match=SAVE):
        both["fp8"].save_pretrained(tmp_path / "fp8")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m, path: m.load_adapter(path), r"load_adapter is not supported.*torch_epilora.load_adapter\(model"),
        (lambda m, path: m.add_adapter(LORA), r"add_adapter is not supported.*torch_epilora.load_adapter\(model"),
    ],
    ids=["load_adapter", "add_adapter"],
)
def test_transformers_own_adapters_are_refused_and_pefts_are_not(call, match, tmp_path):
    plain = get_peft_model(llama(), LORA)
    plain.save_pretrained(tmp_path)
    model = te.patch(llama(), compute="w8a16")
    with pytest.raises(NotImplementedError, match=match):
        call(model, tmp_path)
    assert not any("lora" in name for name, _ in model.named_modules())
    on_top = PeftModel.from_pretrained(model, tmp_path).eval()
    for path, linear in ((n, m) for n, m in model.named_modules() if isinstance(m, LoraLinear)):
        layer = plain.get_base_model().get_submodule(path.removesuffix(".base_layer"))
        getattr(layer, "base_layer", layer).weight.data = weight_value(linear).float()
    with torch.no_grad():
        torch.testing.assert_close(on_top(tokens(2, 4)).logits, plain.eval()(tokens(2, 4)).logits)
    on_top.save_pretrained(tmp_path / "again")
    assert {f.name for f in (tmp_path / "again").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}


def test_adapters_that_transformers_loaded_before_are_refused():
    model = llama()
    model.add_adapter(LORA)
    before = snapshot(model)
    with pytest.raises(NotImplementedError, match=r"layers\.0\.self_attn\.q_proj is PEFT's Linear in another model"):
        te.patch(model)
    assert same(before, snapshot(model))
    te.patch(model, targets="mlp")
    assert model(tokens(1, 3)).logits.isfinite().all()


def mixtral():
    torch.manual_seed(0)
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)).eval()


def test_experts_in_one_parameter_are_named_with_their_share(caplog):
    model = mixtral()
    experts = {n: p for n, p in model.named_parameters() if p.dim() == 3}
    with caplog.at_level(logging.WARNING):
        te.patch(model)
    assert len(experts) == 4 and all(p is model.get_parameter(n) for n, p in experts.items())
    (record,) = caplog.records
    text = record.getMessage()
    total = sum(p.nbytes for p in model.parameters())
    for leaf in ("gate_up_proj", "down_proj"):
        size = sum(p.nbytes for n, p in experts.items() if n.endswith(leaf))
        assert f"model.layers.*.mlp.experts.{leaf} ({size / total:.0%})" in text
    assert "embed" not in text and "lm_head" not in text and "norm" not in text


@pytest.mark.parametrize(
    ("model", "options"),
    [(llama, {}), (mixtral, {"targets": "self_attn"}), (mixtral, {"exclude": ["lm_head", "experts", "gate"]})],
)
def test_what_is_meant_to_stay_is_no_warning(model, options, caplog):
    with caplog.at_level(logging.WARNING):
        te.patch(model(), **options)
    assert not caplog.records


def test_a_model_that_is_quantized_already_is_sent_to_load_quantized(tmp_path):
    te.save_quantized(te.patch(llama()), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"it is already quantized \(compressed-tensors.*torch_epilora.load_quantized\(path\)"
    ):
        te.patch(model)


def test_the_head_by_name_wins_over_the_default_exclude():
    plain = llama()
    for targets in (["lm_head"], ["q_proj", "lm_head"]):
        model = te.patch(copy.deepcopy(plain), targets=targets)
        assert type(model.lm_head) is LoraLinear
        assert isinstance(model.model.layers[0].self_attn.q_proj, LoraLinear) is ("q_proj" in targets)
    torch.testing.assert_close(weight_value(model.lm_head).float(), plain.lm_head.weight.data, rtol=0.07, atol=1e-3)
    assert type(te.patch(copy.deepcopy(plain), targets="*").lm_head) is torch.nn.Linear
    with pytest.raises(ValueError, match="lm_head: it is excluded"):
        te.patch(plain, targets=["lm_head"], exclude=["re:lm_.*"])


def test_conv1d_layers_are_named():
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes))
    with pytest.raises(ValueError, match=r"found none .*transformer\.h\.0\.attn\.c_attn: Conv1D.* is no nn.Linear"):
        te.patch(model)
    with pytest.raises(ValueError, match=r"'c_fc' to name .* \(skipped: transformer\.h\.0\.mlp\.c_fc: Conv1D"):
        te.patch(model, targets="c_fc")


def test_printing_a_model_tells_what_its_layers_are():
    model = te.patch(llama(), layout="tensor", compute="w8a16", max_adapters=3, max_rank=16)
    text = repr(model)
    assert (
        "in_features=64, out_features=32, bias=False, layout=channel, compute=w8a16, slots=3, max_rank=16, "
        "fused with q_proj and v_proj"
    ) in text
    assert repr(model.model.layers[0].mlp.down_proj).count("layout=tensor, compute=w8a16, slots=3, max_rank=16\n") == 1
    te.load_adapter(model, "a", adapter(llama()))
    assert repr(model) == text
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.group._unfuse()
    assert "fused with" not in repr(model.model.layers[0].self_attn)
