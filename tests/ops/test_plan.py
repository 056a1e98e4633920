"""Plans: what is chosen is admitted on every GPU, what is refused says why, and token counts share a plan by bucket."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.cases import make_case
from tests.pairwise import pairwise
from torch_epilora.ops import dispatch
from torch_epilora.ops.checks import Call
from torch_epilora.ops.plan import (
    SHARED_BYTES,
    Decode,
    Expand,
    Gemm,
    Problem,
    Shrink,
    Tiles,
    Tma,
    bare,
    make_plan,
    refusal,
    shared_bytes,
    through,
    unsupported,
    vendor_refusal,
)

GPUS = [(8, 9), (9, 0), (10, 0), (12, 0)]
SHAPES = [(6144, 4096), (4096, 12288), (24576, 4096), (576, 576), (3420, 1280), (200, 130), (32, 15), (1, 1)]
SWEEP = pairwise(
    {
        "m": [1, 2, 7, 16, 17, 32, 33, 64, 65, 100, 256, 257, 1000, 2048, 90_000],
        "shape": SHAPES,
        "rank": [0, 1, 3, 9, 16, 17, 32, 64, 96, 128, 256, 320, 512],
        "slices": [1, 2, 3, 8, 16],
        "groups": [1, 2, 3, 5, 9, 33, 65, 257],
        "layout": ["tensor", "channel", "block"],
        "compute": ["w8a8", "w8a16"],
        "dtype": [torch.bfloat16, torch.float16, torch.float32],
    }
)
PROBLEM = Problem(16, 4096, 4096, 64, 1, 5)
ADA, BLACKWELL = {"capability": (8, 9)}, {"capability": (12, 0)}
GEMM, SHRINK, EXPAND = Gemm(16, 64, 128, 64, 4, 4), Shrink(16, 32, 128, 4, 4, 3), Expand(16, 128, 64, 1, 4, 2)
TMA = Tma(64, 128, 128, 64, 4, 4, 3)
DECODE = Decode(
    block_m=16, block_n=64, block_k=128, num_stages=4, part=1024, shrink_m=16, shrink_r=32, shrink_k=128,
    shrink_stages=3, split_k=4, together=2, b_stages=2, ahead=0, early=1, overlap=True, num_warps=4,
)  # fmt: skip


@pytest.mark.parametrize("capability", GPUS, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_every_plan_is_admitted(capability: tuple[int, int]) -> None:
    assert len(SWEEP) > 150
    paths = set()
    for row in SWEEP:
        n, k = row["shape"]
        p = Problem(n=n, k=k, capability=capability, **{name: v for name, v in row.items() if name != "shape"})
        plan = make_plan(p)
        for config in (plan.gemm, plan.shrink, plan.expand, *([] if plan.tma is None else [plan.tma])):
            assert refusal(config, p) is None, f"{p}: {config}"
        assert 1 <= plan.shrink.split_k <= 8 and plan.expand.run >= 1
        assert plan.path in ("decode", "fused", "hybrid") and plan.reason
        assert plan.base != "vendor" or vendor_refusal(p) is None
        assert ("decode" in (plan.path, plan.base)) == (refusal(through(p, "decode", "own").decode, p) is None)
        assert plan.base != "decode" or refusal(plan.decode, bare(p)) is None
        assert plan.base != "tma" or plan.tma is not None
        paths.add((plan.path, plan.base))
    hopper = {("decode", "own"), ("hybrid", "decode"), ("fused", "tma")} if capability >= (9, 0) else set()
    assert paths == hopper | {("fused", "own"), ("hybrid", "own"), ("hybrid", "vendor")}


def test_every_gpu_of_the_gate_has_its_shared_memory() -> None:
    assert sorted(SHARED_BYTES) == GPUS and all(99 << 10 <= size <= 227 << 10 for size in SHARED_BYTES.values())


@pytest.mark.parametrize(
    ("config", "change", "reason"),
    [
        (replace(GEMM, block_m=8), {}, "block_m=8 is not a power of two of at least 16"),
        (replace(GEMM, block_n=96), {}, "block_n=96 is not a power of two of at least 16"),
        (replace(SHRINK, block_k=0), {}, "block_k=0 is not a power of two of at least 16"),
        (replace(EXPAND, block_r=24), {}, "block_r=24 is not a power of two of at least 16"),
        (replace(GEMM, block_k=64), {"layout": "block"}, "block_k=64 must be 128 under 128x128 scales"),
        (replace(GEMM, block_k=256), {"layout": "block"}, "block_k=256 must be 128 under 128x128 scales"),
        (replace(GEMM, block_r=256), {}, "block_r=256 is more than 128 ranks at once, which spills registers"),
        (replace(EXPAND, block_r=512), {}, "block_r=512 is more than 128 ranks at once, which spills registers"),
        (Gemm(128, 128, 256, 64, 8, 4), {}, "needs 262144 bytes of shared memory, and a block has 232448"),
        (Gemm(128, 128, 128, 64, 8, 4), ADA, "needs 131072 bytes of shared memory, and a block has 101376"),
        (Shrink(64, 64, 128, 1, 4, 8), {}, "needs 262144 bytes of shared memory, and a block has 232448"),
        (replace(DECODE, block_n=48), {}, "block_n=48 is not a power of two of at least 16"),
        (DECODE, ADA, "compute capability 8.9 has no programmatic dependent launch; 9.0 has"),
        (DECODE, {"m": 65}, "65 tokens are more than the 64 of one tile"),
        (DECODE, {"rank": 129}, "rank 129 is more than the 128 of one tile"),
        (DECODE, {"groups": 129}, "129 groups are more than the 128 it holds in registers"),
        (DECODE, {"dtype": torch.float32}, "float32 activations have no tensor cores to use"),
        (DECODE, {"k": 4104}, "inputs come in multiples of 16, not 4104"),
        (replace(DECODE, block_k=256), {"layout": "block"}, "block_k=256 must be 128 under 128x128 scales"),
        # the pipeline and one B and h; the groups' B in flight; the shrink's pipeline
        (replace(DECODE, num_stages=32), {}, "needs 337920 bytes of shared memory, and a block has 232448"),
        (replace(DECODE, b_stages=8), {"rank": 128}, "needs 268288 bytes of shared memory, and a block has 232448"),
        (replace(DECODE, shrink_stages=9), BLACKWELL, "needs 110592 bytes of shared memory, and a block has 101376"),
        (TMA, ADA, "compute capability 8.9 has no tensor memory accelerator; 9.0 has"),
        (TMA, {"compute": "w8a16"}, "it multiplies codes by codes, not w8a16"),
        (TMA, {"layout": "block"}, "it has no 128x128 scales"),
        (TMA, {"dtype": torch.float32}, "float32 activations have no tensor cores to use"),
        (TMA, {"k": 4104}, "inputs come in multiples of 16, not 4104"),
        (replace(TMA, num_stages=10), {}, "needs 246784 bytes of shared memory, and a block has 232448"),
        (replace(TMA, b_stages=5), BLACKWELL, "needs 123904 bytes of shared memory, and a block has 101376"),
        (Expand(64, 128, 128, 1, 8, 8), BLACKWELL, "needs 409600 bytes of shared memory, and a block has 101376"),
        (GEMM, {"capability": (8, 0)}, "compute capability 8.0 has no FP8 tensor cores; 8.9 or later has"),
        (GEMM, {"capability": (11, 0)},
         "compute capability 11.0 is not one the kernels are built for: 8.9, 9.0, 10.0, 12.0"),
    ],
)  # fmt: skip
def test_refusal_says_why(config: Tiles, change: dict, reason: str) -> None:
    assert refusal(config, replace(PROBLEM, **change)) == reason


@pytest.mark.parametrize("config", [GEMM, SHRINK, EXPAND])
def test_what_is_refused_for_one_reason_is_admitted_without_it(config: Gemm | Shrink | Expand) -> None:
    for capability in GPUS:
        assert refusal(config, replace(PROBLEM, capability=capability)) is None
    assert refusal(replace(GEMM, block_k=128), replace(PROBLEM, layout="block")) is None
    assert refusal(replace(GEMM, block_r=128), PROBLEM) is None
    assert refusal(replace(SHRINK, block_r=256, num_stages=1), PROBLEM) is None, "K1 holds no B"
    wide = replace(DECODE, block_m=32)
    for capability in GPUS[1:]:
        assert refusal(wide, replace(PROBLEM, m=32, capability=capability)) is None
    for limit in ({"rank": 128}, {"groups": 128}, {"k": 4112}, {"dtype": torch.float16}, {"layout": "block"}):
        assert refusal(wide, replace(PROBLEM, **limit)) is None, limit


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (11, 0), (13, 0)])
def test_other_gpus_run_the_reference_and_say_why(capability: tuple[int, int]) -> None:
    reason = unsupported(capability)
    assert reason is not None and all(str(part) in reason for part in capability)
    plan = make_plan(replace(PROBLEM, capability=capability))
    assert (plan.path, plan.base, plan.reason) == ("reference", "none", reason)
    assert vendor_refusal(replace(PROBLEM, capability=capability)) == reason


def test_supported_gpus() -> None:
    assert [unsupported(c) for c in GPUS] == [None] * 4


# --- token counts ------------------------------------------------------------------------------------------------


def bucket(m: int) -> int:
    size = 1
    while size < m:
        size *= 2
    return size


@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_token_counts_share_a_plan_by_powers_of_two(compute: str) -> None:
    p = replace(PROBLEM, compute=compute)
    for m in (*range(0, 300), 1000, 1024, 1025, 2048):
        assert make_plan(replace(p, m=m)) is make_plan(replace(p, m=max(1, bucket(m)))), m


def test_buckets_differ_where_they_must() -> None:
    plans = {m: make_plan(replace(PROBLEM, m=m)) for m in (1, 16, 64, 256, 2048)}
    assert len({plan.gemm.block_m for plan in plans.values()}) > 2
    assert plans[1].gemm.block_m == plans[16].gemm.block_m == 16, "a decode batch takes the smallest tile of tokens"
    assert plans[2048].path == "hybrid" and plans[2048].base == "vendor"
    assert make_plan(replace(PROBLEM, m=1, groups=2, **ADA)).path == "fused"


@pytest.mark.parametrize(
    ("m", "n", "path", "base"),
    [
        (256, 4096, "fused", "tma"),
        (256, 6144, "fused", "tma"),
        (256, 24576, "hybrid", "vendor"),
        (512, 2048, "fused", "tma"),
        (512, 4096, "hybrid", "vendor"),
        (512, 6144, "hybrid", "vendor"),
        (1024, 4096, "hybrid", "vendor"),
    ],
)
def test_the_librarys_gemm_serves_what_fills_the_gpu_about_once(m: int, n: int, path: str, base: str) -> None:
    plan = make_plan(replace(PROBLEM, m=m, n=n))
    assert (plan.path, plan.base) == (path, base)


def test_a_path_that_is_asked_for_has_tiles_of_its_own() -> None:
    """Beside K1 and the expand a decode kernel has those of the bare base, which adapters may not fit."""
    many = replace(PROBLEM, m=64, groups=33, rank=64)
    assert make_plan(many).base == "decode" and make_plan(many).decode != through(many, "decode", "own").decode
    for name, base in (("decode", "own"), ("fused", "own"), ("hybrid", "decode")):
        plan = dispatch._forced(name, many)
        assert (plan.path, plan.base) == (name, base) and plan == through(many, name, base)
    vendor = replace(PROBLEM, m=2048)
    assert dispatch._forced("fused", vendor) == through(vendor, "fused", "vendor")


@pytest.mark.parametrize(("m", "groups", "base"), [(64, 17, "decode"), (64, 16, "own"), (32, 33, "own")])
def test_many_adapters_over_32_tokens_are_added_by_a_kernel_of_their_own(m: int, groups: int, base: str) -> None:
    plan = make_plan(replace(PROBLEM, m=m, groups=groups))
    assert (plan.path, plan.base) == ("hybrid" if base == "decode" else "decode", base)


def test_a_plan_is_the_same_every_time() -> None:
    for m in (1, 100, 2048):
        assert make_plan(replace(PROBLEM, m=m)) == make_plan(replace(PROBLEM, m=m))
        assert hash(make_plan(replace(PROBLEM, m=m))) == hash(make_plan(replace(PROBLEM, m=m)))


def test_ranks_bound_the_tiles() -> None:
    for r in (1, 8, 16, 17, 64, 512):
        plan = make_plan(replace(PROBLEM, rank=r))
        assert 16 <= plan.gemm.block_r <= 128 and 16 <= plan.shrink.block_r <= 128 and plan.expand.block_r <= 128
        if r <= 16:
            assert plan.gemm.block_r == plan.shrink.block_r == plan.expand.block_r == 16


def test_metadata_without_an_entry_for_the_base_is_planned_as_with_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_gpu", lambda device: "none")
    case = make_case(8, 256, [64], 8, 4)
    every = dispatch._problem(Call(*case.args()))
    parts = {name: getattr(case.groups, name)[1:] for name in ("ids", "counts", "starts")}
    without = Call(*replace(case, groups=case.groups._replace(**parts)).args())
    assert every.groups == 5 and dispatch._problem(without) == every


# --- decode ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("capability", GPUS[1:], ids=lambda c: f"sm_{c[0]}{c[1]}")
@pytest.mark.parametrize(
    ("change", "most"),
    [
        ({}, 64),
        ({"rank": 0, "groups": 1}, 64),
        ({"layout": "block"}, 64),
        ({"compute": "w8a16"}, 32),
        ({"compute": "w8a16", "dtype": torch.float16}, 16),
    ],
    ids=str,
)
def test_decode_serves_as_many_tokens_as_its_tile_holds(capability: tuple[int, int], change: dict, most: int) -> None:
    for m in range(1, most + 1):
        plan = make_plan(replace(PROBLEM, m=m, capability=capability, **change))
        assert (plan.path, plan.base) == ("decode", "own") and f"at most {most} tokens" in plan.reason
        assert plan.decode.block_m >= m
    assert make_plan(replace(PROBLEM, m=most + 1, capability=capability, **change)).path != "decode"


@pytest.mark.parametrize(
    "change",
    [
        {"m": 65},
        {"m": 33, "compute": "w8a16"},
        {"rank": 129},
        {"dtype": torch.float32},
        {"k": 4104},
        {"groups": 129},
        ADA,
        {"capability": (8, 0)},
    ],
    ids=str,
)
def test_other_paths_serve_what_the_decode_kernel_refuses(change: dict) -> None:
    p = replace(PROBLEM, **change)
    plan = make_plan(p)
    assert refusal(plan.decode, p) and plan.path != "decode" and plan.reason


def test_every_decode_plan_is_one_the_kernel_can_run() -> None:
    """What the refusal leaves to the plan: a tile holds all tokens, and nothing is asked for past a row's end."""
    many = 0
    for row, capability in itertools.product(SWEEP, GPUS):
        n, k = row["shape"]
        p = Problem(n=n, k=k, capability=capability, **{name: v for name, v in row.items() if name != "shape"})
        config = make_plan(p).decode
        if refusal(config, p) is None:
            many += 1
            assert config.block_m >= p.m and 0 <= config.ahead <= p.k and config.ahead % 32 == 0
            for size in (config.part, config.shrink_r, config.shrink_k, config.split_k):
                assert size > 0 and size & (size - 1) == 0, f"{p}: {config}"
            assert config.part % 128 == 0 and config.shrink_r >= 16 and config.shrink_k >= 16
            assert config.early >= 0 and min(config.num_stages, config.shrink_stages, config.b_stages) >= 1
    assert many > 50


