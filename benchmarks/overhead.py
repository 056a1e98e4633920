"""Where a decode layer's time goes (EpiLoRA Tables 11 to 13): the decode kernel with one part after another left out.

    python -m benchmarks.overhead --tokens 1 4 8 16 --ranks 16 64 128 --out /tmp/overhead.json

One adapter, W8A8, scales per channel, microseconds a projection and summed over the layer. All variants take turns in
one measurement, on rotated weights and adapters, so that every byte comes from memory; each was compared with fp64.

``x``: decode from x alone. ``codes``: x's codes handed in; ``codes_nopdl``: the same without programmatic launch.
``h_given``: the shrink's result too, a lower bound for any overlap. ``gemm``: the same kernel without adapters, from
codes. ``serial``: the shrink operator, then ``h_given``; ``empty``: a kernel that does nothing, then ``h_given``.
``shrink``: the shrink operator alone (it clears h, makes partial sums and adds them: three kernels). ``vllm_gemm``:
CUTLASS from codes, where vLLM is installed. ``read``: a kernel that only reads as many bytes as a call moves.
Of those, ``epilogue`` is h_given - gemm, ``exposed`` codes - h_given, ``adapter`` codes - gemm and ``quantization``
x - codes.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
import triton
from torch import Tensor

from benchmarks import layer, peers
from benchmarks.models import MODELS
from benchmarks.peers import Call
from benchmarks.read_rate import read_us
from benchmarks.timing import add_run_options, check_run_options, copies, environment, need_gpu, wrong
from tests.cases import Case, make_case, oracle
from torch_epilora.ops.dispatch import plan_of
from torch_epilora.ops.plan import DECODE_MAX_RANK, DECODE_MAX_TOKENS
from torch_epilora.ops.timing import median_times
from torch_epilora.ops.triton import quantize as q
from torch_epilora.ops.triton.decode import decode
from torch_epilora.ops.triton.pdl import pdl_works

VARIANTS = ("x", "codes", "codes_nopdl", "h_given", "gemm", "serial", "empty", "shrink", "vllm_gemm")
NO_ADAPTER = {"gemm", "vllm_gemm"}
DIFFERENCES = {
    "epilogue": ("h_given", "gemm"),
    "exposed": ("codes", "h_given"),
    "adapter": ("codes", "gemm"),
    "quantization": ("x", "codes"),
}
RATIOS = {
    "gemm / CUTLASS": ("gemm", "vllm_gemm"),
    "serial / codes": ("serial", "codes"),
    "read / x": ("read", "x"),
    "read / codes": ("read", "codes"),
}
Operands = tuple[Tensor, list[Tensor], list[Tensor]]
"""What is rotated: a weight, and its layer's A and B."""


@triton.jit
def empty_kernel():
    """Nothing: what remains is a launch."""
    pass


def after(before: Callable[[], object], then: Call) -> Tensor:
    """Launch ``before``, then make ``then``'s result."""
    before()
    return then()


def bare(case: Case) -> Case:
    """The case without its adapters."""
    return replace(case, a=[], b=[], rank=None, scaling=None, row_slots=[-1] * len(case.row_slots))


def bound(case: Case, operands: Operands, *, without_shrink: bool = False, **options) -> Call:
    """A call of the decode kernel with its plan's tiles, making codes where the case hands none in.

    A call without shrink waits for h; its kernel does not compile for splits, whose partial sums it has no memory for.
    """
    weight, a, b = operands
    made = case.x_codes is None
    tiles = plan_of(*case.args()).decode
    if without_shrink:
        tiles = replace(tiles, split_k=1)
    return partial(
        decode, case.x, case.x_codes, case.x_scale, weight, case.weight_scale, None, case.layout,
        tiles, quantize=q.TOKEN if made else -1, a=a if case.a else [], b=b,
        rank=case.rank, scaling=case.scaling, groups=case.groups, **options,
    )  # fmt: skip


def shrink_of(case: Case, a: list[Tensor]) -> Tensor:
    """The shrink operator by itself."""
    return torch.ops.epilora.shrink(case.x, a, case.rank, case.scaling, *case.groups[:4])


