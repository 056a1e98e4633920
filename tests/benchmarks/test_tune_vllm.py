"""vLLM's launch configurations, tuned and default, with a stand-in for vLLM's operators that runs on the CPU."""

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, reduce
from importlib.machinery import ModuleSpec
from math import log2
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import layer, models, peers, sglang_part, tenants, timing, tune_vllm
from benchmarks.tune_vllm import Key
from tests.cases import Case, make_case, oracle, sqnr

START = {
    "shrink": {
        "block_m": 32,
        "block_n": 16,
        "block_k": 32,
        "split_k": 64,
        "num_warps": 4,
        "num_stages": 2,
        "max": None,
    },
    "expand": {"block_m": 64, "block_n": 64, "block_k": 32, "num_warps": 4, "num_stages": 2, "max": None},
}
GOAL = {
    "shrink": {
        "block_m": 16,
        "block_n": 64,
        "block_k": 128,
        "split_k": 8,
        "num_warps": 4,
        "num_stages": 3,
        "max": None,
    },
    "expand": {"block_m": 128, "block_n": 32, "block_k": 64, "num_warps": 4, "num_stages": 3, "max": None},
}
"""The fastest that runs and is right: eight warps would be faster, but are wrong, and 256 of K do not run."""
TINY = {"qkv": (64, [64, 32, 32]), "o": (64, [64]), "down": (128, [64])}
POINTS = [
    ("tiny", 16, 1, "even", 8),
    ("tiny", 16, 4, "even", 8),
    ("tiny", 32, 4, "half", 8),
    ("tiny", 16, 4, "mixed", 16),
]


class StandIn:
    """What the benchmarks take of vLLM.

    ``launched`` has what each call of an operator launched with, ``asked`` what was looked up without and with tables.
    """

    def __init__(self) -> None:
        self.launched: list[tuple[str, dict]] = []
        self.asked: dict[bool, set[tuple]] = {False: set(), True: set()}
        self.utils = SimpleNamespace(load_lora_op_config=cache(self.load), get_lora_op_configs=cache(self.lookup))
        self.utils._LORA_A_PTR_DICT, self.utils._LORA_B_PTR_DICT = {}, {}
        by_name = {"get_lora_op_configs": self.utils.get_lora_op_configs}
        self.ops = SimpleNamespace(
            utils=self.utils,
            lora_shrink_op=SimpleNamespace(**by_name),
            lora_expand_op=SimpleNamespace(**by_name),
            lora_shrink=self.shrink,
            lora_expand=self.expand,
            LoRAKernelMeta=SimpleNamespace(make=self.meta),
        )

    def load(self, op_type: str, add_inputs: bool | None) -> dict | None:
        folder = os.environ.get("VLLM_TUNED_CONFIG_FOLDER")
        names = {("shrink", None): "GPU_1_A_SHRINK.json", ("expand", True): "GPU_1_A_EXPAND_TRUE.json"}
        path = Path(folder or "no such folder") / names[op_type, add_inputs]
        return json.loads(path.read_text()) if path.exists() else None

    def lookup(self, op_type, max_loras, batch, hidden_size, rank, num_slices, add_inputs=None) -> dict:
        table = self.utils.load_lora_op_config(op_type, add_inputs)
        self.asked[table is not None].add((op_type, max_loras, batch, hidden_size, rank, num_slices))
        if table is None:
            return START[op_type]
        sides = (hidden_size, rank) if op_type == "shrink" else (rank, hidden_size)
        return reduce(lambda level, part: level[str(part)], (max_loras, num_slices, batch, *sides), table)

    def meta(self, slots: int, tokens: int, device: torch.device) -> SimpleNamespace:
        rows = torch.empty(tokens, dtype=torch.int64)
        return SimpleNamespace(prepare_tensors=rows.copy_, meta_args=lambda m, _: (rows[:m], torch.tensor(slots + 1)))

    def launch(self, module: SimpleNamespace, op: str, **asked: object) -> float:
        config = module.get_lora_op_configs(op, **asked)
        self.launched.append((op, config))
        if config["block_k"] == 256:
            raise RuntimeError("out of resource: shared memory")
        return 0.0 if config["num_warps"] == 8 else 1.0

    def shrink(self, x, a, h, rows, max_loras, scaling) -> None:
        asked = {"max_loras": int(max_loras), "batch": len(x), "hidden_size": x.shape[1], "rank": h.shape[2]}
        right = self.launch(self.ops.lora_shrink_op, "shrink", **asked, num_slices=len(a))
        for part, weight in zip(h, a, strict=True):
            part.copy_(right * scaling * torch.einsum("mk,mrk->mr", x.float(), weight[rows, 0].float()))

    def expand(self, h, b, y, rows, max_loras, offset_start, add_inputs) -> None:
        asked = {"max_loras": int(max_loras), "batch": len(y), "hidden_size": max(w.shape[2] for w in b)}
        asked |= {"rank": h.shape[2], "num_slices": len(b), "add_inputs": add_inputs}
        right = self.launch(self.ops.lora_expand_op, "expand", **asked)
        parts = [torch.einsum("mr,mwr->mw", part, w[rows, 0].float()) for part, w in zip(h, b, strict=True)]
        y += (right * torch.cat(parts, 1)).to(y.dtype)