# --- the vendor's GEMM -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"compute": "w8a16"}, "w8a16"),
        ({"dtype": torch.float16}, "bf16 only"),
        ({"dtype": torch.float32}, "bf16 only"),
        ({"n": 4100}, "multiples of 16, not 4096 and 4100"),
        ({"k": 130}, "multiples of 16, not 130 and 4096"),
        ({"layout": "block", "capability": (8, 9)}, "its block-scaled form needs Hopper (9.0), not 8.9"),
        ({"layout": "block", "capability": (10, 0)}, "its block-scaled form needs Hopper (9.0), not 10.0"),
        ({"layout": "block", "n": 4160}, "its block-scaled form needs outputs in multiples of 128, not 4160"),
        ({"layout": "block", "k": 4224}, "its block-scaled form needs inputs in multiples of 512, not 4224"),
        ({"layout": "block", "n": 576, "k": 576}, "multiples of 128, not 576 and inputs in multiples of 512, not 576"),
    ],
)  # fmt: skip
def test_the_vendors_gemm_is_refused_with_a_reason(change: dict, reason: str) -> None:
    p = replace(PROBLEM, m=2048, **change)
    assert reason in (vendor_refusal(p) or "")
    plan = make_plan(p)
    assert plan.base in ("own", "tma") and vendor_refusal(p) in plan.reason


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_the_vendors_gemm_serves_large_batches(layout: str) -> None:
    p = replace(PROBLEM, m=2048, layout=layout)
    assert vendor_refusal(p) is None and make_plan(p).base == "vendor"


