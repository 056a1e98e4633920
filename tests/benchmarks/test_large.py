"""What ``benchmarks.large`` measures: the shrinks in the interpreter and with a stand-in of vLLM's, and its rows."""

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from benchmarks import batches, large, layer
from benchmarks.overhead import h_oracle
from tests.cases import Case, make_case, sqnr
from tests.ops.interpreter import repaired  # noqa: F401
from torch_epilora.ops import reference
from torch_epilora.ops.plan import Shrink


class Meta:
    """vLLM's row metadata, of which its stand-in needs the rows' slots alone."""

    @classmethod
    def make(cls, slots: int, m: int, device: torch.device) -> "Meta":
        return cls()

    def prepare_tensors(self, row_slots: torch.Tensor) -> None:
        self.row_slots = row_slots

    def meta_args(self, m: int, specialize: bool) -> tuple[torch.Tensor]:
        return (self.row_slots,)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Stand in for vLLM's shrink; return where x and the adapters lay that it was called with."""
    found: list[tuple[int, int]] = []

    def lora_shrink(x, a, h, row_slots, scaling):
        assert h.dtype == torch.float32 and h.is_contiguous() and all(t.dim() == 4 for t in a)
        found.append((x.data_ptr(), a[0].data_ptr()))
        for i, t in enumerate(a):
            h[i] = scaling * torch.einsum("mk,mrk->mr", x.float(), t[row_slots.long(), 0].float())

    module = ModuleType("vllm.lora.ops.triton_ops")
    vars(module).update(lora_shrink=lora_shrink, LoRAKernelMeta=Meta)
    vars(module).update(lora_shrink_op=SimpleNamespace(), lora_expand_op=SimpleNamespace())
    for name in ("vllm", "vllm.lora", "vllm.lora.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(large.peers, "installed", lambda: ["vllm"])
    return found


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setattr(large, "plan_of", lambda *_: SimpleNamespace(shrink=Shrink(16, 16, 64, 2, 4, 1)))
    case = make_case(20, 128, [64, 32], 16, 3, mixed_ranks=False, poison=False, bias=False)
    batches.deal(case, "even")
    return case


def test_the_shrink_in_fp64_is_the_references(case: Case) -> None:
    want = reference.shrink(case.x, case.a, case.rank, case.scaling, *case.groups[:4])
    assert sqnr(want, h_oracle(case)) > 50
    case.row_slots[0] = 1
    assert sqnr(want, h_oracle(case)) < 40


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU")
@pytest.mark.usefixtures("repaired")
def test_both_shrinks_are_compared_with_fp64_on_each_copy(case: Case, seen: list[tuple[int, int]]) -> None:
    other = (case.x.flip(1).contiguous(), [t.flip(1).contiguous() for t in case.a])
    operands = [(case.x, case.a), other]
    scaled = h_oracle(case)
    assert list(layer.check(large.shrinks(case, operands), scaled, scaled)[0]) == ["ours"]  # vLLM's has no scaling
    case.scaling.fill_(1)
    want = h_oracle(case)
    calls, db, left_out = layer.check(large.shrinks(case, operands), want, want)
    assert list(calls) == ["ours", "vllm"] and not left_out and min(db.values()) > 50
    want = h_oracle(replace(case, x=other[0], a=other[1]))
    for made in calls.values():
        assert sqnr(made[1](), want) > 50


def test_vllm_has_seen_every_copys_adapters_before_a_graph_is_captured(case: Case, seen: list[tuple[int, int]]) -> None:
    operands = [(case.x.clone(), [t.clone() for t in case.a]) for _ in range(3)]
    calls = large.peers.vllm_shrinks(case, operands)
    assert len(calls) == 3 and seen == [(x.data_ptr(), a[0].data_ptr()) for x, a in operands]


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are interpreted only where there is no GPU")
@pytest.mark.usefixtures("repaired", "case")
def test_a_measurement_rotates_x_and_a(monkeypatch: pytest.MonkeyPatch, seen: list[tuple[int, int]]) -> None:
    def times(rounds, number, device):
        assert number == 3 and all(len(set(places)) == 3 for places in zip(*seen, strict=True))
        for name, step in rounds.items():
            assert torch.equal(step(0), step(2)), name
        return dict.fromkeys(rounds, 2.0)

    size = 2 * 128 * (12 + 2 * 4 * 16)
    copied = []
    monkeypatch.setattr(large, "RANK", 16)
    monkeypatch.setattr(large, "copies", lambda read: copied.append(read) or 3)
    monkeypatch.setattr(large, "median_times", times)
    monkeypatch.setattr(layer, "DEVICE", "cpu")
    repeats, known = large.measure(128, [64, 32], 12, 4, 2)
    assert repeats == [{"ours": 2.0, "vllm": 2.0}] * 2 and copied == [size]
    assert set(known["sqnr"]) == {"ours", "vllm"} and known["left_out"] == {}


def test_a_rows_shrink_sums_its_projections(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(k, widths, m, slots, repeat):
        asked.append((k, widths, m, slots))
        return [{"ours": k / 1024, "vllm": 10.0}] * repeat, {"sqnr": {}, "left_out": {}}

    monkeypatch.setattr(large, "measure", measure)
    row = large.shrink_row(4096, 8, 2)
    assert row["us"] == {"ours": 24.0, "vllm": 40.0} and row["spread"]["ours"] == [24.0, 24.0]
    assert asked[0] == (4096, [4096, 1024, 1024], 4096, 8) and asked[3] == (12288, [4096], 4096, 8)
    assert row["projections"]["down"]["us"] == {"ours": 12.0, "vllm": 10.0}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Stand in for both measurements; return the layers asked for."""
    asked: list[tuple] = []

    def row(model, tokens, adapters, compute, options):
        asked.append((model, tokens, adapters, compute, options.rank, options.batch, options.layout, options.systems))
        return {"tokens": tokens, "us": {"ours": 2.0}, "projections": {"qkv": {"left_out": {}}}}

    monkeypatch.setattr(layer, "layer_row", row)
    shrink = {"us": {"ours": 1.0}, "projections": {"qkv": {"left_out": {"vllm": "RuntimeError: no such kernel"}}}}
    monkeypatch.setattr(large, "shrink_row", lambda *_: shrink)
    monkeypatch.setattr(large, "need_gpu", lambda: None)
    monkeypatch.setattr(large, "environment", lambda: {"gpu": "none"})
    monkeypatch.setattr(large.peers, "installed", lambda: ["vllm_bare", "vllm_gemm", "vllm", "vllm_tuned", "sglang"])
    return asked


def test_every_size_is_measured_and_kept(measured: list[tuple], tmp_path, capsys: pytest.CaptureFixture) -> None:
    large.main(["--out", str(tmp_path / "l.json"), "--repeat", "1"])
    rows = json.loads((tmp_path / "l.json").read_text())["rows"]
    sizes = [(tokens, adapters) for tokens in (2048, 4096, 8192, 16384) for adapters in (1, 8, 32)]
    assert [(tokens, adapters) for _, tokens, adapters, *_ in measured] == sizes and len(rows) == 12
    systems = ["bare", "auto", "vllm_bare", "vllm", "vllm_tuned", "sglang"]
    for model, _, _, *rest in measured:
        assert (model, *rest) == ("qwen3-8b", "w8a8", 64, "even", "channel", systems)
    assert all(row["shrink"]["us"] == {"ours": 1.0} for row in rows)
    assert capsys.readouterr().out.count("  qkv, shrink: left out vllm: RuntimeError: no such kernel\n") == 12


def test_a_wrong_shrink_fails_the_run(measured: list[tuple], monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    wrong = {"us": {}, "projections": {"o": {"left_out": {"ours": "wrong: 3.0 dB from fp64, expected over 40"}}}}
    monkeypatch.setattr(large, "shrink_row", lambda *_: wrong)
    with pytest.raises(SystemExit, match="a variant's output was wrong"):
        large.main(["--out", str(tmp_path / "l.json")])
    assert len(json.loads((tmp_path / "l.json").read_text())["rows"]) == 12


def test_no_repeat_is_refused() -> None:
    with pytest.raises(SystemExit):
        large.main(["--repeat", "0"])
