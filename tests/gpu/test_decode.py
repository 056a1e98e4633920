"""The decode path on the GPU: bits with and without dependent launches, in graphs and on streams, and no deadlock."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.cases import Case, group_rows, make_case, oracle, sqnr
from tests.gpu.paths import HAS_DECODE, decode_serves
from torch_epilora.ops.dispatch import plan_of
from torch_epilora.ops.triton import signals
from torch_epilora.ops.triton.pdl import pdl_works

pytestmark = pytest.mark.skipif(not HAS_DECODE, reason="the decode path needs compute capability 9.0 or later")
ROOT = Path(__file__).parents[2]
PATH = "lora_linear_decode"
KINDS = [("tensor", "w8a8"), ("channel", "w8a8"), ("block", "w8a8"), ("channel", "w8a16"), ("block", "w8a16")]


def kinds_at(*tokens: int) -> list[tuple[str, str, int]]:
    """(layout, compute, tokens) that the decode path takes."""
    return [(*kind, m) for kind in KINDS for m in tokens if decode_serves(m, kind[1])]


def bits(t: Tensor) -> Tensor:
    return t.view(torch.uint8)


def launch(case: Case, *, pdl: bool, bare: bool = False) -> Tensor:
    """The kernel as ``dispatch`` launches it, as a dependent of the kernel before or not."""
    if bare:
        case = Case(**{**vars(case), "groups": case.groups._replace(no_adapter=torch.tensor([True]))})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_epilora.ops.triton.pdl.pdl_works", lambda device: pdl)
        return eager(case)


def layers(m: int, count: int, slots: int, **options: object) -> list[Case]:
    """Square projections for a chain: each reads what the one before it wrote."""
    options = {"poison": False, "device": "cuda", **options}
    return [make_case(m, 512, [256, 128, 128], 16, slots, seed=i, **options) for i in range(count)]


def chain(cases: list[Case], x: Tensor, run: Callable[[Case], Tensor]) -> Tensor:
    for case in cases:
        case.x = x
        x = run(case)
    return x


def eager(case: Case) -> Tensor:
    return case.run(PATH)


def capture(f: Callable[[], Tensor], stream: torch.cuda.Stream | None = None) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A graph of ``f``, whose kernels were compiled before."""
    stream = stream or torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = f()
    return graph, y


def static_groups(case: Case) -> list[Tensor]:
    """Give a case metadata tensors of its own that a test writes into."""
    tensors = [t.clone() for t in case.groups[:4]]
    names = ("sorted_tokens", "ids", "counts", "starts")
    case.groups = case.groups._replace(**dict(zip(names, tensors, strict=True)), no_adapter=torch.tensor([False]))
    return tensors


@pytest.fixture
def fresh_pdl() -> Iterator[None]:
    pdl_works.cache_clear()
    yield
    pdl_works.cache_clear()


# --- programmatic dependent launch -----------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize(("layout", "compute", "m"), kinds_at(1, 17, 32, 64))
def test_bits_do_not_depend_on_dependent_launches(layout: str, compute: str, m: int, slots: int) -> None:
    """cases.md 2."""
    case = make_case(m, 512, [256, 128], 24, slots, layout=layout, compute=compute, b_bias=True, device="cuda")
    want = launch(case, pdl=False)
    assert sqnr(want, oracle(case)) > 40
    for _ in range(20):
        assert torch.equal(bits(launch(case, pdl=True)), bits(want))
    assert torch.equal(bits(eager(case)), bits(want))
    bare = launch(case, pdl=False, bare=True)
    assert torch.equal(bits(launch(case, pdl=True, bare=True)), bits(bare))


@pytest.mark.parametrize(("m", "slots"), [(1, 1), (16, 1), (16, 8), (32, 32), (64, 8)])
def test_a_dependent_reads_what_the_kernel_before_it_wrote(m: int, slots: int) -> None:
    """Eight projections in a row start while the one before them runs, and none reads its x too early."""
    cases = layers(m, 8, slots)
    for i in range(50):
        x = torch.randn_like(cases[0].x)
        want = chain(cases, x, lambda case: launch(case, pdl=False))
        got = chain(cases, x, lambda case: launch(case, pdl=True))
        assert torch.isfinite(want).all() and torch.equal(bits(got), bits(want)), i


def test_the_environment_switches_dependent_launches_off(monkeypatch: pytest.MonkeyPatch, fresh_pdl: None) -> None:
    case = make_case(17, 512, [384], 16, 4, device="cuda")
    monkeypatch.delenv("EPILORA_DISABLE_PDL", raising=False)
    assert pdl_works(case.x.device), "this GPU and this Triton have dependent launches"
    want = eager(case)
    monkeypatch.setenv("EPILORA_DISABLE_PDL", "1")
    pdl_works.cache_clear()
    assert not pdl_works(case.x.device)
    assert torch.equal(bits(eager(case)), bits(want))