# --- shared memory -----------------------------------------------------------------------------------------------


def test_shared_bytes_counts_the_pipelined_tiles() -> None:
    # stages x (weights' codes + activations' codes), then with bf16 activations the widened weights beside them
    assert shared_bytes(Gemm(16, 64, 256, 64, 4, 5), PROBLEM) == 5 * (64 * 256 + 16 * 256)
    w8a16 = replace(PROBLEM, compute="w8a16")
    assert shared_bytes(Gemm(64, 64, 64, 32, 4, 3), w8a16) == 3 * (64 * 64 + 2 * 64 * 64) + 2 * 64 * 64
    assert shared_bytes(Shrink(16, 32, 128, 4, 4, 3), PROBLEM) == 3 * 2 * (16 + 32) * 128
    # an epilogue that needs more than the main loop decides
    assert shared_bytes(Gemm(128, 128, 16, 128, 8, 1), PROBLEM) == 2 * (128 + 128) * 128
    # the decode kernel has B and h beside its main loop if one adapter's are read early; codes and scales of blocks
    main = 4 * (64 * 128 + 16 * 128)
    assert shared_bytes(DECODE, PROBLEM) == main + 2 * 64 * (64 + 16)
    assert shared_bytes(DECODE, replace(PROBLEM, layout="block")) == main + 4 * 4 * (64 + 16) + 2 * 64 * (64 + 16)
    # the expand keeps B and y of every stage in flight, and h
    assert shared_bytes(Expand(64, 128, 16, 1, 8, 2), PROBLEM) == 2 * 2 * (16 * 128 + 64 * 128) + 2 * 64 * 16


