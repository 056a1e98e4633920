"""One computation for the linears that share an input, and everything that could make its result stale."""

import copy
import logging

import pytest
import torch
from torch import nn

import torch_epilora as te
from tests.nn.helpers import CountOps, adapter, attention, llama, tokens
from torch_epilora.nn import adapter_slots, describe


def patched(**options):
    plain = attention()
    model = te.patch(copy.deepcopy(plain), **options)
    te.load_adapter(model, "a", adapter(plain, targets=("q_proj", "k_proj", "v_proj")))
    te.load_adapter(model, "b", adapter(plain, targets=("q_proj", "k_proj", "v_proj"), seed=2))
    return model


def alone(model, name, x):
    """A member's output, computed by an unfused copy."""
    other = copy.deepcopy(model)
    other.q_proj.group.fused = False
    other.q_proj.group.state.batch = model.q_proj.group.state.batch
    return getattr(other, name)(x)


def test_three_calls_with_one_tensor_run_once_and_equal_the_separate_ones():
    model, x = patched(), torch.randn(4, 3, 64)
    with torch.no_grad(), te.adapters(model, ["a", None, "b", "a"]):
        with CountOps() as ops:
            got = model(x)[:3]
        assert ops.widths == [128, 64]
        for name, y in zip(("q_proj", "k_proj", "v_proj"), got, strict=True):
            torch.testing.assert_close(y, alone(model, name, x))
    assert model.q_proj.group._pending is None


def test_any_order_of_members():
    model, x = patched(), torch.randn(2, 64)
    with torch.no_grad(), CountOps() as ops:
        v, q, k = model.v_proj(x), model.q_proj(x), model.k_proj(x)
    assert ops.widths == [128]
    for name, y in (("v_proj", v), ("q_proj", q), ("k_proj", k)):
        torch.testing.assert_close(y, alone(model, name, x))


def test_in_place_change_between_members_is_seen(caplog):
    model, x = patched(), torch.randn(2, 64)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        model.q_proj(x)
        x.mul_(2)
        k = model.k_proj(x)
        torch.testing.assert_close(k, alone(model, "k_proj", x))
        v = model.v_proj(x)
        torch.testing.assert_close(v, alone(model, "v_proj", x))
    assert describe(model)[0].fused is False
    assert caplog.text.count("computed by itself") == 1


def test_other_inputs_unfuse_at_the_second_time_and_are_right_at_once(caplog):
    model = patched()
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        for _ in range(3):
            h, memory = torch.randn(2, 64), torch.randn(2, 64)
            for name, x in (("q_proj", h), ("k_proj", memory), ("v_proj", memory)):
                torch.testing.assert_close(getattr(model, name)(x), alone(model, name, x))
        with CountOps() as ops:
            model(torch.randn(2, 64))
    assert ops.widths == [64, 32, 32, 64] and caplog.text.count("computed by itself") == 1


def test_an_equal_but_different_tensor_is_another_input():
    model, x = patched(), torch.randn(2, 64)
    with torch.no_grad():
        model.q_proj(x)
        torch.testing.assert_close(model.k_proj(x + 1), alone(model, "k_proj", x + 1))


def test_an_interrupted_forward_does_not_unfuse():
    model = patched()
    handle = model.k_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with torch.no_grad():
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                model(torch.randn(2, 64))
            handle.remove()
            x = torch.randn(2, 64)
            torch.testing.assert_close(model(x)[1], alone(model, "k_proj", x))
            handle = model.k_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    assert describe(model)[0].fused


def test_another_batch_between_members_is_seen():
    model, x = patched(), torch.randn(2, 64)
    with torch.no_grad():
        with te.adapters(model, ["a", "b"]):
            model.q_proj(x)
        with te.adapters(model, ["b", "a"]):
            torch.testing.assert_close(model.k_proj(x), alone(model, "k_proj", x))
        torch.testing.assert_close(model.v_proj(x), alone(model, "v_proj", x))


