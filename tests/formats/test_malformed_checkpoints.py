"""Checkpoints that are damaged, absurd, hostile or of another kind: each with its message, naming file and tensor."""

import json
import os
import pickle
import struct

import pytest
import torch
from safetensors.torch import save_file

from torch_epilora.formats import read_checkpoint

SCALE = torch.full((4, 1), 0.5)


@pytest.fixture
def good(codes):
    return {"q.weight": codes(4, 6), "q.weight_scale": SCALE.clone(), "norm.weight": torch.ones(6)}


@pytest.fixture
def folder(tmp_path, write, ct_config, good):
    path = write(tmp_path / "checkpoint", good, ct_config(), shards=2)
    assert torch.equal(read_checkpoint(path).weights["q"].dequantize(), good["q.weight"].float() * 0.5)
    return path


def refused(folder, message, error=ValueError):
    with pytest.raises(error, match=message) as e:
        read_checkpoint(folder)
    assert str(folder) in str(e.value)


def one_file(folder, tensors):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors")


NAN, INF = float("nan"), float("inf")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q.weight_scale": torch.tensor([[1.0], [NAN], [1], [1]])}, ValueError, "q.weight_scale: .* got nan"),
        ({"q.weight_scale": torch.tensor([[1.0], [INF], [1], [1]])}, ValueError, "q.weight_scale: .* got inf"),
        ({"q.weight_scale": -SCALE}, ValueError, "q.weight_scale: expected values finite and not negative, got -0.5"),
        ({"q.weight_scale": torch.ones(4, 1).int()}, ValueError, "q.weight_scale: expected float32.* got int32"),
        ({"q.weight_scale": torch.ones(4, 1).double()}, ValueError, "q.weight_scale: expected float32.* got float64"),
        ({"q.weight_scale": torch.full((4, 1), 255, dtype=torch.uint8)}, ValueError, "q.weight_scale: .* got nan"),
        ({"q.weight_scale": torch.ones(5, 1)}, ValueError, r"q.weight_scale: expected \[4, 1\].* got shape \[5, 1\]"),
        ({"q.weight_scale": torch.ones(2, 2)}, ValueError, r"q.weight_scale: .* got shape \[2, 2\]"),
        ({"q.weight_scale": torch.ones(4, 1, 1)}, ValueError, r"q.weight_scale: .* got shape \[4, 1, 1\]"),
        ({"q.weight_scale": torch.ones(0, 1)}, ValueError, r"q.weight_scale: .* got shape \[0, 1\]"),
        ({"q.weight_scale": torch.ones(1)}, ValueError, r"q.weight_scale: expected \[4, 1\] .*got shape \[1\]"),
        ({"q.weight_scale": None}, ValueError, "q.weight: expected its scale as weight_scale beside it, found none"),
        ({"q.weight": None}, ValueError, "q.weight_scale: expected float8_e4m3fn codes in q.weight, got no weight"),
        ({"k.weight": torch.ones(4, 6), "k.weight_scale": SCALE}, ValueError, "k.weight_scale: .* got float32"),
        ({"k.weight": torch.ones(4, 6).to(E5M2), "k.weight_scale": SCALE}, ValueError, "k.weight: .* got float8_e5m2"),
        ({"k.weight": torch.ones(4, 6).to(E5M2)}, ValueError, "k.weight: expected float8_e4m3fn codes or a plain"),
        ({"q.weight": torch.zeros(0, 6).to(E4M3)}, ValueError, r"q.weight: expected a matrix.* got shape \[0, 6\]"),
        ({"q.weight": torch.zeros(10**9, 0).to(E4M3)}, ValueError, r"q.weight: .* got shape \[1000000000, 0\]"),
        ({"q.weight": torch.full((4, 6), NAN).to(E4M3)}, ValueError, "q.weight: expected finite codes, got NaN"),
        ({"e.gate_up": torch.zeros(2, 4, 6).to(E4M3)}, NotImplementedError, r"e.gate_up: .* got shape \[2, 4, 6\]"),
        ({"e.weight": torch.zeros(2, 4, 6).to(E4M3)}, NotImplementedError, r"e.weight: .* got shape \[2, 4, 6\]"),
        ({"q.input_scale": torch.ones(1)}, ValueError, "q.input_scale: a static input scale, but the config says"),
        ({"q.weight_zero_point": torch.ones(4, 1).char()}, NotImplementedError, "q.weight: zero points other than 0"),
        ({"q.weight_g_idx": torch.ones(6)}, NotImplementedError, "q.weight_g_idx: activation ordering"),
        ({"q.pre_quant_scale": torch.ones(6)}, NotImplementedError, r"q.pre_quant_scale: scaled inputs \(AWQ\)"),
        ({"q.weight_scale_2": torch.ones(1)}, NotImplementedError, "q.weight_scale_2: two-level"),
        ({"k.weight_packed": torch.ones(1).int()}, ValueError, "k.weight_packed: expected float8_e4m3fn codes"),
    ],
)
def test_tensors(folder, good, change, error, message):
    one_file(folder, {k: v for k, v in {**good, **change}.items() if v is not None})
    refused(folder, message, error)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"q.input_scale": None}, "q.weight: expected a static input_scale beside it, found none"),
        ({"q.input_scale": torch.zeros(1)}, "q.input_scale: expected values finite and positive, got 0.0"),
        ({"q.input_scale": torch.tensor([NAN])}, "q.input_scale: .* got nan"),
        ({"q.input_scale": torch.ones(2)}, r"q.input_scale: expected one element .*got shape \[2\]"),
    ],
)
def test_static_input_scales(folder, good, ct_config, change, message):
    (folder / "config.json").write_text(json.dumps(ct_config("tensor", static=True)))
    tensors = {**good, "q.weight_scale": torch.ones(1), "q.input_scale": torch.ones(1), **change}
    one_file(folder, {k: v for k, v in tensors.items() if v is not None})
    refused(folder, message)


