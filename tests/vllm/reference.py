"""What an engine should answer: the model in plain PyTorch, with codes, activations and adapters spelled out.

An engine's own tokens are scored, not generated again: with random weights two tokens are often nearly as likely, and
after another choice nothing could be compared.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

FP8 = torch.float8_e4m3fn
FLOOR = 1 / (448 * 512)
LEAD = 0.4
Pairs = dict[str, tuple[Tensor, Tensor, float]]


class ReferenceLinear(nn.Module):
    """A linear in fp32, of codes or not; an adapter, the same for all rows, reads the unquantized activations."""

    def __init__(self, weight: Tensor, quantize: bool) -> None:
        super().__init__()
        self.weight = nn.Buffer(weight, persistent=False)
        self.quantize = quantize
        self.pair: tuple[Tensor, Tensor, float] | None = None

    def forward(self, x: Tensor) -> Tensor:
        operand = x.float()
        if self.quantize:
            scale = (operand.abs().amax(-1, keepdim=True) / 448).clamp_min(FLOOR)
            operand = (operand / scale).clamp(-448, 448).to(FP8).float() * scale
        y = operand @ self.weight.t()
        if self.pair is not None:
            a, b, scaling = self.pair
            y = y + scaling * (x.float() @ a.t()) @ b.t()
        return y.to(x.dtype)


class Reference:
    """A checkpoint folder's model and adapters.

    ``compute`` is "w8a8" or "w8a16", of FP8 codes or of a bf16 folder's weights that are quantized per output channel
    as vLLM does it; or "bf16".
    """

    def __init__(self, folder: Path, adapters: dict[str, Path], compute: str = "w8a8") -> None:
        self.model = Qwen3ForCausalLM(Qwen3Config.from_pretrained(folder)).bfloat16().eval()
        tensors = load_file(folder / "model.safetensors")
        for path, linear in list(self.model.named_modules()):
            if isinstance(linear, nn.Linear):
                plain = compute == "bf16" or path == "lm_head"
                weight = tensors[f"{path}.weight"].float() if plain else _dequantized(path, tensors)
                self.model.set_submodule(path, ReferenceLinear(weight, compute == "w8a8" and not plain))
        self.model.load_state_dict({name: tensors[name] for name in self.model.state_dict()})
        self.adapters = {name: _read_adapter(path) for name, path in adapters.items()}

    @torch.no_grad()
    def score(self, prompt: list[int], answer: list[int], adapter: str | None) -> Tensor:
        """Log-probabilities [len(answer), vocabulary] of each token of an answer, given all before it."""
        pairs = self.adapters[adapter] if adapter else {}
        for path, linear in self.model.named_modules():
            if isinstance(linear, ReferenceLinear):
                linear.pair = pairs.get(path)
        logits = self.model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
        return logits[len(prompt) - 1 :].float().log_softmax(-1)

    def generate(self, prompt: list[int], tokens: int, adapter: str | None) -> list[int]:
        """Choose the most likely token each time."""
        answer: list[int] = []
        for _ in range(tokens):
            answer.append(int(self.score(prompt, [*answer, 0], adapter)[-1].argmax()))
        return answer


def _dequantized(path: str, tensors: dict[str, Tensor]) -> Tensor:
    """What a linear's codes stand for: those in the file, or made by vLLM's rule for channels."""
    weight = tensors[f"{path}.weight"]
    if weight.dtype == FP8:
        return weight.float() * tensors[f"{path}.weight_scale"].float()
    scale = (weight.float().abs().amax(1, keepdim=True) / 448).clamp_min(FLOOR)
    return (weight.float() / scale).clamp(-448, 448).to(FP8).float() * scale


def _read_adapter(folder: Path) -> Pairs:
    config: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    scaling = config["lora_alpha"] / (config["r"] ** 0.5 if config["use_rslora"] else config["r"])
    pairs = {}
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            prefix = name.removesuffix(".lora_A.weight")
            b = tensors[f"{prefix}.lora_B.weight"]
            pairs[prefix.removeprefix("base_model.model.")] = (a.float(), b.float(), scaling)
    return pairs


@dataclass(frozen=True)
class Deviation:
    """How far an engine's log-probabilities of one request are from those expected, over all its steps.

    ``sure`` counts the steps whose expected most likely token leads the next by at least ``LEAD``, ``wrong`` those of
    them where the engine chose another one.
    """

    mean: float
    largest: float
    sure: int
    wrong: int


def deviation(expected: Tensor, answer: dict[str, Any]) -> Deviation:
    """Compare ``Reference.score`` of an answer's tokens with the log-probabilities that the engine gave."""
    errors, sure, wrong = [], 0, 0
    for row, token, step in zip(expected, answer["tokens"], answer["logprobs"], strict=True):
        ids = torch.tensor([int(i) for i in step])
        errors.append((row[ids] - torch.tensor(list(step.values()))).abs())
        first, second = row.topk(2).values.tolist()
        if first - second >= LEAD:
            sure += 1
            wrong += int(row.argmax()) != token
    found = torch.cat(errors)
    return Deviation(found.mean().item(), found.max().item(), sure, wrong)
