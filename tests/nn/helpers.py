"""Tiny random models and adapters, and the reference they are compared with."""

import copy
import math

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from torch_epilora.nn.linear import lora_linears

VOCAB = 97
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def llama(dtype: torch.dtype = torch.float32, **changes: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).to(dtype).eval()


def qwen3(dtype: torch.dtype = torch.float32, **changes: object) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, "head_dim": 32, **changes})).to(dtype).eval()


def phi3(**changes: object) -> Phi3ForCausalLM:
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**{**SIZES, **changes})).eval()


class Attention(nn.Module):
    """A plain module whose q, k and v read one input (or, on demand, do not)."""

    def __init__(self, hidden: int = 64, widths: tuple[int, int, int] = (64, 32, 32), bias: bool = False) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, n, bias=bias) for n in widths)
        self.o_proj = nn.Linear(widths[0], hidden, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return q, k, v, self.o_proj(q)


def attention(**options: object) -> Attention:
    torch.manual_seed(0)
    return Attention(**options).eval()


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(N, K) of each linear but the head, by path."""
    return {
        name: (m.out_features, m.in_features)
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and name != "lm_head"
    }


def adapter(
    model: nn.Module,
    r: int = 8,
    alpha: float = 16,
    targets: tuple[str, ...] = ALL,
    seed: int = 1,
    dtype: torch.dtype = torch.float32,
    size: float = 0.2,
    **config: object,
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """A random adapter in PEFT's format for the linears whose last name is among the targets."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for path, (n, k) in linear_shapes(model).items():
        if path.rpartition(".")[2] in targets:
            prefix = f"base_model.model.{path}"
            state[f"{prefix}.lora_A.weight"] = (torch.randn(r, k, generator=generator) * size).to(dtype)
            state[f"{prefix}.lora_B.weight"] = (torch.randn(n, r, generator=generator) * size).to(dtype)
            if config.get("lora_bias"):
                state[f"{prefix}.lora_B.bias"] = torch.randn(n, generator=generator).to(dtype)
    return state, {"peft_type": "LORA", "r": r, "lora_alpha": alpha, **config}


def dequantized(model: nn.Module, plain: nn.Module) -> nn.Module:
    """A copy of the plain model whose linears have the patched model's dequantized weights."""
    result = copy.deepcopy(plain)
    for path, linear in lora_linears(model).items():
        weight = result.get_submodule(path).weight
        weight.data = weight_value(linear).to(weight.dtype)
    return result


def weight_value(linear: nn.Module) -> Tensor:
    """Codes times scale, written out independently of the library."""
    codes, scale = linear.weight.double(), linear.weight_scale.double()
    if scale.numel() > 1 and scale.shape != (codes.shape[0], 1):
        scale = scale.repeat_interleave(128, 0)[: codes.shape[0]].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes * scale


def w8a8(linear: nn.Module, x: Tensor, pair: tuple[Tensor, Tensor, float] | None = None) -> Tensor:
    """One projection in fp64 on the same codes: x [M, K], the adapter as (A, B, scaling) on the unrounded x."""
    scale = (x.double().abs().amax(1, keepdim=True) / 448).clamp_min(1 / (448 * 512)).float()
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    y = codes.double() * scale.double() @ weight_value(linear).t()
    if linear.bias is not None:
        y = y + linear.bias.double()
    if pair is not None:
        a, b, scaling = pair
        y = y + scaling * (x.double() @ a.double().t()) @ b.double().t()
    return y


def sqnr(expected: Tensor, actual: Tensor) -> float:
    noise = (expected.double() - actual.double()).square().sum().item()
    return math.inf if noise == 0 else 10 * math.log10(expected.double().square().sum().item() / noise)


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer of a model, adapters' slots included, as bytes."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        name: t.detach().clone().contiguous().view(torch.uint8) for name, t in found.items() if t.numel() and t.dim()
    }


def same(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


class CountOps(TorchDispatchMode):
    """Counts calls of lora_linear and lora_linear_train and notes their output widths."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.epilora.lora_linear.default, torch.ops.epilora.lora_linear_train.default):
            self.widths.append(args[3].shape[0])
        return func(*args, **(kwargs or {}))
