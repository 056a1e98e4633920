"""The sections of tenants, prefill and measured plans in docs/performance.md; each where its result file is there."""

from collections.abc import Callable
from pathlib import Path

from benchmarks.choices import WITHIN
from benchmarks.report_decode import over
from benchmarks.tables import cell, markdown, measured, over_bare, read, source
from benchmarks.tenants import ratio

FIGURE = "figures/tenants.svg"

TENANTS = """## Many tenants and large batches

A layer as above, W8A8, scales per channel (EpiLoRA Tables 14 and 15), in microseconds; the script is
`benchmarks/tenants.py`, or for single rows `benchmarks/layer.py`. *Chosen / bare* is over the faster of both bare
layers."""

KINDS = """Rows of an *even* batch are spread evenly over its adapters; under *zipf* a few adapters have most of them,
under *half* one adapter has every other row, and a *mixed* batch is an even one whose adapters have ranks of 8 to
128."""

PICTURE = """The even batches of Qwen3-8B: a layer's time over the faster bare layer's, the dashed line (EpiLoRA Figure
11)."""

PROJECTIONS = """### By projection

*Chosen* over the fastest of the peers' layers with adapters in the table above, projection by projection."""

LARGE = """## Prefill

A layer as above, of 2,048 to 16,384 tokens that are spread evenly over the adapters (`benchmarks/large.py`)."""

SHRINK = """### The shrink alone

K1, the kernel that the layer launches, beside vLLM's shrink in its default launch configuration, with nothing beside
either (EpiLoRA Table 27), in microseconds summed over the four projections. x and A come from memory; vLLM's kernel
adds K-splits into an fp32 h, and its figure holds what clears that. The columns of single projections are K1 / vLLM."""

CHOICES = """## Measured plans

Sizes of the tables that say which plan is the fastest (`torch_epilora.tune`, `epilora tune`), timed once more in
another process (`benchmarks/choices.py`): the plan that a table names beside every path under the rules' tiles."""

SYSTEMS = {
    "bare": "bare",
    "vLLM bare": "vllm_bare",
    "chosen": "ours",
    "vLLM LoRA": "vllm",
    "vLLM tuned": "vllm_tuned",
    "SGLang LoRA": "sglang",
}
MISSES = 3
PEERS = ("vLLM LoRA", "vLLM tuned", "SGLang LoRA")


def layers(rows: list[dict]) -> str:
    """The rows' layers; a peer that was nowhere measured has no column."""
    heading = ["model", "batch", "rank", "tokens", "adapters"]
    ratios = {f"chosen / {name.removesuffix(' LoRA')}": SYSTEMS[name] for name in PEERS}
    lines = [
        [*(str(row[key]) for key in heading),
         *(cell(row["us"].get(system), 0) for system in SYSTEMS.values()),
         cell(over_bare(row["us"], "ours"), 2),
         *(cell(over(row["us"], "ours", system), 2) for system in ratios.values())]
        for row in rows
    ]  # fmt: skip
    return measured([*heading, *SYSTEMS, "chosen / bare", *ratios], lines)


def by_projection(rows: list[dict]) -> str:
    """The ratio to the fastest peer of each projection."""
    heading = ["model", "batch", "rank", "tokens", "adapters"]
    lines = [
        [*(str(row[key]) for key in heading), *(cell(ratio(part["us"]), 2) for part in row["projections"].values())]
        for row in rows
    ]
    return markdown([*heading, *rows[0]["projections"]], lines)


def shrinks(rows: list[dict]) -> str:
    """The rows' shrinks, and the ratio to vLLM's of each projection."""
    heading = ["model", "rank", "tokens", "adapters"]
    lines = []
    for row in rows:
        us, parts = row["shrink"]["us"], row["shrink"]["projections"].values()
        times = [cell(us.get(system), 1) for system in ("ours", "vllm")]
        ratios = [cell(over(some, "ours", "vllm"), 2) for some in (us, *(part["us"] for part in parts))]
        lines.append([*(str(row[key]) for key in heading), *times, *ratios])
    return markdown([*heading, "K1", "vLLM shrink", "K1 / vLLM", *rows[0]["shrink"]["projections"]], lines)


def tenants_part(path: Path) -> list[str]:
    """The tenants' result file: the figure, the layers, and their projections."""
    env, rows = read(path)
    figure = f"![A layer's time over the bare layer's, by adapters, for each number of tokens]({FIGURE})"
    kinds = [KINDS] if any(row["batch"] != "even" for row in rows) else []
    made = [f"Measured by: {env['command']}."] if env.get("command") else []
    return [TENANTS, *kinds, source(path, env), *made, PICTURE, figure, layers(rows), PROJECTIONS, by_projection(rows)]


def large_part(path: Path) -> list[str]:
    """The prefill's result file: the layer, and its shrink."""
    env, rows = read(path)
    return [LARGE, source(path, env), layers(rows), SHRINK, shrinks(rows)]


def choices_part(path: Path) -> list[str]:
    """The choices' result file: how many are nearly the fastest, and those that are not."""
    env, rows = read(path)
    heading = ["tokens", "adapters", "k", "n", "choice", "us"]
    worst = sorted(rows, key=lambda row: -row["over_best"])[:MISSES]
    good = sum(row["over_best"] <= WITHIN for row in rows)
    lines = [[*(str(row[key]) for key in heading), f"{row['over_best']:.3f}"] for row in worst]
    count = f"{good} of {len(rows)} are within 3 percent of the fastest; those that miss it by most:"
    return [CHOICES, source(path, env), count, markdown([*heading, "us / fastest"], lines)]


PARTS: dict[str, Callable[[Path], list[str]]] = {
    "tenants.json": tenants_part,
    "large.json": large_part,
    "choices.json": choices_part,
}
"""Result files, and what makes their sections."""


def sections(results: Path) -> list[str]:
    """All paragraphs of this part of the page, for the result files that are there."""
    return [part for name, make in PARTS.items() if (results / name).exists() for part in make(results / name)]
