"""The decode path's sections of docs/performance.md; each is left out where its result file is not there."""

from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.overhead import DIFFERENCES, VARIANTS
from benchmarks.tables import cell, markdown, measured, read, source

FIGURE = "figures/exposure.svg"

DECODE = """## Decode: up to 64 tokens

A layer as above, in microseconds. *Decode* starts from x alone, as every system here does unless it says *codes in*:
x's codes and scales are then handed in, as by a fused normalization. *Idle adapters* has adapters that no row uses.
*vLLM GEMM* is CUTLASS without quantization. *Adapter* is what the adapters add: decode with codes in, less the
library's own bare layer with codes in."""

SYSTEMS = {
    "decode": "decode",
    "decode, codes in": "decode_codes",
    "bare": "bare",
    "bare, codes in": "bare_codes",
    "idle adapters": "none",
    "vLLM bare": "vllm_bare",
    "vLLM GEMM": "vllm_gemm",
    "vLLM LoRA": "vllm",
    "SGLang LoRA": "sglang",
}

OVERHEAD = """### Where the time goes

The decode kernel with one adapter on every row, one part after another left out (`benchmarks/overhead.py`; EpiLoRA
Tables 11 to 13), in microseconds summed over the projections; adapters are rotated like weights here. *h given*: the
shrink's result is there already, a lower bound for any overlap. *Serial*: the shrink operator, then that; *empty*: a
kernel that does nothing, then that. *Read*: a kernel that only reads as many bytes as a call moves."""

EXPOSURE = """### What stays exposed of the shrink

What a projection takes longer with the shrink in its kernel than with the shrink's result given, codes in
(`benchmarks/exposure.py`; EpiLoRA Figure 5 and Table 17). *Shrink* is the operator alone, which launches kernels to
clear, to split and to add that the decode kernel does not have; *GEMM* is the kernel without adapters, the window in
which the shrink can hide. *Error* is how far the bound max(0, shrink - GEMM) lies from what was measured, its
median. Microseconds a projection."""

PROFILE = """### What the GPU runs

Every GPU event of eager calls, as `torch.profiler` records them (`benchmarks/profile_call.py`): each call is one
kernel, and nothing is cleared or copied between two calls. Start and duration in microseconds."""

HOST = """### What the host spends

Host time of a layer's four eager calls while the GPU is busy (`benchmarks/host.py`; EpiLoRA Table 26), in
microseconds: Python, checks, allocations and launches. *By Triton*: the same with every launch through Triton's own
launcher, which the library takes the first time alone."""

HOST_SYSTEMS = {"lora_linear": "ours", "by Triton": "triton", "vLLM bare": "vllm_bare", "vLLM LoRA": "vllm"}


def over(us: dict, one: str, *others: str) -> float | None:
    """One system's time over the least of the others', where all were measured."""
    return us[one] / min(us[other] for other in others) if {one, *others} <= us.keys() else None


def matching(row: dict, rows: list[dict]) -> dict:
    """The W8A8 times of a W8A16 row's layer, empty where there are none."""
    keys = ("model", "rank", "tokens", "adapters", "layout")
    same = [other["us"] for other in rows if other["compute"] == "w8a8" and all(other[k] == row[k] for k in keys)]
    return same[0] if same and row["compute"] == "w8a16" else {}


def decode_row(row: dict, rows: list[dict]) -> dict[str, str]:
    """One row of a decode table by column."""
    us = row["us"]
    adapter = us["decode_codes"] - us["bare_codes"] if {"decode_codes", "bare_codes"} <= us.keys() else None
    w8a8 = {"own": us["decode"], "w8a8": matching(row, rows)["decode"]} if "decode" in matching(row, rows) else {}
    return {
        **{key: str(row[key]) for key in ("model", "rank", "tokens", "adapters")},
        **{name: cell(us.get(system), 1) for name, system in SYSTEMS.items()},
        "adapter": cell(adapter, 1),
        "decode / SGLang": cell(over(us, "decode", "sglang"), 2),
        "decode / vLLM": cell(over(us, "decode", "vllm"), 2),
        "codes in / vLLM GEMM": cell(over(us, "decode_codes", "vllm_gemm"), 2),
        "bare, codes in / vLLM GEMM": cell(over(us, "bare_codes", "vllm_gemm"), 2),
        "idle / faster bare": cell(over(us, "none", "bare", "vllm_bare"), 2),
        "decode / W8A8 decode": cell(over(w8a8, "own", "w8a8"), 2),
    }


def decode_tables(path: Path) -> list[str]:
    """A decode result file: one table for each arithmetic and layout of scales."""
    env, rows = read(path)
    parts = []
    for compute, layout in sorted({(row["compute"], row["layout"]) for row in rows}):
        shown = [decode_row(row, rows) for row in rows if (row["compute"], row["layout"]) == (compute, layout)]
        table = measured(list(shown[0]), [list(line.values()) for line in shown])
        parts += [f"### {compute.upper()}, scales per {layout} ({path.stem})", source(path, env)]
        parts += [*([env["note"]] if "note" in env else []), table]
    return parts