@pytest.mark.parametrize("tensors", [{}, {"q.weight": torch.ones(4, 6)}])
def test_no_fp8_at_all(folder, tensors):
    one_file(folder, tensors)
    refused(folder, "expected float8_e4m3fn weights, as compressed-tensors has, found none")


def edit(folder, change):
    file = folder / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    file.write_text(json.dumps(change(index) or index))


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", "", "a\0b", "..\\x"]
)
def test_an_index_may_not_leave_the_folder(folder, tmp_path, name):
    save_file({"norm.weight": torch.zeros(6)}, tmp_path / "secret.safetensors")
    edit(folder, lambda index: index["weight_map"].update({"norm.weight": name}))
    refused(folder, "expected the bare name of a file in this folder, got")


def test_a_shard_that_is_a_link_out_of_the_folder(folder, tmp_path):
    shard = next(iter(folder.glob("model-00002*")))
    shard.rename(tmp_path / shard.name)
    shard.symlink_to(tmp_path / shard.name)
    refused(folder, "a link to .*, outside the folder")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda i: {"weight_map": {}}, "expected weight_map to be a non-empty object"),
        (lambda i: {"weight_map": ["model.safetensors"]}, "expected weight_map to be a non-empty object, got"),
        (lambda i: {"metadata": {}}, "expected weight_map to be a non-empty object, got None"),
        (lambda i: i["weight_map"].update(x=3), "expected a file name for x, got 3"),
        (lambda i: i["weight_map"].update(x="model-00009.safetensors"), "model-00009.safetensors: expected a file"),
        (lambda i: i["weight_map"].update(x="model-00001-of-00002.safetensors"), "but it lacks x"),
        (lambda i: i["weight_map"].pop("norm.weight") and None, "but it also holds norm.weight"),
    ],
)
def test_an_index_at_odds_with_its_files(folder, change, message):
    edit(folder, change)
    refused(folder, message)


def test_an_index_that_lists_a_tensor_twice(folder):
    file = folder / "model.safetensors.index.json"
    file.write_text(file.read_text().replace('"weight_map": {', '"weight_map": {"q.weight": "x",'))
    refused(folder, "index.json: expected JSON.*key 'q.weight' is given twice")


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_a_cut_shard(folder, keep):
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:keep])
    refused(folder, "model-00001-of-00002.safetensors: not a readable safetensors file")


