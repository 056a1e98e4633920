"""What the overhead and exposure benchmarks do without a GPU: their variants, in the interpreter, and arithmetic."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import exposure, overhead
from tests.cases import oracle, sqnr
from tests.ops.interpreter import repaired  # noqa: F401
from torch_epilora.ops.plan import Problem, make_plan

TILES = replace(make_plan(Problem(3, 96, 256, 16, 2)).decode, ahead=0)  # the prefetch is inline assembly


@pytest.fixture
def pair(monkeypatch):
    monkeypatch.setattr(overhead, "plan_of", lambda *_: SimpleNamespace(decode=TILES))
    return overhead.one_adapter(256, [64, 32], 3, 16, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU")
@pytest.mark.usefixtures("repaired")
def test_every_variant_computes_what_its_name_says(pair):
    case, coded = pair
    other = (case.weight.flip(0), [t.flip(1) for t in case.a], [t.flip(1) for t in case.b])
    calls = overhead.our_variants(case, coded, [(case.weight, case.a, case.b), other], False)
    assert set(calls) == set(overhead.VARIANTS) - {"vllm_gemm"}
    right, db, left_out = overhead.checked(case, calls)
    assert list(right) == list(calls) and not left_out
    assert all(value > 45 for value in db.values()), db
    want, base = oracle(case), oracle(overhead.bare(case))
    assert sqnr(base, want) < 20  # the adapter is no rounding error
    for name, made in calls.items():
        assert not torch.equal(made[0](), made[1]()), name
    # copies have other weights and other adapters: only what is handed in stays
    h = overhead.shrink_of(case, case.a)
    assert torch.equal(calls["h_given"][1](), calls["codes"][1](h=h))
    assert torch.equal(calls["serial"][1](), calls["codes"][1](h=overhead.shrink_of(case, other[1])))
    assert torch.equal(calls["empty"][1](), calls["h_given"][1]())
    swapped = replace(case, weight=other[0], a=other[1], b=other[2])
    assert sqnr(calls["x"][1](), oracle(swapped)) > 45


def test_a_variant_that_is_wrong_is_not_timed(pair):
    case, _ = pair
    want, base, h = oracle(case), oracle(overhead.bare(case)), overhead.h_oracle(case)
    calls = {"codes": [want.bfloat16], "gemm": [want.bfloat16], "shrink": [h.neg]}
    right, _, left_out = overhead.checked(case, calls)
    assert list(right) == ["codes"] and list(left_out) == ["gemm", "shrink"]
    assert left_out["gemm"].startswith("wrong: ") and overhead.wrong("qkv", left_out)
    right, _, left_out = overhead.checked(case, {"codes": [base.float], "gemm": [base.float], "shrink": [h.float]})
    assert list(right) == ["gemm", "shrink"] and list(left_out) == ["codes"]
    assert not overhead.wrong("qkv", {"vllm_gemm": "RuntimeError: no such kernel"})


def test_what_each_part_costs():
    us = {"x": 20.0, "codes": 17.0, "h_given": 16.5, "gemm": 14.0, "vllm_gemm": 16.0, "serial": 25.5, "read": 10.0}
    parts = {"epilogue": 2.5, "exposed": 0.5, "adapter": 3.0, "quantization": 3.0}
    assert overhead.differences(us) == parts
    assert overhead.ratios(us) == {
        "gemm / CUTLASS": 0.875, "serial / codes": 1.5, "read / x": 0.5, "read / codes": round(10 / 17, 3)
    }  # fmt: skip
    del us["gemm"], us["read"]
    assert overhead.differences(us) == {"exposed": 0.5, "quantization": 3.0}
    assert overhead.ratios(us) == {"serial / codes": 1.5}


def test_bytes_of_a_call(pair):
    case, _ = pair
    adapters = 2 * (2 * 16 * 256 + 16 * (64 + 32))
    assert overhead.size_of(case) == 96 * 256 + 4 * 96 + adapters + 2 * 3 * 256 + 2 * 3 * 96


def test_a_layer_sums_its_projections(monkeypatch):
    def measure(k, widths, m, rank, names, repeat):
        us = {"x": k / 64, "codes": k / 128, "gemm": 8.0}
        return [us | overhead.differences(us)] * repeat, {"bytes": k + 3, "left_out": {}}

    monkeypatch.setattr(overhead, "measure", measure)
    monkeypatch.setattr(overhead, "read_us", lambda size: size / 512)
    options = overhead.parse(["--projections", "qkv", "down", "--repeat", "2"])
    row = overhead.layer_row("qwen3-8b", 4, options, 16)
    assert row["bytes"] == 4096 + 12288 + 6 and (row["tokens"], row["rank"]) == (4, 16)
    assert row["us"] == {
        "x": 256.0,
        "codes": 128.0,
        "gemm": 16.0,
        "adapter": 112.0,
        "quantization": 128.0,
        "read": 32.0,
    }
    assert row["spread"]["x"] == [256.0, 256.0]
    assert row["ratios"] == {"read / x": 0.125, "read / codes": 0.25}
    assert row["projections"]["down"]["us"]["read"] == 24.0


@pytest.mark.parametrize("parse", [overhead.parse, exposure.parse])
def test_the_command_line_takes_what_the_decode_kernel_takes(parse, capsys):
    options = parse(["--projections", "o", "--tokens", "64", "--ranks", "128"])
    assert (options.projections, options.tokens, options.ranks) == (["o"], [64], [128])
    wrong = (
        (["--tokens", "1", "65"], "--tokens: expected 1 to 64, the decode kernel's, but 65 came"),
        (["--ranks", "129"], "--ranks: expected 1 to 128, the decode kernel's, but 129 came"),
        (["--repeat", "0"], "--repeat: expected at least 1, but 0 came"),
    )
    for arguments, message in wrong:
        with pytest.raises(SystemExit):
            parse(arguments)
        assert message in capsys.readouterr().err


def test_the_exposures_points():
    options = exposure.parse(["--models", "qwen3-8b", "qwen3-0.6b", "--projections", "o", "down", "--ranks", "16"])
    assert exposure.points(options) == [
        ("qwen3-8b", "o", 1, 16), ("qwen3-8b", "down", 1, 16), ("qwen3-0.6b", "o", 1, 16), ("qwen3-0.6b", "down", 1, 16)
    ]  # fmt: skip
    assert len(exposure.points(exposure.parse([]))) == 6 * 3 * 4
    assert set(exposure.VARIANTS) < set(overhead.VARIANTS)
