"""Which base layers of vLLM our operator multiplies itself, and what it is given of those."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import FP8ScaledMMLinearKernel
from vllm.model_executor.layers.linear import ColumnParallelLinear, ReplicatedLinear

from torch_epilora.integrations.vllm import layers
from torch_epilora.integrations.vllm.bases import codes, fp8_refusal, weights
from torch_epilora.integrations.vllm.layers import AfterTheBase, InTheEpilogue

K, N = 32, 48


class Kernel(FP8ScaledMMLinearKernel):
    """One whose quantizer adds rows, as some of vLLM's do."""

    layer_param_names = ("weight", "weight_scale", "input_scale", "input_scale_ub")

    def __init__(self) -> None:
        pass

    def quant_fp8(self, x, scale, bound):
        made = torch.cat([x, x.new_zeros(3, x.shape[1])]).to(torch.float8_e4m3fn)
        return made, scale if scale is not None else torch.arange(len(made), dtype=torch.float32)[:, None]

    is_supported = can_implement = apply_scaled_mm = None


Kernel.__abstractmethods__ = frozenset()


class Marlin(Kernel):
    def apply_weights(self, layer, x, bias=None):
        raise NotImplementedError


class Gate(ReplicatedLinear):
    def forward(self, x):
        raise NotImplementedError


def method(name: str, kernel: object) -> object:
    return type(name, (), {})() if kernel is None else type(name, (), {"fp8_linear": kernel})()


def base(*, kind: type = ReplicatedLinear, by: object = None, weight: torch.Tensor | None = None, scales: int = N):
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.input_size, layer.output_size, layer.tp_size = K, N, 1
    layer.quant_method = by or method("Fp8PtpcOnlineLinearMethod", Kernel())
    layer.weight = torch.randn(N, K).to(torch.float8_e4m3fn).t() if weight is None else weight
    layer.weight_scale = torch.ones(scales, 1) if scales > 1 else torch.tensor(0.5)
    return layer


def scheme(name: str):
    layer = base(by=method(name, None))
    layer.scheme = SimpleNamespace(fp8_linear=Kernel())
    return layer


@pytest.mark.parametrize(
    "layer",
    [base(), base(scales=1), base(by=method("Fp8LinearMethod", Kernel())), scheme("CompressedTensorsLinearMethod")],
)
def test_codes_with_scales_per_tensor_or_channel_are_taken(layer):
    assert fp8_refusal(layer) is None
    weight, scale = weights(layer)
    assert weight.shape == (N, K) and weight.is_contiguous() and torch.equal(weight.t().float(), layer.weight.float())
    assert scale.dim() > 0 and torch.equal(scale.reshape(-1), layer.weight_scale.reshape(-1))


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (base(by=method("UnquantizedLinearMethod", None)), r"no FP8 matrix .* \(UnquantizedLinearMethod\)"),
        (base(by=method("AnotherLinearMethod", Kernel())), r"no FP8 matrix .* \(AnotherLinearMethod\)"),
        (scheme("CompressedTensorsLinearTransformMethod"), r"\(CompressedTensorsLinearTransformMethod\)"),
        (base(by=method("Fp8LinearMethod", Marlin())), r"Marlin keeps its weights in a layout of its own"),
        (base(kind=Gate), r"Gate has a forward of its own"),
        (base(weight=torch.zeros(K, N, dtype=torch.int8)), r"its codes are torch.int8 with strides \(48, 1\)"),
        (base(weight=torch.zeros(K, N).to(torch.float8_e4m3fn)), r"strides \(48, 1\), not e4m3 with rows of inputs"),
        (base(weight=torch.zeros(64, K).to(torch.float8_e4m3fn).t()), r"padded from 32 x 48 to \(32, 64\)"),
        (base(scales=5), r"its 5 scales are neither one nor one for each of 48 outputs"),
    ],
)
def test_others_stay_with_vllm(layer, why):
    assert re.search(why, fp8_refusal(layer) or "taken")


