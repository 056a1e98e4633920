"""Many tenants and large batches beside the peers, in one run (EpiLoRA Tables 14 and 15, Figure 11).

    python -m benchmarks.tenants --out /tmp/tenants.json

A layer of Qwen3-8B from x alone: batches of 64 to 2,048 tokens spread evenly over 1 to 32 adapters, then uneven ones (a
few adapters with most rows, one with half of them, ranks 8 to 128 in one batch), and the even ones of Llama-3.1-8B.
Measures what ``benchmarks.layer`` does with ``auto`` for the library, prints the ratio to the fastest of vLLM's LoRA
kernels, the same tuned (``benchmarks.tune_vllm``) and SGLang's runner, and writes rows as it does.
"""

import argparse
import time

from benchmarks import layer, peers, sglang_part
from benchmarks.overhead import conclude
from benchmarks.timing import add_run_options, check_run_options, environment, need_gpu, wrong

SIZES = [
    (64, 1), (64, 8), (64, 32), (256, 1), (256, 8), (256, 32), (512, 1), (512, 32), (1024, 32), (2048, 1), (2048, 32),
]  # fmt: skip
"""Tokens and adapters."""
UNEVEN = [("zipf", 64), ("half", 64), ("mixed", 128)]
"""Kinds of batches and the rank of their slots, measured at 64 and 256 tokens of 32 adapters."""
OURS = ("bare", "auto")
PEERS = ("vllm", "vllm_tuned", "sglang")


def points() -> list[tuple[str, int, int, str, int]]:
    """(model, tokens, adapters, kind of batch, rank) of every row."""
    even = [(model, *size, "even", 64) for model in ("qwen3-8b", "llama-3.1-8b") for size in SIZES]
    return [*even, *(("qwen3-8b", m, 32, kind, rank) for kind, rank in UNEVEN for m in (64, 256))]


def systems() -> list[str]:
    """What is measured of a layer: the library, and the peers that are installed."""
    return [*OURS, *(name for name in peers.installed() if name in ("vllm_bare", *PEERS))]


def ratio(us: dict[str, float]) -> float | None:
    """The library's time over the fastest peer's, or None where either is missing."""
    times = [us[name] for name in PEERS if name in us]
    return us["ours"] / min(times) if times and "ours" in us else None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser)
    given = parser.parse_args(arguments)
    check_run_options(parser, given)
    need_gpu()
    sources, started = {**environment(), "sglang": sglang_part.release()}, time.perf_counter()
    rows, failed = [], False
    for model, tokens, adapters, kind, rank in points():
        options = argparse.Namespace(rank=rank, batch=kind, layout="channel", systems=systems(), repeat=given.repeat)
        row = layer.layer_row(model, tokens, adapters, "w8a8", options)
        rows.append(row)
        over = ratio(row["us"])
        print(model, tokens, adapters, kind, rank, row["us"], "-" if over is None else f"{over:.2f}", flush=True)
        for name, projection in row["projections"].items():
            failed |= wrong(name, projection["left_out"])
        if given.out:
            layer.write(given.out, sources, rows)
    conclude(started, failed)


if __name__ == "__main__":
    main()
