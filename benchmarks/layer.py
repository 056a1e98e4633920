"""One decoder layer's four projections with LoRA adapters: the library's paths beside its peers' kernels, in one run.

    python -m benchmarks.layer --tokens 16 256 2048 --adapters 1 32 --out /tmp/layer.json
    python -m benchmarks.layer --tokens 1 16 32 --adapters 1 8 32 --compute w8a8 w8a16 --out /tmp/decode.json
    python -m benchmarks.layer --tokens 64 256 --adapters 32 --rank 128 --batch mixed --out /tmp/mixed.json

Prints microseconds a layer (the four projections summed) and writes every figure with GPU, versions, commit and this
command's arguments.
Weights are rotated so that none comes from L2; ``--batch`` says whose the rows are (``benchmarks/batches.py``). Each
system's output is compared with fp64 before it is timed, its memory full of NaN when it starts. The whole measurement
of a projection is repeated; its mean counts, and the least and the most are kept as its spread. A tensor-parallel shard
is one rank's share, without communication.

The library's systems: ``bare`` has no adapters and ``none`` has them but no row uses one; ``auto`` takes the path that
the plan chooses, ``decode`` (up to 64 tokens), ``fused`` and ``hybrid`` are its paths; ``ours`` repeats the figure of
``auto`` or, where that was not measured, of the path that the plan takes. ``bare_codes``
and ``decode_codes`` are handed the activations' codes (W8A8). The peers', where installed: ``vllm_bare``, ``vllm_gemm``
(from codes), ``vllm``, ``vllm_tuned`` and ``sglang``, see ``benchmarks/peers.py``.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from benchmarks import batches, peers, sglang_part
from benchmarks.models import MODELS
from benchmarks.peers import Call
from benchmarks.timing import add_run_options, check_run_options, copies, environment, need_gpu, wrong
from tests.cases import Case, group_rows, make_case, oracle, sqnr
from torch_epilora.ops.dispatch import plan_of
from torch_epilora.ops.plan import DECODE_MAX_TOKENS
from torch_epilora.ops.timing import median_times

DEVICE = "cuda"
OURS = ("bare", "bare_codes", "none", "auto", "decode", "decode_codes", "fused", "hybrid")
NO_ADAPTER = {"bare", "bare_codes", "none", "vllm_bare", "vllm_gemm"}
LEAST_SQNR = 40.0


def with_codes(case: Case) -> Case | None:
    """The case with its activations' codes handed in, or None where there are none."""
    if case.compute != "w8a8":
        return None
    quantize = getattr(torch.ops.epilora, "quantize_fp8_group" if case.layout == "block" else "quantize_fp8_token")
    x_codes, x_scale = quantize(case.x)
    return replace(case, x_codes=x_codes, x_scale=x_scale)


def bound(op: str, case: Case, weights: list[Tensor]) -> list[Call]:
    """Calls of one of the library's operators, one a weight."""
    args = case.args()
    return [partial(getattr(torch.ops.epilora, op), *args[:3], weight, *args[4:]) for weight in weights]


def our_systems(case: Case, coded: Case | None, weights: list[Tensor]) -> dict[str, Callable[[], list[Call]]]:
    """What makes the calls of each of the library's systems that fit the case."""
    m, nobody = case.x.shape[0], [-1] * case.x.shape[0]
    without = {"a": [], "b": [], "rank": None, "scaling": None}
    idle = replace(case, groups=group_rows(nobody, case.a[0].shape[0], device=DEVICE))
    systems = {
        "bare": ("lora_linear", replace(case, **without)),
        "none": ("lora_linear", idle),
        "auto": ("lora_linear", case),
        "fused": ("lora_linear_fused", case),
        "hybrid": ("lora_linear_hybrid", case),
    }
    if m <= DECODE_MAX_TOKENS:
        systems["decode"] = ("lora_linear_decode", case)
    if coded is not None:
        systems["bare_codes"] = ("lora_linear", replace(coded, **without))
    if coded is not None and m <= DECODE_MAX_TOKENS:
        systems["decode_codes"] = ("lora_linear_decode", coded)
    return {name: partial(bound, op, call, weights) for name, (op, call) in systems.items()}


