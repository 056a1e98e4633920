"""`epilora doctor`: useful without a GPU, right about paths, clear about wrong arguments."""

import json

import pytest

pytest.importorskip("typer")
pytest.importorskip("transformers")
from typer.testing import CliRunner

from torch_epilora.cli import doctor, machine, paths, projections
from torch_epilora.cli.commands import app
from torch_epilora.cli.paths import ON_CPU, paths_table
from torch_epilora.cli.probes import Probe

QWEN3_8B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path):
    return _write(tmp_path / "model", QWEN3_8B)


@pytest.fixture(autouse=True)
def compiles_nothing(monkeypatch):
    monkeypatch.setattr(doctor, "ARCHES", ())


def _write(folder, config):
    folder.mkdir()
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
    return folder


def _run(*arguments, **environment):
    environment = {"COLUMNS": "200", "TERMINAL_WIDTH": "200"} | environment
    return CliRunner(env=environment).invoke(app, ["doctor", *map(str, arguments)])


def _probes_seen(monkeypatch):
    """Replace the probes; return the list of what they are asked."""
    calls = []

    def probe(name):
        return lambda arch, *, device: calls.append((name, arch, device)) or Probe(f"{name} {arch}", True, "seen")

    for name in ("probe_fp8", "probe_scaled_mm", "probe_pdl"):
        monkeypatch.setattr(doctor, name, probe(name))
    return calls


def test_without_a_gpu_it_says_why_and_compiles_for_every_architecture(monkeypatch):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "torch finds no device")
    monkeypatch.setattr(doctor, "why_no_gpu", lambda: "torch finds no device")
    monkeypatch.setattr(doctor, "ARCHES", (89, 90))
    calls = _probes_seen(monkeypatch)
    result = _run(EPILORA_DISABLE_PDL="")
    assert result.exit_code == 0, result.output
    assert "GPU: none. torch finds no device." in result.output
    assert "Probes: each compiles a small kernel, without a GPU to run it on" in " ".join(result.output.split())
    assert "EPILORA_DISABLE_PDL: not set" in result.output
    assert calls == [(probe, arch, None) for arch in (89, 90) for probe in ("probe_fp8", "probe_pdl")]


def test_disable_pdl_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "ARCHES", (90,))
    result = _run(EPILORA_DISABLE_PDL="1")
    assert "EPILORA_DISABLE_PDL: set, PDL is switched off" in result.output
    assert "switched off by EPILORA_DISABLE_PDL=1" in result.output


def test_every_gpu_is_probed_on_itself(monkeypatch):
    found = [machine.Gpu(0, "First", 90, 132, 140 << 30), machine.Gpu(1, "Second", 80, 108, 80 << 30)]
    calls = _probes_seen(monkeypatch)
    monkeypatch.setattr(doctor, "gpus", lambda: found)
    monkeypatch.setattr(doctor, "driver_version", lambda: "580.1")
    result = _run()
    assert result.exit_code == 0, result.output
    assert [call[1:] for call in calls] == 3 * [(90, "cuda:0")] + 3 * [(80, "cuda:1")]
    assert [call[0] for call in calls[:3]] == ["probe_fp8", "probe_scaled_mm", "probe_pdl"]
    assert "driver 580.1" in result.output
    assert "140 GiB" in result.output
    assert "Probes: each compiles a small kernel, runs it and compares its values" in " ".join(result.output.split())
    assert "9.0" in result.output


def _read(folder, layout="channel"):
    return projections.read_projections(folder, layout=layout, compute="w8a8", rank=16, slots=3)


def test_projections_of_a_model_without_its_weights(folder):
    found = [(info.names, info.k, info.slices, count) for info, count in _read(folder).items()]
    assert found == [
        (("q_proj", "k_proj", "v_proj"), 4096, (4096, 1024, 1024), 36),
        (("o_proj",), 4096, (4096,), 36),
        (("gate_proj", "up_proj"), 4096, (12288, 12288), 36),
        (("down_proj",), 12288, (4096,), 36),
    ]


def test_block_scales_fuse_only_at_multiples_of_128(tmp_path):
    small = QWEN3_8B | {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "head_dim": 64}
    small |= {"num_key_value_heads": 3, "num_hidden_layers": 2}
    folder = _write(tmp_path / "small", small)
    assert {info.names: count for info, count in _read(folder).items()} == {
        ("q_proj", "k_proj", "v_proj"): 2, ("o_proj",): 2, ("gate_proj", "up_proj"): 2, ("down_proj",): 2
    }  # fmt: skip
    assert {info.names: info.layout for info in _read(folder, "block")} == {
        (name,): "block" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj")
    } | {("gate_proj", "up_proj"): "block"}


def test_fused_names_are_slices(tmp_path):
    phi = {"model_type": "phi3", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "pad_token_id": 0}
    phi |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    found = {info.names[0]: info.slices for info in _read(_write(tmp_path / "phi", phi))}
    assert found == {"qkv_proj": (64, 32, 32), "o_proj": (64,), "gate_up_proj": (96, 96), "down_proj": (64,)}


