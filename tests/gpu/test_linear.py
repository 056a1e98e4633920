"""The projection on the GPU against fp64 over a pairwise covering set, and against the unfused path's own error."""

import zlib

import pytest
import torch
from torch import Tensor

from tests.cases import FP8, Case, make_case, oracle, sqnr
from tests.gpu.paths import decode_serves
from tests.pairwise import pairwise
from torch_epilora.ops import dequantize_fp8
from torch_epilora.ops.dispatch import plan_of
from torch_epilora.ops.reference import quantize_activations

SHAPES = {
    "qwen3-0.6b.qkv": (1024, [2048, 1024, 1024]),
    "qwen3-0.6b.o": (2048, [1024]),
    "qwen3-0.6b.gate_up": (1024, [3072, 3072]),
    "qwen3-0.6b.down": (3072, [1024]),
    "qwen3-8b.qkv": (4096, [4096, 1024, 1024]),
    "qwen3-8b.o": (4096, [4096]),
    "qwen3-8b.gate_up": (4096, [12288, 12288]),
    "qwen3-8b.down": (12288, [4096]),
    "llama-3.1-8b.gate_up": (4096, [14336, 14336]),
    "llama-3.1-8b.down": (14336, [4096]),
    "odd.130": (130, [200]),
    "odd.15": (15, [32]),
    "odd.1280": (1280, [3420]),
    "odd.eight": (576, [576, 192, 192, 64, 16, 8, 5, 11]),
}
KINDS = {
    "popularity": ["uniform", "skewed", "distinct", "one", "none"],
    "layout": ["tensor", "channel", "block"],
    "compute": ["w8a8", "w8a16"],
    "dtype": [torch.bfloat16, torch.float16],
    "codes": ["made", "given", "static"],
    "bias": [False, True],
    "b_bias": [False, True],
    "mixed_ranks": [False, True],
    "rank_unit": [1, 8],
}
CASES = pairwise(
    {
        "m": [0, 1, 2, 3, 4, 7, 8, 16, 17, 24, 32, 33, 64, 77, 100, 256, 1000, 2048],
        "shape": list(SHAPES),
        "r": [1, 3, 4, 8, 9, 16, 17, 32, 64, 96, 128, 256, 320, 512],
        "slots": [1, 2, 8, 32, 64],
        **KINDS,
        "path": ["lora_linear", "lora_linear_fused", "lora_linear_hybrid"],
    }
)
DECODE_CASES = pairwise(
    {
        "m": [1, 3, 4, 7, 8, 16, 17, 24, 32, 33, 50, 64],
        "shape": ["qwen3-0.6b.qkv", "qwen3-8b.o", "qwen3-8b.gate_up", "qwen3-8b.down", "odd.1280", "odd.eight"],
        "r": [1, 8, 9, 16, 17, 64, 96, 128],
        "slots": [1, 2, 8, 32, 64, 127],
        **KINDS,
        "path": ["lora_linear_decode"],
    }
)
"""``lora_linear`` above takes that path too."""
ALL = CASES + [case for case in DECODE_CASES if decode_serves(case["m"], case["compute"], case["dtype"])]


