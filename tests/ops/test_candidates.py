"""Candidates: the rules' plan comes first, all of them can run, and nothing else passes for one."""

from dataclasses import replace

import pytest

from tests.ops.test_plan import GPUS, SWEEP
from torch_epilora.ops.candidates import VALUES, neighbours, refused, routes, used, with_tiles
from torch_epilora.ops.plan import Plan, Problem, bare, bucketed, make_plan, refusal, through, vendor_refusal

LORA = Problem(64, 6144, 4096, 64, 3, 9)


def problems(capability: tuple[int, int]) -> list[Problem]:
    made = [
        Problem(n=row["shape"][0], k=row["shape"][1], capability=capability,
                **{name: value for name, value in row.items() if name != "shape"})
        for row in SWEEP
    ]  # fmt: skip
    return [bucketed(p) for p in made]


def runs(plan: Plan, p: Problem) -> bool:
    """Whether each kernel of the plan is admitted, written down here once more."""
    tiles = {
        "decode": [(plan.decode, p)],
        "fused": [(plan.tma if plan.base == "tma" else plan.gemm, p), (plan.shrink, p)],
        "hybrid": [(plan.shrink, p), (plan.expand, p)],
    }[plan.path]
    if plan.path == "hybrid":
        assert plan.base != "vendor" or vendor_refusal(p) is None
        tiles += {"tma": [(plan.tma, p)], "own": [(plan.gemm, p)], "decode": [(plan.decode, bare(p))]}.get(
            plan.base, []
        )
    return all(config is not None and refusal(config, of) is None for config, of in tiles)


@pytest.mark.parametrize("capability", GPUS, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_rules_plan_is_first_and_all_can_run(capability: tuple[int, int]) -> None:
    seen = set()
    for p in problems(capability):
        found = routes(p)
        assert found[0] == make_plan(p)
        assert len({(plan.path, plan.base) for plan in found}) == len(found)
        for plan in found:
            assert refused(plan, p) is None and runs(plan, p), p
            seen.add((plan.path, plan.base))
    hopper = {("decode", "own"), ("hybrid", "decode"), ("fused", "tma"), ("hybrid", "tma")}
    assert seen == (hopper if capability >= (9, 0) else set()) | {
        ("fused", "own"),
        ("hybrid", "own"),
        ("hybrid", "vendor"),
    }


def test_neighbours_differ_in_one_field_and_can_run() -> None:
    fields = set()
    for p in problems((9, 0))[::5]:
        for plan in routes(p):
            for name, others in neighbours(plan, p):
                kernel, field = name.split(".")
                for other in others:
                    value = getattr(getattr(other, kernel), field)
                    assert value != getattr(getattr(plan, kernel), field) and value in VALUES[kernel][field]
                    assert other == with_tiles(plan, kernel, {field: value})
                    assert refused(other, p) is None and runs(other, p)
                    fields.add(name)
    assert fields == {f"{kernel}.{field}" for kernel, values in VALUES.items() for field in values}


@pytest.mark.parametrize(
    ("plan", "why"),
    [
        (through(LORA, "fused", "tma"), "fused over tma does not run it"),
        (through(LORA, "reference", "none"), "reference over none does not run it"),
        (through(LORA, "decode", "vendor"), "decode over vendor does not run it"),
        (with_tiles(make_plan(LORA), "decode", {"num_stages": 7}), "decode.num_stages=7 is not one of its values"),
        (with_tiles(make_plan(LORA), "decode", {"block_n": 128}), "decode.block_n=128 is not one of its values"),
        (with_tiles(make_plan(LORA), "decode", {"block_k": 256, "num_stages": 8}), "decode: needs"),
        (with_tiles(through(LORA, "hybrid", "vendor"), "expand", {"run": 3}), "expand.run=3 is not one of its values"),
    ],
)  # fmt: skip
def test_what_is_none_says_why(plan: Plan, why: str) -> None:
    assert str(refused(plan, LORA)).startswith(why)


def test_tiles_of_kernels_that_do_not_run_are_not_looked_at() -> None:
    plan = through(LORA, "hybrid", "vendor")
    assert "decode" not in used(plan, LORA)
    assert refused(replace(plan, decode=replace(plan.decode, num_stages=7)), LORA) is None


def test_without_kernels_there_is_the_reference_alone() -> None:
    assert [plan.path for plan in routes(replace(LORA, capability=(8, 0)))] == ["reference"]
