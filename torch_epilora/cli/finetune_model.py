"""The model that `epilora finetune` trains, and what it answers once it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import torch_epilora as te
from torch_epilora.cli.demo_model import MODEL_NAME, decode_answers, load_demo_model
from torch_epilora.cli.finetune_data import Chat, prompt_text
from torch_epilora.nn.linear import lora_linears
from torch_epilora.nn.patch import EXCLUDE, read_patterns
from torch_epilora.nn.select import select

__all__ = ["ADAPTER", "answer", "check_servable", "load_model", "serve"]

ADAPTER = "tuned"
"""Name of the adapter's slot."""


def load_model(folder: Path | None, device: torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load a causal LM and its tokenizer from a folder; by default the demo's model.

    Parameters
    ----------
    folder : Path, optional
        A transformers model in safetensors, not quantized, with its tokenizer.
    device : torch.device
        Where the model goes.
    dtype : torch.dtype
        Type of the weights.

    Returns
    -------
    model, tokenizer
        The model, and its tokenizer with a padding token and padding on the left, as generation wants it.

    Raises
    ------
    FileNotFoundError
        The demo's model is not installed.
    ValueError
        transformers cannot load the folder, or the model in it is quantized.
    """
    if folder is None:
        model, tokenizer = load_demo_model(device, dtype)
        model.name_or_path = MODEL_NAME  # PEFT writes it into the adapter's config
        return model, tokenizer
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    options = {"local_files_only": True}
    try:
        config = AutoConfig.from_pretrained(folder, **options)
        if getattr(config, "quantization_config", None) is not None:
            raise ValueError("one that is quantized already, which torch_epilora.load_quantized takes")
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, use_safetensors=True, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(
            f"model {folder}: expected the folder of a causal LM in safetensors with its tokenizer, not quantized, "
            f"got {type(error).__name__}: {str(error)[:300]}. Name another folder."
        ) from error
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def check_servable(model: Any) -> None:
    """Raise unless ``serve`` will find linears that can be patched.

    Parameters
    ----------
    model : transformers model
        In 16 or 32 bits; left as it is.

    Raises
    ------
    ValueError
        There is no such linear.
    """
    select(model, *read_patterns(None, EXCLUDE), {})


def serve(peft_model: Any, folder: Path) -> Any:
    """Take PEFT's layers off and load the saved adapter into a slot, as any server of the model would.

    Parameters
    ----------
    peft_model : PeftModel
        Whose base is FP8 with a free slot, or not FP8 yet.
    folder : Path
        Where its adapter was saved.

    Returns
    -------
    transformers model
        Patched, with ``ADAPTER`` loaded.
    """
    rank = peft_model.active_peft_config.r
    model = peft_model.unload().eval()
    if not lora_linears(model):
        te.patch(model, base="fp8", compute="w8a16", max_adapters=1, max_rank=rank)
    te.load_adapter(model, ADAPTER, folder)
    return model


def answer(model: Any, tokenizer: Any, chats: Sequence[Chat], new_tokens: int = 48) -> list[tuple[str, str]]:
    """Answer the chats' questions in one batch, with the adapter and on the bare base.

    Parameters
    ----------
    model : transformers model
        From ``serve``.
    tokenizer : transformers tokenizer
        That pads on the left.
    chats : sequence of Chat
        Their last messages are left out.
    new_tokens : int
        The longest answer.

    Returns
    -------
    list of (str, str)
        With the adapter, and without.
    """
    prompts = [prompt_text(tokenizer, chat[:-1]) for chat in chats for _ in range(2)]
    special = not tokenizer.chat_template
    inputs = tokenizer(prompts, padding=True, return_tensors="pt", add_special_tokens=special).to(model.device)
    inputs.pop("token_type_ids", None)
    with te.adapters(model, [ADAPTER, None] * len(chats)):
        tokens = model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, pad_token_id=tokenizer.pad_token_id
        )
    said = decode_answers(tokenizer, tokens, inputs["input_ids"].shape[1])
    return list(zip(said[::2], said[1::2], strict=True))