def test_quantization_config_does_not_matter_to_the_shapes(tmp_path, folder):
    quantized = QWEN3_8B | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    other = _write(tmp_path / "fp8", quantized)
    assert _read(other, "block") == _read(folder, "block")


FP8_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
FP8_KINDS = {"num_bits": 8, "type": "float", "symmetric": True}


def _compressed(*strategies):
    groups = {strategy: {"weights": FP8_KINDS | {"strategy": strategy}} for strategy in strategies}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}


@pytest.mark.parametrize(
    ("own", "asked", "layout", "note"),
    [
        (None, None, "channel", None),
        (None, "tensor", "tensor", None),
        (FP8_BLOCK, None, "block", "layout: the checkpoint (fp8) has block scales"),
        (FP8_BLOCK, "block", "block", "layout: the checkpoint (fp8) has block scales"),
        (FP8_BLOCK, "tensor", "tensor", "layout: the checkpoint (fp8) has block scales; --layout tensor is shown"),
        ({"quant_method": "fp8"}, None, "tensor", "layout: the checkpoint (fp8) has tensor scales"),
        ({"quant_method": "fbgemm_fp8"}, None, "channel", "layout: the checkpoint (fbgemm_fp8) has channel scales"),
        (_compressed("tensor"), None, "tensor", "layout: the checkpoint (compressed-tensors) has tensor scales"),
        (
            _compressed("tensor", "channel"), None, "channel",
            "layout: the checkpoint (compressed-tensors) has channel and tensor scales, by module; "
            "shown as patched with channel scales, see --layout",
        ),
        (
            {"quant_method": "awq"}, None, "channel",
            "layout: the checkpoint's own is not known (quantization_config: quant_method 'awq' is not supported; "
            "expected one of compressed-tensors, modelopt, fbgemm_fp8, fp8); "
            "shown as patched with channel scales, see --layout",
        ),
        (
            [1], "block", "block",
            "layout: the checkpoint's own is not known (quantization_config: expected an object, got list); "
            "--layout block is shown",
        ),
    ],
)  # fmt: skip
def test_the_layout_is_the_checkpoints_own_unless_another_is_asked_for(tmp_path, own, asked, layout, note):
    folder = _write(tmp_path / "model", QWEN3_8B | ({} if own is None else {"quantization_config": own}))
    assert projections.choose_layout(folder, asked) == (layout, note)
    result = _run(folder, "--arch", 90, *(() if asked is None else ("--layout", asked)))
    assert result.exit_code == 0, result.output
    assert f"{layout} scales, w8a8" in result.output
    shown = " ".join(result.output.split())
    assert note in shown if note else "layout:" not in shown


def test_code_that_comes_with_a_model_is_not_run(tmp_path, folder):
    mapped = QWEN3_8B | {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}}
    other = _write(tmp_path / "mapped", mapped)
    (other / "evil.py").write_text("raise SystemExit('it was run')", encoding="utf-8")
    assert _read(other) == _read(folder)
    unknown = _write(tmp_path / "unknown", mapped | {"model_type": "evil"})
    with pytest.raises(ValueError, match="transformers cannot build a causal LM from it"):
        _read(unknown)


def test_paths_are_those_of_the_plan(folder):
    from torch_epilora.ops.plan import Problem, make_plan

    result = _run(folder, "--arch", 90, "--rank", 32, "--slots", 2)
    assert result.exit_code == 0, result.output
    assert "sm_90, bfloat16, channel scales, w8a8, 2 slots of rank 32" in result.output
    for tokens in (1, 8192):
        plan = make_plan(Problem(tokens, 6144, 4096, rank=32, slices=3, groups=3))
        assert plan.reason.removeprefix(f"{tokens} tokens: ") in result.output
    assert f"to 8192: {plan.path} (" in result.output


