"""The figures of docs/performance.md (EpiLoRA Figures 5 and 11 among them), each drawn from one result file."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from benchmarks.tables import over_bare, read

MARKERS = ["o", "s", "^", "D", "v", "P"]
MODEL, RANK = "qwen3-8b", 64
LINES = {"ours": "this library", "vllm": "vLLM LoRA", "vllm_tuned": "vLLM tuned", "sglang": "SGLang LoRA"}
"""Systems of the tenants' figure, and what it calls them."""


def digest(results: Path) -> str:
    """What a figure says of the file that it was drawn from."""
    return f"sha256 of {results.name}: {hashlib.sha256(results.read_bytes()).hexdigest()}"


@contextmanager
def drawing(results: Path, target: Path, size: tuple[float, float]) -> Iterator:
    """An empty figure, written as an SVG in the end: the same results give the same file."""
    import matplotlib
    from matplotlib.figure import Figure

    # text as text, and no random names or dates
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "epilora", "font.size": 10}):
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        target.parent.mkdir(exist_ok=True)
        figure.savefig(target, format="svg", metadata={"Date": None, "Description": digest(results)})


def draw_exposure(results: Path, target: Path) -> None:
    """The shrink's exposed time, one point a projection: colors are models, markers ranks, and the bound is dashed."""
    env, rows = read(results)
    rows = [row for row in rows if {"shrink", "gemm", "exposed"} <= row["us"].keys()]
    models, ranks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "rank"))
    with drawing(results, target, (8, 4.5)) as figure:
        axes = figure.subplots()
        for i, model in enumerate(models):
            for j, rank in enumerate(ranks):
                some = [row["us"] for row in rows if (row["model"], row["rank"]) == (model, rank)]
                axes.scatter(
                    [us["shrink"] - us["gemm"] for us in some], [us["exposed"] for us in some],
                    s=28, color=f"C{i}", marker=MARKERS[j % len(MARKERS)], alpha=0.8,
                )  # fmt: skip
        left, right = axes.get_xlim()
        low, high = axes.get_ylim()
        corners = [left, min(max(left, 0), right), right]
        axes.plot(corners, [max(0, x) for x in corners], "k--", lw=1)
        axes.set(
            xlim=(left, right), ylim=(low, high), xlabel="shrink alone - GEMM (µs)", ylabel="exposed (µs)",
            title=f"One adapter, {env['gpu']}",
        )  # fmt: skip
        for i, model in enumerate(models):
            axes.scatter([], [], color=f"C{i}", marker="o", label=model)
        for j, rank in enumerate(ranks):
            axes.scatter([], [], color="gray", marker=MARKERS[j % len(MARKERS)], label=f"rank {rank}")
        figure.legend(loc="outside right upper", frameon=False)


def panels(rows: list[dict]) -> dict[int, dict[str, list[tuple[int, float]]]]:
    """By tokens and system: adapters and the time over the faster bare layer's, of even batches of MODEL and RANK."""
    found: dict[int, dict[str, list[tuple[int, float]]]] = {}
    for row in sorted(rows, key=lambda row: (row["tokens"], row["adapters"])):
        if (row["model"], row["rank"], row["batch"]) == (MODEL, RANK, "even"):
            systems = found.setdefault(row["tokens"], {})
            for name in LINES:
                ratio = over_bare(row["us"], name)
                if ratio is not None:
                    systems.setdefault(name, []).append((row["adapters"], ratio))
    return found


def draw_tenants(results: Path, target: Path) -> None:
    """The layer's time by adapters, one panel a number of tokens, one line a system; the bare layer is dashed."""
    env, rows = read(results)
    by_tokens = panels(rows)
    with drawing(results, target, (9, 3.6)) as figure:
        row = figure.subplots(1, len(by_tokens), sharey=True, squeeze=False)[0]
        for axes, (tokens, systems) in zip(row, by_tokens.items(), strict=True):
            axes.set_xscale("log", base=2)
            axes.set_yscale("log", base=2)
            for i, (name, label) in enumerate(LINES.items()):
                if name in systems:
                    axes.plot(
                        *zip(*systems[name], strict=True), color=f"C{i}", marker=MARKERS[i], label=label,
                        gid=f"{name}-{tokens}",
                    )  # fmt: skip
            axes.axhline(1, color="k", ls="--", lw=1, label="no adapters")
            axes.set(title=f"{tokens:,} tokens", xlim=(0.7, 46), xticks=[1, 8, 32])
            axes.xaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_major_formatter("{x:g}")
        row[0].set_ylabel("time over the bare layer's")
        figure.supxlabel("adapters in the batch")
        figure.suptitle(f"A layer of {MODEL}, rank {RANK}, {env['gpu']}")
        handles = {label: line for axes in row for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False)


def draw_finetune(results: Path, target: Path) -> None:
    """The loss by step: a line through each system's mean over its seeds, and a band from the least to the most."""
    env, rows = read(results)
    with drawing(results, target, (7, 4)) as figure:
        axes = figure.subplots()
        for i, system in enumerate(dict.fromkeys(row["system"] for row in rows)):
            by_step = list(zip(*(row["losses"] for row in rows if row["system"] == system), strict=True))
            steps = range(1, len(by_step) + 1)
            axes.fill_between(steps, list(map(min, by_step)), list(map(max, by_step)), color=f"C{i}", alpha=0.2, lw=0)
            axes.plot(steps, list(map(fmean, by_step)), color=f"C{i}", lw=1, label=system, gid=f"loss-{system}")
        axes.set(xlabel="step", ylabel="loss of the answers' tokens", yscale="log", title=f"LoRA, {env['gpu']}")
        axes.legend(frameon=False)
