"""A PeftModel: its adapters move into slots, and it goes on as a PeftModel."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model

import torch_epilora as te
from tests.nn.helpers import ALL, adapter, dequantized, llama, same, snapshot, tokens, weight_value
from torch_epilora.nn import adapter_slots
from torch_epilora.nn.linear import lora_linears


def wrapped(targets=ALL, **options):
    torch.manual_seed(3)
    config = LoraConfig(r=6, lora_alpha=12, target_modules=list(targets), init_lora_weights=False, **options)
    model = get_peft_model(llama(), config).eval()
    model.add_adapter("second", LoraConfig(r=3, lora_alpha=3, target_modules=["v_proj"], init_lora_weights=False))
    return model


def reference_for(model, original):
    """The original PeftModel on the patched model's dequantized weights."""
    for path, linear in lora_linears(model).items():
        layer = original.get_base_model().get_submodule(path)
        getattr(layer, "base_layer", layer).weight.data = weight_value(linear).float()
    return original


@torch.no_grad()
def close(model, reference, ids):
    torch.testing.assert_close(model(ids).logits, reference(ids).logits, rtol=1e-4, atol=1e-5)


def test_adapters_move_and_the_active_one_stays_in_effect():
    original = wrapped()
    model = te.patch(copy.deepcopy(original), compute="w8a16")
    reference = reference_for(model, original)
    ids = tokens(3, 6)
    assert isinstance(model, PeftModel) and adapter_slots(model) == {"default": 0, "second": 1}
    close(model, reference, ids)
    with torch.no_grad():
        default = model(ids).logits
    for peft in (model, reference):
        peft.set_adapter("second")
    close(model, reference, ids)
    with model.disable_adapter(), reference.disable_adapter():
        close(model, reference, ids)
        with torch.no_grad():
            bare = model(ids).logits
    close(model, reference, ids)
    with torch.no_grad():
        second = model(ids).logits
        with te.adapters(model, ["default", None, "second"]):
            mixed = model(ids).logits
    for i, want in enumerate((default, bare, second)):
        torch.testing.assert_close(mixed[i], want[i], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(default, bare, atol=1e-2) and not torch.allclose(second, bare, atol=1e-2)
    model.base_model.disable_adapter_layers()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, bare)
    model.base_model.enable_adapter_layers()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, second)


def test_generate_and_deepcopy():
    model = te.patch(wrapped(), compute="w8a16")
    ids = tokens(2, 4)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    got = model.generate(input_ids=ids, **options)
    other = copy.deepcopy(model)
    other.set_adapter("second")
    assert torch.equal(model.generate(input_ids=ids, **options), got)
    with te.adapters(other, ["default"]):
        assert torch.equal(other.generate(input_ids=ids, **options), got)


def test_a_disabled_model_stays_disabled():
    original = wrapped()
    original.base_model.disable_adapter_layers()
    model = te.patch(copy.deepcopy(original), compute="w8a16")
    want = dequantized(model, llama())
    close(model, want, tokens(2, 4))


def test_saved_adapters_load_in_peft_again(tmp_path):
    original = wrapped(lora_bias=False)
    model = te.patch(copy.deepcopy(original), compute="w8a16")
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(llama(), tmp_path)
    again.load_adapter(tmp_path / "second", adapter_name="second")
    for key, want in original.state_dict().items():
        if "lora_" in key:
            assert torch.equal(again.state_dict()[key], want), key
    te.load_adapter(model, "third", tmp_path / "second")
    model.save_pretrained(tmp_path / "one", selected_adapters=["second"])
    assert (tmp_path / "one/second/adapter_config.json").exists() and not (
        tmp_path / "one/adapter_config.json"
    ).exists()


def test_save_quantized_writes_the_base(tmp_path):
    model = te.patch(wrapped(), compute="w8a16")
    te.save_quantized(model, tmp_path)
    loaded = te.load_quantized(tmp_path, compute="w8a16")
    with model.disable_adapter(), torch.no_grad():
        assert torch.equal(loaded(tokens(2, 4)).logits, model(tokens(2, 4)).logits)


def test_delete_frees_the_slot():
    model = te.patch(wrapped())
    model.delete_adapter("second")
    assert adapter_slots(model) == {"default": 0} and list(model.peft_config) == ["default"]


