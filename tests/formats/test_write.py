"""What write_checkpoint writes: read back, and read by transformers and compressed-tensors."""

import copy
import json

import pytest
import torch
from safetensors import safe_open

from torch_epilora.formats import LAYOUTS, Fp8Weight, read_checkpoint, write_checkpoint
from torch_epilora.formats.checkpoints import INDEX, SINGLE


def linears(layouts=LAYOUTS, static=(), k=300):
    """One weight a layout."""
    found = {}
    for i, layout in enumerate(layouts):
        w = torch.randn(200, k, generator=torch.Generator().manual_seed(i))
        q = Fp8Weight.quantize(w, layout)
        found[f"layers.{i}"] = Fp8Weight(q.codes, q.scale, torch.tensor([0.5])) if layout in static else q
    return found


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name].dequantize(), b[name].dequantize())
        assert (a[name].input_scale is None) == (b[name].input_scale is None)
        if a[name].input_scale is not None:
            assert torch.equal(a[name].input_scale, b[name].input_scale)


@pytest.mark.parametrize("shard_bytes", [10**9, 70_000, 1])
@pytest.mark.parametrize("static", [(), ("tensor",), ("tensor", "channel")])
def test_round_trip(tmp_path, shard_bytes, static):
    weights = linears(static=static)
    others = {
        "norm.weight": torch.randn(300),
        "lm_head.weight": torch.randn(4, 300).bfloat16(),
        "b.bias": torch.ones(2),
    }
    write_checkpoint(tmp_path / "a" / "b", weights, others, {"model_type": "x"}, shard_bytes=shard_bytes)
    found = read_checkpoint(tmp_path / "a" / "b")
    same(found.weights, weights)
    assert found.others.keys() == others.keys()
    assert all(torch.equal(found.others[k], others[k]) for k in others)
    assert found.config["model_type"] == "x" and found.method == "compressed-tensors"
    files = sorted(p.name for p in (tmp_path / "a" / "b").glob("*.safetensors"))
    assert len(files) == {10**9: 1, 70_000: 3}.get(shard_bytes, len(files))
    for name in files:
        with safe_open(tmp_path / "a" / "b" / name, "pt") as f:
            assert f.metadata() == {"format": "pt"}
    assert not list((tmp_path / "a" / "b").glob(".writing*"))


def test_members_of_a_fused_buffer_and_tied_tensors(tmp_path):
    whole = Fp8Weight.quantize(torch.randn(6, 8))
    weights = {n: Fp8Weight(whole.codes[i : i + 2], whole.scale[i : i + 2]) for i, n in ((0, "q"), (2, "k"), (4, "v"))}
    shared = torch.randn(4, 8)
    others = {"embed.weight": shared, "lm_head.weight": shared, "rows.weight": shared[1:3], "turned.weight": shared.t()}
    write_checkpoint(tmp_path, weights, others, None)
    found = read_checkpoint(tmp_path)
    same(found.weights, weights)
    assert all(torch.equal(found.others[k], others[k]) for k in others)


