"""The output layer's adapters: added where a slot in use has any, left out else."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM
from vllm.lora.layers import LogitsProcessorWithLoRA

from tests.vllm.test_modes import check, run
from tests.vllm.tiny import Recipe, write_adapter
from torch_epilora.integrations.vllm.head import Head, tell_heads

SLOTS, RANK, HIDDEN, VOCAB = 3, 2, 4, 6
PART = torch.ones(RANK, HIDDEN), torch.ones(VOCAB, RANK)


class Added:
    """Batch metadata of rows that all have an adapter."""

    def add_lora_logits(self, logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        return logits.add_(1)


@pytest.fixture
def head(monkeypatch: pytest.MonkeyPatch) -> Head:
    def get_logits(self, hidden):
        return self.punica_wrapper.add_lora_logits(hidden.clone(), hidden)

    monkeypatch.setattr(LogitsProcessorWithLoRA, "_get_logits", get_logits)
    made = Head.__new__(Head)
    torch.nn.Module.__init__(made)
    made.lora_a_stacked = torch.zeros(SLOTS, 1, RANK, HIDDEN)
    made.lora_b_stacked = torch.zeros(SLOTS, 1, VOCAB, RANK)
    made.punica_wrapper = Added()
    return made


def added(head: Head) -> bool:
    wrapper, logits = head.punica_wrapper, head._get_logits(torch.zeros(2))
    assert head.punica_wrapper is wrapper
    return bool(logits.eq(1).all())


def test_adapters_are_added_where_a_slot_in_use_has_a_part(head):
    assert added(head), "nobody said which slots are in use"
    manager = SimpleNamespace(lora_index_to_id=[None, 7, None])
    tell_heads(torch.nn.Sequential(head), manager)
    assert not added(head)
    head.set_lora(1, *PART)
    assert added(head) and head.lora_b_stacked[1].eq(1).all()
    head.set_lora(2, *PART)
    manager.lora_index_to_id = [None, None, None]
    assert not added(head), "the adapter left its slot, which vLLM does not empty"
    manager.lora_index_to_id = [None, None, 8]
    assert added(head)
    head.reset_lora(2)  # one without a part came
    assert not added(head) and head.lora_b_stacked[2].eq(0).all()


def test_an_error_leaves_the_layer_as_it_was(head, monkeypatch):
    head.manager = SimpleNamespace(lora_index_to_id=[None] * SLOTS)

    def fails(self, hidden):
        raise RuntimeError("no memory")

    monkeypatch.setattr(LogitsProcessorWithLoRA, "_get_logits", fails)
    wrapper = head.punica_wrapper
    with pytest.raises(RuntimeError, match="no memory"):
        head._get_logits(torch.zeros(2))
    assert head.punica_wrapper is wrapper


def test_an_engine_serves_adapters_of_the_output_layer_beside_others(checkpoints, adapters, tmp_path):
    model = Qwen3ForCausalLM.from_pretrained(checkpoints["plain"], dtype=torch.bfloat16)
    head = write_adapter(model, Recipe(8, 16, ("q_proj", "lm_head")), tmp_path / "head", seed=9)
    mode, given = {"model": "fp8"}, {**adapters, "all": head}
    check(run("served", mode, checkpoints, given, tmp_path), mode, checkpoints, given)