def test_a_reload_or_a_write_to_the_slots_between_members_is_seen():
    model, x = patched(), torch.randn(2, 64)
    with torch.no_grad(), te.adapters(model, ["a", "a"]):
        model.q_proj(x)
        te.load_adapter(model, "a", adapter(attention(), targets=("k_proj",), seed=7))
        torch.testing.assert_close(model.k_proj(x), alone(model, "k_proj", x))
        model.q_proj.group._strikes = 0
        model.q_proj(x + 0)
        x = x + 0
        model.q_proj.group._pending, model.q_proj.group._strikes = None, 0
        model.q_proj(x)
        model.q_proj.group.bank.b[1][0].mul_(3)
        torch.testing.assert_close(model.k_proj(x), alone(model, "k_proj", x))


def test_a_write_to_the_base_between_members_is_seen():
    plain = attention(bias=True)
    for write in (
        lambda m: m.bias.add_(1),
        lambda m: m.weight_scale.mul_(2),
        lambda m: m.weight.view(torch.uint8).zero_(),
    ):
        model, x = te.patch(copy.deepcopy(plain)), torch.randn(2, 64)
        with torch.no_grad():
            model.q_proj(x)
            write(model.k_proj)
            torch.testing.assert_close(model.k_proj(x), alone(model, "k_proj", x))


def test_moves_in_inference_mode_leave_normal_tensors():
    model = patched()
    with torch.inference_mode():
        model.to(torch.bfloat16)
        model(torch.randn(2, 64, dtype=torch.bfloat16))
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert all(torch.isfinite(y).all() for y in model(x))


def test_a_result_without_gradient_is_not_handed_to_a_training_call():
    model, x = patched(), torch.randn(2, 64, requires_grad=True)
    with torch.no_grad():
        model.q_proj(x)
    assert model.k_proj(x).requires_grad


def test_outputs_can_be_changed_in_place():
    model, x = patched(), torch.randn(2, 3, 64)
    with torch.no_grad():
        q, k = model.q_proj(x), model.k_proj(x)
        want = k.clone()
        q.zero_()
        assert torch.equal(k, want)
        assert q.view(2, 3, 4, 16).shape == (2, 3, 4, 16)


def test_one_member_called_alone_for_long_unfuses_and_stays_right():
    model = patched()
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(2, 64)
            torch.testing.assert_close(model.k_proj(x), alone(model, "k_proj", x))
    assert not describe(model)[0].fused


def test_mixed_biases_and_different_inputs_are_not_fused():
    plain = attention()
    plain.k_proj = nn.Linear(64, 32, bias=True)
    assert [len(i.names) for i in describe(te.patch(plain))] == [1, 1, 1, 1]

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder_attn = attention()

    assert [len(i.names) for i in describe(te.patch(Decoder()))] == [1, 1, 1, 1]


def test_deepcopy_is_independent_and_fused():
    model = patched()
    x = torch.randn(2, 64)
    with torch.no_grad(), te.adapters(model, ["a", "b"]):
        model.q_proj(x)  # a result waits to be claimed
        other = copy.deepcopy(model)
        assert other.q_proj.group is other.k_proj.group is other.v_proj.group
        assert other.q_proj.group is not model.q_proj.group
        assert other.q_proj.weight.data_ptr() != model.q_proj.weight.data_ptr()
        want = model(x)
    bare = other(x)
    assert not torch.equal(bare[0], want[0])  # copies start outside of the context
    with torch.no_grad(), te.adapters(other, ["a", "b"]):
        assert all(torch.equal(a, b) for a, b in zip(other(x), want, strict=True))
    te.unload_adapter(other, "a")
    with te.adapters(model, ["a", "b"]):
        pass
    layer = copy.deepcopy(llama_layer := te.patch(llama()).model.layers[0])
    assert layer.self_attn.q_proj.group.codes.data_ptr() != llama_layer.self_attn.q_proj.group.codes.data_ptr()


