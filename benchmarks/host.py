"""Host time of eager calls: what the CPU spends to launch one layer's four projections (EpiLoRA, Table 26).

    python -m benchmarks.host --tokens 16 512 2048 --adapters 8 --out /tmp/host.json

Prints microseconds a layer. The GPU is kept busy while calls are queued behind it, so that only the host's time is
counted: Python, the operator's checks and plan, allocations and launches. ``ours`` is ``lora_linear``; ``triton`` the
same with every launch through Triton's own launcher; ``vllm`` is vLLM's quantizer, GEMM, shrink and expand,
``vllm_bare`` its quantizer and GEMM. All run in inference mode, as engines do. Systems take turns; medians of rounds.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from unittest import mock

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.layer import DEVICE, write
from benchmarks.models import MODELS
from benchmarks.timing import check_out, environment, need_gpu
from tests.cases import make_case
from torch_epilora.ops.triton import launch

CALLS, ROUNDS = 20, 9
BUSY_CYCLES = 40_000_000
"""How long the GPU sleeps before each round: 20 milliseconds, longer than any round takes to queue."""


def host_time(call: Callable[[], Tensor]) -> float:
    """Microseconds of host time a call, the GPU being busy."""
    torch.cuda.synchronize()
    torch.cuda._sleep(BUSY_CYCLES)
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * taken / CALLS


def projection(k: int, widths: list[int], m: int, slots: int, rank: int) -> dict[str, float]:
    """Host time of every system on one projection."""
    case = make_case(m, k, widths, rank, slots, mixed_ranks=False, poison=False, bias=False, device=DEVICE)
    systems = {"ours": case.run, "triton": case.run}
    made = peers.systems(case, None, [case.weight])
    systems |= {name: made[name]()[0] for name in ("vllm_bare", "vllm") if name in made}
    for call in systems.values():
        call()
        call()
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in range(ROUNDS):
        for name, call in systems.items():
            # a watched launch is Triton's own
            with mock.patch.object(launch, "_watched", (lambda: True) if name == "triton" else launch._watched):
                times[name].append(host_time(call))
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b", choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[16, 512, 2048])
    parser.add_argument("--adapters", nargs="+", type=int, default=[8])
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    check_out(parser, options.out)
    need_gpu()
    rows = []
    for m, slots in product(options.tokens, options.adapters):
        with torch.inference_mode():
            parts = {
                name: projection(k, widths, m, slots, options.rank)
                for name, (k, widths) in MODELS[options.model].items()
            }
        systems = next(iter(parts.values()))
        us = {system: round(sum(part[system] for part in parts.values()), 1) for system in systems}
        parts = {name: {system: round(value, 1) for system, value in part.items()} for name, part in parts.items()}
        rows.append(
            {
                "model": options.model,
                "tokens": m,
                "adapters": slots,
                "rank": options.rank,
                "us": us,
                "projections": parts,
            }
        )
        print(options.model, m, slots, us, flush=True)
    if options.out:
        write(options.out, environment(), rows)


if __name__ == "__main__":
    main()
