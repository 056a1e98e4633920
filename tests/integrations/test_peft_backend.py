"""PEFT's life cycle over an FP8 base: how its layers are found, checkpoints, choice of adapters, hotswap, refusals."""

import copy
import json
import subprocess
import sys

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

from peft import AdaLoraConfig, OFTConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from safetensors.torch import load_file

import torch_epilora as te
from tests.nn.helpers import ALL, attention, llama, same, snapshot, tokens
from tests.nn.peft_helpers import gradients, lora, ours, over_fp8, over_plain
from torch_epilora.nn.linear import lora_linears


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, **options).logits


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def patched(slots=0, dtype=torch.float32):
    return te.patch(llama(dtype), compute="w8a16", max_adapters=slots)


@pytest.mark.parametrize("first", ["torch_epilora", "peft"])
def test_whichever_library_is_imported_first_our_layers_are_made(first):
    code = (
        f"import sys, {first}, torch_epilora as te\n"
        f"assert ('peft' in sys.modules) == ({first!r} == 'peft')\n"
        "from torch import nn\n"
        "model = te.patch(nn.Sequential(nn.Linear(16, 16)), max_adapters=0)\n"
        "from peft import LoraConfig, get_peft_model\n"
        "model = get_peft_model(model, LoraConfig(target_modules=['0']))\n"
        "print(type(model.base_model.model[0]).__name__)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "Fp8LoraLinear\n", run.stderr


def test_patch_works_where_peft_is_not_there():
    code = (
        "import sys; sys.modules['peft'] = None\n"
        "import torch, torch_epilora as te\n"
        "model = te.patch(torch.nn.Sequential(torch.nn.Linear(16, 16)), max_adapters=0)\n"
        "print(tuple(model(torch.randn(2, 16)).shape))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "(2, 16)\n", run.stderr


def test_all_linear_finds_the_patched_linears_and_nothing_else():
    model = over_fp8(lora(targets="all-linear"))
    assert len(ours(model)) == 14 and all(name.rpartition(".")[2] in ALL for name in ours(model))


def test_a_loaded_checkpoint_trains_too(tmp_path):
    te.save_quantized(patched(), tmp_path)
    model = get_peft_model(te.load_quantized(tmp_path, max_adapters=0), lora())
    assert len(ours(model)) == 14


def test_files_are_plain_peft_and_load_everywhere(tmp_path):
    model = over_fp8(lora(use_rslora=True, rank_pattern={"q_proj": 3}, alpha_pattern={"v_proj": 5}))
    ids = tokens(2, 5)
    want = logits(model, ids)
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert "epilora" not in json.dumps(config).lower()
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"].shape == (3, 64)
    assert len(tensors) == 28 and all(t.dtype == torch.float32 for t in tensors.values())

    again = PeftModel.from_pretrained(patched(), tmp_path)
    assert len(ours(again)) == 14 and torch.equal(logits(again, ids), want)
    trainable = PeftModel.from_pretrained(patched(), tmp_path, is_trainable=True)
    trainable(ids, labels=ids).loss.backward()
    assert len(gradients(trainable)) == 28
    slots = patched(slots=1)
    te.load_adapter(slots, "a", tmp_path)
    with te.adapters(slots, ["a"]):
        close(logits(slots, ids), want)
    plain = PeftModel.from_pretrained(over_plain(model).unload(), tmp_path)
    assert not ours(plain)
    close(logits(plain, ids), want)


def test_adapters_are_added_chosen_disabled_and_deleted():
    model = over_fp8()
    ids = tokens(2, 5)
    default = logits(model, ids)
    model.add_adapter("second", lora(r=3, targets=["q_proj", "o_proj"]))
    assert torch.equal(logits(model, ids), default)
    model.set_adapter("second")
    second = logits(model, ids)
    close(second, logits(over_plain(model), ids))
    with model.disable_adapter():
        bare = logits(model, ids)
    assert torch.equal(bare, logits(patched(), ids))
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all("second" in name for name in trained)
    model.set_adapter("default")
    assert torch.equal(logits(model, ids), default)
    assert not torch.allclose(second, default, atol=1e-3) and not torch.allclose(default, bare, atol=1e-3)
    model.delete_adapter("second")
    assert all("second" not in name for name, _ in model.named_parameters())
    assert torch.equal(logits(model, ids), default)
    model.add_weighted_adapter(["default", "default"], [0.5, 0.5], "both", combination_type="cat")
    model.set_adapter("both")
    close(logits(model, ids), default)
    base = model.unload()
    assert not ours(base) and torch.equal(logits(base, ids), bare)


@pytest.mark.parametrize("autocast", [True, False])
def test_dtypes_of_adapters_on_a_bf16_base(autocast):
    model = over_fp8(lora(), llama(torch.bfloat16), autocast_adapter_dtype=autocast)
    model.add_adapter("second", lora(), autocast_adapter_dtype=autocast)
    want = {torch.float32} if autocast else {torch.bfloat16}
    assert {p.dtype for name, p in model.named_parameters() if "lora_" in name} == want
    ids = tokens(2, 5)
    out = model(ids, labels=ids)
    out.loss.backward()
    assert out.logits.dtype == torch.bfloat16 and {g.dtype for g in gradients(model).values()} == want


@pytest.mark.parametrize("lean", [True, False])
def test_an_adapter_loads_without_a_first_copy_of_its_tensors(tmp_path, lean):
    model = over_fp8(plain=llama(torch.bfloat16))
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(patched(dtype=torch.bfloat16), tmp_path, low_cpu_mem_usage=lean)
    assert len(ours(again)) == 14 and torch.equal(logits(again, tokens(2, 5)), logits(model, tokens(2, 5)))


def test_a_deep_copy_and_a_cast_go_on():
    model = over_fp8()
    ids = tokens(2, 5)
    want = logits(model, ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(iter(ours(model).values())).lora_B.default.weight.zero_()
    assert torch.equal(logits(other, ids), want) and not torch.equal(logits(model, ids), want)
    assert logits(other.to(torch.bfloat16), ids).dtype == torch.bfloat16


def test_hotswap_is_exact(tmp_path):
    folders = []
    for seed, r in ((5, 6), (6, 3)):
        model = over_fp8(lora(r=r))
        torch.manual_seed(seed)
        for layer in ours(model).values():
            nn.init.normal_(layer.lora_B.default.weight)
        model.save_pretrained(tmp_path / str(seed))
        folders.append((tmp_path / str(seed), logits(model, tokens(2, 5))))
    (first, want_first), (second, want_second) = folders
    model = PeftModel.from_pretrained(patched(), first)
    assert torch.equal(logits(model, tokens(2, 5)), want_first)
    hotswap_adapter(model, first, adapter_name="default")
    assert torch.equal(logits(model, tokens(2, 5)), want_first)

    prepared = PeftModel.from_pretrained(patched(), first)
    prepare_model_for_compiled_hotswap(prepared, target_rank=8)
    layer = next(iter(ours(prepared).values()))
    assert isinstance(layer.scaling["default"], torch.Tensor) and layer.lora_A.default.weight.shape == (8, 64)
    torch._dynamo.reset()
    prepared.forward = torch.compile(prepared.forward, backend="eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        close(logits(prepared, tokens(2, 5), use_cache=False), want_first)
        hotswap_adapter(prepared, second, adapter_name="default")
        close(logits(prepared, tokens(2, 5), use_cache=False), want_second)
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_dora": True}, "use_dora: expected none over an FP8 base, got True.*unpatch"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected one of True, False, .*got 'pissa'.*unpatch"),
        ({"init_lora_weights": "olora"}, "init_lora_weights: .*got 'olora'"),
        ({"init_lora_weights": "orthogonal"}, "init_lora_weights: .*got 'orthogonal'"),
        ({"target_parameters": ["mlp.up_proj.weight"]}, "target_parameters: .*model.layers.0.mlp.up_proj"),
        ({"targets": ["q_proj"], "modules_to_save": ["k_proj"]}, "modules_to_save: .*got 'k_proj'.*exclude="),
        ({"targets": ["q_proj"], "modules_to_save": ["mlp"]}, "modules_to_save: .*got 'mlp'.*holds model.layers.0.mlp"),
    ],
)
def test_what_needs_the_base_s_weight_is_refused_by_name(options, message):
    model = patched()
    before, names = snapshot(model), [name for name, _ in model.named_modules()]
    with pytest.raises(NotImplementedError, match=message):
        get_peft_model(model, lora(**options))
    assert same(before, snapshot(model)) and [name for name, _ in model.named_modules()] == names
    assert len(ours(get_peft_model(model, lora()))) == 14


def test_a_second_adapter_that_is_refused_changes_nothing():
    model = over_fp8()
    before = snapshot(model)
    with pytest.raises(NotImplementedError, match="use_dora"):
        model.add_adapter("second", lora(use_dora=True))
    assert same(before, snapshot(model)) and list(model.peft_config) == ["default"]


def test_a_trained_base_bias_and_transposed_weights_are_refused():
    model = te.patch(attention(bias=True), max_adapters=0)
    with pytest.raises(NotImplementedError, match=r"bias: expected 'none'.*q_proj.*lora_bias=True"):
        inject_adapter_in_model(lora(targets=["q_proj"], bias="all"), model)
    with pytest.raises(ValueError, match="fan_in_fan_out: expected False"):
        inject_adapter_in_model(lora(targets=["q_proj"], fan_in_fan_out=True), model)
    assert len(ours(inject_adapter_in_model(lora(targets=["q_proj"]), model))) == 1


def test_other_modules_may_be_trained_and_saved(tmp_path):
    model = over_fp8(lora(modules_to_save=["lm_head"], bias="all"))
    ids = tokens(2, 5)
    model(ids, labels=ids).loss.backward()
    assert any("lm_head.modules_to_save" in name for name in gradients(model))
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(PeftModel.from_pretrained(patched(), tmp_path), ids), logits(model, ids))