def test_one_member_copied_alone_is_right():
    model = patched()
    single = copy.deepcopy(model.k_proj)
    for _ in range(3):
        x = torch.randn(2, 64)
        torch.testing.assert_close(single(x), alone(model, "k_proj", x))


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_casts_keep_codes_and_scales(layout, dtype):
    model = te.patch(llama(attention_bias=True), layout=layout, max_adapters=2)
    te.load_adapter(model, "a", adapter(llama()))
    member = model.model.layers[0].self_attn.v_proj
    codes, scale = member.weight.clone(), member.weight_scale.clone()
    for cast in (
        lambda m: m.to(dtype),
        lambda m: m.float(),
        lambda m: m.half() if dtype == torch.float16 else m.bfloat16(),
    ):
        cast(model)
        assert torch.equal(member.weight.view(torch.uint8), codes.view(torch.uint8))
        assert member.weight.dtype == torch.float8_e4m3fn
        assert torch.equal(member.weight_scale, scale) and member.weight_scale.dtype == torch.float32
        bank = member.group.bank
        assert bank.scaling.dtype == torch.float32 and bank.rank.dtype == torch.int32
        assert bank.dtype == member.bias.dtype == model.lm_head.weight.dtype
    assert model.lm_head.weight.dtype == dtype
    with te.adapters(model, ["a"]), torch.no_grad():
        assert torch.isfinite(model(tokens(1, 3)).logits).all()
    with pytest.raises(TypeError, match=r"x: expected (bfloat16|float16), the dtype of model.layers.0"):
        member(torch.randn(1, 64))


def test_a_move_that_changes_nothing_keeps_every_address():
    model = te.patch(attention(), max_adapters=2)
    before = {n: t.data_ptr() for n, t in [*model.named_buffers(), *model.named_parameters()]}
    model.to("cpu").float().to(torch.float32)
    assert before == {n: t.data_ptr() for n, t in [*model.named_buffers(), *model.named_parameters()]}


def test_meta_and_back():
    model = te.patch(llama(attention_bias=True), max_adapters=2)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        want = model(tokens(2, 5)).logits
    skeleton = copy.deepcopy(model).to("meta")
    assert skeleton.model.layers[0].self_attn.q_proj.weight.is_meta
    with pytest.raises(ValueError, match="meta device"):
        te.load_adapter(skeleton, "a", adapter(llama()))
    skeleton.load_state_dict(state, assign=True)
    skeleton.model.rotary_emb = model.model.rotary_emb
    with torch.no_grad():
        assert torch.equal(skeleton(tokens(2, 5)).logits, want)
    te.load_adapter(skeleton, "a", adapter(llama()))
    on_meta = te.patch(llama().to("meta"))
    assert describe(on_meta)[0].fused and on_meta.model.layers[0].mlp.up_proj.weight_scale.is_meta


def test_a_forward_on_the_meta_device_has_shapes():
    model = te.patch(attention().to("meta"), max_adapters=2)
    assert [tuple(y.shape) for y in model(torch.randn(2, 3, 64, device="meta"))] == [
        (2, 3, n) for n in (64, 32, 32, 64)
    ]


def test_memory_that_was_given_up_holds_no_adapters():
    model = patched(max_adapters=2)
    model.to("meta")
    assert adapter_slots(model) == {}
    model.to_empty(device="cpu")
    bank = model.q_proj.group.bank
    assert not any(t.any() for t in bank.buffers()) and not bank.has_b_bias
    with pytest.raises(ValueError, match="loaded are none"), te.adapters(model, ["a"]):
        pass


def test_autocast_computes_in_the_models_dtype():
    model, x = patched(), torch.randn(2, 64)
    with torch.no_grad():
        want = model.o_proj(x)
        with torch.autocast("cpu", torch.bfloat16):
            got = model.o_proj(x.bfloat16())
            assert all(y.dtype == torch.bfloat16 for y in model(x))
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), want, rtol=0.1, atol=0.05)


def test_inputs_of_any_shape():
    model, x = patched(), torch.randn(2, 3, 4, 64)
    with torch.no_grad(), te.adapters(model, ["a", "b"]):
        y = model.q_proj(x)
        assert y.shape == (2, 3, 4, 64)
        torch.testing.assert_close(
            y[1].reshape(12, 64),
            alone(model, "q_proj", x.transpose(1, 2).contiguous())[1].transpose(0, 1).reshape(12, 64),
        )
        assert model.q_proj(torch.randn(0, 64)).shape == (0, 64)
        strided = torch.randn(64, 2).t()
        torch.testing.assert_close(model.v_proj(strided), alone(model, "v_proj", strided.contiguous()))
    assert model.q_proj(torch.randn(64)).shape == (64,)