def lie(shape, dtype="F8_E4M3", data=24, length=None):
    header = json.dumps({"q.weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, 24]}}).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + b"\0" * data


@pytest.mark.parametrize(
    "content",
    [
        lie([10**9, 10**9]), lie([2**62, 2**62]), lie([4, 7]), lie([4, 6], data=20), lie([4, 6], data=99),
        lie([-4, -6]), lie([4, 6], dtype="F9"), lie([4, 6], length=10**12), lie([4, 6], length=2**63), b"PK\3\4" * 9,
    ],
)  # fmt: skip
def test_a_header_that_lies(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    refused(folder, "model.safetensors: not a readable safetensors file")


def test_a_git_lfs_pointer(folder):
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    refused(folder, "model.safetensors: a Git LFS pointer")


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def test_pickle_is_never_read(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    refused(folder, "expected model.safetensors or model.safetensors.index.json, found neither")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    refused(folder, r"pickled files \(pytorch_model.bin\), which are never read")
    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    refused(folder, "model.safetensors: not a readable safetensors file")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "config.json: expected JSON"),
        ("[]", "config.json: expected a JSON object, got list"),
        ("{}", "expected a quantization_config in config.json or a hf_quant_config.json, found neither"),
        ('{"quantization_config": []}', "quantization_config: expected an object, got list"),
        ('{"quantization_config": {}}', "expected quant_method to be a string, got None"),
        ('{"quantization_config": {"quant_method": 7}}', "expected quant_method to be a string, got 7"),
    ],
)
def test_config_text(folder, text, message):
    (folder / "config.json").write_text(text)
    refused(folder, message)


def test_no_config(folder):
    (folder / "config.json").unlink()
    refused(folder, "found neither. Formats read: compressed-tensors, modelopt, fbgemm_fp8, fp8")


def group(**change):
    return lambda c: c["config_groups"]["group_0"].update(change)


def weights(**change):
    return lambda c: c["config_groups"]["group_0"]["weights"].update(change)


def inputs(**change):
    return lambda c: c["config_groups"]["group_0"]["input_activations"].update(change)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            lambda c: c.update(config_groups=[]),
            ValueError,
            r"expected config_groups to be a non-empty object, got \[\]",
        ),
        (lambda c: c.update(config_groups={"a": 1}), ValueError, "config_groups.a: expected an object, got int"),
        (group(weights=None), ValueError, "group_0.weights: expected an object, got NoneType"),
        (group(input_activations=[]), ValueError, "group_0.input_activations: expected an object, got list"),
        (group(output_activations={"a": 1}), NotImplementedError, "quantized output_activations"),
        (lambda c: c.update(format="pack-quantized"), NotImplementedError, "format 'pack-quantized' is not supported"),
        (group(format="nvfp4-pack-quantized"), NotImplementedError, "format 'nvfp4-pack-quantized' is not supported"),
        (lambda c: c.update(transform_config={"R1": {}}), NotImplementedError, "transform_config .rotated weights"),
        (lambda c: c.update(sparsity_config={"format": "sparse-24"}), NotImplementedError, "sparsity_config"),
        (weights(num_bits=4), NotImplementedError, "group_0.weights: type 'float', num_bits 4 is not supported"),
        (weights(type="int"), NotImplementedError, "group_0.weights: type 'int', num_bits 8 is not supported"),
        (weights(symmetric=False), NotImplementedError, "group_0.weights: asymmetric codes"),
        (weights(actorder="weight"), NotImplementedError, "group_0.weights: actorder 'weight'"),
        (weights(strategy="group"), NotImplementedError, "group_0.weights: strategy 'group' is not supported"),
        (weights(strategy="block", block_structure=[64, 64]), NotImplementedError, r"block_structure \[64, 64\]"),
        (inputs(dynamic=False), NotImplementedError, "static activations are supported with strategy 'tensor' only"),
        (inputs(dynamic="local"), NotImplementedError, "static activations are supported with strategy 'tensor' only"),
        (inputs(type="int"), NotImplementedError, "group_0.input_activations: type 'int', num_bits 8"),
    ],
)
def test_compressed_tensors_configs(folder, ct_config, change, error, message):
    config = ct_config()
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, message, error)


@pytest.mark.parametrize(
    "quantization, error, message",
    [
        ({"quant_method": "gptq"}, NotImplementedError, "quant_method 'gptq' is not supported; expected one of"),
        ({"quant_method": "modelopt"}, ValueError, "expected quant_algo to be a string, got None"),
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4"},
            NotImplementedError,
            "quant_algo 'NVFP4' is not supported",
        ),
        ({"quant_method": "modelopt", "quantization": 3}, ValueError, "expected quantization to be an object, got int"),
        (
            {"quant_method": "fbgemm_fp8", "activation_scale_ub": "x"},
            ValueError,
            "activation_scale_ub to be a positive",
        ),
        ({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}, ValueError, "a positive number, got -1"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, NotImplementedError, "fmt 'e5m2' is not supported"),
        ({"quant_method": "fp8", "activation_scheme": "x"}, ValueError, "activation_scheme 'dynamic' or 'static'"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, ValueError, "two integers or null, got '128'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ValueError, r"two integers or null, got \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [1, 32]}, NotImplementedError, r"weight_block_size \[1, 32\]"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
            NotImplementedError,
            "static activations with block scales",
        ),
    ],
)
def test_other_configs(folder, quantization, error, message):
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    refused(folder, message, error)


def test_two_scales_for_one_weight(folder, good):
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    one_file(folder, {**good, "q.weight_scale_inv": torch.ones(1)})
    refused(folder, "q.weight: expected one scale beside it, got q.weight_scale_inv and q.weight_scale")


@pytest.mark.parametrize("name", ["n" * 300, "\ud800"])
def test_a_shard_name_that_no_file_can_have(folder, name):
    edit(folder, lambda index: index["weight_map"].update({"norm.weight": name}))
    refused(folder, "expected a file, found none")


def test_paths():
    with pytest.raises(TypeError, match="path: expected the path of a folder, got int"):
        read_checkpoint(3)
    with pytest.raises(ValueError, match="path: expected an existing folder, got 'not/there'"):
        read_checkpoint("not/there")
    with pytest.raises(ValueError, match=r"path: expected an existing folder, got 'n{200}\.\.\. \(5000 characters\)'"):
        read_checkpoint("n" * 5000)
