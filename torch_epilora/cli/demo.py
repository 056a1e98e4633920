"""`epilora demo`: one batch of a real model, each row with another adapter, and a check of every projection."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import torch_epilora as te
from torch_epilora.cli.demo_check import (
    MIN_SQNR_DB,
    ProjectionCheck,
    check_projections,
    fp8_projections,
    peft_reference,
)
from torch_epilora.cli.demo_model import MODEL_NAME, decode_answers, encode_questions, load_demo_model
from torch_epilora.cli.demo_paths import path_table
from torch_epilora.cli.paths import print_reasons

__all__ = ["ADAPTERS", "QUESTIONS", "find_adapters", "run_demo"]

ADAPTERS = ("pirate", "json", "telegram")
# Neither is among the questions the adapters were trained on.
QUESTIONS = ("Where do polar bears live?", "What is honey?")
NEW_TOKENS = 32


def find_adapters(folder: Path | None = None) -> dict[str, Path]:
    """Return the directories of the three shipped adapters by name.

    Parameters
    ----------
    folder : Path, optional
        Where they lie; by default `examples/adapters` beside the package, where an editable install or a checkout has
        them.

    Raises
    ------
    FileNotFoundError
        One of them is not there.
    """
    folder = folder or Path(__file__).resolve().parents[2] / "examples" / "adapters"
    found = {name: folder / name for name in ADAPTERS}
    for name, directory in found.items():
        if not (directory / "adapter_model.safetensors").is_file():
            raise FileNotFoundError(
                f"adapter {name}: expected {directory}/adapter_model.safetensors, found none; give "
                "`--adapters CHECKOUT/examples/adapters`, or train it with CHECKOUT/scripts/train_demo_adapters.py"
            )
    return found


def run_demo(console: Console | None = None, adapters_folder: Path | None = None) -> None:
    """Answer questions with three adapters and the bare base in one batch, and check every projection.

    Parameters
    ----------
    console : Console, optional
        Where to print; stdout by default.
    adapters_folder : Path, optional
        See `find_adapters`.

    Raises
    ------
    SystemExit
        With a message, where the model or an adapter is missing, an adapter changes no answer, or a projection is
        under 40 dB or lacks a tenth of its adapter's part.
    """
    console = console or Console()
    try:
        problems = _demo(console, find_adapters(adapters_folder))
    except FileNotFoundError as error:
        problems = [str(error)]
    if problems:
        sys.exit("epilora demo: " + "; ".join(problems))


def choose_device() -> tuple[torch.device, torch.dtype]:
    """Choose the GPU with bf16 where there is one, else the CPU with the type it multiplies fast."""
    if torch.cuda.is_available():
        return torch.device("cuda"), torch.bfloat16
    # oneDNN's bf16 GEMMs want AVX-512; elsewhere bf16 goes through slow generic loops.
    fast_bf16 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return torch.device("cpu"), torch.bfloat16 if fast_bf16 else torch.float32


def _demo(console: Console, directories: Mapping[str, Path]) -> list[str]:
    """Run the demo and return what went wrong."""
    device, dtype = choose_device()
    seconds: dict[str, float] = {}
    names = [name for _ in QUESTIONS for name in (*directories, None)]
    with _progress(console) as progress:
        with _step(progress, seconds, "load the model", 1):
            model, tokenizer = load_demo_model(device, dtype)
        with _step(progress, seconds, "quantize the linears to FP8", 1):
            te.patch(model, base="fp8", max_adapters=len(directories), max_rank=16)
        with _step(progress, seconds, "load the adapters", len(directories)) as task:
            for name, directory in directories.items():
                te.load_adapter(model, name, directory)
                progress.advance(task)
        questions = [question for question in QUESTIONS for _ in range(len(directories) + 1)]
        inputs = encode_questions(tokenizer, questions, device)
        with _step(progress, seconds, "generate", NEW_TOKENS) as task:
            answers = _generate(model, tokenizer, inputs, names, progress, task)
        with _step(progress, seconds, "check against PEFT", len(fp8_projections(model))) as task:
            references = peft_reference(model, directories)
            with te.adapters(model, names):
                checks = check_projections(model, inputs, names, references, lambda: progress.advance(task))
    by_name = _answers_by_name(answers, names)
    console.print(_answer_table(by_name))
    console.print(_check_table(checks))
    prompt = inputs["input_ids"].numel()
    table, reasons = path_table(model, {"prompt": prompt, "each new token": len(names)})
    console.print(table)
    print_reasons(console, reasons)
    console.print(_summary(device, dtype, seconds), markup=False, highlight=False)
    return find_problems(by_name, checks)


def find_problems(answers: Mapping[str | None, Sequence[str]], checks: Sequence[ProjectionCheck]) -> list[str]:
    """List the adapters that leave every answer as the bare base gives it, and the projections that did not pass.

    Parameters
    ----------
    answers : mapping of str or None to sequence of str
        Each adapter's answers, None for the bare base; same questions in the same order.
    checks : sequence of ProjectionCheck
        From `check_projections`.

    Returns
    -------
    list of str
        Empty where all is well.
    """
    problems = [
        f"adapter {name} does not change an answer"
        for name in answers
        if name is not None and list(answers[name]) == list(answers[None])
    ]
    low = sorted((check for check in checks if check.sqnr_db < MIN_SQNR_DB), key=lambda check: check.sqnr_db)
    if low:
        problems.append(
            f"{len(low)} of {len(checks)} projections under {MIN_SQNR_DB:g} dB, "
            f"the worst {low[0].name} at {low[0].sqnr_db:.1f} dB"
        )
    for check in checks:
        if not check.passed and check.sqnr_db >= MIN_SQNR_DB:
            problems.append(f"{check.name} has {check.gain:.2f} times its adapter's part")
    return problems


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console)


@contextmanager
def _step(progress: Progress, seconds: dict[str, float], description: str, total: int) -> Iterator[Any]:
    """Show a step as a bar and keep how long it took."""
    task = progress.add_task(description, total=total)
    begin = time.perf_counter()
    yield task
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    seconds[description] = time.perf_counter() - begin
    progress.update(task, completed=total)


def _generate(
    model: Any,
    tokenizer: Any,
    inputs: Mapping[str, torch.Tensor],
    names: list[str | None],
    progress: Progress,
    task: Any,
) -> list[str]:
    """Answer greedily, one adapter a row."""
    handle = model.register_forward_hook(lambda *_: progress.advance(task))
    try:
        with te.adapters(model, names):
            tokens = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
    finally:
        handle.remove()
    return decode_answers(tokenizer, tokens, inputs["input_ids"].shape[1])


def _answers_by_name(answers: Sequence[str], names: Sequence[str | None]) -> dict[str | None, list[str]]:
    by_name: dict[str | None, list[str]] = {}
    for name, answer in zip(names, answers, strict=True):
        by_name.setdefault(name, []).append(answer)
    return by_name


def _answer_table(answers: Mapping[str | None, Sequence[str]]) -> Table:
    table = Table(title=f"{MODEL_NAME}: one batch of {sum(map(len, answers.values()))} rows", show_lines=True)
    table.add_column("question")
    for name in answers:
        table.add_column("bare base" if name is None else name)
    for question, *row in zip(QUESTIONS, *answers.values(), strict=True):
        table.add_row(question, *(_plain(answer) for answer in row))
    return table


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(" ".join(text.split()))


def _check_table(checks: Sequence[ProjectionCheck]) -> Table:
    table = Table(title="Each projection against PEFT, unfused, on the same FP8 codes and input (SQNR in dB)")
    for column in ("projection", "layers", "SQNR min", "SQNR mean", "adapter's part", ""):
        table.add_column(column, justify="left" if column == "projection" else "right")
    for kind in dict.fromkeys(check.kind for check in checks):
        group = [check for check in checks if check.kind == kind]
        values = [check.sqnr_db for check in group]
        gains = [check.gain for check in group if check.gain is not None]
        table.add_row(
            kind,
            str(len(group)),
            f"{min(values):.1f}",
            f"{statistics.fmean(values):.1f}",
            f"{min(gains):.3f} to {max(gains):.3f}" if gains else "none",
            "ok" if all(check.passed for check in group) else "[bold red]wrong",
        )
    return table


def _summary(device: torch.device, dtype: torch.dtype, seconds: Mapping[str, float]) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    times = ", ".join(f"{step} {value:.1f} s" for step, value in seconds.items())
    return f"device: {where}, activations in {str(dtype).removeprefix('torch.')}\ntimes: {times}"
