"""patch() on the GPU: a whole model against PEFT's arithmetic on the same codes, graphs, moves and several devices."""

import copy

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch_epilora as te
from tests.cases import sqnr
from tests.nn.helpers import adapter, dequantized, llama
from torch_epilora.nn.linear import lora_linears

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}


def patched(compute: str, layout: str = "channel", **options: object):
    plain = llama(torch.bfloat16, **SIZES).cuda()
    model = te.patch(copy.deepcopy(plain), layout=layout, compute=compute, max_rank=16, **options)
    sources = {}
    for i, name in enumerate(("alice", "bob")):
        sources[name] = adapter(plain, r=4 + 8 * i, seed=i, size=0.1)
        te.load_adapter(model, name, sources[name])
    return plain, model, sources


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_whole_model_agrees_with_peft(layout: str) -> None:
    """Only W8A16: with W8A8 the order of a sum alone moves a small model's logits."""
    from peft import LoraConfig, get_peft_model
    from peft.utils import set_peft_model_state_dict

    plain, model, sources = patched("w8a16", layout)
    ids = torch.randint(3, 97, (3, 12), device="cuda")
    with torch.no_grad(), te.adapters(model, ["alice", None, "bob"]):
        got = model(ids).logits
    exact = dequantized(model, copy.deepcopy(plain).float())

    def peft_logits(row: int, name: str | None, dtype: torch.dtype) -> torch.Tensor:
        reference = copy.deepcopy(exact).to(dtype)
        if name is not None:
            state, options = sources[name]
            config = LoraConfig(r=options["r"], lora_alpha=options["lora_alpha"], target_modules="all-linear")
            reference = get_peft_model(reference, config, autocast_adapter_dtype=False)
            set_peft_model_state_dict(reference, state)
        with torch.no_grad():
            return reference(ids[row : row + 1]).logits[0].float()

    for row, name in enumerate(["alice", None, "bob"]):
        want = peft_logits(row, name, torch.float32)
        error = (got[row].float() - want).norm()
        baseline = (peft_logits(row, name, torch.bfloat16) - want).norm()
        assert 0 < error <= 2 * baseline, name


@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_a_row_does_not_depend_on_the_others_adapters(compute: str) -> None:
    _, model, _ = patched(compute)
    ids = torch.randint(3, 97, (4, 12), device="cuda")
    with torch.no_grad():
        with te.adapters(model, ["alice", None, "bob", "bob"]):
            mixed = model(ids).logits
        with te.adapters(model, ["alice", "bob", "bob", None]):
            other = model(ids).logits
    assert torch.equal(mixed[0], other[0]) and torch.equal(mixed[2], other[2])
    assert not torch.equal(mixed[1], other[1]) and not torch.equal(mixed[3], other[3])


def test_generate_greedy_beams_and_samples() -> None:
    _, model, _ = patched("w8a8")
    ids = torch.randint(3, 97, (3, 9), device="cuda")
    names = ["alice", None, "bob"]
    with te.adapters(model, names):
        together = model.generate(ids, max_new_tokens=8, do_sample=False)
        beams = model.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)
        model.generate(ids, max_new_tokens=4, do_sample=True, num_return_sequences=2)
    assert together.shape == (3, 17) and beams.shape[0] == 3
    with te.adapters(model, ["bob"]):
        alone = model.generate(ids[2:], max_new_tokens=1, do_sample=False)
    assert torch.equal(alone[0, 9], together[2, 9])


def test_captured_layer_follows_adapters_swapped_in_place() -> None:
    """cases.md 17: replay equals a fresh eager forward after the slot's content changed."""
    _, model, _ = patched("w8a8")
    layer = model.model.layers[0].mlp
    x = torch.randn(5, 1, 256, device="cuda", dtype=torch.bfloat16)
    names = ["alice", "bob", None, "alice", "bob"]
    with torch.no_grad(), te.adapters(model, names):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            layer(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        pointers = [t.data_ptr() for t in layer.gate_proj.group.bank.buffers()]
        for seed, rank in ((7, 16), (8, 3), (9, 11)):
            te.load_adapter(model, "alice", adapter(llama(torch.bfloat16, **SIZES), r=rank, seed=seed, size=0.1))
            x.normal_()
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(y, layer(x))
        assert pointers == [t.data_ptr() for t in layer.gate_proj.group.bank.buffers()]


def test_a_graph_outlives_its_context() -> None:
    _, model, _ = patched("w8a8")
    layer = model.model.layers[0].mlp
    x = torch.randn(3, 1, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        with te.adapters(model, ["bob", "alice", None]):
            want = layer(x).clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = layer(x)
        for i in range(64):  # whatever the context's memory was, it is written over
            torch.full((1 << (i % 12),), 7, dtype=torch.int32, device="cuda")
        with te.adapters(model, [None, None, "bob"]):
            layer(x)
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(y, want)


def test_moves_keep_codes_and_results() -> None:
    _, model, _ = patched("w8a8")
    codes = {path: m.weight.clone() for path, m in lora_linears(model).items()}
    ids = torch.randint(3, 97, (1, 7), device="cuda")
    with torch.no_grad(), te.adapters(model, ["bob"]):
        before = model(ids).logits
    model.cpu()
    model.cuda()
    for path, m in lora_linears(model).items():
        assert m.weight.is_cuda and torch.equal(m.weight.view(torch.uint8), codes[path].view(torch.uint8))
    with torch.no_grad(), te.adapters(model, ["bob"]):
        assert torch.equal(model(ids).logits, before)


def test_compiled_model() -> None:
    _, model, _ = patched("w8a8")
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for rows, length in ((2, 5), (4, 9)):
            ids = torch.randint(3, 97, (rows, length), device="cuda")
            with te.adapters(model, ["alice", "bob"]):
                assert sqnr(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits) > 20


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_layer_runs_on_its_own_device() -> None:
    _, model, _ = patched("w8a8")
    with torch.no_grad(), te.adapters(model, ["alice", "bob"]):
        x = torch.randn(2, 3, 256, device="cuda:0", dtype=torch.bfloat16)
        want = model.model.layers[1].mlp(x)
        model.model.layers[1].mlp.to("cuda:1")
        assert torch.equal(model.model.layers[1].mlp(x.to("cuda:1")).cpu(), want.cpu())