def test_the_active_adapter_is_deleted_only_after_another_is_set():
    model = te.patch(wrapped())
    with pytest.raises(ValueError, match=r"'default' is the active adapter. Call set_adapter\(\) with another"):
        model.delete_adapter("default")
    assert adapter_slots(model) == {"default": 0, "second": 1} and set(model.peft_config) == {"default", "second"}
    model.set_adapter(["second"])
    assert model.active_adapters == ["second"] and model.active_adapter == "second"
    model.delete_adapter("default")
    assert adapter_slots(model) == {"second": 1} and list(model.peft_config) == ["second"]
    with pytest.raises(NotImplementedError, match="slots do not add up"):
        model.set_adapter(["second", "other"])
    model.base_model.disable_adapter_layers()
    model.delete_adapter("second")
    assert adapter_slots(model) == {}


def refused(model, error, match, **options):
    before = snapshot(model)
    with pytest.raises(error, match=match):
        te.patch(model, **options)
    assert same(before, snapshot(model)) and type(model).__name__.startswith("Peft")


def test_what_slots_cannot_hold_is_refused_and_changes_nothing():
    refused(wrapped(), ValueError, "max_adapters: expected at least 2", max_adapters=1)
    refused(wrapped(), ValueError, "a rank of at most 4, got 6", max_rank=4)
    refused(wrapped(), ValueError, "patched linears with slots", targets="mlp")
    refused(wrapped(use_dora=True), NotImplementedError, "DoRA")
    refused(wrapped(modules_to_save=["lm_head"]), NotImplementedError, "modules_to_save")
    merged = wrapped()
    merged.merge_adapter()
    refused(merged, ValueError, "not merged")
    two = wrapped()
    two.base_model.set_adapter(["default", "second"])
    refused(two, NotImplementedError, "one active adapter")
    prompts = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    refused(prompts, NotImplementedError, "expected a PeftModel with LoRA adapters")


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda m: m.add_adapter("x", LoraConfig(target_modules=["q_proj"])), "add_adapter is not supported"),
        (lambda m: m.load_adapter("x", adapter_name="x"), "Use torch_epilora.load_adapter"),
        (lambda m: m.merge_adapter(), "FP8 weights cannot take an adapter in"),
        (lambda m: m.merge_and_unload(), "FP8 weights cannot take an adapter in"),
        (lambda m: m.unload(), "Use torch_epilora.unpatch"),
        (lambda m: m.base_model.set_adapter(["default", "second"]), "slots do not add up"),
        (lambda m: te.unpatch(m), "a PeftModel's adapters live in the slots"),
        (lambda m: te.load_quantized("x", m), "already patched"),
    ],
)
def test_what_a_patched_peft_model_cannot_do(call, match):
    model = te.patch(wrapped())
    before = snapshot(model)
    with pytest.raises((NotImplementedError, ValueError), match=match):
        call(model)
    assert same(before, snapshot(model))


def test_peft_on_top_of_a_patched_model_trains_its_own_layers():
    model = te.patch(llama(), compute="w8a16")
    ids = tokens(2, 5)
    with torch.no_grad():
        want = model(ids).logits
    on_top = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    loss = on_top(ids, labels=ids).loss
    loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(on_top(ids).logits, want)
    gradients = [p.grad for n, p in on_top.named_parameters() if "lora_B" in n]
    assert len(gradients) == 4 and all(g.abs().sum() > 0 for g in gradients)


def test_a_default_adapter_in_use_is_not_unloaded():
    model = te.patch(wrapped())
    with pytest.raises(ValueError, match="'default' is chosen for rows right now"):
        te.unload_adapter(model, "default")
    te.load_adapter(model, "third", adapter(llama()))
    te.unload_adapter(model, "third")


@torch.no_grad()
def test_disabling_inside_of_a_context_gives_the_bare_base():
    model, ids = te.patch(wrapped(), compute="w8a16"), tokens(2, 4)
    with model.disable_adapter():
        bare = model(ids).logits
    default = model(ids).logits
    with te.adapters(model, ["second"]):
        second = model(ids).logits
        with model.disable_adapter():
            assert torch.equal(model(ids).logits, bare)
            with te.adapters(model, ["default"]):
                assert torch.equal(model(ids).logits, default)
        assert torch.equal(model(ids).logits, second)
    assert not torch.equal(second, bare) and torch.equal(model(ids).logits, default)


@torch.no_grad()
def test_enabling_again_restores_the_name_and_not_the_slot():
    model, ids = te.patch(wrapped(), compute="w8a16"), tokens(2, 4)
    default = model(ids).logits
    with model.disable_adapter():
        with pytest.raises(ValueError, match="'default' is chosen for rows right now"):
            te.unload_adapter(model, "default")
        model.set_adapter("second")
        te.unload_adapter(model, "default")
        te.load_adapter(model, "other", adapter(llama()))
    with te.adapters(model, ["second"]):
        second = model(ids).logits
    assert torch.equal(model(ids).logits, second) and not torch.equal(second, default)
