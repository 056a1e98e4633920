"""Adapters that are damaged, absurd or hostile: each with its message."""

import json
import os
import pickle
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torch_epilora.formats import read_adapter

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
A, B = "base_model.model.q.lora_A.weight", "base_model.model.q.lora_B.weight"
STATE = {A: torch.ones(2, 3), B: torch.ones(5, 2)}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "adapter"
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(CONFIG))
    save_file(STATE, path / "adapter_model.safetensors")
    assert read_adapter(path).modules["q"].scaling == 2.0
    return path


def refused(folder, message, error=ValueError):
    for strict in (True, False):
        with pytest.raises(error, match=message) as e:
            read_adapter(folder, strict=strict)
        assert str(folder) in str(e.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"r": None}, "r: expected a positive integer, got None"),
        ({"r": 0}, "r: expected a positive integer, got 0"),
        ({"r": -4}, "r: expected a positive integer, got -4"),
        ({"r": "8"}, "r: expected a positive integer, got '8'"),
        ({"r": True}, "r: expected a positive integer, got True"),
        ({"r": 10**9}, r"q: expected rank 1000000000, as the config says, got lora_A \[2, 3\]"),
        ({"lora_alpha": "x"}, "lora_alpha: expected a finite number, got 'x'"),
        ({"lora_alpha": float("nan")}, "lora_alpha: expected a finite number, got nan"),
        ({"lora_alpha": 10**400}, "lora_alpha: expected a finite number, got 1000"),
        ({"rank_pattern": [1]}, "rank_pattern: expected an object, got list"),
        ({"rank_pattern": {"q": 0}}, r"rank_pattern\['q'\]: expected a positive integer, got 0"),
        ({"rank_pattern": {"q": 3}}, "q: expected rank 3, as the config says"),
        ({"rank_pattern": {"(q": 2}}, r"rank_pattern: expected a regular expression, got '\(q'"),
        ({"alpha_pattern": {"q": "a"}}, r"alpha_pattern\['q'\]: expected a finite number, got 'a'"),
        ({"use_rslora": "yes"}, "use_rslora: expected true or false, got 'yes'"),
        ({"lora_bias": 1}, "lora_bias: expected true or false, got 1"),
        ({"lora_bias": True}, "q: expected a lora_B.bias, as the config's lora_bias says, got none"),
        ({"bias": "some"}, "expected bias 'none', 'all' or 'lora_only', got 'some'"),
        ({"peft_type": None}, "expected peft_type 'LORA', got None"),
        ({"peft_type": 3}, "expected peft_type 'LORA', got 3"),
    ],
)
def test_config_values(folder, change, message):
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **change}))
    refused(folder, message)


@pytest.mark.parametrize("name", ["r", "lora_alpha", "peft_type"])
def test_config_without(folder, name):
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in CONFIG.items() if k != name}))
    refused(folder, f"expected {name}")


@pytest.mark.parametrize(
    "text, message",
    [
        (b"", "adapter_config.json: expected JSON"),
        (b"{", "adapter_config.json: expected JSON"),
        (b"[1]", "expected a JSON object, got list"),
        (b"\xff\xfe\x00", "adapter_config.json: expected JSON"),
        (b'{"r": 2, "r": 64}', "key 'r' is given twice"),
        (b'{"r": ' + b"[" * 200_000, "adapter_config.json: expected JSON"),
    ],
)
def test_config_text(folder, text, message):
    (folder / "adapter_config.json").write_bytes(text)
    refused(folder, message)


def nan(shape):
    t = torch.ones(shape)
    t[0, 0] = float("nan")
    return t


@pytest.mark.parametrize(
    "state, message",
    [
        ({A: STATE[A]}, "q: expected lora_A and lora_B, found no lora_B"),
        ({B: STATE[B]}, "q: expected lora_A and lora_B, found no lora_A"),
        ({A: STATE[A], B: torch.ones(5, 3)}, r"expected A \[r, K\] and B \[N, r\], got \[2, 3\] and \[5, 3\]"),
        ({A: torch.ones(4, 3), B: torch.ones(5, 4)}, r"q: expected rank 2, as the config says, got lora_A \[4, 3\]"),
        ({A: torch.ones(0, 3), B: torch.ones(5, 0)}, r"lora_A.weight: .* none of them 0, got shape \[0, 3\]"),
        ({A: torch.ones(10**9, 0), B: STATE[B]}, r"lora_A.weight: .* got shape \[1000000000, 0\]"),
        ({A: torch.ones(6), B: STATE[B]}, r"lora_A.weight: expected 2 dimensions.* got shape \[6\]"),
        ({A: nan((2, 3)), B: STATE[B]}, "q.lora_A.weight: expected finite values, got NaN or infinity"),
        ({A: STATE[A], B: STATE[B] * float("inf")}, "q.lora_B.weight: expected finite values"),
        ({A: STATE[A].double(), B: STATE[B]}, "q.lora_A.weight: expected float32, float16 or bfloat16, got float64"),
        ({A: STATE[A], B: STATE[B].to(torch.float8_e4m3fn)}, "q.lora_B.weight: .* got float8_e4m3fn"),
        ({A: STATE[A].int(), B: STATE[B]}, "q.lora_A.weight: .* got int32"),
        ({**STATE, "q.lora_A.weight": STATE[A] + 1}, "q.lora_A.weight.* name the same tensor; expected one"),
        ({**STATE, "q.lora_B.bias": torch.ones(5)}, "q: expected no lora_B.bias, as the config's lora_bias says"),
        ({}, "expected lora_A and lora_B of linear layers, found none"),
    ],
)
def test_tensors(folder, state, message):
    save_file(state, folder / "adapter_model.safetensors")
    refused(folder, message)


