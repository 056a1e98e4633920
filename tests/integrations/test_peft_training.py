"""Training with PEFT over an FP8 base: values, gradients, and what a step changes."""

import copy
import logging

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

import torch_epilora as te
from tests.nn.helpers import ALL, CountOps, adapter, attention, dequantized, llama, qwen3, same, snapshot, tokens
from tests.nn.peft_helpers import gradients, lora, ours, over_fp8, over_plain
from torch_epilora.formats.checkpoints import write_checkpoint
from torch_epilora.formats.fp8 import Fp8Weight
from torch_epilora.integrations import peft_training
from torch_epilora.nn.linear import lora_linears
from torch_epilora.nn.training import train_linear


def cosine(a, b):
    return nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def fresh_log():
    peft_training._log_first.cache_clear()


@pytest.mark.parametrize(
    ("make", "dtype", "compute", "least", "off"),
    [
        (llama, torch.float32, "w8a16", 0.9999, 0.001),
        (qwen3, torch.float32, "w8a16", 0.9999, 0.001),
        (qwen3, torch.bfloat16, "w8a16", 0.999, 0.02),
        (qwen3, torch.float32, "w8a8", 0.99, 0.05),
    ],
)
def test_gradients_of_every_adapter_and_of_x_over_three_layers(make, dtype, compute, least, off):
    plain = make(dtype, num_hidden_layers=3)
    model = over_fp8(plain=plain, compute=compute)
    reference = over_plain(model, plain)
    x = torch.randn(3, 7, 64).to(dtype)
    ids, inputs = tokens(3, 7), []
    for m, value in ((model, x), (reference, x.float())):
        inputs.append(value.clone().requires_grad_())
        m(inputs_embeds=inputs[-1], labels=ids).loss.backward()
    got, want = gradients(model), gradients(reference)
    assert got.keys() == want.keys() and len(got) == 3 * 7 * 2
    assert all(g.dtype == torch.float32 for g in got.values())
    got["x"], want["x"] = inputs[0].grad, inputs[1].grad
    for name in got:
        assert got[name].abs().sum() > 0
        assert cosine(got[name], want[name]) > least, name
        assert abs(got[name].norm().item() / want[name].norm().item() - 1) < off, name


def test_an_adapter_starts_as_the_bare_base_and_with_finite_gradients():
    model = over_fp8(lora(init_lora_weights=True), compute="w8a8")
    ids = tokens(2, 5)
    with torch.no_grad(), model.disable_adapter():
        bare = model(ids).logits
    out = model(ids, labels=ids)
    assert torch.equal(out.logits, bare)
    out.loss.backward()
    for name, grad in gradients(model).items():
        assert torch.isfinite(grad).all() and bool(grad.any()) == ("lora_B" in name), name


def mixed():
    """A model with three adapters of different ranks, scalings and targets, all of which train."""
    model = over_fp8(lora(r=6, alpha=12))
    model.add_adapter("second", lora(r=3, alpha=9, targets=["q_proj", "v_proj", "down_proj"], use_rslora=True))
    model.add_adapter("third", lora(r=8, alpha=4, rank_pattern={"o_proj": 2}, alpha_pattern={"up_proj": 32}))
    for layer in ours(model).values():
        for part in (layer.lora_A, layer.lora_B):
            part.requires_grad_(True)
    return model.eval()


def test_several_adapters_in_a_batch_equal_separate_runs():
    model = mixed()
    ids, names = tokens(5, 6), ["second", "__base__", "default", "second", "third"]
    logits = model(ids, adapter_names=names).logits
    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    got = {name: grad.clone() for name, grad in gradients(model).items()}
    model.zero_grad()
    for name in ("default", "second", "third"):
        rows = [i for i, n in enumerate(names) if n == name]
        model.set_adapter(name)
        alone = model(ids[rows]).logits
        close(logits[rows], alone)
        (alone * weights[rows]).sum().backward()
    with model.disable_adapter():
        close(logits[[1]], model(ids[[1]]).logits)
    want = gradients(model)
    assert got.keys() == want.keys() and len(got) == 2 * 2 * (7 + 3 + 7)
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4)


def test_a_batch_of_adapters_is_one_call_a_projection_and_beams_repeat_it():
    model = mixed()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(4, 3, 64)
    with torch.no_grad(), CountOps() as ops:
        y = layer(x, adapter_names=["third", "third", "default", "__base__"])
    assert ops.widths == [64]
    close(y[3], layer.base_layer(x[3]))
    reference = over_plain(model)
    ids = tokens(2, 4)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False, "num_beams": 2}
    outputs = [m.generate(input_ids=ids, adapter_names=["third", "second"], **options) for m in (model, reference)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "options",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 9}, "alpha_pattern": {"down_proj": 40}},
        {"targets": ["q_proj", "down_proj"]},
        {"targets": "all-linear", "init_lora_weights": "gaussian"},
    ],
)
def test_ranks_scalings_and_targets_are_peft_s(options):
    model = over_fp8(lora(**options))
    ids = tokens(2, 5)
    with torch.no_grad():
        close(model(ids).logits, over_plain(model)(ids).logits)


