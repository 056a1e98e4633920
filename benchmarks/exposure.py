"""How much of the shrink stays exposed on the decode path (EpiLoRA Figure 5, Table 17), projection by projection.

    python -m benchmarks.exposure --out /tmp/exposure.json

If programs that run beside each other hide the shrink, a projection takes no longer with it than with its result given.
``exposed`` is that difference, codes - h_given, in microseconds; ``shrink`` is the operator alone, and ``gemm``, the
same kernel without adapters, is the window in which it can hide. Variants as in ``benchmarks/overhead.py``.
"""

import argparse
import time

import torch

from benchmarks import layer
from benchmarks.models import MODELS
from benchmarks.overhead import add_options, checked_options, compile_all, conclude, measure
from benchmarks.timing import environment, need_gpu, wrong

VARIANTS = ("codes", "h_given", "gemm", "shrink")
SHAPES = ["qwen3-8b", "qwen3-8b-tp2", "qwen3-8b-tp4", "qwen3-8b-tp8", "qwen3-0.6b", "qwen3-1.7b"]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=SHAPES, choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1])
    add_options(parser)
    return checked_options(parser, arguments)


def points(options: argparse.Namespace) -> list[tuple[str, str, int, int]]:
    """Model, projection, tokens and rank of each measurement."""
    return [
        (model, name, m, rank)
        for model in options.models
        for m in options.tokens
        for rank in options.ranks
        for name in options.projections
    ]


def main() -> None:
    options = parse()
    need_gpu()
    sources, started = environment(), time.perf_counter()
    jobs = [(*MODELS[model][name], m, rank, VARIANTS) for model, name, m, rank in points(options)]
    compile_all(jobs, options.processes)
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    rows, failed = [], False
    for model, name, m, rank in points(options):
        k, widths = MODELS[model][name]
        samples, known = measure(k, widths, m, rank, VARIANTS, options.repeat)
        head = {"model": model, "projection": name, "k": k, "n": sum(widths), "slices": len(widths)}
        rows.append({**head, "tokens": m, "adapters": 1, "rank": rank, **layer.summary(samples, 2), **known})
        print(model, name, m, rank, rows[-1]["us"], flush=True)
        failed |= wrong(name, known["left_out"])
        torch.cuda.empty_cache()
        if options.out:  # after every row, so that a run cut short keeps what it has
            layer.write(options.out, sources, rows)
    conclude(started, failed)


if __name__ == "__main__":
    main()
