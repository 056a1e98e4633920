"""Launch configurations for vLLM's LoRA kernels, which ship without any: for benchmarks beside tuned vLLM.

    mkdir /tmp/tuned && python -m benchmarks.tune_vllm --out /tmp/tuned
    VLLM_TUNED_CONFIG_FOLDER=/tmp/tuned python -m benchmarks.tenants --out /tmp/tenants.json

Covers every row of ``benchmarks.tenants`` and writes one file for the shrink and one for the expand, as vLLM reads
them; vLLM's own operators must then launch by them. Each search starts from vLLM's default and changes one field after
another, twice round: a value stays if the operator alone is fastest with it. Adapters are rotated so that they come
from memory; x, h and y may lie in L2, where the kernel before leaves them in a layer too. A configuration that does not
run, or whose result is not that of fp64, is left out. What a field's values need is compiled side by side before any is
timed. Takes minutes and about 40 GB of the GPU's memory.
"""

import argparse
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

from benchmarks import batches, peers, tenants
from benchmarks.layer import DEVICE, LEAST_SQNR
from benchmarks.models import MODELS
from benchmarks.timing import copies, need_gpu
from tests.cases import sqnr
from torch_epilora.ops.timing import median_times

Config = dict[str, int | None]

VALUES: dict[str, dict[str, Sequence[int]]] = {
    "shrink": {
        "block_m": (16, 32, 64, 128),
        "block_n": (16, 32, 64),
        "split_k": (1, 2, 4, 8, 16, 32),
        "block_k": (32, 64, 128, 256),
        "num_warps": (4, 8),
        "num_stages": (2, 3, 4),
    },
    "expand": {
        "block_m": (16, 32, 64, 128),
        "block_n": (32, 64, 128, 256),
        "block_k": (16, 32, 64),
        "num_warps": (4, 8),
        "num_stages": (2, 3),
    },
}
"""What is tried of each operator's fields, in this order; block_n divides the width of every slice."""
ROUNDS = 2
LEAST_GAIN = 0.01
"""Less is noise, which would also have keys of like needs take, and compile, unlike kernels."""
COLD_BYTES = 64_000_000
"""Adapters are rotated through so much, more than an H200's L2 cache."""


class Key(NamedTuple):
    """What vLLM finds a configuration by: the operator's file, and in it one level for each other field."""

    op: str
    max_loras: int
    """Slots and one more."""
    slices: int
    m: int
    k: int
    n: int
    """The widest slice's."""


def keys() -> dict[Key, list[int]]:
    """Every key that a row of ``benchmarks.tenants`` asks for, and the widths of its slices."""
    found = {}
    for model, m, slots, _, rank in tenants.points():
        for k, widths in MODELS[model].values():
            found[Key("shrink", slots + 1, len(widths), m, k, rank)] = [rank] * len(widths)
            found[Key("expand", slots + 1, len(widths), m, rank, max(widths))] = widths
    return found


def default(key: Key) -> Config:
    """The configuration that vLLM ships for a key."""
    rank, hidden = (key.n, key.k) if key.op == "shrink" else (key.k, key.n)
    return peers.vllm_default(
        key.op, max_loras=key.max_loras, batch=key.m, hidden_size=hidden, rank=rank, num_slices=key.slices
    )


def kernel(key: Key, config: Config) -> tuple:
    """What tells two compiled kernels apart here: of the sizes only whether K is a whole number of steps."""
    step = config["block_k"] * config.get("split_k", 1)
    return key.op, key.slices, key.k % step == 0, *config.values()