def test_a_linear_that_is_several_in_one_and_one_with_a_bias():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv_proj, self.out = nn.Linear(64, 160), nn.Linear(160, 64)

        def forward(self, x):
            return self.out(self.qkv_proj(x))

    plain = Block()
    model = te.patch(copy.deepcopy(plain), compute="w8a16", max_adapters=0, slices={"qkv_proj": (96, 32, 32)})
    model = peft_training.LoraModel(model, lora(targets=["qkv_proj", "out"]), "default")
    layer = model.model.qkv_proj
    x = torch.randn(2, 3, 64)
    delta = (x @ layer.lora_A.default.weight.t()) @ layer.lora_B.default.weight.t() * 2
    close(layer(x), layer.base_layer(x) + delta)
    assert layer(x).shape == (2, 3, 160) and layer(x[0, 0]).shape == (160,)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_changes_no_gradient(reentrant, dropout):
    found = []
    for checkpointing in (False, True):
        model = over_fp8(lora(lora_dropout=dropout)).train()
        model.enable_input_require_grads()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        ids = tokens(2, 5)
        torch.manual_seed(7)
        model(ids, labels=ids, use_cache=False).loss.backward()
        found.append(gradients(model))
    assert found[0].keys() == found[1].keys() and len(found[0]) == 28
    for name in found[0]:
        assert torch.equal(found[0][name], found[1][name]), name


@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_zero_rows_and_no_rows_are_finite(compute):
    layer = next(iter(ours(over_fp8(compute=compute)).values()))
    x = torch.randn(4, 64)
    x[1:3] = 0
    x.requires_grad_()
    y = layer(x)
    y.square().sum().backward()
    assert torch.isfinite(y).all() and not y[1:3].any()
    assert all(torch.isfinite(t.grad).all() for t in (x, layer.lora_A.default.weight, layer.lora_B.default.weight))
    assert layer(x[:0]).shape == (0, 64)


@pytest.mark.parametrize("kind", ["lora_bias", "several active", "alora", "lora_bias in a mixed batch"])
def test_what_is_not_fused_is_peft_s_arithmetic_on_our_base(kind, caplog):
    options = {
        "alora": {"alora_invocation_tokens": [5, 6], "task_type": "CAUSAL_LM"},
        "several active": {},
    }.get(kind, {"lora_bias": True})
    model = over_fp8(lora(**options))
    model.add_adapter("second", lora(r=3, targets=["q_proj", "k_proj"]))
    ids, extra = tokens(2, 6), {}
    ids[0, 2], ids[0, 3] = 5, 6
    if kind == "several active":
        model.base_model.set_adapter(["default", "second"])
    if kind.endswith("in a mixed batch"):
        extra = {"adapter_names": ["second", "default"]}
    outputs = []
    with caplog.at_level(logging.WARNING, logger="torch_epilora"):
        models = (model, over_plain(model))
        for m in models:
            torch.manual_seed(11)
            outputs.append(m(ids, labels=ids, **extra))
            outputs[-1].loss.backward()
    close(outputs[0].logits, outputs[1].logits)
    got, want = (gradients(m) for m in models)
    assert got.keys() == want.keys() and got
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4)
    with torch.no_grad(), model.disable_adapter():
        bare = model(ids).logits
    assert ((outputs[0].logits - bare).abs().amax(-1) > 1e-3)[0, 3:].all()
    slower = [r.message for r in caplog.records if "PEFT's arithmetic" in r.message]
    assert len(slower) == 1 and len(caplog.records) == 1
    word = {"alora": "ALora", "several active": "several"}.get(kind, kind.split()[0])
    assert word in slower[0]