def test_layers_that_peft_replicates_share_the_codes():
    model = over_fp8(lora(layer_replication=[[0, 2], [0, 1]]))
    layers = model.base_model.model.model.layers
    first, third = (layers[i].self_attn.q_proj for i in (0, 2))
    assert len(layers) == 3 and first.base_layer.weight.data_ptr() == third.base_layer.weight.data_ptr()
    ids = tokens(2, 5)
    model(ids, labels=ids, use_cache=False).loss.backward()
    assert len(gradients(model)) == 3 * 14


def test_a_merge_is_refused_before_the_first_layer_and_says_what_to_do():
    model = over_fp8(lora(targets=["embed_tokens", *ALL]))
    before, kinds = snapshot(model), [type(m) for m in model.modules()]
    for merge in (model.merge_adapter, model.merge_and_unload, next(iter(ours(model).values())).merge):
        with pytest.raises(NotImplementedError, match=r"merge: .*save_pretrained.*load_adapter.*unpatch\(model\)"):
            merge()
    assert same(before, snapshot(model)) and [type(m) for m in model.modules()] == kinds


def test_unpatch_keeps_the_adapters_and_makes_them_mergeable():
    model = over_fp8(lora(targets=["q_proj", "down_proj"]))
    ids = tokens(2, 5)
    want = logits(model, ids)
    assert te.unpatch(model) is model
    assert not lora_linears(model) and not ours(model)
    close(logits(model, ids), want)
    model(ids, labels=ids).loss.backward()
    assert len(gradients(model)) == 8 and all("lora_" in name for name in gradients(model))
    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear
    close(logits(merged, ids), want)


