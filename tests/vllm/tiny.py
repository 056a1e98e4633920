"""A tiny random Qwen3 with a tokenizer, its FP8 checkpoint, PEFT adapters for it, and requests: all from seeds."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import torch_epilora as te

VOCAB = 320
BYTES = 256
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Recipe:
    """What a random adapter is made of."""

    r: int
    alpha: float
    targets: tuple[str, ...] = ALL
    rslora: bool = False


RECIPES = {
    "all": Recipe(8, 16),
    "rslora": Recipe(16, 8, rslora=True),
    "partial": Recipe(4, 12, ("q_proj", "down_proj")),
}


def write_model(folder: Path) -> Path:
    """Write the model in bf16, and its tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        bos_token_id=None,
        pad_token_id=BYTES,
        eos_token_id=BYTES + 1,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    return folder


def _tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, two special tokens, and no merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def write_fp8(plain: Path, folder: Path) -> Path:
    """Write the model again as this library saves FP8: compressed-tensors, per channel."""
    model = te.patch(Qwen3ForCausalLM.from_pretrained(plain, dtype=torch.bfloat16))
    te.save_quantized(model, folder)
    _tokenizer().save_pretrained(folder)
    return folder


def write_adapters(plain: Path, folder: Path) -> dict[str, Path]:
    """Write each recipe's adapter as a PEFT folder."""
    model = Qwen3ForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    return {
        name: write_adapter(model, recipe, folder / name, seed) for seed, (name, recipe) in enumerate(RECIPES.items())
    }


def write_adapter(model: nn.Module, recipe: Recipe, folder: Path, seed: int) -> Path:
    """Its change of a linear is about as large as the linear itself."""
    generator = torch.Generator().manual_seed(seed)
    scaling = recipe.alpha / (recipe.r**0.5 if recipe.rslora else recipe.r)
    tensors = {}
    for path, linear in model.named_modules():
        if isinstance(linear, nn.Linear) and path.rpartition(".")[2] in recipe.targets:
            n, k = linear.weight.shape
            a = torch.randn(recipe.r, k, generator=generator) * k**-0.5
            b = torch.randn(n, recipe.r, generator=generator) * (k / recipe.r) ** 0.5 * 0.1 / scaling
            tensors[f"base_model.model.{path}.lora_A.weight"] = a.bfloat16()
            tensors[f"base_model.model.{path}.lora_B.weight"] = b.bfloat16()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": recipe.r,
        "lora_alpha": recipe.alpha,
        "use_rslora": recipe.rslora,
        "target_modules": list(recipe.targets),
        "bias": "none",
    }
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def requests(tokens: int = 8) -> list[dict[str, Any]]:
    """Prompts of different lengths; neighbours in a batch have different adapters, or none."""
    generator = torch.Generator().manual_seed(1)
    names = [None, "all", "rslora", "partial", None, "partial", "all", "rslora"]
    lengths = [5, 17, 1, 9, 12, 3, 8, 24]
    return [
        {"prompt": torch.randint(0, BYTES, (n,), generator=generator).tolist(), "adapter": name, "tokens": tokens}
        for name, n in zip(names, lengths, strict=True)
    ]