def overhead_tables(path: Path) -> list[str]:
    """The overhead's result file: what was measured, and what follows from it."""
    env, rows = read(path)
    heads = [[row["model"], str(row["rank"]), str(row["tokens"])] for row in rows]
    names = [*VARIANTS, "read"]
    times = [head + [cell(row["us"].get(name), 1) for name in names] for head, row in zip(heads, rows, strict=True)]
    found: list[str] = list(dict.fromkeys(name for row in rows for name in row["ratios"]))
    parts = [
        head
        + [cell(row["us"].get(name), 1) for name in DIFFERENCES]
        + [cell(row["ratios"].get(name), 2) for name in found]
        + [cell(row["bytes"] / row["us"]["x"] / 1e6 if "x" in row["us"] else None, 2)]
        for head, row in zip(heads, rows, strict=True)
    ]
    keys = ["model", "rank", "tokens"]
    columns = [name.replace("_nopdl", ", no PDL").replace("vllm_gemm", "vLLM GEMM").replace("_", " ") for name in names]
    last = [*keys, *DIFFERENCES, *found, "x, TB/s"]
    return [OVERHEAD, source(path, env), measured([*keys, *columns], times), measured(last, parts)]


def bound_error(us: dict) -> float:
    """How far the bound of the exposed time lies from what was measured."""
    return abs(us["exposed"] - max(0.0, us["shrink"] - us["gemm"]))


def exposure_part(path: Path) -> list[str]:
    """The exposure's result file: the figure, and a table of groups of projections."""
    env, rows = read(path)
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if {"shrink", "gemm", "exposed"} <= row["us"].keys():
            groups.setdefault((row["model"], row["rank"], row["tokens"]), []).append(row["us"])

    def span(times: list[dict], name: str) -> str:
        return f"{min(us[name] for us in times):.1f} to {max(us[name] for us in times):.1f}"

    lines = [
        [*map(str, group), str(len(times)), span(times, "shrink"), span(times, "gemm"),
         *(f"{pick([us['exposed'] for us in times]):.1f}" for pick in (median, max)),
         f"{median(map(bound_error, times)):.1f}"]
        for group, times in groups.items()
    ]  # fmt: skip
    heading = ["model", "rank", "tokens", "projections", "shrink", "GEMM", "exposed, median", "exposed, most", "error"]
    figure = f"![Exposed time against the shrink's time less the GEMM's]({FIGURE})"
    return [EXPOSURE, source(path, env), figure, markdown(heading, lines)]


def profile_part(path: Path) -> list[str]:
    """The profile's result file."""
    env, rows = read(path)
    heading = ["projection", "tokens", "adapters", "call", "kernel", "start", "duration", "starts before the last ends"]
    lines = [
        [row["projection"], str(row["tokens"]), str(row["adapters"]), f"{number} of {row['calls']}", event["name"],
         f"{event['start_us']:.1f}", f"{event['us']:.1f}", "yes" if event["overlaps"] else "no"]
        for row in rows
        for number, event in enumerate(row["events"], 1)
    ]  # fmt: skip
    pdl = "" if rows[0]["pdl"] else " Without programmatic launch."
    return [PROFILE + pdl, source(path, env), markdown(heading, lines)]


def host_part(path: Path) -> list[str]:
    """The host's result file; its ratio is to vLLM's quantizer, GEMM, shrink and expand together."""
    env, rows = read(path)
    heading = ["model", "rank", "tokens", "adapters", *HOST_SYSTEMS, "lora_linear / vLLM LoRA"]
    lines = [
        [*(str(row[key]) for key in ("model", "rank", "tokens", "adapters")),
         *(cell(row["us"].get(system), 0) for system in HOST_SYSTEMS.values()),
         cell(over(row["us"], "ours", "vllm"), 2)]
        for row in rows
    ]  # fmt: skip
    return [HOST, source(path, env), markdown(heading, lines)]


PARTS: dict[str, Callable[[Path], list[str]]] = {
    "overhead.json": overhead_tables,
    "exposure.json": exposure_part,
    "profile.json": profile_part,
    "host.json": host_part,
}
"""Result files beside ``decode_*.json``, and what makes their sections."""


def sections(results: Path) -> list[str]:
    """All paragraphs of the decode path's part of the page, for the result files that are there."""
    tables = [part for path in sorted(results.glob("decode_*.json")) for part in decode_tables(path)]
    rest = [part for name, make in PARTS.items() if (results / name).exists() for part in make(results / name)]
    return [DECODE, *tables, *rest] if tables else rest
