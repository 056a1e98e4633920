"""`epilora finetune`: train a LoRA adapter on an FP8 base, save it, and serve it beside the bare base."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from torch_epilora.cli.demo import choose_device
from torch_epilora.cli.finetune_data import Chat, Example, encode, read_chats, split, word_problems
from torch_epilora.cli.finetune_model import answer, check_servable, load_model, serve
from torch_epilora.cli.finetune_train import add_adapter, held_out_loss, train

__all__ = ["draw_losses", "run_finetune"]

SHOWN = 4
FIGURE = "loss.png"


def run_finetune(
    console: Console, out: Path, *, base: str, steps: int, batch: int, rank: int, lr: float, seed: int,
    model_folder: Path | None = None, data: Path | None = None,
) -> None:  # fmt: skip
    """Train an adapter, write it and its loss curve to a folder, and show what it answers beside the bare base.

    Parameters
    ----------
    console : Console
        Where to print.
    out : Path
        Folder of the adapter; made if it is not there, and it may hold no adapter yet.
    base : str
        "w8a16", "w8a8" or "bf16".
    steps, batch : int
        Optimizer steps, and examples in each.
    rank : int
        Rank of the adapter.
    lr : float
        The highest learning rate.
    seed : int
        Of the adapter's first values and the order of the examples.
    model_folder : Path, optional
        A causal LM; by default the demo's model.
    data : Path, optional
        A JSONL file of chats; by default generated word problems.

    Raises
    ------
    ValueError
        ``out`` holds an adapter, the data or the model cannot be read, or the loss is not finite.
    FileNotFoundError
        The demo's model is not installed.
    OSError
        ``out`` cannot be written.
    """
    if (out / "adapter_config.json").exists():
        raise ValueError(f"out {out}: expected a folder without an adapter, got one that has one. Name another folder.")
    chats = word_problems() if data is None else read_chats(data)
    device, dtype = choose_device()
    model, tokenizer = load_model(model_folder, device, dtype)
    check_servable(model)
    longest = getattr(model.config, "max_position_embeddings", None)
    examples = encode(tokenizer, chats, longest)
    _check_tokens(examples, model.get_input_embeddings().num_embeddings)
    learnt, held_out = split(examples)
    shown = split(chats)[1][:SHOWN]
    out.mkdir(parents=True, exist_ok=True)
    peft_model = add_adapter(model, base, rank, seed, slots=1)
    pad = tokenizer.pad_token_id
    before = held_out_loss(peft_model, held_out, batch=batch, pad=pad)
    begin = time.perf_counter()
    losses = _train(console, peft_model, learnt, steps=steps, batch=batch, lr=lr, seed=seed, pad=pad)
    seconds = time.perf_counter() - begin
    after = held_out_loss(peft_model, held_out, batch=batch, pad=pad)
    if not math.isfinite(after):
        raise ValueError(f"lr {lr:g}: expected a finite loss after the last step, got {after}. Try a lower one.")
    peft_model.save_pretrained(out, save_embedding_layers=False)
    figure = draw_losses(losses, out / FIGURE)
    served = serve(peft_model, out)
    console.print(_answers(shown, answer(served, tokenizer, shown)))
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    console.print(
        f"{steps} steps on {base} in {seconds:.0f} s on {where}, activations in {str(dtype).removeprefix('torch.')}\n"
        f"loss of {len(held_out)} held-out answers: {before:.3f} before, {after:.3f} after\n"
        f"adapter: {out}\nloss curve: {figure}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def _check_tokens(examples: Sequence[Example], vocabulary: int) -> None:
    """Raise unless the model has an embedding of every token."""
    largest = max(max(example.tokens) for example in examples)
    if largest >= vocabulary:
        raise ValueError(
            f"model: expected an embedding for every token of its tokenizer, got {vocabulary}, and token {largest} in "
            "the data. Use the tokenizer that the model was trained with."
        )


def _train(console: Console, model: Any, examples: Sequence[Example], *, steps: int, **options: Any) -> list[float]:
    """Train under a bar that shows the loss."""
    losses = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loss", total=steps)
        for loss in train(model, examples, steps=steps, **options):
            losses.append(loss)
            progress.update(task, advance=1, description=f"loss {loss:.3f}")
    return losses


def draw_losses(losses: Sequence[float], path: Path) -> str:
    """Draw the loss of every step as a PNG, where matplotlib is installed.

    Parameters
    ----------
    losses : sequence of float
        One a step.
    path : Path
        The file.

    Returns
    -------
    str
        The file's path, or why there is none.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "not drawn: matplotlib is not installed; run `pip install matplotlib`"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="loss of the answers' tokens", ylim=(0, None))
    figure.savefig(path, format="png", dpi=150)
    return str(path)


def _answers(chats: Sequence[Chat], said: Sequence[tuple[str, str]]) -> Table:
    """Make the table of held-out questions, with what was wanted and what came."""
    table = Table(title="Held-out questions, both answers from one batch", box=box.ROUNDED, show_lines=True)
    for heading in ("question", "wanted", "with the adapter", "bare base"):
        table.add_column(heading)
    for chat, answers in zip(chats, said, strict=True):
        texts = (chat[-2]["content"], chat[-1]["content"], *answers)
        table.add_row(*(escape(" ".join(text.split())) for text in texts))
    return table
