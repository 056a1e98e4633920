"""Which paths this GPU has at a number of tokens."""

import torch

from torch_epilora.ops.plan import DECODE_MAX_TOKENS
from torch_epilora.ops.schemas import LINEAR_OPS

HAS_DECODE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def paths_at(*tokens: int) -> list[tuple[str, int]]:
    """(operator, tokens) for every path that serves that many tokens."""
    return [
        (path, m)
        for path in LINEAR_OPS[1:]
        for m in tokens
        if path != "lora_linear_decode" or (HAS_DECODE and m <= DECODE_MAX_TOKENS)
    ]
