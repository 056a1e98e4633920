"""The section of vLLM engines in docs/performance.md: what ``engine_*.json`` say."""

from pathlib import Path
from statistics import median

from benchmarks.tables import cell, measured, read, source

ENGINES = """## vLLM engines

Whole engines with the plugin and without it (`benchmarks/engine.py`): milliseconds a token of one request, and a step
of 32 requests that take the adapters in turn, medians; the seconds from `LLM(...)` to ready with empty caches; the
tokens that the KV cache holds. *Base* is vLLM without LoRA, and ratios are to rows of the same file. Launches are those
of a step of one request, as `torch.profiler` counts them. qwen3-8b has dummy weights and random adapters, under vLLM's
`fp8` (scales per tensor); SmolLM2-135M is a checkpoint that this library wrote (scales per channel), with the adapters
of the demo. *Same again* is whether the same requests got the same bits twice; a file whose engines all answered alike,
as dummy weights had it at commit 33ae326, does not tell. Each start was measured once; engines
that were started together have no such figures. A system that a file's command
names and that has no row was cut off by the time limit of its run."""

APART = """### What engines answer

How far log-probabilities are from those of vLLM's LoRA, mean and most: of a token that each step is made to choose, in
the first step and in later ones, and of freely chosen ones until two differ; and the share of equal tokens. Prompts
are questions, but random tokens at commit 33ae326; after those, right implementations of one model are that far apart
(the log in `benchmarks/NOTES.md`)."""

NAMES = {
    "base": "base",
    "vllm": "vLLM LoRA",
    "vllm_dual": "vLLM LoRA, dual stream",
    "vllm_torch": "vLLM LoRA, PyTorch's product",
    "ours": "plugin",
    "ours_w8a16": "plugin, W8A16",
}
OURS = ("decode_kernel", "shrink_kernel", "expand_kernel", "tma_kernel", "linear_kernel")
VLLMS = ("_lora_shrink_kernel", "_lora_expand_kernel")
MEASURES = ("first", "later", "free")


def time_of(rows: list[dict], system: str, slots: int, kind: str) -> float | None:
    """The median of an engine's times, if it was measured."""
    found = [median(row[kind]) for row in rows if (row["system"], row["slots"]) == (system, slots) and kind in row]
    return found[0] if found else None


def over(value: float | None, other: float | None) -> str:
    """A ratio, or a dash."""
    return cell(None if value is None or other is None else value / other, 2)


def launches(row: dict, names: tuple[str, ...]) -> str:
    """Launches a step of kernels with these names; an engine without any has 0."""
    if "launches" not in row:
        return "-"
    return f"{sum(count for name, count in row['launches'].items() if name in names):.0f}"


def engines(rows: list[dict]) -> str:
    """Times, start and memory."""
    heading = ["model", "slots", "engine", "ms a token", "/ base", "/ vLLM LoRA", "ms a step of 32", "32 / base",
               "32 / vLLM LoRA", "start, s", "KV tokens", "KV / vLLM LoRA", "our launches", "vLLM's LoRA launches",
               "same again"]  # fmt: skip
    table, told = [], any(row.get("differs", {}).get("later_most") for row in rows)
    for row in (row for row in rows if "error" not in row):
        slots = row["slots"]
        one, many = (time_of(rows, row["system"], slots, kind) for kind in ("one_ms", "many_ms"))
        ratios = [
            over(time, time_of(rows, system, 0 if system == "base" else slots, kind))
            for time, kind in ((one, "one_ms"), (many, "many_ms"))
            for system in ("base", "vllm")
        ]
        held = [other.get("kv_tokens") for other in rows if (other["system"], other["slots"]) == ("vllm", slots)]
        table.append(
            [row["model"], str(slots), NAMES[row["system"]], cell(one, 2), *ratios[:2], cell(many, 2), *ratios[2:],
             cell(row.get("start_s"), 0), str(row.get("kv_tokens", "-")),
             over(row.get("kv_tokens"), held[0] if held else None),
             launches(row, OURS), launches(row, VLLMS), "-" if not told else "yes" if row["same_again"] else "no"]
        )  # fmt: skip
    return measured(heading, table)


def apart(rows: list[dict]) -> str | None:
    """Differences between answers, where they say anything: dummy weights once gave all tokens alike."""
    told = [row for row in rows if row.get("differs", {}).get("later_most")]
    if not told:
        return None
    heading = ["model", "slots", "engine", *(f"{m} {k}" for m in MEASURES for k in ("mean", "most")), "equal tokens"]
    table = [
        [row["model"], str(row["slots"]), NAMES[row["system"]],
         *(cell(row["differs"].get(f"{m}_{k}"), 3) for m in MEASURES for k in ("mean", "most")),
         cell(row["differs"]["same_tokens"], 2)]
        for row in told
    ]  # fmt: skip
    return measured(heading, table)


def sections(results: Path) -> list[str]:
    """The section, if there is a file for it."""
    files = [(path, *read(path)) for path in sorted(results.glob("engine_*.json"))]
    if not files:
        return []
    parts = [ENGINES]
    for path, env, rows in files:
        parts += [source(path, env), engines(rows)]
    differences = [(path, found) for path, _, rows in files if (found := apart(rows)) is not None]
    if differences:
        parts += [APART, *(f"`{path.name}`\n\n{found}" for path, found in differences)]
    return ["\n\n".join(parts)]
