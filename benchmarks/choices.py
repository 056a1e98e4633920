"""The dispatch's choices timed once more, in another process than the one that made them.

    python -m benchmarks.choices --out /tmp/choices.json

For every size in the tables of the GPU present (the shipped one and the user's) times the plan that a table names and
all paths under the rules' tiles, as they run there: in CUDA graphs, or launched one by one. Prints by how much each
choice misses the fastest, and how many are within 3 percent. All kernels are compiled first, by processes side by side.
"""

import argparse
import multiprocessing
from pathlib import Path

import torch

from benchmarks.layer import DEVICE, write
from benchmarks.models import MODELS
from benchmarks.timing import check_out, environment, need_gpu
from torch_epilora.ops import choice
from torch_epilora.ops.candidates import routes
from torch_epilora.ops.plan import Plan
from torch_epilora.ops.tables import Key, problem_of
from torch_epilora.ops.trial import Trial

WITHIN = 1.03


def widths_of(key: Key) -> list[int]:
    """Widths of a key's slices: those of a model's projection, else equal ones."""
    if not key.rank:
        return [key.n]
    for projections in MODELS.values():
        for k, widths in projections.values():
            if (k, sum(widths), len(widths)) == (key.k, key.n, key.slices):
                return widths
    rest = key.n // key.slices
    return [key.n - rest * (key.slices - 1), *[rest] * (key.slices - 1)]


def plans_of(key: Key, chosen: Plan, capability: tuple[int, int]) -> list[Plan]:
    """The plan that a table names, then the paths, each once."""
    return list(dict.fromkeys([chosen, *routes(problem_of(key, capability))]))


def trial(key: Key) -> Trial:
    """A trial of a key on the GPU present."""
    problem = problem_of(key, torch.cuda.get_device_capability(DEVICE))
    return Trial(problem, widths_of(key), torch.device(DEVICE, torch.cuda.current_device()))


def compile_plans(work: tuple[Key, list[Plan]]) -> None:
    """Run a key's plans once, so that their kernels are in Triton's cache."""
    key, plans = work
    trial(key).right(plans)
    torch.cuda.empty_cache()


def row(key: Key, chosen: Plan, us: dict[Plan, float]) -> dict:
    """One row of the results: microseconds of the choice and of each path, and how far the choice is from the best."""
    paths = {f"{plan.path}/{plan.base}": round(time, 2) for plan, time in us.items() if plan != chosen}
    miss = us[chosen] / min(us.values())
    name = f"{chosen.path}/{chosen.base}"
    return {**vars(key), "choice": name, "us": round(us[chosen], 2), "paths": paths, "over_best": round(miss, 4)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error(f"--jobs: expected at least 1, but {options.jobs} came")
    check_out(parser, options.out)
    need_gpu()
    capability, found = torch.cuda.get_device_capability(), choice.table(torch.cuda.get_device_name())
    if not found:
        parser.exit(1, "nothing to time: no table has a plan for this GPU. Run `epilora tune` or torch_epilora.tune.\n")
    plans = {key: plans_of(key, measured.plan, capability) for key, measured in found.items()}
    with multiprocessing.get_context("spawn").Pool(min(options.jobs, len(plans))) as pool:
        pool.map(compile_plans, plans.items(), chunksize=1)
    rows = []
    for key, measured in found.items():
        us = trial(key).times(plans[key], graph=measured.graph)
        rows.append(row(key, plans[key][0], us))
        print(*(rows[-1][name] for name in ("tokens", "adapters", "k", "n", "choice", "us", "over_best")), flush=True)
        torch.cuda.empty_cache()
    good = sum(r["over_best"] <= WITHIN for r in rows)
    print(f"{good} of {len(rows)} choices are within 3 percent of the fastest")
    if options.out:
        write(options.out, environment(), rows)


if __name__ == "__main__":
    main()