def unfused(case: Case) -> Tensor:
    """The same codes, one bf16 (fp16) operator after another, as PEFT beside a base linear would.

    W8A8's base is torch's FP8 GEMM with fast accumulation, which is how engines run it; block scales, which add up per
    128-block, and W8A16 take the exact product.
    """
    dtype = case.x.dtype
    if case.compute == "w8a16":
        y = (case.x.float() @ dequantize_fp8(case.weight, case.weight_scale).t()).to(dtype)
    elif case.layout == "block":
        bare = Case(**{**vars(case), "row_slots": [-1] * len(case.row_slots), "bias": None})
        y = oracle(bare).to(dtype)
    else:
        codes, scale = quantize_activations(case.x, case.x_codes, case.x_scale, case.layout)
        (m, k), n = codes.shape, case.weight.shape[0]
        pad = torch.zeros(-(-m // 16) * 16 + -(-n // 16) * 16, -(-k // 16) * 16, dtype=torch.uint8, device="cuda")
        left, right = pad[: -(-m // 16) * 16], pad[-(-m // 16) * 16 :]
        left[:m, :k], right[:n, :k] = codes.view(torch.uint8), case.weight.view(torch.uint8)
        one = torch.ones((), device="cuda")
        acc = torch._scaled_mm(
            left.view(FP8), right.view(FP8).t(), one, one, out_dtype=torch.float32, use_fast_accum=True
        )[:m, :n]
        y = (acc * scale * case.weight_scale.reshape(1, -1)).to(dtype)
    if case.bias is not None:
        y = y + case.bias
    for slot in sorted({s for s in case.row_slots if s >= 0}):
        rows = torch.tensor([i for i, s in enumerate(case.row_slots) if s == slot], device=y.device)
        start = 0
        for s, (down, up) in enumerate(zip(case.a, case.b, strict=True)):
            stop = start + up.shape[1]
            r = int(case.rank[s, slot]) if case.rank is not None else down.shape[1]
            scaling = float(case.scaling[s, slot])
            if r:
                delta = (case.x[rows] @ down[slot, :r].t()) @ up[slot, :, :r].t()
                if case.b_bias:
                    delta = delta + case.b_bias[s][slot]
                y[rows, start:stop] += delta * scaling
            start = stop
    return y


@pytest.mark.parametrize("number", range(len(ALL)))
def test_pairwise(number: int, record) -> None:
    p = dict(ALL[number])
    path, shape = p.pop("path"), p.pop("shape")
    k, widths = SHAPES[shape]
    case = make_case(
        p.pop("m"), k, widths, p.pop("r"), p.pop("slots"), device="cuda", seed=zlib.crc32(b"%d" % number), **p
    )
    for elements in (1 << 24, case.x.shape[0] * sum(widths)):  # what torch.empty hands out next holds NaN
        torch.full((elements,), float("nan"), dtype=case.x.dtype, device="cuda")
    got = case.run(path)
    assert got.shape == (case.x.shape[0], sum(widths)) and got.dtype == case.x.dtype
    if not got.numel():
        return
    plan = plan_of(*case.args())
    took = plan.path
    assert path != "lora_linear_decode" or "decode" in (took, plan.base)
    want, real = oracle(case), oracle(case, round_h=False)
    db = sqnr(got, want)
    error, baseline = (got.double() - real).norm(), (unfused(case).double() - real).norm()
    record(
        test="pairwise",
        number=number,
        path=path,
        took=took,
        sqnr=db,
        ratio=float(error / baseline),
    )
    assert db > 40, f"{ALL[number]}: {db:.1f} dB"
    assert error <= 2 * baseline, f"{ALL[number]}: error {error:.3e}, unfused {baseline:.3e}"


@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
@pytest.mark.parametrize("compute", ["w8a8", "w8a16"])
def test_float32(dtype: torch.dtype, layout: str, compute: str) -> None:
    case = make_case(33, 320, [192, 64], 9, 4, layout=layout, compute=compute, dtype=dtype, device="cuda")
    assert sqnr(case.run(), oracle(case)) > 60


@pytest.mark.parametrize("m", [65, 77, 100, 129, 1001])
@pytest.mark.parametrize(("k", "n"), [(512, 256), (2048, 384), (512, 128)])
def test_block_scales_through_the_vendors_gemm(m: int, k: int, n: int) -> None:
    case = make_case(m, k, [n], 8, 2, layout="block", device="cuda", bias=m != 77)
    assert plan_of(*case.args()).base == "vendor"
    assert sqnr(case.run("lora_linear_hybrid"), oracle(case)) > 40


@pytest.mark.parametrize("m", [1, 40, 300])
def test_adapters_are_added_to_what_another_base_wrote(m: int) -> None:
    case = make_case(m, 1024, [512, 256], 40, 4, b_bias=True, popularity="distinct", device="cuda")
    adapters = (case.a, case.b, case.b_bias, case.rank, case.scaling)
    y = torch.randn(m, 768, device="cuda").bfloat16()
    want, before = y.cpu(), y.clone()
    on_cpu = [[t.cpu() for t in v] if isinstance(v, list) else v.cpu() for v in adapters]
    flag = torch.tensor([False])
    torch.ops.epilora.lora_add_(want, case.x.cpu(), *on_cpu, *(t.cpu() for t in case.groups[:4]), flag)
    torch.ops.epilora.lora_add_(y, case.x, *adapters, *case.groups[:4], flag)
    assert sqnr(y.cpu(), want.double()) > 40 and not torch.equal(y, before)
    again = before.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.ops.epilora.lora_add_(again, case.x, *adapters, *case.groups[:4], torch.tensor([True]))
    graph.replay()
    assert torch.equal(again, before)


def test_row_strides_past_two_to_the_thirty() -> None:
    """cases.md 19: offsets that 32 bits cannot hold."""
    case = make_case(3, 64, [128], 8, 2, device="cuda", popularity="distinct")
    stride = (1 << 30) + 64
    room = torch.empty(2 * stride + 128, dtype=torch.bfloat16, device="cuda")
    far = room.as_strided((3, 64), (stride, 1))
    far.copy_(case.x)
    want = case.run()
    case.x = far
    assert torch.equal(case.run(), want)
    h = torch.ops.epilora.shrink(far, case.a, case.rank, case.scaling, *case.groups[:4])
    y = room.as_strided((3, 128), (stride, 1))
    y.zero_()
    torch.ops.epilora.expand_add_(y, h, case.b, [], case.rank, case.scaling, *case.groups[:4])
    near = torch.zeros(3, 128, dtype=torch.bfloat16, device="cuda")
    torch.ops.epilora.expand_add_(near, h, case.b, [], case.rank, case.scaling, *case.groups[:4])
    assert near[2].abs().sum() > 0 and torch.equal(y, near)


def test_many_tokens_and_outputs() -> None:
    """cases.md 19: 90,000 tokens by 12,288 outputs is past 2^30 elements; the last rows are compared."""
    case = make_case(90_000, 256, [12288], 8, 2, device="cuda", popularity="skewed", bias=False)
    got = case.run()
    tail = make_case(1, 256, [12288], 8, 2, device="cuda")
    rows = slice(89_980, 90_000)
    tail = Case(**{**vars(case), "x": case.x[rows], "row_slots": case.row_slots[rows]})
    assert sqnr(got[rows], oracle(tail)) > 40
