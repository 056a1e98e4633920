"""What ``benchmarks.engine`` makes of engines, without one."""

import json
import subprocess

import pytest
import torch

from benchmarks import engine, engine_part

ANSWERS = {"forced": [[-1.0, -2.0, -3.0]], "tokens": [[5, 6, 7]], "logprobs": [[-0.5, -0.6, -0.7]]}
FIGURES = {"start_s": 9.0, "kv_tokens": 64, "one_ms": [3.0, 4.0, 5.0], "many_ms": [6.0], "first_ms": 7.0,
           "same_again": True, "answers": ANSWERS}  # fmt: skip


def test_answers_are_compared_step_by_step_and_freely_chosen_ones_until_they_differ() -> None:
    other = {"forced": [[-1.5, -2.0, -3.25]], "tokens": [[5, 6, 8]], "logprobs": [[-0.5, -0.8, -9.0]]}
    assert engine.differs(other, ANSWERS) == {
        "first_mean": 0.5, "first_most": 0.5, "later_mean": 0.125, "later_most": 0.25, "free_mean": 0.1,
        "free_most": 0.2, "same_tokens": 0.6667,
    }  # fmt: skip
    at_once = {**other, "tokens": [[1, 6, 7]]}
    found = engine.differs(at_once, ANSWERS)
    assert "free_mean" not in found and found["same_tokens"] == 0.6667


def test_rows_say_how_far_an_engine_is_from_plain_vllm_with_as_many_slots() -> None:
    far = {**FIGURES, "answers": {**ANSWERS, "tokens": [[1, 2, 3]]}}
    found = {("base", 0): far, ("vllm", 1): FIGURES, ("ours", 1): far, ("ours", 2): far, ("vllm", 2): {"error": "no"}}
    rows = engine.rows_of(found, {"model": "m"})
    assert [("differs" in row, "answers" in row) for row in rows] == [(i == 2, False) for i in range(5)]
    assert rows[2]["differs"]["same_tokens"] == 0 and rows[2]["slots"] == 1 and rows[2]["model"] == "m"
    assert "one 4.000 ms" in engine.told(rows[2]) and engine.told(rows[4]) == "vllm 2: no"


@pytest.mark.parametrize("together", [False, True])
def test_each_engine_has_empty_caches_and_its_turn_and_one_that_fails_is_told(monkeypatch, tmp_path, together) -> None:
    part = """
import json, os, pathlib, sys, time
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
turn = pathlib.Path(job["turn"])
if job["slots"] == 2:
    sys.exit("out of memory")
turn.with_suffix(".ready").touch()
begun = time.time()
while not turn.with_suffix(".go").exists():
    time.sleep(0.01)
names = job["names"]
found = {"ready": begun, "go": time.time(), "environment": {n: os.environ[n] for n in names}}
time.sleep(0.2)
pathlib.Path(sys.argv[2]).write_text(json.dumps({**found, "end": time.time()}))
"""
    (tmp_path / "part.py").write_text(part)
    begin = subprocess.Popen
    monkeypatch.setattr(
        engine.subprocess, "Popen",
        lambda command, **more: begin([command[0], str(tmp_path / "part.py"), *command[3:]], **more),
    )  # fmt: skip
    names = [*engine.CACHES, "EPILORA_VLLM"]
    jobs = {key: {"slots": key[1], "names": names} for key in (("ours", 1), ("vllm", 2), ("vllm", 1))}
    found = dict(engine.results(jobs, tmp_path / "r.json", together))
    assert found["vllm", 2] == {"error": "exit status 1: out of memory\n"}
    seen = [found["ours", 1], found["vllm", 1]]
    assert [one["environment"]["EPILORA_VLLM"] for one in seen] == ["on", "off"]
    assert len({one["environment"][name] for one in seen for name in engine.CACHES}) == 6
    assert seen[0]["end"] <= seen[1]["go"], "two engines were measured at once"
    assert (seen[1]["ready"] < seen[0]["end"]) == together


def test_a_dummy_model_has_an_adapter_for_each_linear(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(engine.QWEN3_8B, "num_hidden_layers", 1)
    model, adapter = engine.dummy(tmp_path, 2)
    assert json.loads((model / "config.json").read_text())["num_hidden_layers"] == 1
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    assert len(tensors) == 14 and sum(t.shape[0] == 2 for t in tensors.values()) == 7


def test_what_is_asked_for_together_is_checked(tmp_path, capsys) -> None:
    out = ["--out", str(tmp_path / "r.json")]
    for wrong, why in ((["--model", "m"], "--adapters"), (["--slots", "0"], "at least 1, but 0 came")):
        with pytest.raises(SystemExit):
            engine.parse([*wrong, *out])
        assert why in capsys.readouterr().err


def test_spread_leaves_what_is_no_scale_norm_or_embedding() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("weight", "weight_scale", "norm", "embed"):
                setattr(self, name, torch.nn.Parameter(torch.full((2,), 0.5), requires_grad=False))

    model = Model()
    engine_part.spread(model)
    assert [p.tolist() for p in (model.weight, model.weight_scale, model.norm, model.embed)] == [
        [0.5, 0.5], [12.5, 12.5], [1, 1], [12.5, 12.5],
    ]  # fmt: skip
    assert len(engine_part.QUESTIONS) == len(set(engine_part.QUESTIONS)) == engine_part.ANSWERED