def our_variants(case: Case, coded: Case, rotated: list[Operands], pdl: bool) -> dict[str, list[Call]]:
    """The library's variants: calls, one a copy of the operands."""
    h = shrink_of(case, case.a)
    codes = [bound(coded, operands, pdl=pdl) for operands in rotated]
    from_h = [bound(coded, operands, without_shrink=True, pdl=pdl) for operands in rotated]
    given = [partial(call, h=h) for call in from_h]
    shrinks = [partial(shrink_of, case, a) for _, a, _ in rotated]
    return {
        "x": [bound(case, operands, pdl=pdl) for operands in rotated],
        "codes": codes,
        "codes_nopdl": [bound(coded, operands, pdl=False) for operands in rotated],
        "h_given": given,
        "gemm": [bound(bare(coded), operands, pdl=pdl) for operands in rotated],
        "serial": [
            lambda call=call, shrink=shrink: call(h=shrink()) for call, shrink in zip(from_h, shrinks, strict=True)
        ],
        "empty": [partial(after, lambda: empty_kernel[(1,)](), call) for call in given],
        "shrink": shrinks,
    }


def h_oracle(case: Case) -> Tensor:
    """The shrink in fp64, [M, slices, R], of rows that all have an adapter."""
    x, slots = case.x.double(), torch.tensor(case.row_slots, device=case.x.device)
    h = x.new_empty(len(x), len(case.a), case.a[0].shape[1])
    for slot in set(case.row_slots):
        rows = slots == slot
        for i, a in enumerate(case.a):
            h[rows, i] = case.scaling[i, slot].double() * (x[rows] @ a[slot].double().t())
    return h


def one_adapter(k: int, widths: list[int], m: int, rank: int, device: str = "cuda") -> tuple[Case, Case | None]:
    """A projection with one adapter on every row, from x and from x's codes."""
    case = make_case(
        m, k, widths, rank, 1, popularity="one", mixed_ranks=False, poison=False, bias=False, device=device
    )  # fmt: skip
    return case, layer.with_codes(case)


def size_of(case: Case) -> int:
    """Bytes that a call has to move: weight and scales, A, B, x and y."""
    y = case.x.shape[0] * case.weight.shape[0] * case.x.element_size()
    return y + sum(t.numel() * t.element_size() for t in (case.weight, case.weight_scale, case.x, *case.a, *case.b))


def differences(us: dict[str, float]) -> dict[str, float]:
    """What each part costs, in microseconds, where both of its variants were measured."""
    return {name: us[more] - us[less] for name, (more, less) in DIFFERENCES.items() if more in us and less in us}


def ratios(us: dict[str, float]) -> dict[str, float]:
    """Ratios of the variants that were measured."""
    return {name: round(us[one] / us[two], 3) for name, (one, two) in RATIOS.items() if one in us and two in us}


def checked(case: Case, calls: dict[str, list[Call]]) -> tuple[dict[str, list[Call]], dict, dict]:
    """The variants whose first call agrees with fp64, their decibels, and why others do not count."""
    want, base, h = oracle(case), oracle(bare(case)), h_oracle(case)
    right: dict[str, list[Call]] = {}
    db: dict[str, float] = {}
    left_out: dict[str, str] = {}
    for name, made in calls.items():
        expected = h if name == "shrink" else base if name in NO_ADAPTER else want
        found = layer.check({name: lambda made=made: made}, expected, expected)
        for known, new in zip((right, db, left_out), found, strict=True):
            known.update(new)
    return right, db, left_out


def measure(k: int, widths: list[int], m: int, rank: int, names: Iterable[str], repeat: int) -> tuple[list[dict], dict]:
    """Microseconds of the named variants on one projection, one dict a repeat; and what else is known about it."""
    case, coded = one_adapter(k, widths, m, rank)
    n = sum(widths)
    rotated = [(case.weight, case.a, case.b)]
    for _ in range(copies(n * k) - 1):
        weight = case.weight[torch.randperm(n, device=case.x.device)]
        rotated.append((weight, [t.clone() for t in case.a], [t.clone() for t in case.b]))
    calls = our_variants(case, coded, rotated, pdl_works(case.x.device))
    if "vllm_gemm" in peers.installed():
        calls["vllm_gemm"] = peers.vllm_gemms(coded, [weight for weight, _, _ in rotated])
    right, db, left_out = checked(case, {name: calls[name] for name in names if name in calls})
    rounds = {name: lambda copy, made=made: made[copy]() for name, made in right.items()}
    repeats = [median_times(rounds, len(rotated), case.x.device) for _ in range(repeat)]
    return [us | differences(us) for us in repeats], {"bytes": size_of(case), "sqnr": db, "left_out": left_out}


