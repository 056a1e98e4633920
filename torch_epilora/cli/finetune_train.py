"""The training that `epilora finetune` does: PEFT's LoRA adapters on an FP8 or a 16-bit base, in a plain loop."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import torch_epilora as te
from torch_epilora.cli.finetune_data import Example, batches, collate

__all__ = ["BASES", "add_adapter", "held_out_loss", "train"]

BASES = ("w8a16", "w8a8", "bf16")
"""FP8 weights under 16-bit or FP8 activations; or the model as it is."""

WARM_UP = 0.1
MAX_NORM = 1.0


def add_adapter(model: Any, base: str, rank: int, seed: int, *, slots: int = 0) -> Any:
    """Make the base and put a new PEFT adapter of all its linears over it.

    Parameters
    ----------
    model : transformers model
        In 16 or 32 bits; changed in place.
    base : str
        One of ``BASES``.
    rank : int
        Rank of the adapter; its alpha is twice that.
    seed : int
        Decides the adapter's first values, which are the same on every base.
    slots : int
        Slots of an FP8 base, for adapters to serve later.

    Returns
    -------
    PeftModel
        Ready for training; only the adapter's parameters are trained.
    """
    from peft import LoraConfig, get_peft_model

    if base != "bf16":
        te.patch(model, base="fp8", compute=base, max_adapters=slots, max_rank=rank)
    torch.manual_seed(seed)
    config = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(model, config)


def train(
    model: Any, examples: Sequence[Example], *, steps: int, batch: int, lr: float, seed: int, pad: int
) -> Iterator[float]:
    """Train the parameters that want gradients, by AdamW under a warm-up and a cosine, and yield each step's loss.

    Parameters
    ----------
    model : PeftModel
        From ``add_adapter``.
    examples : sequence of Example
        What to learn, in an order that ``seed`` decides.
    steps, batch : int
        Optimizer steps, and examples in each.
    lr : float
        The highest learning rate.
    seed : int
        Of the order.
    pad : int
        Token to pad with.

    Yields
    ------
    float
        The mean cross entropy of a batch's answers, before its step.

    Raises
    ------
    ValueError
        A loss is not finite; the step is named.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _share(step, steps))
    model.train()
    for step, rows in zip(range(steps), batches(examples, batch, seed), strict=False):
        loss = model(**collate(rows, pad, model.device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
        value = loss.item()
        if not math.isfinite(value):
            raise ValueError(f"lr {lr:g}: expected a finite loss, got {value} at step {step + 1}. Try a lower one.")
        optimizer.step()
        optimizer.zero_grad()
        rate.step()
        yield value


def _share(step: int, steps: int) -> float:
    """Share of the highest learning rate: up in a line, then down along a cosine."""
    warm = max(1, round(steps * WARM_UP))
    if step < warm:
        return (step + 1) / warm
    return (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))) / 2


@torch.no_grad()
def held_out_loss(model: Any, examples: Sequence[Example], *, batch: int, pad: int) -> float:
    """Return the mean cross entropy of all the answers' tokens; every token counts the same.

    Parameters
    ----------
    model : transformers model or PeftModel
        Put in eval mode.
    examples : sequence of Example
        What was held out.
    batch : int
        Examples at a time.
    pad : int
        Token to pad with.

    Returns
    -------
    float
        In nats.
    """
    model.eval()
    total, count = 0.0, 0
    for i in range(0, len(examples), batch):
        rows = examples[i : i + batch]
        answered = sum(len(row.tokens) - row.prompt for row in rows)
        total += model(**collate(rows, pad, model.device), use_cache=False).loss.item() * answered
        count += answered
    return total / count