def test_shared_bytes_grows_with_every_tile() -> None:
    for config in (GEMM, SHRINK, EXPAND):
        for field in ("block_m", "block_n", "block_k", "block_r", "num_stages"):
            if hasattr(config, field):
                larger = replace(config, **{field: 4 * getattr(config, field)})
                assert shared_bytes(larger, PROBLEM) >= shared_bytes(config, PROBLEM)
    assert shared_bytes(GEMM, replace(PROBLEM, compute="w8a16")) > shared_bytes(GEMM, PROBLEM)


def test_decode_tiles_fit_whatever_the_kernel_takes() -> None:
    """Nothing but a missing ability of the kernel sends a decode batch elsewhere: shared memory never does."""
    for m, r, groups, k, n, capability in itertools.product(
        (1, 4, 16, 32, 64),
        (0, 16, 64, 128),
        (2, 9, 128),
        (16, 144, 4096, 32768),
        (64, 5120, 200000),
        [(9, 0), (10, 0), (12, 0)],
    ):
        for layout, compute in itertools.product(("channel", "block"), ("w8a8", "w8a16")):
            dtype = torch.float16 if compute == "w8a8" or m <= 16 else torch.bfloat16
            p = Problem(m, n, k, r, 2, groups, layout, compute, dtype, capability)
            if compute == "w8a8" or m <= 32:
                assert "decode" in (make_plan(p).path, make_plan(p).base), p


