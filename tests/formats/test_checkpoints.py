"""Each format as its own tool lays it out on disk, against the values that the format's definition gives."""

import json

import pytest
import torch
from safetensors.torch import load_file

from torch_epilora.formats import read_checkpoint
from torch_epilora.formats.files import MAX_JSON_BYTES, read_json

N, K = 200, 300
NAME = "model.layers.0.self_attn.q_proj"
OTHER = "model.layers.0.mlp.down_proj"


def tensors_of(codes, **parts):
    """Two quantized layers with ``parts`` beside each, plus what is never quantized."""
    found = {
        "model.embed_tokens.weight": torch.randn(8, K).bfloat16(),
        "model.norm.weight": torch.randn(K),
        "lm_head.weight": torch.randn(8, K).bfloat16(),
        f"{NAME}.bias": torch.randn(N).bfloat16(),
    }
    for i, name in enumerate((NAME, OTHER)):
        found[f"{name}.weight"] = codes(N, K, seed=i)
        found |= {f"{name}.{leaf}": value.clone() for leaf, value in parts.items()}
    return found


def check(folder, tensors, multiplier, method, input_scale=None):
    """``multiplier``: the scale of every element, computed from the definition."""
    found = read_checkpoint(folder)
    assert found.method == method
    assert set(found.weights) == {NAME, OTHER}
    for name, weight in found.weights.items():
        assert torch.equal(weight.dequantize(), tensors[f"{name}.weight"].float() * multiplier)
        assert torch.equal(weight.codes.view(torch.uint8), tensors[f"{name}.weight"].view(torch.uint8))
        if input_scale is None:
            assert weight.input_scale is None
        else:
            assert torch.equal(weight.input_scale, torch.tensor([input_scale]))
    plain = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", f"{NAME}.bias")
    assert set(found.others) == set(plain)
    assert all(torch.equal(found.others[k], tensors[k]) for k in plain)
    return found


def blocks(grid):
    return grid.repeat_interleave(128, 0)[:N].repeat_interleave(128, 1)[:, :K]


def rand(*shape, dtype=torch.float32):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(3)) * 0.01 + 1e-3).to(dtype)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stored", ["column", "row", "vector"])
def test_compressed_tensors_channel(tmp_path, write, codes, ct_config, shards, dtype, stored):
    scale = rand(N, 1, dtype=dtype)
    shaped = {"column": scale, "row": scale.t().contiguous(), "vector": scale.flatten()}[stored]
    tensors = tensors_of(codes, weight_scale=shaped)
    check(write(tmp_path, tensors, ct_config(), shards), tensors, scale.float(), "compressed-tensors")


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("static", [False, True])
def test_compressed_tensors_tensor(tmp_path, write, codes, ct_config, shape, static):
    parts = {"weight_scale": torch.full(shape, 0.03125 * 3)}
    if static:
        parts |= {"input_scale": torch.tensor([0.75]).bfloat16(), "input_zero_point": torch.zeros(1, dtype=torch.int8)}
    tensors = tensors_of(codes, **parts)
    folder = write(tmp_path, tensors, ct_config("tensor", static))
    check(folder, tensors, 0.03125 * 3, "compressed-tensors", 0.75 if static else None)


@pytest.mark.parametrize("turned", [False, True])
def test_compressed_tensors_block(tmp_path, write, codes, ct_config, turned):
    grid = rand(2, 3)
    tensors = tensors_of(codes, weight_scale=grid.t().contiguous() if turned else grid)
    check(write(tmp_path, tensors, ct_config("block")), tensors, blocks(grid), "compressed-tensors")


def test_compressed_tensors_weight_only_and_mixed_groups(tmp_path, write, codes, ct_config):
    config = ct_config()
    groups = config["quantization_config"]["config_groups"]
    groups["group_0"]["input_activations"] = None
    groups["group_1"] = ct_config("tensor", static=True)["quantization_config"]["config_groups"]["group_0"]
    scale = rand(N, 1)
    tensors = tensors_of(codes, weight_scale=scale)
    tensors[f"{OTHER}.weight_scale"] = torch.tensor([0.5])
    tensors[f"{OTHER}.input_scale"] = torch.tensor([0.25])
    found = read_checkpoint(write(tmp_path, tensors, config))
    assert torch.equal(found.weights[NAME].dequantize(), tensors[f"{NAME}.weight"].float() * scale)
    assert torch.equal(found.weights[OTHER].dequantize(), tensors[f"{OTHER}.weight"].float() * 0.5)
    assert found.weights[NAME].input_scale is None
    assert torch.equal(found.weights[OTHER].input_scale, torch.tensor([0.25]))


def test_kv_cache_scales_are_set_apart(tmp_path, write, codes, ct_config):
    tensors = tensors_of(codes, weight_scale=rand(N, 1))
    tensors["model.layers.0.self_attn.k_scale"] = torch.tensor([0.5])
    found = read_checkpoint(write(tmp_path, tensors, ct_config()))
    assert list(found.kv_scales) == ["model.layers.0.self_attn.k_scale"]
    assert "model.layers.0.self_attn.k_scale" not in found.others


MODELOPT = {"producer": {"name": "modelopt", "version": "0.33.0"}}