def test_a_merge_where_no_adapter_lies_over_fp8_is_peft_s_own():
    model = te.patch(llama(), targets="mlp", max_adapters=0)
    model = get_peft_model(model, lora(targets=["q_proj"])).eval()
    assert not ours(model)
    ids = tokens(2, 5)
    want = logits(model, ids)
    close(logits(model.merge_and_unload(), ids), want)


def test_the_base_is_not_saved_with_adapters_over_it(tmp_path):
    model = over_fp8()
    with pytest.raises(NotImplementedError, match=r"model: expected no PEFT layers.*unload\(\)"):
        te.save_quantized(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    te.save_quantized(model.unload(), tmp_path / "out")
    assert torch.equal(
        logits(te.load_quantized(tmp_path / "out", compute="w8a16"), tokens(1, 4)), logits(patched(), tokens(1, 4))
    )


@pytest.mark.parametrize(
    "config",
    [
        AdaLoraConfig(target_modules=["q_proj"], init_r=4, target_r=2, total_step=10),
        # it adds in place, and gate's output was kept for the gradient of what multiplies up's
        AdaLoraConfig(target_modules=["gate_proj", "up_proj"], init_r=4, target_r=2, total_step=10),
        OFTConfig(target_modules=["q_proj"], oft_block_size=16),
    ],
)
def test_other_tuners_of_peft_go_on_but_do_not_merge(config):
    model = get_peft_model(patched(), copy.deepcopy(config))
    assert not ours(model)
    ids = tokens(2, 5)
    model(ids, labels=ids).loss.backward()
    assert gradients(model)
    with pytest.raises(NotImplementedError, match="merge: an adapter cannot be merged into FP8 codes"):
        model.merge_adapter()
    assert not any(layer.merged for layer in model.modules() if isinstance(layer, BaseTunerLayer))
    te.unpatch(model)
    assert not lora_linears(model)