class Inline:
    """A pool of processes without processes."""

    map = staticmethod(map)

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """The stand-in in vLLM's place, of which a tiny model is measured."""
    made = StandIn()
    package = SimpleNamespace(__spec__=ModuleSpec("vllm", None))
    modules = {"vllm": package, "vllm.lora": package, "vllm.lora.ops": SimpleNamespace(triton_ops=made.ops)}
    for name, module in {**modules, "vllm.lora.ops.triton_ops": made.ops}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv(peers.TUNED, raising=False)
    monkeypatch.delenv(sglang_part.VARIABLE, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU 1-A")
    monkeypatch.setitem(models.MODELS, "tiny", TINY)
    monkeypatch.setattr(tenants, "points", lambda: POINTS)
    monkeypatch.setattr(tune_vllm, "ProcessPoolExecutor", Inline)
    monkeypatch.setattr(tune_vllm, "DEVICE", "cpu")
    monkeypatch.setattr(tune_vllm, "COLD_BYTES", 1)
    monkeypatch.setattr(tune_vllm, "need_gpu", lambda: None)

    def times(variants, copies, device):
        found = {}
        for name, call in variants.items():
            for copy in range(copies):
                call(copy)
            op, config = made.launched[-1]
            away = [abs(log2(value / GOAL[op][field])) / 10 for field, value in config.items() if value is not None]
            found[name] = 1 + sum(away) - 0.5 * (config["num_warps"] == 8)
        return found

    monkeypatch.setattr(tune_vllm, "median_times", times)
    peers.vllm_default.cache_clear()
    yield made
    peers.vllm_default.cache_clear()


def tune(folder: Path) -> None:
    tune_vllm.main(["--out", str(folder), "--jobs", "1"])


def test_both_files_hold_the_fastest_right_configuration_of_every_key(vllm, tmp_path, capsys):
    tune(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"GPU_1_A_SHRINK.json", "GPU_1_A_EXPAND_TRUE.json"}
    shrink = json.loads((tmp_path / "GPU_1_A_SHRINK.json").read_text())
    goal = GOAL["shrink"]
    # slots and one more, slices, tokens, K, rank
    assert shrink == {
        "2": {"3": {"16": {"64": {"8": goal}}}, "1": {"16": {"64": {"8": goal}, "128": {"8": goal}}}},
        "5": {
            "3": {"16": {"64": {"8": goal, "16": goal}}, "32": {"64": {"8": goal}}},
            "1": {
                "16": {"64": {"8": goal, "16": goal}, "128": {"8": goal, "16": goal}},
                "32": {"64": {"8": goal}, "128": {"8": goal}},
            },
        },
    }
    expand = json.loads((tmp_path / "GPU_1_A_EXPAND_TRUE.json").read_text())
    goal = GOAL["expand"]
    # slots and one more, slices, tokens, rank, the widest slice; o and down ask for the same
    assert expand == {
        "2": {slices: {"16": {"8": {"64": goal}}} for slices in "31"},
        "5": {slices: {"16": {"8": {"64": goal}, "16": {"64": goal}}, "32": {"8": {"64": goal}}} for slices in "31"},
    }
    assert vllm.asked[False] == vllm.asked[True] and len(vllm.asked[True]) == len(tune_vllm.keys())
    printed = capsys.readouterr().out
    assert "shrink 5 3 16 64 8 1.9 -> 1.0 us {'block_m': 16," in printed and "'split_k': 8" in printed
    assert "times: shrink: RuntimeError: out of resource: shared memory" in printed
    assert "times: expand: wrong: 0 dB from fp64, expected over 40" in printed


def test_a_configuration_that_is_no_faster_is_not_taken(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr(tune_vllm, "LEAST_GAIN", 0.5)
    tune(tmp_path)
    assert '"split_k": 64' in (tmp_path / "GPU_1_A_SHRINK.json").read_text()
    assert '"split_k": 8' not in (tmp_path / "GPU_1_A_SHRINK.json").read_text()


def test_every_kernel_is_compiled_once_and_a_faulty_one_is_not_tried_again(vllm, tmp_path, monkeypatch):
    found, first, later = [], tune_vllm.first_fault, tune_vllm.Operator.fault

    def first_fault(task):
        fault = first(task)
        found.append((tune_vllm.kernel(task[0], task[2]), fault))
        return fault

    def fault(operator, config):
        if len(operator.weights) > 1:  # where it is timed
            assert (tune_vllm.kernel(operator.key, config), None) in found
        return later(operator, config)

    monkeypatch.setattr(tune_vllm, "first_fault", first_fault)
    monkeypatch.setattr(tune_vllm.Operator, "fault", fault)
    tune(tmp_path)
    assert len(found) == len({name for name, _ in found}) > 40 and not all(fault is None for _, fault in found)


def test_nothing_is_taken_for_adapters_that_are_gone(vllm, monkeypatch):
    monkeypatch.setattr(peers, "vllm_bases", lambda case, weights: [torch.zeros(16, 128).bfloat16])
    case, key = projection(), Key("shrink", 5, 1, 16, 64, 8)
    known = vllm.utils._LORA_A_PTR_DICT, vllm.utils._LORA_B_PTR_DICT
    for start in (
        lambda: peers.systems(case, None, [case.weight])["vllm"](),
        lambda: tune_vllm.first_fault((key, [8], START["shrink"])),
    ):
        for table in known:
            table["an address"] = "another's strides"
        start()
        assert known == ({}, {})


def test_kernels_differ_by_what_is_compiled_into_them():
    def kernel(op="shrink", slices=1, k=4096, **changed):
        return tune_vllm.kernel(Key(op, 2, slices, 64, k, 64), {**START[op], **changed})

    assert kernel() == kernel(k=12288) == tune_vllm.kernel(Key("shrink", 33, 1, 2048, 4096, 128), START["shrink"])
    names = [kernel(), kernel(slices=2), kernel(k=4096 + 32), kernel(block_m=16), kernel("expand", k=64)]
    assert len({*names, kernel("expand", k=64, block_k=48)}) == 6


def test_keys_are_those_of_every_row_of_tenants():
    keys = tune_vllm.keys()
    assert keys[Key("shrink", 33, 3, 64, 4096, 64)] == [64] * 3
    assert keys[Key("expand", 33, 3, 64, 64, 4096)] == [4096, 1024, 1024]
    assert keys[Key("expand", 33, 3, 256, 128, 4096)] == [4096, 1024, 1024]
    assert keys[Key("expand", 2, 2, 2048, 64, 14336)] == [14336, 14336]
    assert keys[Key("shrink", 9, 1, 256, 12288, 64)] == [64]
    qwen = [key for key in keys if {key.k, key.n} <= {64, 4096, 12288}]
    assert len(qwen) == 11 * (4 + 3)  # o and down have one expand
    for key, widths in keys.items():
        assert all(width % n == 0 for n in tune_vllm.VALUES[key.op]["block_n"] for width in widths), key


def projection() -> Case:
    case = make_case(16, 64, [64, 32, 32], 8, 4, popularity="distinct", mixed_ranks=False, poison=False, bias=False)
    case.scaling = torch.ones_like(case.scaling)
    return case


def test_each_system_launches_by_its_own_lookup_whatever_the_order(vllm, tmp_path, monkeypatch):
    tune(tmp_path)
    case = projection()
    base, want = oracle(replace(case, row_slots=[-1] * 16)), oracle(case)
    monkeypatch.setattr(peers, "vllm_bases", lambda case, weights: [base.bfloat16])
    assert peers.installed() == ["vllm_bare", "vllm_gemm", "vllm"]
    assert "vllm_tuned" not in peers.systems(case, None, [case.weight])
    vllm.launched.clear()
    peers.systems(case, None, [case.weight])["vllm"]()[0]()
    assert vllm.launched == [("shrink", START["shrink"]), ("expand", START["expand"])]
    monkeypatch.setenv(peers.TUNED, str(tmp_path))
    peers.vllm_default.cache_clear()
    assert peers.installed() == ["vllm_bare", "vllm_gemm", "vllm", "vllm_tuned"]
    made = peers.systems(case, None, [case.weight])
    calls = {name: made[name]()[0] for name in ("vllm_tuned", "vllm")}
    for name in ("vllm", "vllm_tuned", "vllm_tuned", "vllm"):
        vllm.launched.clear()
        assert sqnr(calls[name](), want) > 40 > sqnr(base, want)
        configs = GOAL if name == "vllm_tuned" else START
        assert vllm.launched == [("shrink", configs["shrink"]), ("expand", configs["expand"])], name


@pytest.mark.parametrize("missing", ["SHRINK", "EXPAND_TRUE"])
def test_tuned_vllm_without_its_files_is_left_out(vllm, tmp_path, monkeypatch, missing):
    tune(tmp_path)
    (tmp_path / f"GPU_1_A_{missing}.json").unlink()
    vllm.utils.load_lora_op_config.cache_clear()
    monkeypatch.setenv(peers.TUNED, str(tmp_path))
    monkeypatch.setattr(peers, "vllm_bases", lambda case, weights: [torch.zeros(16, 128).bfloat16])
    case = projection()
    made = peers.systems(case, None, [case.weight])
    _, _, left_out = layer.check({"vllm_tuned": made["vllm_tuned"]}, oracle(case), oracle(case))
    assert left_out["vllm_tuned"].startswith(
        "ValueError: VLLM_TUNED_CONFIG_FOLDER: expected this GPU's _SHRINK.json and"
    )


def test_what_vllm_does_not_find_is_an_error(vllm, tmp_path, monkeypatch):
    write = tune_vllm.write

    def swapped(folder, best):
        write(folder, {key: START[key.op] if key.max_loras == 2 else config for key, config in best.items()})

    monkeypatch.setattr(tune_vllm, "write", swapped)
    with pytest.raises(
        SystemExit, match=r"Key\(op='shrink', max_loras=2, slices=3, m=16, k=64, n=8\): vLLM launches by"
    ):
        tune(tmp_path)


def test_a_default_that_fails_is_an_error(vllm, tmp_path, monkeypatch):
    monkeypatch.setitem(START, "expand", {**START["expand"], "num_warps": 8})
    with pytest.raises(SystemExit, match="vLLM's own configurations fail here: wrong: 0 dB from fp64"):
        tune(tmp_path)


def test_what_it_needs(tmp_path, monkeypatch, capsys):
    absent = tmp_path / "no"
    wrong = (
        (["--out", str(absent)], f"--out: expected an existing folder, but {absent} came: make it first"),
        (["--out", str(tmp_path), "--jobs", "0"], "--jobs: expected at least 1, but 0 came"),
    )
    for arguments, message in wrong:
        with pytest.raises(SystemExit):
            tune_vllm.main(arguments)
        assert message in capsys.readouterr().err
    monkeypatch.setattr(timing, "why_no_gpu", lambda: "torch finds no device")
    with pytest.raises(SystemExit, match="nothing to measure: torch finds no device"):
        tune_vllm.main(["--out", str(tmp_path)])
    monkeypatch.setattr(tune_vllm, "need_gpu", lambda: None)
    monkeypatch.setattr(peers, "installed", lambda: [])
    with pytest.raises(SystemExit, match="nothing to tune: vLLM is not installed"):
        tune_vllm.main(["--out", str(tmp_path)])