@pytest.mark.parametrize("where", ["config", "file", "file without config.json"])
@pytest.mark.parametrize("shards", [1, 2])
def test_modelopt_static(tmp_path, write, codes, where, shards):
    tensors = tensors_of(codes, weight_scale=torch.tensor(0.013), input_scale=torch.tensor(0.07))
    inner = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    config, hf_quant = {"model_type": "llama"}, {**MODELOPT, "quantization": inner}
    if where == "config":
        config, hf_quant = {"quantization_config": {**MODELOPT, "quant_method": "modelopt", "quant_algo": "FP8"}}, None
    elif where == "file without config.json":
        config = None
    folder = write(tmp_path, tensors, config, shards, hf_quant)
    found = check(folder, tensors, torch.tensor(0.013), "modelopt", 0.07)
    assert found.config == config


def test_modelopt_per_channel(tmp_path, write, codes):
    scale = rand(N)
    tensors = tensors_of(codes, weight_scale=scale)
    hf_quant = {**MODELOPT, "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}
    check(write(tmp_path, tensors, {}, hf_quant=hf_quant), tensors, scale[:, None], "modelopt")


@pytest.mark.parametrize("shards", [1, 2])
def test_fbgemm(tmp_path, write, codes, shards):
    scale = rand(N, 1)
    tensors = tensors_of(codes, weight_scale=scale, input_scale_ub=torch.tensor([1200.0]))
    config = {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}}
    found = check(write(tmp_path, tensors, config, shards), tensors, scale, "fbgemm_fp8")
    assert found.input_scale_ub == 1200.0


def fine_grained(**changes):
    found = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return {"quantization_config": {**found, **changes}}


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "e8m0", "exponent"])
def test_fine_grained_blocks(tmp_path, write, codes, shards, turned, kind):
    exponents = torch.tensor([[100, 127, 120], [0, 130, 119]], dtype=torch.uint8)
    if kind in ("e8m0", "exponent"):
        grid = torch.pow(2.0, exponents.double() - 127).float()
        stored = exponents if kind == "exponent" else exponents.view(torch.float8_e8m0fnu)
    else:
        stored = rand(2, 3, dtype=getattr(torch, kind))
        grid = stored.float()
    if turned:
        stored = stored.t().contiguous()
    tensors = tensors_of(codes, weight_scale_inv=stored)
    scale_fmt = "ue8m0" if kind in ("e8m0", "exponent") else "float"
    check(write(tmp_path, tensors, fine_grained(scale_fmt=scale_fmt), shards), tensors, blocks(grid), "fp8")


@pytest.mark.parametrize("leaf", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize("static", [None, "input_scale", "activation_scale"])
def test_fine_grained_without_blocks(tmp_path, write, codes, leaf, static):
    parts = {leaf: torch.tensor(0.011)} | ({static: torch.tensor(0.5)} if static else {})
    tensors = tensors_of(codes, **parts)
    config = fine_grained(weight_block_size=None, activation_scheme="static" if static else "dynamic")
    check(write(tmp_path, tensors, config), tensors, torch.tensor(0.011), "fp8", 0.5 if static else None)


@pytest.mark.parametrize("exponent", [False, True])
def test_fine_grained_as_transformers_dequantizes_it(tmp_path, write, codes, exponent):
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    values, grid = codes(256, 384), torch.tensor([[100, 127, 120], [99, 130, 119]], dtype=torch.uint8)
    grid = grid if exponent else rand(2, 3)
    theirs = fp8.Fp8Dequantize(None)._dequantize_one(values, grid, torch.float32)
    ours = read_checkpoint(write(tmp_path, {"q.weight": values, "q.weight_scale_inv": grid}, fine_grained()))
    assert torch.equal(ours.weights["q"].dequantize(), theirs)


def test_a_lone_linear_has_an_empty_name(tmp_path, write, codes, ct_config):
    tensors = {"weight": codes(4, 6), "weight_scale": torch.full((4, 1), 2.0)}
    found = read_checkpoint(write(tmp_path, tensors, ct_config()))
    assert torch.equal(found.weights[""].dequantize(), codes(4, 6).float() * 2)


def test_the_hub_cache_stores_files_as_links(tmp_path, write, codes, ct_config):
    """models--x/snapshots/<revision>/model.safetensors is a link to models--x/blobs/<hash>."""
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    tensors = {"q.weight": codes(4, 6), "q.weight_scale": torch.full((4, 1), 2.0)}
    for file in write(tmp_path / "plain", tensors, ct_config()).iterdir():
        file.rename(blobs / f"hash-{file.name}")
        (snapshot / file.name).symlink_to(blobs / f"hash-{file.name}")
    assert torch.equal(read_checkpoint(snapshot).weights["q"].dequantize(), codes(4, 6).float() * 2)


def test_reading_leaves_the_files_alone(tmp_path, write, codes, ct_config):
    tensors = tensors_of(codes, weight_scale=rand(N, 1))
    folder = write(tmp_path, tensors, ct_config())
    read_checkpoint(folder).others["model.norm.weight"].zero_()
    assert torch.equal(load_file(folder / "model.safetensors")["model.norm.weight"], tensors["model.norm.weight"])


def test_json_has_a_size_limit(tmp_path):
    with (tmp_path / "config.json").open("wb") as f:
        f.truncate(MAX_JSON_BYTES + 1)
    with pytest.raises(ValueError, match=r"config.json: expected at most \d+ bytes of JSON"):
        read_json(tmp_path, "config.json")
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    assert read_json(tmp_path, "config.json") == {"a": 1}