class Operator:
    """vLLM's shrink or expand on a key's random operands, with ``count`` copies of its adapters."""

    def __init__(self, key: Key, widths: list[int], count: int) -> None:
        from vllm.lora.ops import triton_ops

        self.ops, self.key, slots = triton_ops, key, key.max_loras - 1
        row_slots = torch.tensor(batches.row_slots("even", key.m, slots), dtype=torch.int32, device=DEVICE)
        self.meta = peers.vllm_meta(row_slots, slots)
        bf16 = {"dtype": torch.bfloat16, "device": DEVICE}
        drawn = [torch.randn(count, slots, 1, width, key.k, **bf16) for width in widths]
        self.weights = list(zip(*drawn, strict=True))
        if key.op == "shrink":
            self.x = torch.randn(key.m, key.k, **bf16)
            self.out = torch.empty(key.slices, key.m, key.n, device=DEVICE)
        else:
            self.x = torch.randn(key.slices, key.m, key.k, device=DEVICE)
            self.out = torch.empty(key.m, sum(widths), **bf16)
        self.want = self._oracle(row_slots)

    def _oracle(self, row_slots: Tensor) -> Tensor:
        """The result of the first copy, in fp64."""
        x = self.x.double().expand(self.key.slices, -1, -1)
        parts = [x.new_zeros(self.key.m, weight.shape[2]) for weight in self.weights[0]]
        for slot in row_slots.unique().tolist():
            rows = row_slots == slot
            for part, given, weight in zip(parts, x, self.weights[0], strict=True):
                part[rows] = given[rows] @ weight[slot, 0].double().t()
        return torch.stack(parts) if self.key.op == "shrink" else torch.cat(parts, 1)

    def run(self, lookup: peers.Lookup, copy: int = 0) -> None:
        """One call, launched by a lookup; the expand adds to what ``out`` holds."""
        peers.launch_by(self.ops, lookup)
        if self.key.op == "shrink":
            self.ops.lora_shrink(self.x, list(self.weights[copy]), self.out, *self.meta, 1.0)
        else:
            self.ops.lora_expand(self.x, list(self.weights[copy]), self.out, *self.meta, 0, True)

    def fault(self, config: Config) -> str | None:
        """Why a configuration may not be timed."""
        try:
            self.out.zero_()
            self.run(always(config))
            quality = sqnr(self.out, self.want)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:300]
        return None if quality > LEAST_SQNR else f"wrong: {quality:.0f} dB from fp64, expected over {LEAST_SQNR:.0f}"

    def launched(self, lookup: peers.Lookup) -> Config:
        """What a lookup answers to the operator, which alone knows what it asks."""
        answers = []

        def ask(*args: object, **kwargs: object) -> Config:
            answers.append(lookup(*args, **kwargs))
            return answers[-1]

        self.run(ask)
        return answers[-1]


def always(config: Config) -> peers.Lookup:
    """A lookup with one answer."""
    return lambda *_, **__: config


class Search:
    """The search for one key's configuration, started from vLLM's."""

    def __init__(self, key: Key, widths: list[int]) -> None:
        slots = key.max_loras - 1
        self.key, self.widths = key, widths
        self.count = copies(2 * slots * key.k * sum(widths), at_least=COLD_BYTES)
        self.operator = Operator(key, widths, self.count)
        self.default = self.best = default(key)
        self.seen = [self.default]
        self.left_out: list[str] = []
        # the first call with some adapters copies their addresses to the GPU, which must not become part of a graph
        for copy in range(self.count):
            self.operator.run(always(self.default), copy)

    def untried(self, field: str) -> list[Config]:
        """The best configuration with each other value of a field."""
        changed = [{**self.best, field: value} for value in VALUES[self.key.op].get(field, ())]
        return [config for config in changed if config not in self.seen]

    def times(self, configs: list[Config]) -> list[float]:
        """Microseconds of each configuration, side by side."""
        calls = {str(i): partial(self.operator.run, always(config)) for i, config in enumerate(configs)}
        return list(median_times(calls, self.count, self.operator.x.device).values())

    def step(self, field: str, faults: Mapping[tuple, str | None]) -> None:
        """Keep the value of a field with which the operator is fastest."""
        untried, right = self.untried(field), [self.best]
        self.seen += untried
        for config in untried:
            fault = faults[kernel(self.key, config)] or self.operator.fault(config)
            if fault is None:
                right.append(config)
            else:
                self.left_out.append(f"{self.key.op}: {fault}")
        if len(right) > 1:
            times = self.times(right)
            if min(times) < times[0] * (1 - LEAST_GAIN):
                self.best = right[times.index(min(times))]