def test_a_bias_of_another_width(folder):
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, "lora_bias": True}))
    save_file({**STATE, "q.lora_B.bias": torch.ones(4)}, folder / "adapter_model.safetensors")
    refused(folder, r"q: expected lora_B.bias \[5\], as B has rows, got \[4\]")


def test_a_cut_file(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    refused(folder, "adapter_model.safetensors: not a readable safetensors file")


def test_a_header_that_lies(folder):
    header = json.dumps({A: {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 24]}}).encode()
    (folder / "adapter_model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 24)
    refused(folder, "adapter_model.safetensors: not a readable safetensors file")


class Trap:
    def __reduce__(self):
        return (os.mkdir, ("sprung",))


def test_pickle_is_never_read(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Trap()))
    refused(folder, r"found pickled files \(adapter_model.bin\), which are never read")
    (folder / "adapter_model.safetensors").write_bytes(pickle.dumps(Trap()))
    refused(folder, "adapter_model.safetensors: not a readable safetensors file")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_link_out_of_the_folder(folder, tmp_path, name):
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    refused(folder, f"{name}: a link to .*, outside the folder")


def test_a_link_inside_the_folder_is_followed(folder):
    (folder / "adapter_model.safetensors").rename(folder / "real.safetensors")
    (folder / "adapter_model.safetensors").symlink_to("real.safetensors")
    assert read_adapter(folder).rank == 2


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_missing_file_a_dangling_link_a_folder(folder, name):
    (folder / name).unlink()
    refused(folder, f"{name}: expected a file, found none")
    (folder / name).symlink_to("nowhere")
    refused(folder, f"{name}: expected a file, found none")
    (folder / name).unlink()
    (folder / name).mkdir()
    refused(folder, f"{name}: expected a file, found none")


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_that_may_not_be_read(folder, name, monkeypatch):
    real = Path.open

    def deny(self, *args, **kwargs):
        if self.name == name:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", deny)
    refused(folder, f"{name}: cannot be read .Permission denied.")


@pytest.mark.parametrize(
    "source, error, message",
    [
        (
            "nowhere/at/all",
            ValueError,
            "source: expected an existing folder, got 'nowhere/at/all'. Nothing is downloaded",
        ),
        (None, TypeError, "source: expected the path of a folder, got NoneType"),
        (STATE, TypeError, "source: expected the path of a folder, got dict"),
        ((STATE,), TypeError, r"source: expected \(state dict, config\) as two mappings, got \(dict\)"),
        ((STATE, object()), TypeError, "got .dict, object.. A LoraConfig has to_dict"),
        (({A: [1]}, CONFIG), TypeError, "state_dict.*expected a tensor under a string, got list"),
        (({1: torch.ones(1)}, CONFIG), TypeError, r"state_dict\[1\]: expected a tensor under a string"),
        ((STATE, {**CONFIG, "r": 3}), ValueError, "state_dict: q: expected rank 3"),
        ((STATE, {"r": 3}), ValueError, "config: expected peft_type 'LORA', got None"),
        ("n" * 5000, ValueError, r"source: expected an existing folder, got 'n{200}\.\.\. \(5000 characters\)'"),
        (({A: STATE[A].to_sparse(), B: STATE[B]}, CONFIG), ValueError, "q.lora_A.weight: expected a dense tensor"),
        (({A: STATE[A], B: STATE[B].to("meta")}, CONFIG), ValueError, "q.lora_B.weight: .*on the meta device"),
        (({"q" * 600 + ".lora_A.weight": STATE[A]}, CONFIG), ValueError, "names of at most 512 characters .*got 614"),
        (({"q\n.lora_A.weight": STATE[A]}, CONFIG), ValueError, "without line breaks"),
    ],
)
def test_sources(source, error, message):
    with pytest.raises(error, match=message):
        read_adapter(source)
