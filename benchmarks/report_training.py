"""Training in docs/performance.md: what ``training.json``, ``finetune.json`` and ``model_training*.json`` say."""

from pathlib import Path
from statistics import fmean

from benchmarks.finetune import SYSTEMS, within
from benchmarks.tables import cell, markdown, measured, read, source

FIGURE = "figures/finetune.svg"
NAMES = {
    "bf16": "bf16",
    "bf16_masters": "bf16, fp32 adapters",
    "w8a16": "W8A16",
    "w8a16_masters": "W8A16, fp32 adapters",
    "w8a8": "W8A8",
}

LAYER = """## Training a layer

The seven linears of a layer of Qwen3-8B's shape, forward and backward, one adapter of rank 64, gradients to x, A and B
(`benchmarks/training.py`): milliseconds, eagerly with the host's time and as a replayed CUDA graph, medians of systems
in turn. All compute the same layer, whose base is the value of the same FP8 codes; their gradients were compared with
fp32 autograd before they were timed (*lowest cosine*, over 0.9999). Ratios are to *bf16*, which has no LoRA, timed the
same way: replayed graphs keep the GPU busy without a pause, at a lower clock than calls among which some wait for the
host. Where a call takes much longer eagerly than as a graph, the difference is the host's. Adapters are in bf16 but
where a row says fp32, which is PEFT's default; under PEFT every linear is a call of its own, so *q, k, v and gate, up
as one* is not what it runs."""

FINETUNE = """## Training a model

SmolLM2-135M-Instruct learns to answer word problems as JSON, with PEFT on bf16 and on a patched model: the same
adapter, first values and order of examples under the same seed (`benchmarks/finetune.py`). The loss is that of the
answers' tokens; *held-out* is that of 360 answers to other questions. *Apart* is the largest difference from bf16 under
one seed. The problems have larger numbers than those of `epilora finetune`, so that the loss does not come down to
nothing. Times of runs that shared the GPU are not shown."""

MODEL = """## A training step of a whole model

A model of Qwen3-8B's shape with random weights, LoRA on its seven linears, gradient checkpointing: forward, backward
and AdamW's step of the adapters, eagerly, in a process for each system (`benchmarks/model_training.py`). *bf16* is PEFT
with LoRA on the bf16 model, and what ratios are to here. Adapters are in bf16 (`autocast_adapter_dtype=False`) but
where a row says fp32, which is PEFT's default. The loss is that of 256 positions, so that the head takes little of a
step; with random weights only its differences say anything. *Linears* are the frozen weights under adapters; *at rest*
is what is allocated between two steps, *peak* the most within one (GB are 10^9 bytes)."""


LAYER_NAMES = {
    "bf16": "bf16, no LoRA",
    "eager": "bf16, PEFT's arithmetic",
    "compiled": "the same, compiled",
    "manual": "bf16, written by hand",
    "fp8": "FP8 dequantized by a compiled kernel, by hand",
    "w8a16": "W8A16, a linear at a time",
    "grouped": "W8A16, q, k, v and gate, up as one",
    "masters": "W8A16, fp32 adapters",
    "w8a8": "W8A8 forward",
}


def layer(rows: list[dict]) -> str:
    """A row a system and number of tokens."""
    table = []
    for row in rows:
        for name, ms in row["ms"]["eager"].items():
            times = {how: each.get(name) for how, each in row["ms"].items()}
            over = {how: t and t / row["ms"][how]["bf16"] for how, t in times.items()}
            table.append([
                str(row["tokens"]), LAYER_NAMES[name], cell(ms, 2), cell(over["eager"], 2), cell(times["graph"], 2),
                cell(over["graph"], 3), f"{row['agrees'][name][0]:.5f}",
            ])  # fmt: skip
    heading = ["tokens", "system", "eager, ms", "/ bf16", "graph, ms", "/ bf16", "lowest cosine"]
    return markdown(heading, table)


def finetune(rows: list[dict]) -> str:
    """A row a system: held-out losses over its seeds, and a step's time."""
    table = []
    for system in SYSTEMS:
        own = [row for row in rows if row["system"] == system]
        if own:
            losses = [row["held_out"] for row in own]
            alone = all(row["jobs"] == 1 for row in own)
            found = within(rows, system) if system != "bf16" else None
            before = fmean(row["held_out_before"] for row in own)
            milliseconds = fmean(row["step_s"] for row in own) * 1e3 if alone else None
            table.append([
                NAMES[system], str(len(own)), str(own[0]["steps"]), cell(before, 3), cell(fmean(losses), 4),
                cell(min(losses), 4), cell(max(losses), 4), cell(found and found["apart"], 4), cell(milliseconds, 1),
            ])  # fmt: skip
    heading = ["base", "seeds", "steps", "held-out before", "held-out, mean", "least", "most", "apart", "ms a step"]
    return measured(heading, table)


def verdict(rows: list[dict]) -> str:
    """The pass line, for each FP8 system that was measured."""
    lines = []
    for system in SYSTEMS[1:]:
        found = within(rows, system)
        if found is not None:
            side = "within" if found["within"] else "above" if found["mean"] > found["high"] else "below"
            lines.append(
                f"{NAMES[system]}'s mean, {found['mean']:.4f}, lies {side} what bf16's seeds span, "
                f"{found['low']:.4f} to {found['high']:.4f}."
            )
    return " ".join(lines)


def model_step(rows: list[dict]) -> str:
    """A row a system: time, ratio and memory."""
    heading = ["base", "tokens", "rank", "ms a step", "/ bf16", "tokens/s", "linears, GB", "embeddings, head, GB",
               "at rest, GB", "peak, GB", "peak - at rest, GB", "first loss"]  # fmt: skip
    times = {row["system"]: row["ms"] for row in rows if "error" not in row}
    table = []
    for row in (row for row in rows if "error" not in row):
        size = {name: count / 1e9 for name, count in row["bytes"].items()}
        ratio = row["ms"] / times["bf16"] if "bf16" in times else None
        table.append([
            NAMES[row["system"]], f"{row['sequences']} x {row['length']}", str(row["rank"]), cell(row["ms"], 0),
            cell(ratio, 2), f"{row['sequences'] * row['length'] / row['ms'] * 1e3:,.0f}", cell(size["linears"], 2),
            cell(size["embeddings"], 2), cell(size["resting"], 1), cell(size["peak"], 1),
            cell(size["peak"] - size["resting"], 1), cell(row["loss"], 3),
        ])  # fmt: skip
    return markdown(heading, table)


def sections(results: Path) -> list[str]:
    """The sections whose files are there."""
    found = []
    path = results / "training.json"
    if path.exists():
        env, rows = read(path)
        found.append("\n\n".join([LAYER, source(path, env), layer(rows)]))
    path = results / "finetune.json"
    if path.exists():
        env, rows = read(path)
        figure = f"![The loss by step, one line a base, from its least to its most over the seeds]({FIGURE})"
        found.append("\n\n".join([FINETUNE, source(path, env), finetune(rows), verdict(rows), figure]))
    models = [(path, *read(path)) for path in sorted(results.glob("model_training*.json"))]
    if models:
        parts = [part for path, env, rows in models for part in (source(path, env), model_step(rows))]
        found.append("\n\n".join([MODEL, *parts]))
    return found
