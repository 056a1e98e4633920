"""Write docs/performance.md and its figures from result files: ``python -m benchmarks.report``.

Every figure of the page is read from a JSON under benchmarks/results; a test compares the page with what this writes.
``layer_*.json`` and ``decode_*.json`` are of ``benchmarks.layer``, the latter with the decode path's columns;
``tenants.json``, ``large.json``, ``choices.json``, ``overhead.json``, ``exposure.json``, ``profile.json``,
``host.json``, ``training.json``, ``finetune.json`` and ``model_training*.json`` are of the benchmarks of those names,
``engine_*.json`` of ``benchmarks.engine``. A file that is not there leaves its section out. Drawing a figure takes
matplotlib.
"""

import argparse
from pathlib import Path

from benchmarks import figure, report_decode, report_engine, report_tenants, report_training
from benchmarks.tables import markdown, read, source

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h200"
PAGE = ROOT / "docs" / "performance.md"
INTRO = """# First figures

<!-- written by `python -m benchmarks.report` from benchmarks/results; edit that, not this -->

Time of one decoder layer's four linear projections with LoRA adapters, in microseconds, on one GPU: this library beside
its peers' kernels in the same run. *Bare* is the layer without adapters, activations quantized by each side (W8A8;
vLLM's W8A16 is Marlin). *Decode* (up to 64 tokens), *fused* and *hybrid* are the CUDA paths, *chosen* the one that the
plan took. *vLLM LoRA* is vLLM's base with its LoRA kernels in their default launch configurations, as they ship;
*SGLang LoRA* is vLLM's base with SGLang's planned LoRA runner, on its tuned plans. Each row's tokens are spread evenly
over its adapters. Every system's output was compared with fp64 before it was timed (over 40 dB, or no figure). CUDA
graphs, weights rotated so that none comes from L2, medians of interleaved rounds; a file with a spread holds the mean
of several such medians. A dash: not measured, or not a case of that path. The script is `benchmarks/layer.py`; the log
of what was tried is `benchmarks/NOTES.md`.

The tables of `layer_block.json`, `layer_tensor.json` and `layer_w8a16.json` are from before the decode path and before
the paths of larger batches that the table by channel shows: their *chosen* is not what the plan takes now, and few
tokens under W8A16 are slower there than vLLM's Marlin. In the table by channel *chosen* takes each projection's own
path, so it can be less than both; it is that of the rules, from before plans were measured (many tenants, below). The
decode path's own tables are further down.
"""


COLUMNS = {
    "bare": "bare",
    "vLLM bare": "vllm_bare",
    "decode": "decode",
    "fused": "fused",
    "hybrid": "hybrid",
    "chosen": "ours",
    "vLLM LoRA": "vllm",
    "SGLang LoRA": "sglang",
}
RATIOS = {"chosen / vLLM": "vllm", "chosen / SGLang": "sglang"}
FIGURES = {
    "exposure.json": (figure.draw_exposure, report_decode.FIGURE),
    "tenants.json": (figure.draw_tenants, report_tenants.FIGURE),
    "finetune.json": (figure.draw_finetune, report_training.FIGURE),
}
"""Result files that have a figure, what draws it, and its place beside the page."""


def cells(row: dict) -> list[str]:
    """One row of the table; a dash where the row has no such figure."""
    us = row["us"]
    times = [f"{us[system]:.0f}" if system in us else "-" for system in COLUMNS.values()]
    ratios = [f"{us['ours'] / us[system]:.2f}" if "ours" in us and system in us else "-" for system in RATIOS.values()]
    return [*(str(row[key]) for key in ("model", "rank", "tokens", "adapters")), *times, *ratios]


def table(path: Path) -> str:
    """One result file as a heading and a Markdown table."""
    env, rows = read(path)
    first = rows[0]
    models = sorted({row["model"] for row in rows})
    ranks = sorted({row["rank"] for row in rows})
    title = f"{first['compute'].upper()}, scales per {first['layout']}, {', '.join(models)}"
    heading = ["model", "rank", "tokens", "adapters", *COLUMNS, *RATIOS]
    return "\n\n".join(
        [
            f"## {title}, rank {', '.join(map(str, ranks))}",
            source(path, env),
            markdown(heading, [cells(row) for row in rows]),
        ]
    )


def page(results: Path = RESULTS) -> str:
    """The whole page, for the result files that are there."""
    layers = [table(path) for path in sorted(results.glob("layer_*.json"))]
    rest = [
        *report_tenants.sections(results), *report_decode.sections(results), *report_engine.sections(results),
        *report_training.sections(results),
    ]  # fmt: skip
    return "\n\n".join([INTRO.rstrip(), *layers, *rest]) + "\n"


def main(results: Path = RESULTS, target: Path = PAGE) -> None:
    """Write the page and its figures."""
    target.write_text(page(results))
    for name, (draw, drawn) in FIGURES.items():
        if (results / name).exists():
            draw(results / name, target.parent / drawn)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; there are no options, but ``--help`` must not write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    parse()
    main()