def test_writing_over_a_model_replaces_it_and_keeps_other_files(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    write_checkpoint(tmp_path, linears(), {}, None, shard_bytes=1)
    write_checkpoint(tmp_path, linears(("channel",)), {}, None)
    assert {p.name for p in tmp_path.iterdir()} == {"tokenizer.json", "config.json", SINGLE}
    write_checkpoint(tmp_path, linears(("tensor",)), {}, None, shard_bytes=1)
    assert INDEX in {p.name for p in tmp_path.iterdir()} and not (tmp_path / SINGLE).exists()
    same(read_checkpoint(tmp_path).weights, linears(("tensor",)))


def test_a_checkpoint_may_be_written_over_the_one_it_was_read_from(tmp_path):
    write_checkpoint(tmp_path, linears(), {"norm.weight": torch.ones(3)}, {"a": 1})
    found = read_checkpoint(tmp_path)
    write_checkpoint(tmp_path, found.weights, found.others, found.config)
    same(read_checkpoint(tmp_path).weights, linears())


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"weights": {}}, ValueError, "weights: expected at least one FP8 weight"),
        ({"weights": {"q": torch.ones(2, 2)}}, TypeError, r"weights\['q'\]: expected an Fp8Weight, got Tensor"),
        ({"others": {"n": [1]}}, TypeError, r"others\['n'\]: expected a tensor, got list"),
        ({"others": {"layers.0.weight": torch.ones(1)}}, ValueError, "expected a name that weights does not use"),
        ({"others": {"n": torch.ones(1, device="meta")}}, ValueError, "n: expected a tensor with values"),
        ({"others": {"n": torch.eye(2).to_sparse()}}, ValueError, "n: expected a tensor with values, got a sparse one"),
        ({"path": "n" * 5000}, ValueError, r"path: expected a folder that can be made, got 'n{200}\.\.\. .*too long"),
        ({"config": [1]}, TypeError, "config: expected a mapping or None, got list"),
        ({"config": {"dtype": torch.float32}}, TypeError, "config: expected values that JSON can hold"),
        ({"shard_bytes": 0}, ValueError, "shard_bytes: expected a positive integer, got 0"),
        ({"shard_bytes": True}, ValueError, "shard_bytes: expected a positive integer, got True"),
        ({"path": 3}, TypeError, "path: expected the path of a folder, got int"),
    ],
)
def test_bad_arguments_write_nothing(tmp_path, change, error, message):
    write_checkpoint(tmp_path, linears(("channel",)), {}, None)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    call = {"path": tmp_path, "weights": linears(("channel",)), "others": {}, "config": None, **change}
    with pytest.raises(error, match=message):
        write_checkpoint(**call)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "here").write_text("x")
    with pytest.raises(ValueError, match="path: expected a folder, got the file"):
        write_checkpoint(tmp_path / "here", linears(("channel",)), {}, None)


def test_the_callers_config_is_not_changed(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8"}, "model_type": "x"}
    before = copy.deepcopy(config)
    write_checkpoint(tmp_path, linears(("channel",)), {}, config)
    assert config == before
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["format"] == "float-quantized"


SCHEMES = {
    "channel": lambda name: ("channel", False),
    "tensor": lambda name: ("tensor", False),
    "tensor, static": lambda name: ("tensor", True),
    "channel, static": lambda name: ("channel", True),
    "block": lambda name: ("block", False),
    "mixed": lambda name: ("channel", False) if "self_attn" in name else ("tensor", True),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_the_same_values(tmp_path, monkeypatch, scheme, tied):
    pytest.importorskip("compressed_tensors")
    transformers = pytest.importorskip("transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=128, vocab_size=64, tie_word_embeddings=tied, architectures=["LlamaForCausalLM"], dtype="float32",
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            layout, static = SCHEMES[scheme](name)
            q = Fp8Weight.quantize(module.weight.detach(), layout)
            weights[name] = Fp8Weight(q.codes, q.scale, torch.tensor([0.25]) if static else None)
    quantized = {f"{name}.weight" for name in weights} | ({"lm_head.weight"} if tied else set())
    others = {k: v for k, v in model.state_dict().items() if k not in quantized}
    write_checkpoint(tmp_path, weights, others, config.to_dict(), shard_bytes=200_000)

    read = transformers.CompressedTensorsConfig(dequantize=True)
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=read, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    modules = dict(loaded.named_modules())
    assert len(weights) == 14
    for name, weight in weights.items():
        assert torch.equal(modules[name].weight, weight.dequantize()), name
        if weight.input_scale is not None:
            assert torch.equal(modules[name].input_scale, weight.input_scale)
    assert torch.equal(modules["lm_head"].weight, model.lm_head.weight)
    for key, value in others.items():
        assert torch.equal(loaded.state_dict()[key], value)
    same(read_checkpoint(tmp_path).weights, weights)


def test_compressed_tensors_parses_the_config_as_meant(tmp_path):
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig

    write_checkpoint(tmp_path, linears(static=("tensor",)), {"lm_head.weight": torch.ones(2, 300)}, None)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(written)
    assert parsed.ignore == ["lm_head"]
    found = {g.weights.strategy: g for g in parsed.config_groups.values()}
    assert {s: g.targets for s, g in found.items()} == {
        "tensor": ["layers.0"], "channel": ["layers.1"], "block": ["layers.2"],
    }  # fmt: skip
    assert (found["tensor"].input_activations.strategy, found["tensor"].input_activations.dynamic) == ("tensor", False)
    assert (found["channel"].input_activations.strategy, found["channel"].input_activations.dynamic) == ("token", True)
    assert (found["block"].input_activations.strategy, found["block"].input_activations.group_size) == ("group", 128)
