"""What the layer benchmark does without a GPU: shapes, checks before timing, sums, and the floor's kernel."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import batches, layer, peers, read_rate, sglang_part
from benchmarks.models import MODELS, shard
from tests.cases import make_case, oracle, sqnr


def size(projections: dict) -> int:
    return sum(k * sum(widths) for k, widths in projections.values())


def test_layers_have_the_models_own_widths():
    assert size(MODELS["qwen3-8b"]) == 192_937_984  # config.json: 4096 hidden, 12288, 32 heads and 8 of 128
    assert MODELS["qwen2.5-72b"]["qkv"] == (8192, [8192, 1024, 1024])
    assert MODELS["qwen2.5-72b"]["gate_up"] == (8192, [29568, 29568])
    assert MODELS["qwen3-0.6b"]["o"] == (2048, [1024]) and MODELS["qwen3-1.7b"]["down"] == (6144, [2048])


def test_a_shard_splits_outputs_of_qkv_and_gate_up_and_inputs_of_o_and_down():
    assert MODELS["qwen3-8b-tp4"] == {
        "qkv": (4096, [1024, 256, 256]),
        "o": (1024, [4096]),
        "gate_up": (4096, [3072, 3072]),
        "down": (3072, [4096]),
    }
    for parts in (2, 4, 8):
        assert size(MODELS[f"qwen3-8b-tp{parts}"]) * parts == size(MODELS["qwen3-8b"])
    with pytest.raises(ValueError, match="parts: qkv has a width of 4096, which 3 ranks cannot share evenly"):
        shard(MODELS["qwen3-8b"], 3)


@pytest.mark.parametrize(("compute", "layout"), [("w8a8", "channel"), ("w8a8", "block"), ("w8a16", "tensor")])
@pytest.mark.parametrize("m", [64, 65])
def test_the_librarys_systems_compute_what_their_columns_say(monkeypatch, m, compute, layout):
    monkeypatch.setattr(layer, "DEVICE", "cpu")
    case = make_case(
        m, 256, [128, 64], 8, 3, compute=compute, layout=layout, popularity="distinct", mixed_ranks=False, poison=False,
        bias=False,
    )  # fmt: skip
    other = case.weight.flip(0)
    systems = layer.our_systems(case, layer.with_codes(case), [case.weight, other])
    handed = {"bare_codes", "decode_codes"} if compute == "w8a8" else set()
    fits = {"bare", "none", "auto", "fused", "hybrid", "decode"} | handed
    assert set(systems) == fits - ({"decode", "decode_codes"} if m > layer.DECODE_MAX_TOKENS else set())
    want, base = oracle(case), oracle(replace(case, row_slots=[-1] * m))
    calls, db, left_out = layer.check(systems, want, base)
    assert set(calls) == set(systems) and not left_out
    assert all(value > 50 for value in db.values())
    assert sqnr(calls["bare"][0](), want) < 20  # the adapters are no rounding error
    assert not torch.equal(calls["bare"][0](), calls["bare"][1]())


@pytest.mark.parametrize("kind", batches.KINDS)
@pytest.mark.parametrize(("m", "slots"), [(1, 1), (64, 1), (64, 8), (40, 32)])
def test_every_kind_of_batch_is_computed_right(kind, m, slots):
    case = make_case(m, 256, [64, 32], 32, slots, mixed_ranks=False, poison=False, bias=False)
    batches.deal(case, kind)
    assert len(case.row_slots) == m and set(case.row_slots) <= set(range(slots))
    assert sqnr(case.run(), oracle(case)) > 48
    case.rank = None  # beyond a rank there are zeros
    assert sqnr(case.run(), oracle(case)) > 48


def test_kinds_of_batches_are_what_they_say():
    even, half = batches.row_slots("even", 64, 8), batches.row_slots("half", 64, 8)
    assert even == batches.row_slots("mixed", 64, 8) and [even.count(s) for s in range(8)] == [8] * 8
    assert half.count(0) == 32 and {half.count(s) for s in range(1, 8)} == {4, 5}
    zipf = batches.row_slots("zipf", 4096, 8)
    assert zipf == batches.row_slots("zipf", 4096, 8)
    shares = [place**-1.5 for place in range(1, 9)]
    for s, share in enumerate(shares):
        assert abs(zipf.count(s) / 4096 - share / sum(shares)) < 0.03
    case = make_case(10, 64, [32, 16], 128, 6, mixed_ranks=False, poison=False)
    batches.deal(case, "mixed")
    assert case.rank.tolist() == [[8, 16, 32, 64, 128, 8]] * 2 and peers._ranks(case).tolist() == case.rank[0].tolist()
    assert not case.a[0][1, 16:].any() and not case.b[1][1, :, 16:].any() and case.a[0][1, :16].all()


def test_slices_of_a_lie_one_below_the_other_by_each_adapters_rank_for_sglang():
    case = make_case(10, 64, [32, 16], 128, 6, mixed_ranks=False, poison=False)
    batches.deal(case, "mixed")
    stacked = peers.stacked_a(case)
    assert stacked.shape == (6, 256, 64)
    for slot, rank in enumerate(case.rank[0].tolist()):
        assert torch.equal(stacked[slot, :rank], case.a[0][slot, :rank])
        assert torch.equal(stacked[slot, rank : 2 * rank], case.a[1][slot, :rank])
        assert not stacked[slot, 2 * rank :].any()


def test_only_right_results_are_timed():
    want = torch.randn(4, 64, dtype=torch.float64)

    def refuses():
        raise ValueError("x: expected what this is not")

    def crashes():
        raise RuntimeError("no such kernel")

    def leaves_a_row_out():
        y = torch.empty(4, 64)
        y[:3] = want[:3].float()
        return y

    systems = {
        "fused": lambda: [want.float],
        "bare": lambda: [want.float],
        "hybrid": lambda: [leaves_a_row_out],
        "decode": lambda: [refuses],
        "vllm": lambda: [crashes],
        "sglang": crashes,
    }
    calls, db, left_out = layer.check(systems, want, torch.zeros_like(want))
    assert list(calls) == ["fused"] == list(db)
    assert left_out == {
        "bare": "wrong: -inf dB from fp64, expected over 40",
        "hybrid": "wrong: -inf dB from fp64, expected over 40",
        "decode": "ValueError: x: expected what this is not",
        "vllm": "RuntimeError: no such kernel",
        "sglang": "RuntimeError: no such kernel",
    }
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError, match="no such kernel"):
        layer.check({"fused": lambda: [crashes]}, want, want)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_layer_sums_each_repeat_and_only_systems_that_every_projection_has():
    o = [{"bare": 1.0, "decode": 5.0}, {"bare": 3.0, "decode": 7.0}]
    down = [{"bare": 10.0}, {"bare": 20.0}]
    assert layer.added([o, down]) == [{"bare": 11.0}, {"bare": 23.0}]
    assert layer.summary(layer.added([o, down]), 1) == {"us": {"bare": 17.0}, "spread": {"bare": [11.0, 23.0]}}


def test_a_result_file_is_json_with_a_line_for_each_row(tmp_path):
    rows = [{"model": "a", "us": {"bare": 1.5}}, {"model": "b", "us": {}}]
    layer.write(tmp_path / "out.json", {"gpu": "none"}, rows)
    text = (tmp_path / "out.json").read_text()
    assert json.loads(text) == {"environment": {"gpu": "none"}, "rows": rows}
    assert [line.rstrip(",") for line in text.splitlines()[2:4]] == [json.dumps(row) for row in rows]


def test_what_is_not_installed_is_not_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(layer.peers, "installed", lambda: [])
    assert layer.parse([]).systems == list(layer.OURS)
    assert layer.parse(["--systems", "decode", "bare"]).systems == ["decode", "bare"]
    with pytest.raises(SystemExit):
        layer.parse(["--systems", "bare", "sglang"])
    assert "--systems: sglang needs vLLM installed, and SGLANG_PART set" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        layer.parse(["--systems", "vllm_tuned"])
    assert "vllm_tuned needs vLLM installed, and VLLM_TUNED_CONFIG_FOLDER set" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        layer.parse(["--systems", "bare", "vllm"])
    said = capsys.readouterr().err
    assert said.endswith("--systems: vllm needs vLLM installed\n") and "SGLANG" not in said.splitlines()[-1]
    monkeypatch.delenv(sglang_part.VARIABLE, raising=False)
    assert sglang_part.release() is None
    monkeypatch.setenv(sglang_part.VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match="SGLANG_PART: expected a folder with pk/sglang/srt/lora/dense, but"):
        sglang_part.release()


def test_the_floors_kernel_reads_every_word():
    words = 3 * 4096 + 17
    for shape in ((4096, 1, 4), (1024, 4, 4)):
        for planted in (None, 0, words // 2, words - 1):
            source, found = torch.zeros(words, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
            if planted is not None:
                source[planted] = -1
            read_rate.launch(source, found, *shape)
            assert int(found) == (planted is not None), (shape, planted)
