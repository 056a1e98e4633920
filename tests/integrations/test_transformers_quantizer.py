"""from_pretrained with EpiLoraConfig: the model that patch makes, saved and read again; checkpoints of other tools."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import torch_epilora as te
from tests.nn.helpers import SIZES, VOCAB, adapter, llama, phi3, qwen3, tokens, weight_value
from torch_epilora.formats.fp8 import Fp8Weight
from torch_epilora.nn import describe
from torch_epilora.nn.linear import LoraLinear, lora_linears

Config = te.EpiLoraConfig


@pytest.fixture
def folder(tmp_path):
    """A tiny Llama in 16 bits, untied, as a folder."""
    llama(torch.bfloat16, attention_bias=True).save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def load(path, config=None, **options):
    # To transformers, None is not the same as no config: it leaves out what config.json says.
    options |= {} if config is None else {"quantization_config": config}
    return AutoModelForCausalLM.from_pretrained(path, **options)


def patched(path, dtype="auto", **options):
    return te.patch(AutoModelForCausalLM.from_pretrained(path, dtype=dtype), **options)


def assert_same(one, other):
    """The same tensors bit for bit, the same slots, the same outputs."""
    assert_same_tensors(one, other)
    with torch.no_grad():
        assert torch.equal(one(tokens(2, 5))[0], other(tokens(2, 5))[0])


def assert_same_tensors(one, other):
    first, second = one.state_dict(), other.state_dict()
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype, key
        assert torch.equal(tensor.contiguous().view(torch.uint8), second[key].contiguous().view(torch.uint8)), key
    assert describe(one) == describe(other)
    assert one.training is other.training is False


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("build", "options"),
    [
        (llama, {}),
        (llama, {"layout": "tensor", "compute": "w8a16", "max_adapters": 2, "max_rank": 16}),
        (llama, {"layout": "block", "max_adapters": 0}),
        (llama, {"targets": ["q_proj", "k_proj", "lm_head"]}),
        (llama, {"targets": "self_attn", "exclude": "re:.*v_proj"}),
        (qwen3, {"layout": "channel"}),
        (phi3, {}),
        (phi3, {"slices": {"qkv_proj": [64, 64]}}),
    ],
)
def test_codes_and_scales_are_those_of_patch(build, options, dtype, tmp_path):
    changes = {"hidden_size": 160, "intermediate_size": 272} if options.get("layout") == "block" else {}
    build(**changes).to(dtype).save_pretrained(tmp_path)
    model, want = load(tmp_path, Config(**options)), patched(tmp_path, **options)
    assert model.dtype == dtype and type(model) is type(want)
    assert_same(model, want)
    assert sorted(lora_linears(model)) == sorted(lora_linears(want)) != []


def test_weights_are_cast_to_the_models_dtype_before_they_are_quantized(tmp_path):
    llama(torch.float32).save_pretrained(tmp_path)
    model = load(tmp_path, Config(), dtype=torch.bfloat16)
    assert_same(model, patched(tmp_path, torch.bfloat16))
    weight = load_file(tmp_path / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    other = Fp8Weight.quantize(weight)
    assert not torch.equal(model.model.layers[0].mlp.down_proj.weight_scale, other.scale)


class KeptInFp32(LlamaForCausalLM):
    _keep_in_fp32_modules_strict = ("down_proj",)


def test_layers_that_transformers_keeps_in_fp32_take_fp32(tmp_path):
    llama(torch.float32, mlp_bias=True).save_pretrained(tmp_path)
    model = KeptInFp32.from_pretrained(tmp_path, dtype=torch.bfloat16, quantization_config=Config())
    assert_same_tensors(model, te.patch(KeptInFp32.from_pretrained(tmp_path, dtype=torch.bfloat16)))
    layer = model.model.layers[0]
    assert layer.mlp.down_proj.group.bank.dtype == torch.float32
    assert layer.mlp.up_proj.group.bank.dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_stays_as_patch_leaves_it(tied, tmp_path):
    qwen3(torch.bfloat16, tie_word_embeddings=tied).save_pretrained(tmp_path)
    model = load(tmp_path, Config())
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight.dtype == torch.bfloat16
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    model.save_pretrained(tmp_path / "out")
    assert ("lm_head.weight" in load_file(tmp_path / "out/model.safetensors")) is not tied
    assert_same(load(tmp_path / "out"), model)
    if tied:
        with pytest.raises(ValueError, match="lm_head: its weight is tied to another module's"):
            load(tmp_path, Config(targets="lm_head"))
    else:
        assert type(load(tmp_path, Config(targets="lm_head")).lm_head) is LoraLinear


def test_the_16_bit_model_never_lies_there_as_a_whole(folder, monkeypatch):
    from torch_epilora.integrations.transformers_quantizer import EpiLoraQuantizer

    seen, sizes = {}, []
    before, after = (getattr(EpiLoraQuantizer, f"_process_model_{when}_weight_loading") for when in ("before", "after"))

    def look_before(self, model, **kwargs):
        before(self, model, **kwargs)
        # transformers reserves memory on a GPU by these
        for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):
            sizes.append(self.param_element_size(model, name, model.get_parameter(name)))

    def look_after(self, model, **kwargs):
        seen.update({n: m.weight.dtype for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        return after(self, model, **kwargs)

    monkeypatch.setattr(EpiLoraQuantizer, "_process_model_before_weight_loading", look_before)
    monkeypatch.setattr(EpiLoraQuantizer, "_process_model_after_weight_loading", look_after)
    load(folder, Config())
    assert sizes == [2, 1]
    assert seen.pop("lm_head") == torch.bfloat16
    assert len(seen) == 14 and set(seen.values()) == {torch.float8_e4m3fn}


@pytest.mark.parametrize("options", [{}, {"layout": "tensor", "compute": "w8a16", "max_adapters": 3, "max_rank": 4}])
def test_saved_and_read_again_is_the_same_model(folder, options, tmp_path):
    model = load(folder, Config(**options))
    model.generation_config.max_new_tokens = 7
    te.load_adapter(model, "a", adapter(model, r=4, dtype=torch.bfloat16))
    model.save_pretrained(tmp_path / "out")
    te.unload_adapter(model, "a")
    for config in (None, Config(**options)):
        again = load(tmp_path / "out", config)
        assert_same(again, model)
        assert again.generation_config.max_new_tokens == 7
        assert again.config.quantization_config.to_dict() == model.config.quantization_config.to_dict()
    other = load(tmp_path / "out", Config(max_adapters=1, max_rank=2))
    assert {(i.slots, i.max_rank) for i in describe(other)} == {(1, 2)}
    again.save_pretrained(tmp_path / "twice")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()
    compute = options.get("compute", "w8a8")
    loaded = te.load_quantized(tmp_path / "out", compute=compute, max_adapters=other.config.num_hidden_layers)
    first, second = loaded.state_dict(), model.state_dict()
    assert first.keys() == second.keys() and all(torch.equal(first[k].float(), second[k].float()) for k in first)
    with torch.no_grad():
        assert torch.equal(loaded(tokens(2, 5)).logits, model(tokens(2, 5)).logits)


def test_what_is_saved_is_what_save_quantized_writes(folder, tmp_path):
    model = load(folder, Config(max_rank=4))
    model.save_pretrained(tmp_path / "out")
    te.save_quantized(patched(folder), tmp_path / "ours")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "ours"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k].view(torch.uint8), other[k].view(torch.uint8)) for k in one)
    key = "model.layers.0.self_attn.q_proj"
    assert one[f"{key}.weight"].dtype == torch.float8_e4m3fn
    assert one[f"{key}.weight_scale"].dtype == torch.float32 and one[f"{key}.weight_scale"].shape == (64, 1)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "ours")]
    quantization, plain = (config["quantization_config"] for config in configs)
    assert quantization.pop("epilora")["max_rank"] == 4
    assert quantization == plain and plain["quant_method"] == "compressed-tensors"
    assert configs[0]["dtype"] == configs[1]["dtype"] == "bfloat16"
    te.save_quantized(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["quantization_config"] == plain


def test_without_this_library_transformers_reads_values_and_no_raw_codes(folder, tmp_path):
    model = load(folder, Config(), dtype=torch.float32)
    model.save_pretrained(tmp_path / "out")
    code = (
        "import sys, torch; from safetensors.torch import save_file; from transformers import AutoModelForCausalLM\n"
        f"model = AutoModelForCausalLM.from_pretrained({str(tmp_path / 'out')!r})\n"
        "model(torch.tensor([[3, 4, 5]]))\n"
        "assert not [m for m in sys.modules if m.startswith('torch_epilora')]\n"
        "weights = {n: m.weight for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}\n"
        f"save_file(weights, {str(tmp_path / 'weights')!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    theirs = load_file(tmp_path / "weights")
    assert len(theirs) == 15
    for name, linear in lora_linears(model).items():
        torch.testing.assert_close(theirs[name].double(), weight_value(linear), rtol=1e-6, atol=0)


def test_importing_the_package_imports_no_transformers():
    code = (
        "import sys, torch_epilora as te; print('transformers' in sys.modules); te.EpiLoraConfig\n"
        "print('transformers' in sys.modules)\n"
        "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING; print('epilora' in AUTO_QUANTIZER_MAPPING)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split() == ["False", "True", "True"]
    with pytest.raises(AttributeError, match="has no attribute 'EpiLora'"):
        te.EpiLora  # noqa: B018


def write_as(method, path, plain):
    """The plain model as another tool would quantize it."""
    layout = {"fp8": "block", "fbgemm_fp8": "channel"}.get(method, "tensor")
    tensors = {k: v for k, v in plain.state_dict().items() if not k.endswith("proj.weight")}
    for name, module in plain.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            weight = Fp8Weight.quantize(module.weight.detach(), layout)
            tensors[f"{name}.weight"] = weight.codes
            if method == "fp8":
                tensors[f"{name}.weight_scale_inv"] = weight.scale.to(torch.float8_e8m0fnu).reshape(1, 1)
            else:
                tensors[f"{name}.weight_scale"] = weight.scale.reshape(()) if layout == "tensor" else weight.scale
            if layout == "tensor":
                tensors[f"{name}.input_scale"] = torch.tensor(0.02)
    path.mkdir()
    save_file({k: v.clone().contiguous() for k, v in tensors.items()}, path / "model.safetensors")
    config = {**plain.config.to_dict(), "dtype": "bfloat16"}
    if method == "modelopt file":
        described = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
        (path / "hf_quant_config.json").write_text(json.dumps(described))
    else:
        config["quantization_config"] = {
            "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
            "fbgemm_fp8": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
            "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
        }[method]
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8", "modelopt", "modelopt file"])
def test_checkpoints_of_other_tools_keep_their_codes(method, tmp_path, caplog):
    write_as(method, tmp_path / "theirs", llama(torch.bfloat16, attention_bias=True))
    model = load(tmp_path / "theirs", Config(max_rank=16))
    assert_same(model, te.load_quantized(tmp_path / "theirs", max_rank=16))
    assert len(lora_linears(model)) == 14
    assert ("input_scale_ub=1200 is not applied" in caplog.text) is (method == "fbgemm_fp8")
    model.save_pretrained(tmp_path / "ours")
    assert_same(load(tmp_path / "ours"), model)


def test_compressed_tensors_of_another_writer_is_read_with_our_config_and_by_them_without(folder, tmp_path):
    model = patched(folder)
    te.save_quantized(model, tmp_path / "out")
    assert_same(load(tmp_path / "out", Config()), model)
    assert not lora_linears(load(tmp_path / "out"))


def test_a_model_without_its_head_finds_its_layers(folder, tmp_path):
    load(folder, Config()).save_pretrained(tmp_path / "out")
    plain = te.patch(AutoModel.from_pretrained(folder))
    assert_same(AutoModel.from_pretrained(folder, quantization_config=Config()), plain)
    body = AutoModel.from_pretrained(tmp_path / "out", quantization_config=Config())
    assert_same(body, plain)
    body.save_pretrained(tmp_path / "body")
    assert_same(AutoModel.from_pretrained(tmp_path / "body"), plain)


def test_experts_in_one_parameter_stay_and_are_saved_under_their_own_names(tmp_path):
    torch.manual_seed(0)
    MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2)).save_pretrained(tmp_path)
    assert "model.layers.0.mlp.experts.gate_up_proj" not in load_file(tmp_path / "model.safetensors")
    model = load(tmp_path, Config())
    assert_same(model, patched(tmp_path))
    model.save_pretrained(tmp_path / "out")
    assert load_file(tmp_path / "out/model.safetensors").keys() == model.state_dict().keys()
    again = load(tmp_path / "out")
    assert_same_tensors(again, model)
    with torch.no_grad():  # experts that lie at other addresses give other last bits on the CPU, with plain models too
        torch.testing.assert_close(again(tokens(2, 5)).logits, model(tokens(2, 5)).logits)


def test_a_weight_that_is_missing_is_initialized_then_quantized(folder):
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    linear = load(folder, Config()).model.layers[1].mlp.up_proj
    assert linear.weight.dtype == torch.float8_e4m3fn and linear.weight.float().std() > 50
    assert linear.weight_scale.isfinite().all()


def test_one_config_serves_several_models(folder, tmp_path):
    config = Config(max_adapters=1)
    before = config.to_dict()
    one, other = (LlamaForCausalLM.from_pretrained(folder, quantization_config=config) for _ in range(2))
    assert config.to_dict() == before == Config.from_dict(before).to_dict()
    assert_same(one, other)
    assert_same(load(folder, copy.deepcopy(config)), copy.deepcopy(one))
    torch.nn.Module.half(other)
    assert other.model.layers[0].self_attn.q_proj.weight.dtype == torch.float8_e4m3fn


def test_layers_can_be_placed_but_not_offloaded(folder, tmp_path):
    pytest.importorskip("accelerate")
    assert_same(load(folder, Config(), device_map="cpu"), load(folder, Config()))
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    with pytest.raises(NotImplementedError, match=r"device_map: model\.layers\.1\.\S* is offloaded, which FP8 layers"):
        load(folder, Config(), device_map=places, offload_folder=tmp_path / "offload")


def test_unpatch_leaves_a_plain_model(folder, tmp_path):
    model = te.unpatch(load(folder, Config()))
    model.save_pretrained(tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        assert torch.equal(again(tokens(2, 4)).logits, model(tokens(2, 4)).logits)
    assert lora_linears(te.patch(model))
    with pytest.raises(NotImplementedError, match="save_pretrained is not supported by a patched model"):
        model.save_pretrained(tmp_path / "out")


def test_what_transformers_does_with_adapters_is_refused_and_patching_twice_too(folder):
    model = load(folder, Config())
    with pytest.raises(NotImplementedError, match=r"load_adapter is not supported.*torch_epilora.load_adapter"):
        model.load_adapter("anywhere")
    with pytest.raises(ValueError, match="it is already patched"):
        te.patch(model)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"base": "int4"}, ValueError, "base: expected one of 'fp8', got 'int4'"),
        ({"layout": "row"}, ValueError, "layout: expected one of 'tensor', 'channel', 'block', got 'row'"),
        ({"compute": "w4a4"}, ValueError, "compute: expected one of 'w8a8', 'w8a16', got 'w4a4'"),
        ({"max_rank": 0}, ValueError, "max_rank: expected at least 1, got 0"),
        ({"max_adapters": 1.5}, TypeError, "max_adapters: expected an integer, got float"),
        ({"targets": ["re:("]}, ValueError, r"targets: 're:\(' is not a regular expression"),
        ({"exclude": [3]}, TypeError, "exclude: expected module names or patterns, got an entry of type int"),
        ({"exclude": None}, TypeError, "exclude: expected module names or patterns, got NoneType"),
        ({"targets": 7}, TypeError, "targets: expected module names or patterns, got int"),
        ({"slices": [1]}, TypeError, "slices: expected a mapping of name to widths, got list"),
        ({"rank": 8}, TypeError, "unexpected keyword argument 'rank'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        Config(**options)


def test_models_that_do_not_fit_are_refused(folder, tmp_path):
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    GPT2LMHeadModel(GPT2Config(**sizes)).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match=r"expected at least one nn.Linear to patch, found none \(skipped: .*Conv1D"):
        load(tmp_path / "gpt2", Config())
    with pytest.raises(ValueError, match="targets: expected 'nothing' to name a linear that can be patched"):
        load(folder, Config(targets="nothing"))
    with pytest.raises(ValueError, match=r"slices\['q_proj'\]: expected at most 16 positive integers that sum to 64"):
        load(folder, Config(slices={"q_proj": [1, 2]}))
    state = llama().state_dict()
    with pytest.raises(ValueError, match="EpiLoraConfig expects a folder of safetensors files, got a state_dict"):
        LlamaForCausalLM.from_pretrained(None, config=llama().config, state_dict=state, quantization_config=Config())
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("inf")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.up_proj\.weight: expected finite values, got NaN or inf"):
        load(folder, Config())
    header = json.dumps({"a": {"dtype": "F4", "shape": [2, 2], "data_offsets": [0, 2]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"xx")
    with pytest.raises(NotImplementedError, match=r"model\.safetensors: a: the dtype F4 is not supported"):
        load(folder, Config())
    (folder / "model.safetensors").write_bytes(b"x" * 30)
    with pytest.raises(ValueError, match=r"model\.safetensors: not a readable safetensors file"):
        load(folder, Config())
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"a folder of safetensors files, got pytorch_model\.bin"):
        load(folder, Config())


def rewrite(path, change):
    """Change the tensors and the quantization_config of a saved model."""
    tensors = load_file(path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    change(tensors, config)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda t, c: t.pop("model.layers.0.mlp.up_proj.weight_scale"), ValueError, "up_proj.weight: expected its sca"),
        (
            lambda t, c: t["model.layers.0.mlp.up_proj.weight"].view(torch.uint8).fill_(0x7F),
            ValueError,
            r"model\.safetensors: model\.layers\.0\.mlp\.up_proj\.weight: expected finite codes, got NaN",
        ),
        (
            lambda t, c: t.update({"model.mtp.weight": t.pop("model.layers.0.mlp.up_proj.weight")}),
            ValueError,
            "up_proj.weight_scale: expected float8_e4m3fn codes .* got no weight",
        ),
        (
            lambda t, c: t.update({"model.mtp.weight": t["model.layers.0.mlp.up_proj.weight"].clone()}),
            ValueError,
            r"model\.mtp: the checkpoint has FP8 codes for it, but LlamaForCausalLM has no linear layer of that name.*"
            r"torch_epilora\.load_quantized\(path, model\)",
        ),
        (
            lambda t, c: t.update(
                {"model.layers.0.mlp.up_proj.weight": t["model.layers.0.mlp.up_proj.weight"][:, :32].contiguous()}
            ),
            ValueError,
            r"up_proj\.weight: the model expects \[96, 64\], the checkpoint has \[96, 32\]",
        ),
        (
            lambda t, c: c.update(quantization_config={"quant_method": "gptq", "bits": 4}),
            NotImplementedError,
            "quant_method 'gptq' is not supported; expected one of compressed-tensors",
        ),
        (lambda t, c: c.pop("quantization_config"), ValueError, "expected a quantization_config in config.json or a"),
        (
            lambda t, c: t.update({k: v.to(torch.bfloat16) for k, v in t.items()}),
            ValueError,
            r"model\.safetensor.*: expected float8_e4m3fn|expected float8_e4m3fn weights, as compressed-tensors has",
        ),
        (
            lambda t, c: t.update({k: v.to(torch.float8_e5m2) for k, v in t.items() if "norm" in k}),
            ValueError,
            "norm.*expected float8_e4m3fn codes or a plain tensor, got float8_e5m2",
        ),
    ],
)
def test_fp8_checkpoints_that_do_not_fit_are_refused(change, error, match, folder, tmp_path):
    load(folder, Config()).save_pretrained(tmp_path / "out")
    rewrite(tmp_path / "out", change)
    with pytest.raises(error, match=match):
        load(tmp_path / "out", Config())


def test_options_that_the_checkpoint_decided_otherwise_are_refused(folder, tmp_path):
    load(folder, Config(layout="tensor", targets="mlp")).save_pretrained(tmp_path / "out")
    for config in (Config(), Config(layout="tensor"), Config(targets="mlp", max_rank=2)):
        assert len(lora_linears(load(tmp_path / "out", config))) == 6
    with pytest.raises(ValueError, match=r"layout: expected 'tensor', since .*out is FP8 already .* got 'block'"):
        load(tmp_path / "out", Config(layout="block"))
    with pytest.raises(ValueError, match=r"targets: expected \['mlp'\], since .* got \['q_proj'\]"):
        load(tmp_path / "out", Config(targets="q_proj"))

    def forge(tensors, config):
        config["quantization_config"]["epilora"]["rank"] = 8

    rewrite(tmp_path / "out", forge)
    with pytest.raises(ValueError, match=r"expected options of EpiLoraConfig \(base, .*'rank': 8"):
        load(tmp_path / "out")


def test_experts_that_are_fp8_are_refused_and_not_merged_as_weights(tmp_path):
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))
    model.to(torch.bfloat16).save_pretrained(tmp_path)

    def quantize(tensors, config):
        for key in [k for k in tensors if "experts" in k]:
            weight = Fp8Weight.quantize(tensors[key])
            tensors[key], tensors[f"{key}_scale"] = weight.codes, weight.scale
        config["quantization_config"] = {"quant_method": "fbgemm_fp8"}

    rewrite(tmp_path, quantize)
    with pytest.raises(ValueError, match=r"experts\..*FP8 codes for it, but MixtralForCausalLM has no linear"):
        load(tmp_path, Config())


def test_trainer_takes_it_with_pefts_adapters_only(folder, tmp_path):
    pytest.importorskip("accelerate")
    from peft import LoraConfig, get_peft_model
    from transformers import Trainer, TrainingArguments

    model = load(folder, Config(max_adapters=0))
    assert model.is_quantized and model.hf_quantizer.is_trainable and model.quantization_method == "epilora"
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=1, per_device_train_batch_size=2, report_to=[], use_cpu=True, learning_rate=0.1
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in tokens(4, 6).tolist()]
    with pytest.raises(ValueError, match="cannot perform fine-tuning on purely quantized models"):
        Trainer(model, arguments, train_dataset=rows)
    base = {k: v.clone() for k, v in model.state_dict().items()}
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    trainer = Trainer(wrapped, arguments, train_dataset=rows)
    trainer.train()
    adapters = {k: v for k, v in wrapped.state_dict().items() if "lora_B" in k}
    assert len(adapters) == 4 and all(v.count_nonzero() for v in adapters.values())
    after = {k.removeprefix("base_model.model.").replace(".base_layer", ""): v for k, v in wrapped.state_dict().items()}
    assert all(torch.equal(after[k].float(), v.float()) for k, v in base.items())
    trainer.save_model(tmp_path / "adapter")
    other = load(folder, Config())
    te.load_adapter(other, "trained", tmp_path / "adapter")
    ids = tokens(2, 5)
    with torch.no_grad(), te.adapters(other, ["trained", None]):
        logits = other(ids).logits
        assert torch.equal(logits[1], load(folder, Config())(ids).logits[1])
        assert not torch.equal(logits[0], load(folder, Config())(ids).logits[0])
