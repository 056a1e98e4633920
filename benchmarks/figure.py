"""The figure of the shrink's exposed time (EpiLoRA Figure 5), drawn from a result file of ``benchmarks.exposure``."""

import hashlib
from pathlib import Path

from benchmarks.tables import read

MARKERS = ["o", "s", "^", "D", "v", "P"]


def digest(results: Path) -> str:
    """What a figure says of the file that it was drawn from."""
    return f"sha256 of {results.name}: {hashlib.sha256(results.read_bytes()).hexdigest()}"


def draw(results: Path, target: Path) -> None:
    """Write an SVG with one point a projection: colors are models, markers ranks, and the bound is dashed."""
    import matplotlib
    from matplotlib.figure import Figure

    env, rows = read(results)
    rows = [row for row in rows if {"shrink", "gemm", "exposed"} <= row["us"].keys()]
    models, ranks = (list(dict.fromkeys(row[key] for row in rows)) for key in ("model", "rank"))
    # text as text, and no random names or dates: the same results give the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "epilora", "font.size": 10}):
        figure = Figure(figsize=(8, 4.5), layout="constrained")
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
        target.parent.mkdir(exist_ok=True)
        figure.savefig(target, format="svg", metadata={"Date": None, "Description": digest(results)})