def test_dropout_of_one_adapter_is_part_of_the_call(caplog):
    model = over_fp8(lora(lora_dropout=0.3)).train()
    reference, ids, outputs = over_plain(model), tokens(2, 6), []
    for m in (model, reference):
        torch.manual_seed(11)
        with CountOps() as ops:
            outputs.append(m(ids, labels=ids))
        assert len(ops.widths) == (14 if m is model else 0)
        outputs[-1].loss.backward()
    close(outputs[0].logits, outputs[1].logits)
    got, want = gradients(model), gradients(reference)
    assert got.keys() == want.keys() and got and not caplog.records
    for name in got:
        torch.testing.assert_close(got[name], want[name], rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert not torch.equal(model(ids).logits, outputs[0].logits), "another mask changed nothing"


def test_dropout_in_evaluation_is_fused(caplog):
    model = over_fp8(lora(lora_dropout=0.3))
    ids = tokens(2, 6)
    with torch.no_grad(), CountOps() as ops:
        got = model(ids).logits
    assert len(ops.widths) == 14 and not caplog.records
    with torch.no_grad():
        close(got, over_plain(model)(ids).logits)


@pytest.mark.parametrize("layout", ["tensor", "block"])
def test_other_layouts_of_scales(layout):
    plain = llama(hidden_size=128, intermediate_size=256)
    model = te.patch(copy.deepcopy(plain), layout=layout, compute="w8a16", max_adapters=0)
    model = peft_training.LoraModel(model, lora(), "default")
    ids = tokens(2, 5)
    model.model(ids, labels=ids).loss.backward()
    reference = peft_training.LoraModel(dequantized(model, plain), lora(), "default")
    reference.load_state_dict({n: p for n, p in model.state_dict().items() if "lora_" in n}, strict=False)
    reference.model(ids, labels=ids).loss.backward()
    got, want = gradients(model), gradients(reference)
    assert got.keys() == want.keys() and len(got) == 28
    for name in got:
        assert cosine(got[name], want[name]) > 0.9999, name


def test_a_static_input_scale_is_used(tmp_path):
    plain = attention()
    weights = {name: Fp8Weight.quantize(m.weight.detach(), "tensor") for name, m in plain.named_children()}
    static = {name: Fp8Weight(w.codes, w.scale, torch.tensor([0.01])) for name, w in weights.items()}
    write_checkpoint(tmp_path, static, {}, {})
    model = te.load_quantized(tmp_path, model=plain, max_adapters=0)
    layer = peft_training.LoraModel(model, lora(targets=["q_proj"]), "default").model.q_proj
    x = torch.randn(3, 64) * 3
    delta = (x @ layer.lora_A.default.weight.t()) @ layer.lora_B.default.weight.t() * 2
    close(layer(x), layer.base_layer(x) + delta)
    dynamic = te.patch(attention(), layout="tensor", max_adapters=0).q_proj
    assert not torch.allclose(layer.base_layer(x), dynamic(x), atol=1e-3)


def test_steps_lower_the_loss_and_leave_every_byte_of_the_base():
    model = over_fp8(lora(init_lora_weights=True, lora_dropout=0.05), plain=llama(torch.bfloat16)).train()
    base = {n: t for n, t in snapshot(model).items() if "lora_" not in n}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)
    assert len(optimizer.param_groups[0]["params"]) == 28
    ids, losses = tokens(4, 8), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert same(base, {n: t for n, t in snapshot(model).items() if "lora_" not in n})


def test_a_layer_compiles_without_graph_breaks_forward_and_backward():
    torch._dynamo.reset()
    layer = next(iter(ours(over_fp8()).values())).train()
    results = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        layer.zero_grad()
        y = call(x)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, layer.lora_A.default.weight.grad, layer.lora_B.default.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch._dynamo.reset()


