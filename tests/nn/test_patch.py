"""Which layers patch takes, what stands there afterwards, and the way back."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import torch_epilora as te
from tests.nn.helpers import (
    Attention,
    CountOps,
    adapter,
    attention,
    dequantized,
    llama,
    phi3,
    qwen3,
    tokens,
    weight_value,
)
from torch_epilora.nn import LoraLinear, describe
from torch_epilora.nn.linear import lora_linears
from torch_epilora.nn.patterns import matches


def test_import_loads_no_optional_library():
    code = (
        "import sys, torch_epilora; print([m for m in ('transformers', 'peft', 'typer', 'rich') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
    assert te.__version__ == "0.1.0"


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("q_proj", True),
        ("self_attn", True),
        ("layers.1", True),
        ("model.layers.1.self_attn.q_proj", True),
        ("q", False),
        ("layers.1.mlp", False),
        ("*.q_proj", True),
        ("q_proj*", False),
        ("*layers.[01].*", True),
        ("re:.*\\.(q|k)_proj", True),
        ("re:q_proj", False),
    ],
)
def test_patterns_match_components_globs_and_regexes(pattern, expected):
    assert matches("model.layers.1.self_attn.q_proj", pattern) is expected


@pytest.mark.parametrize("build", [llama, qwen3])
def test_a_layer_becomes_four_projections(build):
    model = te.patch(build(), max_adapters=3, max_rank=16)
    infos = describe(model)
    assert len(infos) == 8
    q, o, gate, down = infos[:4]
    leaves = [[name.rpartition(".")[2] for name in info.names] for info in infos[:4]]
    assert leaves == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]
    width = 32 * 4 if build is qwen3 else 64
    assert (q.k, q.slices, q.layout, q.compute, q.slots, q.max_rank, q.fused) == (
        64,
        (width, width // 2, width // 2),
        "channel",
        "w8a8",
        3,
        16,
        True,
    )
    assert (gate.slices, down.k, o.k, down.n) == ((96, 96), 96, width, 64)
    assert type(model.lm_head) is nn.Linear
    with CountOps() as ops:
        model(tokens(1, 4))
    assert ops.widths == [2 * width, 64, 192, 64] * 2


def test_modules_keep_their_names_attributes_and_values():
    plain = llama(attention_bias=True)
    model = te.patch(copy.deepcopy(plain))
    old, new = plain.model.layers[0].self_attn.k_proj, model.model.layers[0].self_attn.k_proj
    assert isinstance(new, LoraLinear) and isinstance(new, nn.Linear)
    assert (new.in_features, new.out_features) == (64, 32)
    assert new.weight.dtype == torch.float8_e4m3fn and new.weight.shape == old.weight.shape
    assert new.weight_scale.dtype == torch.float32 and new.weight_scale.shape == (32, 1)
    assert new.input_scale is None
    assert torch.equal(new.bias, old.bias)
    codes, scale = torch.ops.epilora.quantize_fp8_weight(old.weight.detach(), "channel")
    assert torch.equal(new.weight.view(torch.uint8), codes.view(torch.uint8)) and torch.equal(new.weight_scale, scale)
    assert not any(p.requires_grad for n, p in model.named_parameters() if "proj" in n)
    assert sum(p.numel() for p in model.parameters()) <= sum(p.numel() for p in plain.parameters())


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize("bias", [False, True])
def test_base_of_every_layout_is_the_dequantized_linear(layout, bias):
    for widths in ((64, 32, 32), (256, 128, 128)):
        plain = attention(hidden=200, widths=widths, bias=bias)
        model = te.patch(copy.deepcopy(plain), layout=layout, compute="w8a16")
        fused = layout != "block" or widths[0] == 256
        assert describe(model)[0].fused is fused
        x = torch.randn(3, 5, 200)
        with torch.no_grad():
            for got, want in zip(model(x), dequantized(model, plain)(x), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        expected = {"tensor": (1,), "channel": (widths[1], 1), "block": (-(-widths[1] // 128), 2)}[layout]
        assert tuple(model.k_proj.weight_scale.shape) == expected
        error = (weight_value(model.k_proj) - plain.k_proj.weight).norm() / plain.k_proj.weight.norm()
        assert 0.01 < error < 0.04


def test_targets_and_exclude():
    model = te.patch(llama(), targets=["q_proj", "*.layers.1.mlp.*"], exclude="re:.*\\.up_proj")
    assert sorted(p.removeprefix("model.layers.") for p in lora_linears(model)) == [
        "0.self_attn.q_proj",
        "1.mlp.down_proj",
        "1.mlp.gate_proj",
        "1.self_attn.q_proj",
    ]
    subset = te.patch(llama(), targets=("q_proj", "v_proj"))
    assert describe(subset)[0].slices == (64, 32)


def test_tied_weights_stay():
    model = llama(tie_word_embeddings=True)
    te.patch(model, exclude=())
    assert type(model.lm_head) is nn.Linear and model.lm_head.weight is model.model.embed_tokens.weight

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.weight = self.a.weight

    twice = te.patch(Twice())
    assert list(lora_linears(twice)) == ["c"] and twice.a.weight is twice.b.weight


def test_the_head_is_left_alone_under_any_name_unless_it_is_named():
    model = llama()
    assert te.patch(copy.deepcopy(model), exclude=()).lm_head.weight.dtype == torch.float32
    named = te.patch(copy.deepcopy(model), exclude=(), targets=["lm_head", "q_proj"])
    assert named.lm_head.weight.dtype == torch.float8_e4m3fn


def test_subclasses_are_taken_only_with_linear_semantics():
    class Same(nn.Linear):
        pass

    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Zoo(nn.Module):
        def __init__(self):
            super().__init__()
            self.same, self.scaled, self.plain = Same(16, 8), Scaled(16, 8), nn.Linear(16, 8)
            self.normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 8))
            self.attention = nn.MultiheadAttention(16, 2)
            self.half = nn.Linear(16, 8, dtype=torch.float64)
            self.wrapped = nn.Linear(16, 8)
            self.wrapped.forward = lambda x: x

    zoo = Zoo()
    te.patch(zoo)
    assert sorted(lora_linears(zoo)) == ["plain", "same"]
    out, _ = zoo.attention(torch.randn(3, 1, 16), torch.randn(3, 1, 16), torch.randn(3, 1, 16))
    assert out.shape == (3, 1, 16)


def test_a_shared_module_stays_shared_and_containers_keep_their_length():
    linear = nn.Linear(16, 16)
    model = nn.Sequential(linear, nn.ReLU(), linear, nn.Linear(16, 4))
    want = copy.deepcopy(model)
    te.patch(model, compute="w8a16")
    assert len(model) == 4 and model[0] is model[2] and isinstance(model[0], LoraLinear)
    x = torch.randn(5, 16)
    torch.testing.assert_close(model(x), dequantized_sequential(model, want)(x), rtol=1e-4, atol=1e-5)
    te.unpatch(model)
    assert model[0] is model[2] and type(model[0]) is nn.Linear


def dequantized_sequential(model, plain):
    for i in (0, 3):
        plain[i].weight.data = weight_value(model[i]).float()
    return plain


def test_experts_become_fp8_without_slots():
    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            self.proj = nn.Linear(16, 16)

        def forward(self, x):
            return self.experts[0](x[:3]).sum() + self.experts[1](x[3:]).sum() + self.proj(x).sum()

    moe = te.patch(Moe(), max_adapters=2)
    assert {i.names[0]: i.slots for i in describe(moe)} == {"experts.0": 0, "experts.1": 0, "proj": 2}
    with te.adapters(moe, [None, None]):
        assert torch.isfinite(moe(torch.randn(4, 16)))  # 3 and 1 rows an expert fit no 2 names, and need not
    with pytest.raises(ValueError, match=r"patched linears with slots, got experts\.0"):
        te.load_adapter(
            moe,
            "a",
            (
                {"experts.0.lora_A.weight": torch.ones(1, 16), "experts.0.lora_B.weight": torch.ones(16, 1)},
                {"peft_type": "LORA", "r": 1, "lora_alpha": 1},
            ),
        )


def test_zero_adapters_make_a_plain_fp8_model():
    model = te.patch(attention(), max_adapters=0, compute="w8a16")
    assert describe(model)[0].slots == 0
    x = torch.randn(2, 64)
    torch.testing.assert_close(model.q_proj(x), x @ weight_value(model.q_proj).float().t())
    with pytest.raises(ValueError, match="the model has no slots"):
        te.load_adapter(model, "a", ({}, {}))


def test_fused_linears_know_their_slices_from_config_or_caller():
    infos = describe(te.patch(phi3()))
    assert sorted(i.slices for i in infos[:4]) == [(64,), (64,), (64, 32, 32), (96, 96)]
    model = nn.Sequential(nn.Linear(16, 24))
    assert describe(te.patch(model, slices={"0": (8, 16)}))[0].slices == (8, 16)


def test_hooks_and_training_mode_move_over():
    model = attention().train()
    seen = []
    model.q_proj.register_forward_hook(lambda m, a, y: seen.append(type(m)))
    te.patch(model)
    model(torch.randn(2, 64))
    assert seen == [LoraLinear] and model.q_proj.training and model.q_proj.group.training


def test_handles_taken_before_remove_their_hooks_and_hooks_survive_unpatching():
    model, seen = attention().train(), []
    first = model.q_proj.register_forward_hook(lambda m, a, y: seen.append("first"))
    model.q_proj.register_full_backward_hook(lambda m, i, o: seen.append("backward"))
    te.patch(model)
    second = model.q_proj.register_forward_pre_hook(lambda m, a: seen.append("second"))
    x = torch.randn(2, 64, requires_grad=True)
    model.q_proj(x).sum().backward()
    assert seen == ["second", "first", "backward"]
    first.remove()
    model.q_proj(x)
    assert seen[3:] == ["second"]
    te.unpatch(model)
    model.q_proj(x).sum().backward()
    assert seen[4:] == ["second", "backward"]
    second.remove()
    model.q_proj(x)
    assert len(seen) == 6


@pytest.mark.parametrize("part", [False, True], ids=["whole", "regional"])
def test_a_compiled_model_has_the_paths_of_the_plain_one(part, tmp_path):
    plain = llama()
    model = copy.deepcopy(plain)
    if part:
        model.model.layers[1] = torch.compile(model.model.layers[1], backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    assert te.patch(model, compute="w8a16") is model
    other = te.patch(copy.deepcopy(plain), compute="w8a16")
    for m in (model, other):
        te.load_adapter(m, "a", adapter(plain))
    ids = tokens(2, 5)
    with torch.no_grad(), te.adapters(model, ["a", None]), te.adapters(other, ["a", None]):
        torch.testing.assert_close(model(ids, use_cache=False).logits, other(ids, use_cache=False).logits)
    te.save_quantized(model, tmp_path)
    assert list(lora_linears(te.load_quantized(tmp_path))) == list(lora_linears(other))
    te.unpatch(model)
    assert not lora_linears(model)


def test_linears_with_more_slices_together_than_the_operator_takes_are_not_fused():
    plain = attention(widths=(64, 32, 32))
    fused = te.patch(copy.deepcopy(plain), slices={"q_proj": [8] * 8, "k_proj": [8] * 4, "v_proj": [8] * 4})
    assert [len(i.slices) for i in describe(fused)] == [16, 1]
    apart = te.patch(copy.deepcopy(plain), slices={"q_proj": [8] * 8, "k_proj": [4] * 8, "v_proj": [32]})
    assert [len(i.slices) for i in describe(apart)] == [8, 8, 1, 1]
    apart(torch.randn(2, 64))
    with pytest.raises(ValueError, match="expected at most 16 positive"):
        te.patch(plain, slices={"k_proj": [1] * 16 + [16]})


def test_accelerates_placement_hooks_are_no_obstacle():
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    model = attention()
    for linear in (model.q_proj, model.k_proj, model.v_proj):
        add_hook_to_module(linear, AlignDevicesHook(execution_device="cpu"))
    model.o_proj._hf_hook = AlignDevicesHook(execution_device="cpu", offload=True)
    te.patch(model)
    assert list(lora_linears(model)) == ["q_proj", "k_proj", "v_proj"]
    own = attention()
    own.q_proj.forward = lambda x: x
    add_hook_to_module(own.q_proj, AlignDevicesHook(execution_device="cpu"))
    assert list(lora_linears(te.patch(own))) == ["k_proj", "v_proj", "o_proj"]


def test_unpatch_puts_dequantized_linears_back():
    plain = llama(attention_bias=True)
    model = te.patch(copy.deepcopy(plain), compute="w8a16")
    want = dequantized(model, plain)
    te.unpatch(model)
    assert not lora_linears(model) and set(model.state_dict()) == set(plain.state_dict())
    for name, value in want.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert not model._forward_hooks and not model._forward_pre_hooks
    te.patch(model)  # and it can be patched again


def test_patch_inside_inference_mode_leaves_a_trainable_model():
    model = attention()
    with torch.inference_mode():
        te.patch(model)
        model(torch.randn(2, 64))
    x = torch.randn(2, 64, requires_grad=True)
    model.o_proj(x).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0


def test_a_default_device_does_not_catch_the_batch():
    model = attention()
    x, source = torch.randn(2, 64), adapter(attention())
    with torch.device("meta"):
        te.patch(model)
        te.load_adapter(model, "a", source)
        with te.adapters(model, ["a", None]):
            y = model.q_proj(x)
    assert y.device.type == "cpu" and model.q_proj.group.bank.rank[0, 0] == 8


def test_everything_may_require_a_gradient():
    model = te.patch(attention()).requires_grad_(True)
    x = torch.randn(2, 64, requires_grad=True)
    sum(y.sum() for y in model(x)).backward()
    assert x.grad.abs().sum() > 0 and model.q_proj.group.codes.grad is None


def test_a_linear_with_unusable_weights_changes_nothing():
    model = Attention()
    model.o_proj.weight.data[1, 1] = float("nan")
    with pytest.raises(ValueError, match=r"o_proj.weight: expected finite values"):
        te.patch(model)
    assert type(model.q_proj) is nn.Linear and not model._forward_hooks