@contextmanager
def poisoned() -> Iterator[None]:
    """Within it new memory is full of NaN, so that no element which a kernel leaves unwritten passes for right."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check(
    systems: Mapping[str, Callable[[], list[Call]]], want: Tensor, base: Tensor
) -> tuple[dict[str, list[Call]], dict[str, float], dict[str, str]]:
    """Make every system's calls and compare the first with fp64.

    Returns the calls and decibels of the systems that may be timed, and why each of the others may not. What an
    operator of the library raises besides ValueError, its refusal of a case, ends the run; a peer's failure does not.
    """
    calls: dict[str, list[Call]] = {}
    db: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, make in systems.items():
        forgiven = Exception if name in peers.NAMES else ValueError
        try:
            made = make()
            with poisoned():
                got = made[0]()
        except forgiven as error:
            left_out[name] = f"{type(error).__name__}: {error}"[:300]
            continue
        quality = sqnr(got, base if name in NO_ADAPTER else want)
        if quality > LEAST_SQNR:
            calls[name], db[name] = made, round(quality, 1)
        else:
            left_out[name] = f"wrong: {quality:.1f} dB from fp64, expected over {LEAST_SQNR:.0f}"
    return calls, db, left_out


def measure(
    k: int, widths: list[int], m: int, slots: int, compute: str, options: argparse.Namespace
) -> tuple[list[dict], dict]:
    """Microseconds of every system on one projection, one dict a repeat; and what else is known about it."""
    case = make_case(
        m, k, widths, options.rank, slots, layout=options.layout, compute=compute, mixed_ranks=False, poison=False,
        bias=False, device=DEVICE,
    )  # fmt: skip
    batches.deal(case, options.batch)
    # make_case has a row of zeros, which vLLM's quantizer divides by its slow branch: real activations have none
    case.x.copy_(torch.randn_like(case.x))
    n = sum(widths)
    weights = [case.weight, *(case.weight[torch.randperm(n, device=DEVICE)] for _ in range(copies(n * k) - 1))]
    coded = with_codes(case)
    systems = our_systems(case, coded, weights) | peers.systems(case, coded, weights)
    calls, db, left_out = check(
        {name: systems[name] for name in options.systems if name in systems},
        oracle(case),
        oracle(replace(case, row_slots=[-1] * m)),
    )
    plan = plan_of(*case.args())
    rounds = {name: lambda copy, made=made: made[copy]() for name, made in calls.items()}
    repeats = [median_times(rounds, len(weights), case.x.device) for _ in range(options.repeat)]
    for times in repeats:
        ours = "auto" if "auto" in times else plan.path
        if ours in times:
            times["ours"] = times[ours]
    return repeats, {"sqnr": db, "path": plan.path, "base": plan.base, "left_out": left_out}


def summary(repeats: list[dict[str, float]], digits: int) -> dict[str, dict]:
    """Mean of the repeats by system, and their least and most."""
    samples = {name: [times[name] for times in repeats] for name in repeats[0]}
    return {
        "us": {name: round(fmean(values), digits) for name, values in samples.items()},
        "spread": {name: [round(min(values), digits), round(max(values), digits)] for name, values in samples.items()},
    }


def added(projections: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """The projections' times summed, repeat by repeat, for the systems that have a figure for every one of them."""
    systems = [name for name in projections[0][0] if all(name in repeats[0] for repeats in projections)]
    return [{name: sum(times[name] for times in part) for name in systems} for part in zip(*projections, strict=True)]


def layer_row(model: str, m: int, slots: int, compute: str, options: argparse.Namespace) -> dict:
    """One row of the results: a layer, and its projections."""
    repeats, projections = [], {}
    for name, (k, widths) in MODELS[model].items():
        samples, known = measure(k, widths, m, slots, compute, options)
        repeats.append(samples)
        projections[name] = {**summary(samples, 2), **known}
        torch.cuda.empty_cache()
    head = {"model": model, "tokens": m, "adapters": slots, "rank": options.rank}
    head |= {"layout": options.layout, "compute": compute, "batch": options.batch}
    return {**head, **summary(added(repeats), 1), "projections": projections}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; ``systems`` names only what can be measured here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b"], choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 2048])
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--batch", default="even", choices=batches.KINDS)
    parser.add_argument("--layout", default="channel", choices=["tensor", "channel", "block"])
    parser.add_argument("--compute", nargs="+", default=["w8a8"], choices=["w8a8", "w8a16"])
    parser.add_argument("--systems", nargs="+", choices=[*OURS, *peers.NAMES], help="default: all that fit a case")
    add_run_options(parser)
    options = parser.parse_args(arguments)
    check_run_options(parser, options)
    here = [*OURS, *peers.installed()]
    needs = {
        name: f"{name} needs vLLM installed" + (f", and {peers.VARIABLES[name]} set" if name in peers.VARIABLES else "")
        for name in options.systems or here
        if name not in here
    }
    if needs:
        parser.error(f"--systems: {'; '.join(needs.values())}")
    options.systems = options.systems or here
    return options


def write(path: Path, sources: dict, rows: list[dict]) -> None:
    """Write a result file, one row a line."""
    lines = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    path.write_text(f'{{"environment": {json.dumps(sources)},\n"rows": [\n{lines}\n]}}\n')


def main() -> None:
    options = parse()
    need_gpu()
    sources = {**environment(), "sglang": sglang_part.release()}
    rows, failed = [], False
    for model, m, slots, compute in product(options.models, options.tokens, options.adapters, options.compute):
        if slots > m:
            continue
        start = time.perf_counter()
        row = layer_row(model, m, slots, compute, options)
        rows.append(row)
        took = f"in {time.perf_counter() - start:.0f} s"
        print(model, m, slots, options.rank, compute, row["us"], took, flush=True)
        for name, projection in row["projections"].items():
            failed |= wrong(name, projection["left_out"])
        if options.out:  # after every row, so that a run cut short keeps what it has
            write(options.out, sources, rows)
    if failed:
        sys.exit("a system's output was wrong, so it was not timed: see above")


if __name__ == "__main__":
    main()
