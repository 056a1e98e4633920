"""Whatever the bytes say: a value that was meant, or one of our errors; never a crash, never another exception."""

import json

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.torch import save_file

from torch_epilora.formats import read_adapter, read_checkpoint

EXAMPLES = settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["fp8", "LORA", "channel", "[", "\0"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["q", "a", "strategy"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.fixture
def files(tmp_path, write, codes, ct_config):
    """A checkpoint and an adapter side by side."""
    tensors = {"q.weight": codes(4, 6), "q.weight_scale": torch.full((4, 1), 0.5), "q.input_scale": torch.ones(1)}
    write(tmp_path, tensors, ct_config("channel", static=True), shards=2)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    save_file(
        {"q.lora_A.weight": torch.ones(2, 3), "q.lora_B.weight": torch.ones(5, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    return {p: p.read_bytes() for p in sorted(tmp_path.iterdir())}


def read_both(folder):
    for read in (read_checkpoint, read_adapter):
        try:
            read(folder)
        except (ValueError, NotImplementedError) as e:
            assert str(folder) in str(e)


@EXAMPLES
@given(data=st.data())
def test_damaged_bytes(files, data):
    for path, content in files.items():
        path.write_bytes(content)
    path = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[path])
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content))) or None])
    read_both(path.parent)


@EXAMPLES
@given(data=st.data())
def test_any_json_anywhere(files, data):
    for path, content in files.items():
        path.write_bytes(content)
    path = data.draw(st.sampled_from([p for p in files if p.suffix == ".json"]))
    document = json.loads(files[path])
    spot = document
    while isinstance(spot, dict) and spot:
        key = data.draw(st.sampled_from(sorted(spot)))
        if not isinstance(spot[key], dict) or data.draw(st.booleans()):
            spot[key] = data.draw(JSON)
            break
        spot = spot[key]
    path.write_text(json.dumps(document))
    read_both(path.parent)