@pytest.mark.parametrize("amp", [False, True])
def test_a_step_of_the_transformers_trainer(tmp_path, amp):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    model = over_fp8(lora(init_lora_weights=True), compute="w8a8")
    before = snapshot(model)
    data = [{"input_ids": row, "labels": row} for row in tokens(4, 6)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        max_steps=2,
        learning_rate=1e-2,
        gradient_checkpointing=True,
        bf16=amp,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    assert torch.isfinite(torch.tensor(Trainer(model, arguments, train_dataset=data).train().training_loss))
    after = snapshot(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_A" in name or "lora_B" in name}


def test_slots_and_peft_adapters_do_not_mix_in_one_forward():
    plain = llama()
    model = te.patch(copy.deepcopy(plain), compute="w8a16", max_adapters=2)
    bare = copy.deepcopy(model)
    te.load_adapter(model, "alice", adapter(plain))
    torch.manual_seed(3)
    trained = peft_training.LoraModel(model, lora(targets=["v_proj"]), "default").eval()
    ids = tokens(2, 4)
    with te.adapters(model, ["alice", None]):
        with pytest.raises(ValueError, match=r"adapters\(\): expected only rows on the bare base.*v_proj"):
            trained(ids)
        trained.disable_adapter_layers()
        with te.adapters(bare, [None]), torch.no_grad():
            slots = trained(ids).logits
            close(slots[1], bare(ids[1:]).logits[0])
            assert not torch.allclose(slots[0], bare(ids[:1]).logits[0], atol=1e-2)
        trained.enable_adapter_layers()
    with te.adapters(model, [None]), torch.no_grad():
        named = trained(ids).logits
    with torch.no_grad():
        assert torch.equal(trained(ids).logits, named)
        layer = trained.model.model.layers[0].self_attn.v_proj
        x = torch.randn(3, 64)
        delta = (x @ layer.lora_A.default.weight.t()) @ layer.lora_B.default.weight.t() * 2
        close(layer(x), bare.model.layers[0].self_attn.v_proj(x) + delta)


def test_linears_beside_a_trained_one_go_on_and_nothing_waits(caplog):
    with caplog.at_level(logging.WARNING, logger="torch_epilora"):
        model = over_fp8(lora(targets=["q_proj", "v_proj"]))
        reference = over_plain(model)
        for i in range(3):
            ids = tokens(2, 5, seed=i)
            close(model(ids).logits, reference(ids).logits)
    groups = {id(m.group): m.group for m in lora_linears(model).values()}.values()
    assert not caplog.records and all(g._pending is None for g in groups)
    assert [g.fused for g in groups] == [False, False, True, False] * 2


def test_train_linear_says_what_does_not_fit():
    layer = next(iter(ours(over_fp8()).values()))
    linear, x = layer.base_layer, torch.randn(2, 64)
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    with pytest.raises(ValueError, match="a, b, scaling: expected one of each an adapter, got 1, 1 and 2"):
        train_linear(linear, x, [a], [b], [1.0, 1.0])
    with pytest.raises(ValueError, match="rows: expected the adapter of every run of rows where there are 2"):
        train_linear(linear, x, [a, a], [b, b], [1.0, 1.0])
    with pytest.raises(ValueError, match=r"x: expected \[..., 64\]"):
        train_linear(linear, x[:, :32], [a], [b], [1.0])
    with pytest.raises(TypeError, match="x: expected float32"):
        train_linear(linear, x.bfloat16(), [a], [b], [1.0])
    with pytest.raises(ValueError, match=r"a\[0\]: expected \[slots, rank, 64\]"):
        train_linear(linear, x, [a[:, :32]], [b], [1.0])
    close(train_linear(linear, x, [a], [b], [torch.tensor(2.0)]), layer(x))


def test_targets_of_other_classes_are_peft_s_own():
    model = over_fp8(lora(targets=[*ALL, "lm_head", "embed_tokens"]))
    kinds = {type(m).__module__ for m in model.modules() if hasattr(m, "lora_A")}
    assert kinds == {"torch_epilora.integrations.peft_training", "peft.tuners.lora.layer"}
    ids = tokens(2, 5)
    with torch.no_grad():
        close(model(ids).logits, over_plain(model)(ids).logits)


def test_dropout_in_a_mixed_batch_is_applied(caplog):
    model = over_fp8(lora(lora_dropout=0.5)).train()
    layer, x = next(iter(ours(model).values())), torch.randn(2, 3, 64)
    reference = next(m for m in over_plain(model).modules() if hasattr(m, "lora_A"))
    outputs = []
    for m in (layer, reference):
        torch.manual_seed(11)
        outputs.append(m(x, adapter_names=["default", "default"]))
    close(*outputs)
    assert not torch.equal(layer(x, adapter_names=["default", "default"]), outputs[0]), "another mask changed nothing"
    assert ["dropout" in r.message for r in caplog.records] == [True]


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_hooks_of_an_adapter_s_modules_are_called(part):
    model = over_fp8()
    layer, x, seen = next(iter(ours(model).values())), torch.randn(2, 64), []
    want = layer(x)
    handle = getattr(layer, part).default.register_forward_hook(lambda *call: seen.append(call))
    close(layer(x), want)
    assert len(seen) == 1
    handle.remove()
    assert torch.equal(layer(x), want) and len(seen) == 1


def test_an_adapter_that_peft_made_of_two_by_svd_runs():
    model = over_fp8()
    model.add_adapter("second", lora(r=3))
    model.add_weighted_adapter(["default", "second"], [0.5, 0.7], "both", combination_type="svd", svd_rank=4)
    model.set_adapter("both")
    assert not next(iter(ours(model).values())).lora_A.both.weight.is_contiguous()
    ids = tokens(2, 5)
    with torch.no_grad():
        close(model(ids).logits, over_plain(model)(ids).logits)


def test_the_adapter_itself_is_kept_for_the_backward_and_may_not_change_before():
    layer, x, kept = next(iter(ours(over_fp8()).values())), torch.randn(2, 64), set()
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.data_ptr()) or t, lambda t: t):
        layer(x)
    assert {a.data_ptr(), b.data_ptr()} <= kept
    y = layer(x)
    with torch.no_grad():
        a.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