# --- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "slots"), [(1, 1), (1, 8), (16, 1), (16, 8), (32, 1), (32, 32), (64, 1), (50, 8), (64, 32)]
)
def test_a_thousand_runs_have_the_same_bits(m: int, slots: int) -> None:
    """cases.md 20."""
    case = make_case(m, 8192, [512, 128], 32, slots, popularity="distinct", device="cuda")
    want = eager(case)
    assert sqnr(want, oracle(case)) > 40
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        wrong += (bits(eager(case)) != bits(want)).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize("slots", [6, 32])
def test_a_row_does_not_depend_on_the_others(slots: int) -> None:
    """cases.md 20: row 0 is the same whatever the other rows hold, and whoever they belong to."""
    case = make_case(32, 4096, [256, 64], 32, slots, popularity="distinct", poison=False, device="cuda")
    want = eager(case)[0].clone()
    for seed in range(5):
        gen = torch.Generator().manual_seed(seed)
        case.x[1:] = torch.randn(31, 4096, generator=gen).to("cuda", torch.bfloat16) * 10**seed
        case.row_slots = [0, *torch.randint(-1, slots, (31,), generator=gen).tolist()]
        case.groups = group_rows(case.row_slots, slots, device="cuda")
        assert torch.equal(eager(case)[0], want)
    case.x[1:] = float("nan")
    assert torch.equal(eager(case)[0], want)