def test_a_decode_tile_must_hold_all_tokens() -> None:
    problem = Problem(32, 4096, 4096, 64)
    small = replace(make_plan(problem).decode, block_m=16)
    assert refusal(small, problem) == "block_m=16 is less than the 32 tokens that its one tile must hold"
    assert refusal(small, replace(problem, m=16)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ahead": 48}, "ahead=48 is not a multiple of 32"),
        ({"ahead": 8192}, "within 4096 inputs"),
        ({"part": 96}, "part=96 is not a power of two"),
        ({"part": 64}, "of at least 128"),
        ({"block_k": 16}, "less than the 32 inputs of an FP8 MMA"),
        ({"shrink_m": 48}, "shrink_m=48 is not a power of two of at least 16"),
        ({"shrink_r": 8}, "shrink_r=8 is not a power of two of at least 16"),
        ({"together": 3}, "together=3 is not a power of two of at least 1"),
    ],
    ids=str,
)
def test_decode_tiles_that_the_kernel_cannot_take(change: dict, reason: str) -> None:
    problem = Problem(16, 4096, 4096, 64, compute="w8a16")
    tiles = make_plan(problem).decode
    assert refusal(tiles, problem) is None and reason in (refusal(replace(tiles, **change), problem) or "")


def test_a_batch_without_adapters_is_planned_as_the_bare_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(dispatch, "_gpu", lambda device: "none")
    idle = make_case(4, 512, [64], 8, 3, popularity="none")
    bare = replace(idle, a=[], b=[], rank=None, scaling=None)
    assert dispatch._problem(Call(*idle.args())) == dispatch._problem(Call(*bare.args()))
    some = make_case(4, 512, [64], 8, 3, popularity="one")
    assert dispatch._problem(Call(*some.args())).groups == 4
