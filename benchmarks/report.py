"""Write docs/performance.md from the results of ``benchmarks.layer``: ``python -m benchmarks.report``.

Every figure of the page is read from a JSON under benchmarks/results; a test compares the page with what this writes.
"""

import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
PAGE = ROOT / "docs" / "performance.md"
INTRO = """# First figures

<!-- written by `python -m benchmarks.report` from benchmarks/results; edit that, not this -->

Time of one decoder layer's four linear projections with LoRA adapters, in microseconds, on one GPU: this library beside
vLLM's kernels in the same run. *Bare* is the layer without adapters, activations quantized by each side (W8A8; vLLM's
W8A16 is Marlin). *Fused* and *hybrid* are the two CUDA paths, *chosen* the one that the plan takes. Each row's tokens
are spread evenly over its adapters. Every system's output was compared with fp64 before it was timed (over 40 dB, or no
figure). CUDA graphs, weights rotated so that none comes from L2, medians of interleaved rounds. vLLM's LoRA kernels run
their default launch configurations, as they ship. The script is `benchmarks/layer.py`; the log of what was tried is
`benchmarks/NOTES.md`.

These are the two general paths. The decode path for up to 32 tokens is not built yet, so those rows are where it starts
from. W8A16 at few tokens, whose weights are still widened by conversion instructions, is slower than vLLM's Marlin.
"""


def table(path: Path) -> str:
    """One result file as a heading and a Markdown table."""
    result = json.loads(path.read_text())
    env, rows = result["environment"], result["rows"]
    first = rows[0]
    models = sorted({row["model"] for row in rows})
    ranks = sorted({row["rank"] for row in rows})
    title = f"{first['compute'].upper()}, scales per {first['layout']}"
    lines = [
        f"## {title}, {', '.join(models)}, rank {', '.join(map(str, ranks))}",
        "",
        f"{env['gpu']}, torch {env['torch']}, Triton {env['triton']}, vLLM {env['vllm']}, commit `{env['commit']}`.",
        f"`{path.relative_to(ROOT)}`",
        "",
        "| model | rank | tokens | adapters | bare | vLLM bare | fused | hybrid | chosen | vLLM LoRA | chosen / vLLM |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        us = row["us"]
        cells = [us.get(name) for name in ("bare", "vllm_bare", "fused", "hybrid", "ours", "vllm")]
        shown = ["-" if cell is None else f"{cell:.0f}" for cell in cells]
        ratio = "-" if us.get("vllm") is None else f"{us['ours'] / us['vllm']:.2f}"
        lines.append(
            f"| {row['model']} | {row['rank']} | {row['tokens']} | {row['adapters']} | "
            + " | ".join([*shown, ratio])
            + " |"
        )
    return "\n".join(lines)


def page() -> str:
    """The whole page."""
    return "\n\n".join([INTRO.rstrip(), *(table(path) for path in sorted(RESULTS.glob("*.json")))]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