@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize(("layout", "compute", "m"), kinds_at(1, 8, 32, 50))
def test_rows_without_adapter_are_bitwise_the_layer_without_adapters(
    layout: str, compute: str, m: int, slots: int
) -> None:
    case = make_case(m, 1024, [256, 100], 16, slots, layout=layout, compute=compute, b_bias=True, device="cuda")
    case.b[0].fill_(1e4)
    case.row_slots = [-1 if i % 2 == 0 else i // 2 % slots for i in range(m)]
    case.groups = group_rows(case.row_slots, slots, device="cuda")._replace(no_adapter=torch.tensor([False]))
    mixed = eager(case)
    none = Case(**{**vars(case), "groups": group_rows([-1] * m, slots, device="cuda")})
    assert none.groups.no_adapter.item()
    flagged = eager(none)
    none.groups = none.groups._replace(no_adapter=torch.tensor([False]))
    listed = eager(none)
    layer = Case(**{**vars(none), "a": [], "b": [], "b_bias": [], "rank": None, "scaling": None})
    bare = layer.run("lora_linear")
    assert plan_of(*layer.args()).path == "decode"
    assert torch.equal(bits(flagged), bits(bare)) and torch.equal(bits(listed), bits(bare))
    assert torch.equal(bits(mixed[::2].contiguous()), bits(bare[::2].contiguous()))
    assert m == 1 or not torch.equal(mixed, bare)


@pytest.mark.parametrize("m", [1, 16, 32, 64])
@pytest.mark.parametrize("k", [144, 4096, 12288])
@pytest.mark.parametrize(("layout", "codes"), [("channel", "made"), ("block", "made"), ("tensor", "static")])
def test_codes_made_give_the_bits_of_the_same_codes_handed_in(layout: str, codes: str, k: int, m: int) -> None:
    case = make_case(m, k, [192, 100], 16, 3, layout=layout, codes=codes, device="cuda")
    case.x *= torch.logspace(-7, 3, m, device="cuda")[:, None].to(case.x.dtype)
    made = eager(case)
    if codes == "static":
        scale = case.x_scale
        case.x_codes = torch.ops.epilora.quantize_fp8_static(case.x, scale)
        case.x_scale = scale.expand(m, 1).contiguous()
    else:
        name = "group" if layout == "block" else "token"
        case.x_codes, case.x_scale = getattr(torch.ops.epilora, f"quantize_fp8_{name}")(case.x)
    assert torch.equal(bits(eager(case)), bits(made))


@pytest.mark.parametrize(
    ("m", "dtype"),
    [(1, torch.bfloat16), (8, torch.bfloat16), (32, torch.bfloat16), (8, torch.float16), (16, torch.float16)],
    ids=str,
)
def test_w8a16_has_every_codes_value_at_its_own_input(m: int, dtype: torch.dtype) -> None:
    """One input of each row is 1, the others 0: the output is a column of the weights, bit for bit."""
    case = make_case(m, 256, [256], 8, 1, layout="tensor", compute="w8a16", dtype=dtype, bias=False, device="cuda")
    codes = (torch.arange(256)[:, None] + torch.arange(256)[None, :]) % 256
    codes[codes % 128 == 127] = 0  # NaN
    case.weight = codes.to("cuda", torch.uint8).view(torch.float8_e4m3fn)
    case.weight_scale = torch.ones(1, device="cuda")
    case.groups = case.groups._replace(no_adapter=torch.tensor([True]))
    for first in range(0, 256, m):
        case.x = torch.eye(256, device="cuda")[first : first + m].to(dtype)
        assert torch.equal(eager(case), case.weight[:, first : first + m].float().t().to(dtype)), first


# --- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("m", "slots"), [(4, 1), (17, 6), (32, 32), (64, 1), (64, 8)])
def test_captured_layers_follow_x_slots_and_weights(m: int, slots: int) -> None:
    """cases.md 3: several calls in one graph, captured with dependent launches on a side stream."""
    cases = layers(m, 6, slots)
    assert pdl_works(cases[0].x.device)
    static = [static_groups(case) for case in cases]
    x = torch.randn_like(cases[0].x)
    graph, y = capture(lambda: chain(cases, x, eager))
    gen = torch.Generator().manual_seed(1)
    for i in range(100):
        x.normal_()
        for tensors, case in zip(static, cases, strict=True):
            rows = torch.randint(-1, slots, (m,), generator=gen).tolist() if i % 3 else [i % slots] * m
            for target, source in zip(tensors, group_rows(rows, slots)[:4], strict=True):
                target.copy_(source)
            case.a[0].normal_(0, 0.05)
            case.b[1].normal_(0, 0.25)
            case.scaling.uniform_(0.5, 1.5)
        y.fill_(float("nan"))
        graph.replay()
        want = chain(cases, x, eager)
        assert torch.isfinite(want).all() and torch.equal(bits(y), bits(want)), i


def test_a_captured_slot_takes_a_smaller_adapter_in_place() -> None:
    """cases.md 17: rank 64, then 8 with NaN beyond it, then 0 and 33, at the same addresses."""
    case = make_case(8, 1024, [512, 256], 64, 2, mixed_ranks=False, poison=True, popularity="distinct", device="cuda")
    pointers = [t.data_ptr() for t in (*case.a, *case.b, case.rank, case.scaling)]
    graph, y = capture(lambda: eager(case))
    for rank in (64, 8, 0, 33):
        for t in (*case.a, *case.b):
            t[0] = torch.randn_like(t[0]) * t.shape[-1] ** -0.5
        for s in range(2):
            case.a[s][0, rank:] = float("nan")
            case.b[s][0, :, rank:] = float("nan")
        case.rank[:, 0] = rank
        y.fill_(float("nan"))
        graph.replay()
        assert torch.equal(bits(y), bits(eager(case))) and sqnr(y, oracle(case)) > 40, rank
    assert pointers == [t.data_ptr() for t in (*case.a, *case.b, case.rank, case.scaling)]


def test_a_graph_runs_on_any_stream() -> None:
    case = make_case(16, 1024, [512], 16, 8, device="cuda")
    want = eager(case)
    graph, y = capture(lambda: eager(case), torch.cuda.Stream())
    for stream in (torch.cuda.Stream(), torch.cuda.default_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(5):
                y.fill_(float("nan"))
                graph.replay()
            got = y.clone()
        torch.cuda.synchronize()
        assert torch.equal(bits(got), bits(want))


def test_graphs_and_calls_at_the_same_time_share_no_counters() -> None:
    """Two graphs on two streams, beside calls on a third: a shared counter lets one of them read too early, or hang."""
    sets = [layers(m, 5, slots) for m, slots in ((8, 1), (32, 32), (16, 6))]
    starts = [torch.randn_like(cases[0].x) for cases in sets]
    wants = [chain(cases, x, eager) for cases, x in zip(sets, starts, strict=True)]
    graphs = [capture(lambda i=i: chain(sets[i], starts[i], eager)) for i in range(2)]
    streams = [torch.cuda.Stream() for _ in range(3)]
    results: list[list[Tensor]] = [[], [], []]
    torch.cuda.synchronize()
    for _ in range(100):
        for i, (graph, y) in enumerate(graphs):
            with torch.cuda.stream(streams[i]):
                graph.replay()
                results[i].append(y.clone())
        with torch.cuda.stream(streams[2]):
            results[2].append(chain(sets[2], starts[2], eager))
    torch.cuda.synchronize()
    for found, want in zip(results, wants, strict=True):
        assert [i for i, y in enumerate(found) if not torch.equal(bits(y), bits(want))] == []


def test_captures_beyond_the_pool_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_POOL", 256), ("_pools", {}), ("_of_streams", {}), ("_kept", [])):
        monkeypatch.setattr(signals, name, value)
    cases = layers(16, 24, 6)
    x = torch.randn_like(cases[0].x)
    want = chain(cases, x, eager)
    graphs = [capture(lambda: chain(cases, x, eager)) for _ in range(2)]
    assert signals._pools[x.device][1] == 256, "the pool was not spent"
    for _ in range(20):
        for graph, y in graphs:
            y.fill_(float("nan"))
            graph.replay()
            assert torch.equal(bits(y), bits(want))
        assert torch.equal(bits(chain(cases, x, eager)), bits(want))


# --- progress --------------------------------------------------------------------------------------------------------

CROWD = """
import torch
from tests.cases import make_case
cases = [
    make_case(32, 4096, [12288, 12288], 64, 32, popularity="distinct", mixed_ranks=False, poison=False, device="cuda"),
    make_case(16, 4096, [12288, 12288], 64, 1, mixed_ranks=False, poison=False, device="cuda"),
    make_case(32, 12288, [4096], 128, 32, popularity="distinct", mixed_ranks=False, poison=False, device="cuda"),
]
wants = [case.run("lora_linear_decode") for case in cases]
for case, want in zip(cases, wants):
    for _ in range(500):
        got = case.run("lora_linear_decode")
    assert torch.equal(got, want)
streams = [torch.cuda.Stream() for _ in range(4)]
torch.cuda.synchronize()
big = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
found = [[], [], []]
for _ in range(200):
    for case, stream, results in zip(cases, streams, found):
        with torch.cuda.stream(stream):
            results.append(case.run("lora_linear_decode"))
    with torch.cuda.stream(streams[3]):
        big @ big
torch.cuda.synchronize()
for results, want in zip(found, wants):
    assert all(torch.equal(y, want) for y in results)
print("done")
"""


def test_more_programs_than_the_gpu_has_room_for_do_not_deadlock() -> None:
    """24,576 outputs are 384 programs that wait for others, many times in a row, and on three streams beside a GEMM."""
    done = subprocess.run(
        [sys.executable, "-c", CROWD], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr[-2000:]


def on_the_gpu(f: Callable[[], object], trace: Path) -> list[str]:
    """Names of all that ran on the GPU, in the order of its start: kernels, copies and memsets."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        f()
        torch.cuda.synchronize()
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memset", "gpu_memcpy")]
    return [e["name"] for e in sorted(ran, key=lambda e: e["ts"])]


@pytest.mark.parametrize("codes", ["made", "given"])
@pytest.mark.parametrize(("m", "slots"), [(1, 1), (16, 8), (32, 32)])
def test_a_call_is_one_kernel_and_nothing_else(tmp_path: Path, m: int, slots: int, codes: str) -> None:
    """cases.md 4: no memset, no fill and no second kernel, whatever the adapters; two calls are two kernels."""
    case = make_case(m, 4096, [1024, 256, 256], 64, slots, codes=codes, popularity="distinct", device="cuda")
    bare = Case(**{**vars(case), "groups": case.groups._replace(no_adapter=torch.tensor([True]))})
    for one in (case, bare):
        one.run()
    torch.cuda.synchronize()
    on_the_gpu(torch.cuda.synchronize, tmp_path / "warm.json")  # what the profiler itself does the first time
    for one in (case, bare):
        assert on_the_gpu(one.run, tmp_path / "one.json") == ["decode_kernel"]
    both = on_the_gpu(lambda: (case.run(), case.run()), tmp_path / "two.json")
    assert both == ["decode_kernel", "decode_kernel"]


def test_a_replay_is_its_calls_kernels_and_nothing_else(tmp_path: Path) -> None:
    cases = layers(16, 4, 6)
    graph, _ = capture(lambda: chain(cases, cases[0].x, eager))
    graph.replay()
    torch.cuda.synchronize()
    assert on_the_gpu(graph.replay, tmp_path / "graph.json") == ["decode_kernel"] * 4


def test_inductors_own_graphs_leave_the_flag_and_the_counters_alone() -> None:
    """Its graphs would keep the first value of a flag read on the host; its warm-up allocates in a private pool."""
    case = make_case(4, 512, [256, 64], 16, 3, device="cuda", bias=False, poison=False)
    *args, _, compute = case.args()[1:]

    def layer(x: torch.Tensor, no_adapter: torch.Tensor) -> torch.Tensor:
        return torch.ops.epilora.lora_linear(x, *args, no_adapter, compute).float() * 2

    compiled = torch.compile(layer, mode="reduce-overhead")
    for i in range(8):
        x, flag = torch.randn_like(case.x), torch.tensor([i % 2 == 1])
        got = compiled(x, flag).clone()
        assert torch.equal(got, layer(x, flag))
        torch.full((1 << 20,), 7, dtype=torch.int32, device="cuda")
