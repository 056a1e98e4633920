"""Result files as Markdown: what the sections of docs/performance.md share."""

import json
from collections.abc import Sequence
from pathlib import Path


def read(path: Path) -> tuple[dict, list[dict]]:
    """A result file's environment and rows."""
    result = json.loads(path.read_text())
    return result["environment"], result["rows"]


def source(path: Path, env: dict) -> str:
    """Where a table's figures were measured, and their file."""
    peers = "".join(f" {name} {env[key]}," for name, key in (("vLLM", "vllm"), ("SGLang", "sglang")) if env.get(key))
    where = f"{env['gpu']}, torch {env['torch']}, Triton {env['triton']},{peers} commit `{env['commit']}`."
    return f"{where}\n`benchmarks/results/{path.parent.name}/{path.name}`"


def markdown(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [heading, *rows]
    head, *body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([head, "|---" * len(heading) + "|", *body])


def measured(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table without the columns that have no figure in any row."""
    keep = [i for i in range(len(heading)) if any(row[i] != "-" for row in rows)]
    return markdown([heading[i] for i in keep], [[row[i] for i in keep] for row in rows])


def cell(value: float | None, digits: int) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def over_bare(us: dict, system: str) -> float | None:
    """A system's time over the faster bare layer's, where it was measured."""
    return us[system] / min(us[bare] for bare in ("bare", "vllm_bare") if bare in us) if system in us else None