@pytest.mark.parametrize("m", [1, 5])
def test_each_row_gets_its_scale_and_added_rows_are_dropped(m):
    layer, x = base(), torch.randn(m, K).bfloat16()
    made, scale = codes(layer, x)
    assert torch.equal(made.float(), x.to(torch.float8_e4m3fn).float())
    assert torch.equal(scale, torch.arange(m, dtype=torch.float32)[:, None])
    layer.input_scale = torch.tensor([0.25])  # a static one
    made, scale = codes(layer, x)
    assert made.shape == (m, K) and scale.shape == (m, 1) and scale.is_contiguous() and (scale == 0.25).all()


@pytest.mark.parametrize(
    ("variable", "why"),
    [("VLLM_BATCH_INVARIANT", "plans differ"), ("VLLM_LORA_ENABLE_DUAL_STREAM", "were asked for")],
)
def test_what_a_variable_asks_of_vllm_is_left_to_it(monkeypatch, variable, why):
    config = SimpleNamespace(fully_sharded_loras=False)
    assert layers.refusal(base(), config) is None
    monkeypatch.setenv(variable, "1")
    assert why in layers.refusal(base(), config)


def test_fully_sharded_adapters_and_many_slices_are_left_to_vllm():
    sharded, layer = SimpleNamespace(fully_sharded_loras=True), base()
    assert layers.refusal(layer, sharded) is None
    layer.tp_size = 2
    assert layers.refusal(layer, sharded) is None  # replicated
    column = base(kind=ColumnParallelLinear)
    column.tp_size = 2
    assert "communicates" in layers.refusal(column, sharded)
    layer.tp_size, layer.output_sizes = 1, [8] * 17
    assert layers.refusal(layer, sharded) == "17 slices are more than 16"


@pytest.mark.parametrize(
    ("platform", "why"),
    [
        ({"is_cuda": True, "capability": (8, 0)}, "compute capability 8.0 has no FP8 tensor cores"),
        ({"is_cuda": True, "capability": (9, 0)}, None),
        ({"is_cuda": False, "capability": None}, "another: the kernels are for CUDA"),
    ],
)
def test_hardware_that_the_kernels_are_not_for_is_left_to_vllm(monkeypatch, platform, why):
    fake = SimpleNamespace(
        is_cuda=lambda: platform["is_cuda"], is_cpu=lambda: False, device_name="another",
        get_device_capability=lambda: platform["capability"],
    )  # fmt: skip
    monkeypatch.setattr("vllm.platforms.current_platform", fake)
    found = layers.refusal(base(), SimpleNamespace(fully_sharded_loras=False))
    assert found is None if why is None else why in found


def test_a_gates_fp32_output_is_left_to_vllm():
    class Original:
        def _apply_lora_to_output(self, x, output):
            return "vllm's"

    ours = type("Ours", (AfterTheBase, Original), {})()
    assert ours._apply_lora_to_output(torch.zeros(1, 4).bfloat16(), torch.zeros(1, 4)) == "vllm's"


def test_ours_stand_before_those_that_they_stand_for():
    said = []
    found = layers.classes((int, layers.ReplicatedLinearWithLoRA), "w8a16", lambda *why: said.append(why))
    assert found[0] is int and found[-1] is layers.ReplicatedLinearWithLoRA
    epilogue, after = found[1:-1]
    assert issubclass(epilogue, InTheEpilogue) and issubclass(after, AfterTheBase) and epilogue.mode == "w8a16"
    given = {"lora_config": SimpleNamespace(fully_sharded_loras=False), "packed_modules_list": [], "model_config": None}
    assert epilogue.can_replace_layer(source_layer=base(), **given) and not said
    plain = base(by=method("UnquantizedLinearMethod", None))
    assert not epilogue.can_replace_layer(source_layer=plain, **given) and after.can_replace_layer(
        source_layer=plain, **given
    )
    assert said[0][0] == "ReplicatedLinear" and not epilogue.can_replace_layer(source_layer=nn.Linear(2, 2), **given)
