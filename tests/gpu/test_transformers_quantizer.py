"""EpiLoraConfig on the GPU: the codes that patch makes there, without the 16-bit model on the device."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import AutoModelForCausalLM

import torch_epilora as te
from tests.nn.helpers import llama
from torch_epilora.nn.linear import lora_linears

SIZES = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}


def test_weights_become_fp8_one_by_one_and_are_those_of_patch(tmp_path) -> None:
    llama(torch.bfloat16, **SIZES).save_pretrained(tmp_path / "plain")
    want = te.patch(AutoModelForCausalLM.from_pretrained(tmp_path / "plain").cuda(), max_adapters=0)
    in_16_bits = sum(2 * linear.weight.numel() for linear in lora_linears(want).values())
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    config = te.EpiLoraConfig(max_adapters=0)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", device_map="cuda", quantization_config=config)
    assert torch.cuda.max_memory_allocated() - before < 0.9 * in_16_bits
    first, second = model.state_dict(), want.state_dict()
    assert first.keys() == second.keys()
    assert all(t.is_cuda and torch.equal(t.float(), second[key].float()) for key, t in first.items())
    model.save_pretrained(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", device_map="cuda")
    ids = torch.randint(3, 97, (2, 12), device="cuda")
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)
        assert torch.equal(want(ids).logits, model(ids).logits)
