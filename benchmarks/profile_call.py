"""What the GPU runs for eager calls of ``lora_linear`` on the decode path: one call, and two in a row.

    python -m benchmarks.profile_call --out /tmp/profile.json

Prints every GPU event between the calls' first and last, with its start, its duration and whether it began before the
one before it had ended, and checks what the documentation says: each call is one kernel, nothing is cleared or copied,
and where programmatic launch works a call starts while the one before it ends. A kernel that spins lets the host queue
both calls before the first of them starts; it is not listed.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks import layer
from benchmarks.models import MODELS
from benchmarks.timing import check_out, environment, need_gpu
from tests.cases import Case, make_case
from torch_epilora.ops.dispatch import plan_of
from torch_epilora.ops.plan import DECODE_MAX_TOKENS
from torch_epilora.ops.triton.pdl import pdl_works

SPIN_CYCLES = 4_000_000
"""About 2 ms: longer than the host takes for two calls under the profiler."""


def listed(spans: list[tuple[str, float, float]]) -> list[dict]:
    """Events from (name, start, end) in microseconds, in order of start and counted from the first."""
    events: list[dict] = []
    ended = float("-inf")
    spans = sorted(spans, key=lambda span: span[1])
    for name, start, end in spans:
        times = {"start_us": round(start - spans[0][1], 3), "us": round(end - start, 3)}
        events.append({"name": name, **times, "overlaps": start < ended})
        ended = max(ended, end)
    return events


def verify(events: list[dict], calls: int, pdl: bool) -> None:
    """Raise ValueError if the events are not what the documentation says of so many calls."""
    names = [event["name"] for event in events]
    if names != ["decode_kernel"] * calls:
        raise ValueError(f"events: expected one decode_kernel for each of {calls} calls, but the GPU ran {names}")
    apart = [event for event in events[1:] if not event["overlaps"]]
    if pdl and apart:
        raise ValueError(f"events: expected calls that overlap where programmatic launch works, but came {events}")


def record(call: Callable[[], object], calls: int) -> list[dict]:
    """The GPU events of some calls in a row."""
    call()  # compiles and makes what a stream keeps
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        torch.cuda._sleep(SPIN_CYCLES)
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == DeviceType.CUDA and "spin" not in event.name
    ]
    return listed(spans)


def one_case(projection: str, m: int, slots: int, rank: int) -> Case:
    """A Qwen3-8B projection from x alone, its rows spread over the adapters."""
    k, widths = MODELS["qwen3-8b"][projection]
    case = make_case(
        m, k, widths, rank, slots, popularity="distinct", mixed_ranks=False, poison=False, bias=False, device="cuda"
    )
    path = plan_of(*case.args()).path
    if path != "decode":
        raise ValueError(f"--tokens, --adapters, --rank: expected a call of the decode path, but its plan is {path!r}")
    return case


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--projections", nargs="+", default=["qkv", "down"], choices=list(MODELS["qwen3-8b"]))
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if not 1 <= options.tokens <= DECODE_MAX_TOKENS:
        parser.error(f"--tokens: expected 1 to {DECODE_MAX_TOKENS}, the decode path's, but {options.tokens} came")
    check_out(parser, options.out)
    return options


def main() -> None:
    options = parse()
    need_gpu()
    pdl, rows = pdl_works(torch.device("cuda", torch.cuda.current_device())), []
    for projection in options.projections:
        for slots in options.adapters:
            case = one_case(projection, options.tokens, slots, options.rank)
            for calls in (1, 2):
                events = record(case.run, calls)
                head = {"model": "qwen3-8b", "projection": projection, "tokens": options.tokens, "adapters": slots}
                rows.append({**head, "rank": options.rank, "calls": calls, "pdl": pdl, "events": events})
                print(projection, f"{options.tokens} tokens, {slots} adapters, {calls} calls:")
                for event in events:
                    late = "before the one before it ended" if event["overlaps"] else ""
                    print(f"  {event['start_us']:9.3f} us  {event['us']:9.3f} us  {event['name']} {late}")
    if options.out:
        layer.write(options.out, environment(), rows)
    for row in rows:
        verify(row["events"], row["calls"], pdl)


if __name__ == "__main__":
    main()