def compile_one(k: int, widths: list[int], m: int, rank: int, names: Iterable[str]) -> None:
    """Call the library's named variants once, which leaves their kernels in Triton's cache."""
    case, coded = one_adapter(k, widths, m, rank)
    calls = our_variants(case, coded, [(case.weight, case.a, case.b)], pdl_works(case.x.device))
    for name in names:
        if name in calls:
            calls[name][0]()


def compile_all(jobs: list[tuple], processes: int) -> None:
    """Compile in processes beside each other: a run's kernels are many, and one process compiles one at a time."""
    if processes > 1:
        with multiprocessing.get_context("spawn").Pool(processes) as pool:
            pool.starmap(compile_one, jobs, chunksize=1)


def layer_row(model: str, m: int, options: argparse.Namespace, rank: int) -> dict:
    """One row of the results: a layer, and its projections."""
    repeats, projections = [], {}
    for name in options.projections:
        k, widths = MODELS[model][name]
        samples, known = measure(k, widths, m, rank, VARIANTS, options.repeat)
        torch.cuda.empty_cache()
        floor = read_us(known["bytes"] // 4 * 4)
        samples = [{**us, "read": floor} for us in samples]
        repeats.append(samples)
        result = layer.summary(samples, 2)
        projections[name] = {**result, "ratios": ratios(result["us"]), **known}
        torch.cuda.empty_cache()
    total = layer.summary(layer.added(repeats), 2)
    size = sum(projection["bytes"] for projection in projections.values())
    head = {"model": model, "tokens": m, "adapters": 1, "rank": rank, "bytes": size}
    return {**head, **total, "ratios": ratios(total["us"]), "projections": projections}


def add_options(parser: argparse.ArgumentParser) -> None:
    """What can be selected, in this benchmark and in that of the exposure."""
    parser.add_argument("--projections", nargs="+", default=list(MODELS["qwen3-8b"]), choices=list(MODELS["qwen3-8b"]))
    parser.add_argument("--ranks", nargs="+", type=int, default=[16, 64, 128])
    parser.add_argument("--processes", type=int, default=min(8, os.cpu_count() or 1), help="that compile kernels")
    add_run_options(parser)


def checked_options(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line; refuse what the decode kernel does not take."""
    options = parser.parse_args(arguments)
    for name, most in (("tokens", DECODE_MAX_TOKENS), ("ranks", DECODE_MAX_RANK)):
        for value in getattr(options, name):
            if not 1 <= value <= most:
                parser.error(f"--{name}: expected 1 to {most}, the decode kernel's, but {value} came")
    check_run_options(parser, options)
    return options


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b"], choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 4, 8, 16])
    add_options(parser)
    return checked_options(parser, arguments)


def conclude(started: float, failed: bool) -> None:
    """Print how long it took; leave with an error if a variant was wrong."""
    print(f"in {time.perf_counter() - started:.0f} s")
    if failed:
        sys.exit("a variant's output was wrong, so it was not timed: see above")


def main() -> None:
    options = parse()
    need_gpu()
    sources, started = environment(), time.perf_counter()
    shapes = [(model, name, rank) for model in options.models for name in options.projections for rank in options.ranks]
    jobs = [(*MODELS[model][name], m, rank, VARIANTS) for m in options.tokens for model, name, rank in shapes]
    compile_all(jobs, options.processes)
    print(f"compiled in {time.perf_counter() - started:.0f} s", flush=True)
    rows, failed = [], False
    for model in options.models:
        for m in options.tokens:
            for rank in options.ranks:
                row = layer_row(model, m, options, rank)
                if not rows:
                    print("model tokens rank", *row["us"], *row["ratios"], sep=" | ")
                rows.append(row)
                cells = [f"{us:.1f}" for us in row["us"].values()], [f"{ratio:.2f}" for ratio in row["ratios"].values()]
                print(f"{model} {m} {rank}", *cells[0], *cells[1], sep=" | ", flush=True)
                failed |= any([wrong(name, part["left_out"]) for name, part in row["projections"].items()])
                if options.out:  # after every row, so that a run cut short keeps what it has
                    layer.write(options.out, sources, rows)
    conclude(started, failed)


if __name__ == "__main__":
    main()