def first_fault(task: tuple[Key, list[int], Config]) -> str | None:
    """Compile and run a kernel in a process of its own; Triton's cache on the disk then has it."""
    from vllm.lora.ops import triton_ops

    key, widths, config = task
    peers.forget_adapters(triton_ops)
    return Operator(key, widths, 1).fault(config)


def compile_all(
    pool: Executor, wanted: Iterable[tuple[Key, list[int], Config]], faults: dict[tuple, str | None]
) -> None:
    """Compile each kernel that is not among ``faults`` yet, and put there why it may not be timed."""
    new: dict[tuple, tuple[Key, list[int], Config]] = {}
    for key, widths, config in wanted:
        name = kernel(key, config)
        if name not in faults:
            new.setdefault(name, (key, widths, config))  # the first key has the fewest tokens
    faults.update(zip(new, pool.map(first_fault, new.values()), strict=True))


def search(wanted: Mapping[Key, list[int]], pool: Executor) -> list[Search]:
    """Search for all keys' configurations, one field after the other."""
    faults: dict[tuple, str | None] = {}
    compile_all(pool, ((key, widths, default(key)) for key, widths in wanted.items()), faults)
    if any(faults.values()):
        sys.exit(f"vLLM's own configurations fail here: {next(filter(None, faults.values()))}")
    searches = [Search(key, widths) for key, widths in wanted.items()]
    fields = list(dict.fromkeys(field for values in VALUES.values() for field in values))
    for field in fields * ROUNDS:
        start, before = time.perf_counter(), len(faults)
        compile_all(pool, ((s.key, s.widths, config) for s in searches for config in s.untried(field)), faults)
        compiled = time.perf_counter()
        for one in searches:
            one.step(field, faults)
        took = f"in {compiled - start:.0f} s, timed in {time.perf_counter() - compiled:.0f} s"
        print(f"{field}: {len(faults) - before} kernels compiled {took}", flush=True)
    return searches


def write(folder: Path, best: Mapping[Key, Config]) -> None:
    """Write both files as vLLM reads them."""
    gpu = re.sub("[ -]", "_", torch.cuda.get_device_name())
    for op, suffix in (("shrink", "SHRINK"), ("expand", "EXPAND_TRUE")):
        table: dict = {}
        for key, config in best.items():
            if key.op == op:
                level = table
                for part in key[1:-1]:
                    level = level.setdefault(str(part), {})
                level[str(key.n)] = config
        (folder / f"{gpu}_{suffix}.json").write_text(json.dumps(table, indent=1) + "\n")


def verify(folder: Path, searches: Iterable[Search]) -> None:
    """Leave with an error where vLLM's operators do not launch by what was written."""
    with mock.patch.dict(os.environ, {peers.TUNED: str(folder)}):
        lookup = peers.vllm_tuned()
        for one in searches:
            found = one.operator.launched(lookup)
            if found != one.best:
                sys.exit(f"{one.key}: vLLM launches by {found}, not by {one.best}, which was written")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--out", type=Path, required=True, help="folder for both files")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        parser.error(f"--jobs: expected at least 1, but {given.jobs} came")
    if not given.out.is_dir():
        parser.error(f"--out: expected an existing folder, but {given.out} came: make it first")
    need_gpu()
    if "vllm" not in peers.installed():
        sys.exit("nothing to tune: vLLM is not installed")
    with ProcessPoolExecutor(given.jobs, get_context("spawn")) as pool:
        searches = search(keys(), pool)
    write(given.out, {one.key: one.best for one in searches})
    verify(given.out, searches)
    for one in searches:
        before, after = one.times([one.default, one.best])
        changed = {field: value for field, value in one.best.items() if value != one.default[field]}
        print(*one.key, f"{before:.1f} -> {after:.1f} us", changed, flush=True)
    for reason, times in Counter(reason for one in searches for reason in one.left_out).items():
        print(f"left out {times} times: {reason}", flush=True)


if __name__ == "__main__":
    main()
