"""Generation: every way of choosing tokens must leave each row with its own adapter."""

import copy

import pytest
import torch

import torch_epilora as te
from tests.nn.helpers import CountOps, adapter, llama, qwen3, tokens

NAMES = ["a", None, "b"]


@pytest.fixture(scope="module", params=[llama, qwen3], ids=["llama", "qwen3"])
def model(request):
    plain = request.param()
    model = te.patch(copy.deepcopy(plain), compute="w8a16", max_adapters=3)
    te.load_adapter(model, "a", adapter(plain, size=0.3))
    te.load_adapter(model, "b", adapter(plain, r=3, seed=2, size=0.3))
    return model


def run(model, ids, names, **options):
    torch.manual_seed(0)
    with te.adapters(model, names):
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, min_new_tokens=8, **options)


@pytest.mark.parametrize(
    "options",
    [{"do_sample": False}, {"num_beams": 3}, {"num_beams": 4, "num_return_sequences": 2}],
    ids=["greedy", "beams", "beams-return"],
)
def test_a_mixed_batch_equals_each_row_alone(model, options):
    ids = tokens(3, 5)
    together = run(model, ids, NAMES, **options)
    count = options.get("num_return_sequences", 1)
    alone = [run(model, ids[i : i + 1], [name], **options) for i, name in enumerate(NAMES)]
    assert torch.equal(together, torch.cat(alone)) and together.shape == (3 * count, 13)
    swapped = run(model, ids, ["b", "a", None], **options)
    assert not torch.equal(swapped[:count], together[:count])


def test_sampling_and_return_sequences(model):
    ids = tokens(2, 5)
    got = run(model, ids, ["a", "b"], do_sample=True, num_return_sequences=3, top_k=5)
    assert got.shape == (6, 13) and torch.equal(
        got, run(model, ids, ["a", "b"], do_sample=True, num_return_sequences=3, top_k=5)
    )
    # with one candidate a step, sampling is greedy
    top = run(model, ids, ["a", "b"], do_sample=True, num_return_sequences=2, top_k=1)
    assert torch.equal(top, run(model, ids, ["a", "b"]).repeat_interleave(2, 0))


def test_greedy_equals_a_forward_without_cache(model):
    ids = tokens(3, 5)
    got = run(model, ids, NAMES)
    with torch.no_grad(), te.adapters(model, NAMES):
        for _ in range(8):
            logits = model(ids, use_cache=False).logits[:, -1:]
            logits[..., 2] = -torch.inf  # as min_new_tokens forbids the end
            ids = torch.cat([ids, logits.argmax(-1)], 1)
    assert torch.equal(got, ids)


def test_generation_keeps_four_projections_a_layer_and_builds_metadata_once(model):
    ids = tokens(3, 5)
    run(model, ids, NAMES)
    with CountOps() as ops:
        run(model, ids, NAMES)
    assert len(ops.widths) == 8 * 8
    layers = model.model.layers
    assert all(layer.self_attn.q_proj.group.fused and layer.mlp.up_proj.group.fused for layer in layers)


def test_too_few_rows_for_the_names_raise(model):
    with pytest.raises(ValueError, match=r"3 entries were given to adapters\(\), but a layer got 2 rows \(10 tokens\)"):
        run(model, tokens(2, 5), NAMES)
