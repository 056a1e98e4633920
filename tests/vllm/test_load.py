"""What the plugin changes of vLLM, and when it does not."""

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
from vllm.config import VllmConfig
from vllm.lora import utils
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from torch_epilora.integrations.vllm import load
from torch_epilora.integrations.vllm.layers import OURS

RUNNER = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=object()))


def loaded(self, *_):
    """A model that remembers what it was built of."""
    return SimpleNamespace(modules=lambda: [], classes=utils._all_lora_classes, head=utils.LogitsProcessorWithLoRA)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin, for one test, on a vLLM without it."""
    originals = {
        LoRAModelRunnerMixin: ("load_lora_model", loaded),
        VllmConfig: ("compute_hash", lambda self, **_: "0123456789"),
    }
    for owner, (name, function) in originals.items():
        monkeypatch.setattr(owner, name, function)
    load.install()


def config(**changed: object) -> SimpleNamespace:
    shapes = SimpleNamespace(type=SimpleNamespace(value="backed"))
    made = {
        "additional_config": {},
        "lora_config": object(),
        "compilation_config": SimpleNamespace(dynamic_shapes_config=shapes),
    }
    return SimpleNamespace(**{**made, **changed})


def test_layers_are_built_with_our_classes_and_vllms_list_is_as_before(installed):
    before = utils._all_lora_classes
    seen = LoRAModelRunnerMixin.load_lora_model(RUNNER, None, config(), None)
    assert utils._all_lora_classes is before and len(seen.classes) == len(before) + 2 * len(OURS)
    assert issubclass(seen.head, utils.LogitsProcessorWithLoRA) and seen.head is not utils.LogitsProcessorWithLoRA
    off = config(additional_config={"epilora": {"enabled": False}})
    seen = LoRAModelRunnerMixin.load_lora_model(RUNNER, None, off, None)
    assert seen.classes is before and seen.head is utils.LogitsProcessorWithLoRA


def test_an_error_in_loading_leaves_vllms_list_as_it_was(installed, monkeypatch):
    before = utils._all_lora_classes, utils.LogitsProcessorWithLoRA

    def fails():
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        load.build(fails, config())
    assert (utils._all_lora_classes, utils.LogitsProcessorWithLoRA) == before


def test_it_is_installed_once_even_under_another_wrapper(installed):
    wrapped = LoRAModelRunnerMixin.load_lora_model
    load.install()
    assert LoRAModelRunnerMixin.load_lora_model is wrapped


def test_another_plugins_wrapper_is_not_taken_for_ours(monkeypatch):
    def other(self, *_):
        return None

    other.__wrapped__ = other
    monkeypatch.setattr(LoRAModelRunnerMixin, "load_lora_model", other)
    monkeypatch.setattr(VllmConfig, "compute_hash", VllmConfig.compute_hash)
    load.install()
    assert LoRAModelRunnerMixin.load_lora_model is not other


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """What vLLM's logger says, which it keeps from pytest."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.WARNING)
    return caplog


def test_unbacked_shapes_are_left_to_vllm(installed, log):
    shapes = SimpleNamespace(dynamic_shapes_config=SimpleNamespace(type=SimpleNamespace(value="unbacked")))
    seen = LoRAModelRunnerMixin.load_lora_model(RUNNER, None, config(compilation_config=shapes), None)
    assert seen.classes is utils._all_lora_classes and "Unbacked dynamic shapes" in log.text


def test_a_vllm_without_a_name_stays_as_it_is(monkeypatch, log):
    monkeypatch.delattr(LoRAModelRunnerMixin, "load_lora_model")
    before = VllmConfig.compute_hash
    load.install()
    assert VllmConfig.compute_hash is before and "load_lora_model" in log.text


def test_the_hash_of_every_copy_of_a_configuration_says_what_is_traced(installed, monkeypatch):
    plain, salted = "0123456789", VllmConfig.compute_hash
    monkeypatch.setenv("EPILORA_VLLM_MODE", "w8a8")
    found = salted(config())
    assert found != plain and len(found) == len(plain) and found == salted(config(additional_config=object()))
    assert salted(config(additional_config={"epilora": {"mode": "w8a16"}})) not in (plain, found)
    monkeypatch.setenv("EPILORA_VLLM_MODE", "w8a16")
    assert salted(config()) == salted(config(additional_config={"epilora": {"mode": "w8a16"}})) != found
    assert salted(config(lora_config=None)) == plain
    assert salted(config(additional_config={"epilora": {"enabled": False}})) == plain
    settings = load.Settings()
    assert load.salt(settings) != load.salt(replace(settings, mode="w8a16"))


@pytest.mark.parametrize(
    ("capability", "environment", "wanted"),
    [
        ((9, 0), {}, True),
        ((10, 0), {"EPILORA_DISABLE_PDL": "0"}, True),
        ((8, 9), {}, False),
        ((9, 0), {"EPILORA_DISABLE_PDL": "1"}, False),
        ((9, 0), {"TORCHINDUCTOR_ENABLE_PDL": "0"}, False),
    ],
)
def test_compiled_kernels_launch_the_next_one_early_where_ours_do(monkeypatch, capability, environment, wanted):
    for name in ("EPILORA_DISABLE_PDL", "TORCHINDUCTOR_ENABLE_PDL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    options = SimpleNamespace(enable_pdl=False)
    load.launch_early(capability, options)
    assert options.enable_pdl is wanted
    load.launch_early(capability, older := SimpleNamespace())
    assert not vars(older)


def test_without_early_launches_other_graphs_are_compiled(installed, monkeypatch):
    monkeypatch.delenv("EPILORA_DISABLE_PDL", raising=False)
    found = VllmConfig.compute_hash(config())
    monkeypatch.setenv("EPILORA_DISABLE_PDL", "1")
    assert VllmConfig.compute_hash(config()) != found