def test_paths_on_the_gpu_present_are_those_that_were_measured_there(folder, monkeypatch, tmp_path):
    from torch_epilora.ops import choice
    from torch_epilora.ops.plan import Problem, through
    from torch_epilora.ops.tables import Measured, key_of

    problem = Problem(64, 6144, 4096, 64, 3, 9)
    monkeypatch.setenv("EPILORA_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "gpus", lambda: [machine.Gpu(0, "NVIDIA H000", 90, 132, 1 << 37)])
    monkeypatch.setattr(doctor, "_probe_table", lambda console, devices: "")
    choice.keep("NVIDIA H000", (9, 0), {key_of(problem): Measured(through(problem, "hybrid", "own"), 1.0, 2.0, True)})
    measured = "the fastest when measured on NVIDIA H000"
    assert measured in " ".join(_run(folder).output.split())
    assert measured not in " ".join(_run(folder, "--arch", 90).output.split())


def test_each_line_of_paths_begins_where_the_one_before_ends(folder, monkeypatch):
    options = {"layout": "channel", "compute": "w8a8", "rank": 64, "slots": 32}
    plans = {m: "decode" if m <= 32 or m == 256 else "fused" for m in paths.TOKENS}
    monkeypatch.setattr(paths, "choose_path", lambda info, m, *_: (plans[m], plans[m]))
    table, _ = paths_table(folder, 90, **options)
    cell = next(iter(table.columns[-1].cells))
    assert cell == "to 32: decode (1)\nto 128: fused (2)\nto 256: decode (1)\nto 8192: fused (2)"


def test_doctor_says_which_tables_count(monkeypatch, tmp_path):
    from torch_epilora.ops import choice

    monkeypatch.setenv("EPILORA_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "gpus", lambda: [machine.Gpu(0, "NVIDIA H200", 90, 132, 1 << 37)])
    monkeypatch.setattr(doctor, "_probe_table", lambda console, devices: "")
    shipped = choice.shipped("NVIDIA H200")
    count = len(json.loads(shipped.read_text())["plans"])
    said = " ".join(_run().output.split())
    assert f"measured plans of NVIDIA H200: {count} of {shipped} and 0 of {choice.cached('NVIDIA H200')}" in said
    monkeypatch.setenv("EPILORA_TUNE", "off")
    assert "EPILORA_TUNE=off: NVIDIA H200 follows the rules' plans" in " ".join(_run().output.split())


def test_a_models_paths_come_first(folder):
    output = _run(folder, "--arch", 90).output
    assert output.index("Paths of model") < output.index("(1) ") < output.index("Versions") < output.index("Probes")


@pytest.mark.parametrize("changed", [{"rank": 16}, {"slots": 1}, {"compute": "w8a16"}, {"layout": "block"}])
def test_the_plan_is_asked_about_the_model_as_patched(folder, monkeypatch, changed):
    from torch_epilora.cli import paths

    asked = []
    real = paths.make_plan
    monkeypatch.setattr(paths, "make_plan", lambda problem: asked.append(problem) or real(problem))
    options = {"layout": "channel", "compute": "w8a8", "rank": 64, "slots": 8} | changed
    paths_table(folder, 90, **options)
    first = asked[0]
    assert (first.m, first.n, first.k, first.slices, first.capability) == (1, 6144, 4096, 3, (9, 0))
    assert (first.layout, first.compute, first.rank, first.groups - 1) == tuple(options.values())


def test_without_a_gpu_every_path_is_the_reference(folder):
    _, reasons = paths_table(folder, None, layout="channel", compute="w8a8", rank=16, slots=8)
    assert reasons == [ON_CPU]


def test_a_gpu_without_fp8_is_told_so(folder):
    result = _run(folder, "--arch", 80)
    assert "to 8192: reference (1)" in result.output
    assert "(1) compute capability 8.0 has no FP8 tensor cores" in result.output


def test_a_gpu_that_is_not_supported_is_told_which_are(folder):
    result = _run(folder, "--arch", 103)
    assert "to 8192: reference (1)" in result.output
    reason = "(1) compute capability 10.3 is not one the kernels are built for: 8.9, 9.0, 10.0, 12.0"
    assert reason in result.output


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "not found; expected the folder of a transformers model"),
        ("{", "expected a JSON file, got"),
        ("[]", "expected a JSON object with a model_type"),
        ({"hidden_size": 3}, "expected a JSON object with a model_type"),
        (QWEN3_8B | {"num_hidden_layers": 10**9}, "expected num_hidden_layers from 1 to 1024, got 1000000000"),
        (QWEN3_8B | {"num_hidden_layers": "many"}, "expected num_hidden_layers from 1 to 1024, got 'many'"),
        ({"model_type": "no-such-model"}, "transformers cannot build a causal LM from it: "),
        (QWEN3_8B | {"hidden_size": -4}, "transformers cannot build a causal LM from it: "),
        ("[" * 100_000, "expected a JSON file, got"),
    ],
)
def test_a_wrong_config_gives_one_message(tmp_path, config, message):
    folder = tmp_path / "wrong"
    if config is None:
        folder.mkdir()
    else:
        _write(folder, config)
    result = _run(folder)
    assert result.exit_code == 1
    assert f"epilora: {folder / 'config.json'}: " in result.output
    assert message in result.output
    assert "Traceback" not in result.output


def test_a_huge_config_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(projections, "MAX_CONFIG_BYTES", 10)
    with pytest.raises(ValueError, match=r"config.json: expected a model's config, got \d+ bytes"):
        _read(_write(tmp_path / "m", QWEN3_8B))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such/folder"], "does not exist"),
        (["--layout", "rows"], "'rows' is not one of 'tensor', 'channel', 'block'"),
        (["--compute", "w4a4"], "'w4a4' is not one of 'w8a8', 'w8a16'"),
        (["--rank", "0"], "Invalid value for '--rank': Input should be greater than or equal to 1"),
        (["--slots", "-1"], "Invalid value for '--slots': Input should be greater than or equal to 0"),
        (["--rank", "x"], "Invalid value for '--rank': Input should be a valid integer"),
        (["--arch", "90"], "it chooses the GPU of a model's paths: give MODEL_DIR too"),
        (["--arch", "9"], "Invalid value for '--arch': Input should be greater than or equal to 50"),
        (["--gpu"], "No such option: --gpu"),
    ],
)
def test_a_wrong_argument_gives_its_message(arguments, message):
    result = _run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", " ").split())
