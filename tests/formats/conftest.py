import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


def _codes(n, k, seed=0):
    """Random e4m3 codes of every bit pattern but the two NaNs."""
    raw = torch.randint(0, 256, (n, k), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    raw[(raw & 0x7F) == 0x7F] = 0x31
    return raw.view(torch.float8_e4m3fn)


def _write(folder, tensors, config=None, shards=1, hf_quant=None):
    """Write a checkpoint as its authors' tools do: one file, or numbered shards with an index."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if hf_quant is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(hf_quant))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    keys, listed = sorted(tensors), {}
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = keys[i::shards]
        save_file({k: tensors[k] for k in part}, folder / name)
        listed.update(dict.fromkeys(part, name))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    return folder


def _ct_config(strategy="channel", static=False, **changes):
    """A compressed-tensors quantization_config as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    inputs = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": not static}
    inputs["strategy"] = "tensor" if static else "token"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    found = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    return {"model_type": "llama", "quantization_config": {**found, **changes}}


@pytest.fixture
def codes():
    return _codes


@pytest.fixture
def write():
    return _write


@pytest.fixture
def ct_config():
    return _ct_config
