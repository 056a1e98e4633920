"""Prefill beside the peers, and the shrink alone beside vLLM's, in one run (what EpiLoRA Table 27 asks).

    python -m benchmarks.large --out /tmp/large.json

A layer of Qwen3-8B, rank 64, 2,048 to 16,384 tokens spread evenly over 1, 8 and 32 adapters. Measures the layer as
``benchmarks.tenants`` does, then the shrink of its four projections by itself: ``ours`` is K1 with the layer's tiles,
``vllm`` is ``lora_shrink`` in its default launch configuration, which clears its h first. Nothing runs beside them, x
and A are rotated so that neither comes from L2, and every scaling is one, as vLLM has it in B. Each shrink is compared
with fp64 before it is timed.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch
from torch import Tensor

from benchmarks import batches, layer, peers, sglang_part, tenants
from benchmarks.models import MODELS
from benchmarks.overhead import conclude, h_oracle
from benchmarks.peers import Call
from benchmarks.timing import add_run_options, check_run_options, copies, environment, need_gpu, wrong
from tests.cases import Case, make_case
from torch_epilora.ops.dispatch import plan_of
from torch_epilora.ops.timing import median_times
from torch_epilora.ops.triton.shrink import shrink

MODEL, RANK = "qwen3-8b", 64
TOKENS = (2048, 4096, 8192, 16384)
ADAPTERS = (1, 8, 32)
Operands = list[tuple[Tensor, list[Tensor]]]
"""Copies of what a shrink reads: x, and every slice's A."""


def our_shrinks(case: Case, operands: Operands) -> list[Call]:
    """K1 as the layer launches it, without what runs beside it there."""
    tiles = plan_of(*case.args()).shrink
    return [partial(shrink, x, a, case.rank, case.scaling, case.groups, tiles) for x, a in operands]


def shrinks(case: Case, operands: Operands) -> dict[str, Callable[[], list[Call]]]:
    """What makes the calls of each shrink that can be measured here."""
    systems = {"ours": partial(our_shrinks, case, operands)}
    if "vllm" in peers.installed():
        systems["vllm"] = partial(peers.vllm_shrinks, case, operands)
    return systems


def measure(k: int, widths: list[int], m: int, slots: int, repeat: int) -> tuple[list[dict], dict]:
    """Microseconds of each shrink on one projection, one dict a repeat; and what else is known about it."""
    case = make_case(m, k, widths, RANK, slots, mixed_ranks=False, poison=False, bias=False, device=layer.DEVICE)
    batches.deal(case, "even")
    case.scaling.fill_(1)
    size = sum(t.nbytes for t in (case.x, *case.a))
    operands = [(case.x.clone(), [a.clone() for a in case.a]) for _ in range(copies(size))]
    want = h_oracle(case)
    calls, db, left_out = layer.check(shrinks(case, operands), want, want)
    rounds = {name: lambda copy, made=made: made[copy]() for name, made in calls.items()}
    repeats = [median_times(rounds, len(operands), case.x.device) for _ in range(repeat)]
    return repeats, {"sqnr": db, "left_out": left_out}


def shrink_row(m: int, slots: int, repeat: int) -> dict:
    """The shrink's part of a row: a layer's, and its projections'."""
    repeats, projections = [], {}
    for name, (k, widths) in MODELS[MODEL].items():
        samples, known = measure(k, widths, m, slots, repeat)
        repeats.append(samples)
        projections[name] = {**layer.summary(samples, 2), **known}
        torch.cuda.empty_cache()
    return {**layer.summary(layer.added(repeats), 1), "projections": projections}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_run_options(parser)
    given = parser.parse_args(arguments)
    check_run_options(parser, given)
    need_gpu()
    options = argparse.Namespace(
        rank=RANK, batch="even", layout="channel", systems=tenants.systems(), repeat=given.repeat
    )
    sources, started = {**environment(), "sglang": sglang_part.release()}, time.perf_counter()
    rows, failed = [], False
    for tokens, adapters in product(TOKENS, ADAPTERS):
        row = layer.layer_row(MODEL, tokens, adapters, "w8a8", options)
        row["shrink"] = shrink_row(tokens, adapters, given.repeat)
        rows.append(row)
        print(tokens, adapters, row["us"], "shrink", row["shrink"]["us"], flush=True)
        for what, part in (("", row), (", shrink", row["shrink"])):
            for name, projection in part["projections"].items():
                failed |= wrong(name + what, projection["left_out"])
        if given.out:  # after every row, so that a run cut short keeps what it has
            layer.write(given.out, sources, rows)
    conclude(started, failed)


if __name__ == "__main__":
    main()
