"""Times the candidates of a problem on the GPU, the way they will run."""

import logging
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor

from torch_epilora.ops import checks, dispatch
from torch_epilora.ops.candidates import neighbours, routes
from torch_epilora.ops.checks import BLOCK, Call
from torch_epilora.ops.functional import adapter_groups
from torch_epilora.ops.plan import Plan, Problem
from torch_epilora.ops.tables import Measured
from torch_epilora.ops.timing import median_times

logger = logging.getLogger("torch_epilora")

ROTATED_BYTES = 200 << 20
"""Bytes of weights in rotation, more than an L2 cache holds: in a model each call's come from memory."""
MOST_COPIES = 64
"""Of small weights, which then stay in the cache."""
LEAST_SQNR = 40.0
"""Decibels between the outputs of two right plans: rounding alone gives over 50, a lost adapter under 20."""
LEAST_GAIN = 0.995
"""Medians of one plan differ by that much from run to run."""
MOST_PATHS, ROUNDS = 2, 2
EAGER_CALLS, EAGER_ROUNDS = 10, 7


class Trial:
    """One problem with random operands: rows dealt evenly to all its adapters, weights in rotation.

    Parameters
    ----------
    problem : Problem
        What to measure.
    widths : sequence of int
        Outputs of each slice.
    device : torch.device
        The GPU.
    alone : context manager
        Held while something is timed: a lock, where other processes use the GPU too.
    """

    def __init__(
        self,
        problem: Problem,
        widths: Sequence[int],
        device: torch.device,
        alone: AbstractContextManager | None = None,
    ):
        p, self.problem, self.device, self.alone = problem, problem, device, alone or nullcontext()
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int, spread: float = 1.0) -> Tensor:
            return torch.empty(shape, dtype=p.dtype, device=device).normal_(0, spread, generator=generator)

        adapters = p.groups - 1 if p.rank else 0
        slots = torch.arange(p.m, device=device, dtype=torch.int32)
        slots = slots * adapters // p.m if adapters else slots.fill_(-1)
        groups = adapter_groups(slots, p.m, max(adapters, 1), any_adapter=adapters > 0)
        # as the slots of a patched model have them
        per_slot = (len(widths), adapters)
        rank = torch.full(per_slot, p.rank, dtype=torch.int32, device=device) if adapters else None
        scaling = torch.ones(per_slot, dtype=torch.float32, device=device) if adapters else None
        a = [random(adapters, p.rank, p.k, spread=p.k**-0.5) for _ in widths] if adapters else []
        b = [random(adapters, width, p.rank, spread=p.rank**-0.5) for width in widths] if adapters else []
        weight = random(p.n, p.k, spread=p.k**-0.5).to(torch.float8_e4m3fn)
        blocks = (-(-p.n // BLOCK), -(-p.k // BLOCK))
        shape = {"tensor": (1,), "channel": (p.n, 1), "block": blocks}[p.layout]
        scale, x = torch.ones(shape, dtype=torch.float32, device=device), random(p.m, p.k)
        x_codes, x_scale = None, None
        if p.codes:
            by = "group" if p.layout == "block" else "token"
            x_codes, x_scale = getattr(torch.ops.epilora, f"quantize_fp8_{by}")(x)
        copies = min(max(2, -(-ROTATED_BYTES // weight.numel())), MOST_COPIES)
        self.calls = [
            Call(x, x_codes, x_scale, copy, scale, None, a, b, [], rank, scaling, *groups, p.compute)
            for copy in (weight, *(weight.clone() for _ in range(copies - 1)))
        ]  # fmt: skip

    def right(self, plans: Sequence[Plan]) -> dict[Plan, list[Callable[[], Tensor]]]:
        """Prepare the calls of plans whose outputs agree with those of the first; the others are logged.

        Raises
        ------
        RuntimeError
            If the first cannot run.
        """
        call, want = self.calls[0], None
        found: dict[Plan, list[Callable[[], Tensor]]] = {}
        checks.check_call(call)
        for plan in plans:
            try:
                with self._on_device():
                    run = dispatch.prepare(call, plan)
                    got = run(call)
                    _synchronize(self.device)
            except Exception as error:
                # a compiler or driver that refuses one candidate leaves the others
                if want is None:
                    raise RuntimeError(f"{self.problem}: the rules' plan does not run: {error}") from error
                logger.warning("%s under %s is left out: %s", self.problem, plan, str(error)[:200])
                continue
            want = got if want is None else want
            if _sqnr(got, want) < LEAST_SQNR:
                logger.warning("%s under %s is left out: its output is another", self.problem, plan)
                continue
            found[plan] = [partial(run, call) for call in self.calls]
        return found

    def _on_device(self) -> AbstractContextManager:
        """Make the GPU the current one, as the operator does."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def times(self, plans: Sequence[Plan], *, graph: bool) -> dict[Plan, float]:
        """Microseconds a call of each plan that gives what the first gives: graph replays, or eager calls by the clock.

        An eager call counts until the GPU is done with it and the host with the next ones: whichever takes longer.
        """
        found = self.right(plans)
        if not graph:
            with self.alone, self._on_device():
                return _eager_times(found, self.device)
        names = {str(i): plan for i, plan in enumerate(found)}
        steps = {name: lambda copy, calls=found[plan]: calls[copy]() for name, plan in names.items()}
        with self.alone, self._on_device():
            us = median_times(steps, len(self.calls), self.device)
        return {plan: us[name] for name, plan in names.items()}

    def fastest(self, plans: Sequence[Plan] = (), *, graph: bool) -> Measured:
        """Time some plans, by default all paths under the rules' tiles; the rules' plan stays unless one is faster."""
        paths = routes(self.problem)
        return _winner(self.times(list(dict.fromkeys([paths[0], *(plans or paths)])), graph=graph), graph)

    def search(self, *, graph: bool) -> list[Plan]:
        """Find plans for ``fastest`` to choose from: the paths, and the fastest ones with tiles changed field by field.

        A field's values are tried with the best of the fields before it, until a round through all changes nothing.
        """
        paths = self.times(routes(self.problem), graph=graph)
        found = list(paths)
        for best in sorted(paths, key=paths.__getitem__)[:MOST_PATHS]:
            for _ in range(ROUNDS):
                start = best
                for _, others in neighbours(best, self.problem):
                    best = _winner(self.times([best, *others], graph=graph), graph).plan
                if best == start:
                    break
            found.append(best)
        return list(dict.fromkeys(found))


def _winner(us: dict[Plan, float], graph: bool) -> Measured:
    """Take the first plan, unless another is faster by more than the noise."""
    first = next(iter(us))
    best = min(us, key=us.__getitem__)
    best = best if us[best] < LEAST_GAIN * us[first] else first
    return Measured(best, us[best], us[first], graph)


def _sqnr(got: Tensor, want: Tensor) -> float:
    error, signal = (got.float() - want.float()).square().sum(), want.float().square().sum()
    return float(10 * torch.log10(signal / error.clamp(min=1e-30)).nan_to_num(nan=-1e3))


def _eager_times(runs: dict[Plan, list[Callable[[], Tensor]]], device: torch.device) -> dict[Plan, float]:
    times: dict[Plan, list[float]] = {plan: [] for plan in runs}
    with torch.inference_mode():
        for _ in range(EAGER_ROUNDS):
            for plan, calls in runs.items():
                _synchronize(device)
                start = time.perf_counter()
                for i in range(EAGER_CALLS):
                    calls[i % len(calls)]()
                _synchronize(device)
                times[plan].append(1e6 * (time.perf_counter() - start) / EAGER_CALLS)
    return {plan: statistics.median(values) for plan, values in times.items()}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
