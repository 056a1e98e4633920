"""What the plugin's layers know of the adapters in their slots: nothing past a rank is read."""

import pytest
import torch
from torch import Tensor, nn

from torch_epilora.integrations.vllm.layers import AfterTheBase, InTheEpilogue

SLOTS, R, K, N = 3, 8, 16, 12


class Original(nn.Module):
    """A layer of vLLM with two slices, as far as it keeps slots; setting one empties it first, there as here."""

    def create_lora_weights(self, max_loras: int, lora_config: object, model_config: object = None) -> None:
        self.lora_a_stacked = tuple(torch.zeros(max_loras, 1, R, K) for _ in range(2))
        self.lora_b_stacked = tuple(torch.zeros(max_loras, 1, N, R) for _ in range(2))

    def set_lora(self, index: int, lora_a: list[Tensor | None], lora_b: list[Tensor | None]) -> None:
        self.reset_lora(index)

    def reset_lora(self, index: int) -> None:
        pass


class Layer(InTheEpilogue, Original):
    pass


@pytest.fixture
def layer() -> Layer:
    made = Layer()
    made.create_lora_weights(SLOTS, None, model_config=None)
    return made


def part(rank: int) -> tuple[Tensor, Tensor]:
    return torch.ones(rank, K), torch.ones(N, rank)


def test_a_slot_knows_the_rank_of_each_slice_until_it_is_emptied(layer):
    ranks = layer._adapters()[3]
    assert ranks.shape == (2, SLOTS) and ranks.dtype == torch.int32 and not ranks.any()
    (a, b), (c, d) = part(4), part(8)
    layer.set_lora(1, [a, c], [b, d])
    layer.set_lora(2, [None, a], [None, b])
    assert ranks.tolist() == [[0, 4, 0], [0, 8, 4]]
    layer.set_lora(1, [a, None], [b, None])
    assert ranks.tolist() == [[0, 4, 0], [0, 0, 4]]
    layer.reset_lora(2)
    assert ranks.tolist() == [[0, 4, 0], [0, 0, 0]]
    assert layer._adapters()[3] is ranks, "captured graphs read it where it is"


def test_one_part_for_several_slices_has_the_rank_of_all(layer):
    a, b = part(4)
    layer.set_lora(0, a, b)
    layer.set_lora(1, [a], [b])
    assert layer._ranks.tolist() == [[4, 4, 0], [4, 4, 0]]


def test_activations_whose_columns_lie_apart_are_put_in_order(monkeypatch):
    """Mamba layers hand on what they transposed."""
    seen = []
    monkeypatch.setattr(torch.ops.epilora, "lora_add_", lambda y, x, *rest: seen.append(x))
    x = torch.arange(2.0 * K).reshape(K, 2).t()
    after = type("After", (AfterTheBase, Original), {})()
    after.create_lora_weights(SLOTS, None)
    monkeypatch.setattr(type(after), "_groups", lambda self, m: ())
    after._apply_lora_to_output(x, torch.zeros(2, 2 * N))
    (rows,) = seen
    assert rows.stride(-1) == 1 and torch.equal(rows, x)
