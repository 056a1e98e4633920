"""`epilora bench --quick`: our paths beside plain torch on the GPU present."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from torch_epilora.cli.bench_cases import CPU_CASES, GPU_CASES, Case, Operands, oracle, variants
from torch_epilora.cli.machine import driver_version, gpus, versions
from torch_epilora.cli.sqnr import sqnr_db
from torch_epilora.ops.timing import median_times

__all__ = ["measure", "run_bench"]

CAPTION = "Medians, weights rotated. torch: torch._scaled_mm, then two bf16 products an adapter and slice"
GAIN_CAPTION = "; gain: torch over the best of the others."
# bf16 alone gives about 55 dB; a wrong scale or a lost adapter gives under 20.
LEAST_SQNR = 40.0


def measure(case: Case, device: torch.device, copies: int | None = None) -> dict[str, Any]:
    """Check and time every variant of one case.

    Parameters
    ----------
    case : Case
        What to measure.
    device : torch.device
        Where.
    copies : int, optional
        Copies of weights in rotation; by default more than a cache holds.

    Returns
    -------
    dict
        The case's fields and, by variant, ``us`` (median microseconds), ``sqnr`` (dB against fp32) and ``failed`` (the
        reason): a variant that raises or is less than 40 dB from fp32 is not timed.
    """
    operands = Operands(case, device, copies)
    reference = oracle(operands)
    failed: dict[str, str] = {}
    quality: dict[str, float] = {}
    steps = variants(operands)
    for name, step in steps.items():
        try:
            quality[name] = sqnr_db(reference, step(0))
        except (RuntimeError, NotImplementedError, ValueError) as error:
            failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else 'no message'}"
            continue
        if quality[name] < LEAST_SQNR:
            failed[name] = f"wrong result: {quality[name]:.1f} dB against fp32, expected at least {LEAST_SQNR:.0f}"
    right = {name: step for name, step in steps.items() if name not in failed}
    return {
        "projection": case.projection,
        "k": case.k,
        "slices": list(case.slices),
        "tokens": case.tokens,
        "adapters": case.adapters,
        "rank": case.rank,
        "us": median_times(right, operands.copies, device),
        "sqnr": quality,
        "failed": failed,
    }


def run_bench(console: Console, *, cpu: bool = False, output: Path | None = None) -> bool:
    """Measure all cases and print them as a table.

    Parameters
    ----------
    console : Console
        Where to print.
    cpu : bool
        Time the plain-torch reference on the CPU instead; its figures say nothing about a GPU.
    output : Path, optional
        A JSON file to write the figures to, with the GPU's name and the versions.

    Returns
    -------
    bool
        False where a variant gave a wrong result or raised.
    """
    device = torch.device("cpu" if cpu else "cuda")
    cases = CPU_CASES if cpu else GPU_CASES
    place = "CPU, plain-torch reference: no figure for a GPU" if cpu else gpus()[0].name
    rows = [
        measure(case, device, 2 if cpu else None)
        for case in track(cases, description="Measuring", console=console, transient=True)
    ]
    console.print(_table(rows, place, gain=not cpu))
    notes = sorted({f"{name}: {reason}" for row in rows for name, reason in row["failed"].items()})
    for note in notes:
        console.print(f"not timed: {note}", style="yellow", markup=False)
    if output is not None:
        found = {"device": place, "driver": None if cpu else driver_version(), "versions": versions(), "cases": rows}
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        console.print(f"written to {output}", markup=False)
    return not notes


def _table(rows: list[dict[str, Any]], place: str, *, gain: bool) -> Table:
    """Make the table of the medians; the reference has no gain worth a column."""
    names = list(dict.fromkeys(name for row in rows for name in (*row["sqnr"], *row["failed"])))
    title = f"Microseconds of one projection with adapters of rank {rows[0]['rank']}\n{place}"
    caption = CAPTION + (GAIN_CAPTION if gain else ".")
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, collapse_padding=True)
    for heading in ("linear", "K", "N", "tokens", "loras", *names, *(["gain"] if gain else [])):
        table.add_column(heading, justify="left" if heading == "linear" else "right")
    for row in rows:
        us = row["us"]
        best = min((time for name, time in us.items() if name != "torch"), default=None)
        factor = f"{us['torch'] / best:.2f}x" if best and "torch" in us else "-"
        case = (row["projection"], row["k"], sum(row["slices"]), row["tokens"], row["adapters"])
        times = [f"{us[name]:.1f}" if name in us else "-" for name in names]
        table.add_row(*map(str, case), *times, *([factor] if gain else []))
    return table
