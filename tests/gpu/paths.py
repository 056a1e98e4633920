"""Which paths this GPU has at a number of tokens."""

import torch

from torch_epilora.ops.plan import Problem, refusal, through
from torch_epilora.ops.schemas import LINEAR_OPS

HAS_DECODE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def decode_serves(m: int, compute: str = "w8a8", dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether the decode path takes that many tokens."""
    problem = Problem(m, 4096, 4096, 64, compute=compute, dtype=dtype)
    return HAS_DECODE and refusal(through(problem, "decode", "own").decode, problem) is None


def paths_at(*tokens: int) -> list[tuple[str, int]]:
    """(operator, tokens) for every path that serves that many tokens."""
    return [(path, m) for path in LINEAR_OPS[1:] for m in tokens if path != "lora_linear_decode" or decode_serves(m)]
