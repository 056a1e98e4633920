"""What users of neighbouring systems ran into, one test a case, at the level at which they met it.

The numbers are the design notes' own; each test names the reports. Not here: 2, 3 and 4 (programmatic dependent launch
and its graphs: the decode path), 8 (tensor parallelism: the engine's integration) and 22 (speed: the benchmarks). The
GPU's part of 5, 17, 19 and 20 is in tests/gpu.
"""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import torch_epilora as te
from tests.cases import FP8, exact_codes, group_rows, make_case, oracle, sqnr
from tests.nn.helpers import adapter, attention, linear_shapes, same, snapshot, weight_value
from torch_epilora.formats import read_adapter, read_checkpoint
from torch_epilora.nn import LoraLinear

EPILORA = torch.ops.epilora
LAYOUTS = ["tensor", "channel", "block"]


def patched(plain: nn.Module, **options) -> nn.Module:
    return te.patch(copy.deepcopy(plain), **{"max_adapters": 4, "max_rank": 16, **options})


def pair(source: tuple, name: str) -> tuple[Tensor, Tensor]:
    """A and B of one linear of an adapter."""
    return tuple(source[0][f"base_model.model.{name}.lora_{part}.weight"].double() for part in "AB")


def layer(linear: LoraLinear, x: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """A W8A16 linear with an adapter in fp64."""
    y = x.double() @ weight_value(linear).t() + scaling * x.double() @ a.t() @ b.t()
    return y if linear.bias is None else y + linear.bias.double()


def test_case_01_the_adapter_reads_the_activations_not_their_codes() -> None:
    """vllm#42007, TensorRT-LLM#7014, #9808: codes without their scale made the delta 50 to 500 times too small."""
    case = make_case(4, 256, [128], 8, 1, popularity="one", poison=False, mixed_ranks=False, bias=False)
    case.x = (case.x / case.x.abs().amax() * 3).to(torch.bfloat16)
    want = oracle(case)
    bare = make_case(4, 256, [128], 8, 1, popularity="none", poison=False, mixed_ranks=False, bias=False)
    bare.x = case.x
    base = oracle(bare)
    for codes, scale in ((None, None), exact_codes(case.x, "channel")):
        case.x_codes, case.x_scale = codes, scale
        ratio = (case.run().double() - base).norm() / (want - base).norm()
        assert 0.99 < ratio < 1.01
    case.x_scale = None
    with pytest.raises(ValueError, match="x_scale: expected the scale of x_codes, got None"):
        case.run()


@pytest.mark.parametrize("rows", [[-1, 0, -1, 0], [-1, -1, -1], []])
def test_case_05_slot_minus_one_is_not_the_last_adapter(rows: list[int]) -> None:
    """vllm#48421, #49656, sglang#5928, TensorRT-LLM#2096: -1 indexed the last adapter."""
    case = make_case(len(rows), 64, [32, 16], 4, 1, poison=False, mixed_ranks=False)
    case.x.normal_()
    for t in case.b:
        t.fill_(1e4)
    case.groups = group_rows(rows, 1)._replace(no_adapter=torch.tensor([False]))
    got = case.run()
    case.a, case.b, case.rank, case.scaling = [], [], None, None
    base = case.run()
    bare = [i for i, slot in enumerate(rows) if slot < 0]
    assert got.shape == (len(rows), 48) and torch.equal(got[bare], base[bare])
    assert all(not torch.equal(got[i], base[i]) for i, slot in enumerate(rows) if slot >= 0)


@pytest.mark.parametrize("touched", [("q_proj",), ("k_proj",), ("q_proj", "v_proj")])
def test_case_06_an_adapter_on_some_slices_leaves_the_others_alone(touched: tuple[str, ...]) -> None:
    """vllm#47639, #47640, sglang#28199: partial adapters of a packed projection crashed or had the wrong width."""
    plain = attention(widths=(256, 64, 64))
    model = patched(plain)
    te.load_adapter(model, "part", adapter(plain, targets=touched))
    x = torch.randn(5, 64)
    with torch.no_grad():
        bare = model(x)[:3]
        with te.adapters(model, ["part"]):
            got = model(x)[:3]
    for name, before, after in zip(("q_proj", "k_proj", "v_proj"), bare, got, strict=True):
        assert before.shape == after.shape and torch.equal(before, after) == (name not in touched)


def test_case_07_fused_and_split_names_are_one_adapter() -> None:
    """vllm#36825, #36652, #4715: four slices under two names, and adapters of qkv_proj that found no layer."""
    plain = attention()
    model = patched(plain, compute="w8a16")
    split, config = adapter(plain, targets=("q_proj",), r=4)
    a = split["base_model.model.q_proj.lora_A.weight"]
    b = torch.randn(128, 4)
    prefix = "base_model.model."
    fused = {f"{prefix}qkv_proj.lora_A.weight": a, f"{prefix}qkv_proj.lora_B.weight": b}
    split = {
        f"{prefix}{name}.lora_{part}.weight": t
        for name, rows in zip(("q_proj", "k_proj", "v_proj"), b.split([64, 32, 32]), strict=True)
        for part, t in (("A", a), ("B", rows))
    }
    te.load_adapter(model, "fused", (fused, config))
    te.load_adapter(model, "split", (split, config))
    x = torch.randn(2, 64)
    with torch.no_grad():
        with te.adapters(model, ["fused"]):
            one = model(x)
        with te.adapters(model, ["split"]):
            other = model(x)
        assert all(torch.equal(s, t) for s, t in zip(one, other, strict=True)) and not torch.equal(one[0], model(x)[0])
    before = snapshot(model)
    fused[f"{prefix}qkv_proj.lora_B.weight"] = b[:96]
    with pytest.raises(ValueError, match=r"qkv_proj.lora_B: expected \[128, 4\], got \[96, 4\]"):
        te.load_adapter(model, "short", (fused, config))
    whole = te.patch(nn.ModuleDict({"qkv_proj": nn.Linear(64, 128)}), slices={"qkv_proj": (64, 64)})
    with pytest.raises(ValueError, match="qkv_proj has 2 output slices, expected 3"):
        te.load_adapter(whole, "split", (split, config))
    assert same(before, snapshot(model))


def test_case_09_any_rank_in_one_batch_and_none_above_the_capacity() -> None:
    """vllm#2847, #55158, TensorRT-LLM#1903, prime-rl#1408, nunchaku#82, #108: rank limits, rounding, black images."""
    ranks = [1, 3, 4, 8, 16, 17, 32, 64, 96, 128, 256, 320, 512]
    case = make_case(26, 64, [48, 16], 512, len(ranks), popularity="distinct", poison=False, mixed_ranks=False)
    case.rank = torch.tensor([ranks, ranks[::-1]], dtype=torch.int32)
    clean = case.run()
    assert sqnr(clean, oracle(case)) > 48
    for s in range(2):
        for slot, r in enumerate(case.rank[s].tolist()):
            case.a[s][slot, r:], case.b[s][slot, :, r:] = float("nan"), float("nan")
    assert torch.equal(case.run(), clean)
    plain = attention()
    model = patched(plain, max_rank=16)
    before = snapshot(model)
    with pytest.raises(ValueError, match="expected a rank of at most 16, got 17"):
        te.load_adapter(model, "large", adapter(plain, r=17))
    assert same(before, snapshot(model))


SCALINGS = {
    "plain": ({"use_rslora": False}, {"q_proj": 2.0, "k_proj": 2.0}),
    "rslora": ({"use_rslora": True}, {"q_proj": 8.0, "k_proj": 8.0}),
    "patterns": ({"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 64}}, {"q_proj": 16.0, "k_proj": 2.0}),
}


@pytest.mark.parametrize(("options", "scalings"), SCALINGS.values(), ids=SCALINGS)
def test_case_10_scaling_is_pefts(options: dict, scalings: dict[str, float]) -> None:
    """vllm#6909, lorax#299, mlx-vlm#845, diffusers#14409, Soup#803: alpha, rsLoRA and the patterns."""
    peft = pytest.importorskip("peft")
    plain = attention()
    options = {**options, "r": 16, "lora_alpha": 32, "target_modules": ["q_proj", "k_proj"], "init_lora_weights": False}
    config = peft.LoraConfig(**options)
    wrapped = peft.get_peft_model(copy.deepcopy(plain), config)
    source = (peft.get_peft_model_state_dict(wrapped), wrapped.peft_config["default"].to_dict())
    model = patched(plain, compute="w8a16")
    te.load_adapter(model, "a", source)
    x = torch.randn(3, 64)
    with torch.no_grad(), te.adapters(model, ["a"]):
        for name, scaling in scalings.items():
            linear = getattr(model, name)
            member = linear.group.members[linear.index]
            assert getattr(wrapped.base_model.model, name).scaling["default"] == scaling
            assert linear.group.bank.scaling[member.slice, 0] == scaling
            assert sqnr(linear(x), layer(linear, x, *pair(source, name), scaling)) > 90


def test_case_11_dora_is_refused_by_name() -> None:
    """vllm#6983, #10849, #47395: a magnitude vector was rejected with an obscure message."""
    plain = attention()
    model = patched(plain)
    before = snapshot(model)
    state, config = adapter(plain, targets=("q_proj",))
    with_vector = {**state, "base_model.model.q_proj.lora_magnitude_vector": torch.ones(64)}
    with pytest.raises(NotImplementedError, match=r"q_proj.*\(DoRA\)"):
        te.load_adapter(model, "dora", (with_vector, config))
    with pytest.raises(NotImplementedError, match="use_dora"):
        te.load_adapter(model, "dora", (state, {**config, "use_dora": True}))
    assert same(before, snapshot(model))


def test_case_12_what_comes_beside_the_adapter_is_listed_and_left_out_on_demand() -> None:
    """vllm#9280, #4186, #32599, #7441: modules_to_save, lm_head.base_layer and score in the file."""
    plain = attention()
    model = patched(plain)
    state, config = adapter(plain, targets=("q_proj", "v_proj"))
    extra = [
        "base_model.model.lm_head.base_layer.weight", "base_model.model.score.weight",
        "base_model.model.norm.modules_to_save.weight",
    ]  # fmt: skip
    source = ({**state, **{key: torch.ones(4, 4) for key in extra}}, {**config, "modules_to_save": ["score"]})
    before = snapshot(model)
    with pytest.raises(NotImplementedError) as caught:
        te.load_adapter(model, "a", source)
    assert all(key in str(caught.value) for key in extra) and "strict=False" in str(caught.value)
    assert same(before, snapshot(model))
    left_out = te.load_adapter(model, "a", source, strict=False)
    assert all(any(key in text for text in left_out) for key in extra)
    te.load_adapter(model, "b", (state, config))
    x = torch.randn(2, 64)
    with torch.no_grad():
        with te.adapters(model, ["a"]):
            got = model(x)
        with te.adapters(model, ["b"]):
            want = model(x)
        assert torch.equal(got[0], want[0]) and not torch.equal(got[0], model(x)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_case_13_adapters_of_any_float_dtype_apply(stored: torch.dtype, dtype: torch.dtype) -> None:
    """vllm#14827, #10348, TensorRT-LLM#2434, #1910, tensorrtllm_backend#791, OpenRLHF#1348: silently not applied."""
    plain = attention().to(dtype)
    model = patched(plain, compute="w8a16")
    source = adapter(plain, dtype=stored, r=8, alpha=16)
    te.load_adapter(model, "a", source)
    x = torch.randn(16, 64).to(dtype)
    a, b = pair(source, "q_proj")
    real = layer(model.q_proj, x, a, b, 2.0)
    with torch.no_grad():
        bare = model.q_proj(x)
        with te.adapters(model, ["a"]):
            got = model.q_proj(x)
    base = (x.float() @ weight_value(model.q_proj).float().t()).to(dtype)
    unfused = base + 2.0 * (x @ a.to(dtype).t() @ b.to(dtype).t())
    assert (got.double() - real).norm() <= 2 * (unfused.double() - real).norm()
    assert (got - bare).norm() > 0.1 * bare.norm()
    with pytest.raises(ValueError, match="expected float32, float16 or bfloat16, got float64"):
        te.load_adapter(model, "b", adapter(plain, dtype=torch.float64))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_14_zeros_stay_finite_forward_and_backward(layout: str) -> None:
    """pytorch/ao#3356: zero rows gave a scale of 0 and then NaN in LoRA training on FP8."""
    plain = nn.ModuleDict({"proj": nn.Linear(256, 160)}).bfloat16()
    plain["proj"].weight.data[:128, :128] = 0
    model = patched(plain, layout=layout)
    state, config = adapter(plain, targets=("proj",))
    state = {key: t * ("lora_A" in key) for key, t in state.items()}
    te.load_adapter(model, "fresh", (state, config))
    bank = model["proj"].group.bank
    for t in (bank.a[0], bank.b[0]):
        t.requires_grad_()
    x = torch.randn(8, 256).bfloat16()
    x[5], x[2, 128:] = 0, 0
    x.requires_grad_()
    with te.adapters(model, ["fresh"]):
        y = model["proj"](x)
        grad = torch.randn_like(y)
        grad[3] = 0
        y.backward(grad)
    assert torch.isfinite(y).all() and torch.equal(y[5], model["proj"].bias)
    for t in (x, bank.a[0], bank.b[0]):
        assert torch.isfinite(t.grad).all()
    assert (x.grad[3] == 0).all() and (bank.a[0].grad == 0).all() and bank.b[0].grad.abs().sum() > 0


@pytest.mark.parametrize(("m", "n", "k", "r"), [(1, 15, 32, 7), (17, 3420, 1280, 5), (3, 130, 200, 9)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_15_widths_that_are_multiples_of_nothing(layout: str, m: int, n: int, k: int, r: int) -> None:
    """pytorch/ao#1268, torchtune#2833: dimensions had to be divisible by 16."""
    for compute in ("w8a8", "w8a16"):
        case = make_case(m, k, [n], r, 2, layout=layout, compute=compute, popularity="distinct")
        assert sqnr(case.run(), oracle(case)) > 48
    weight = torch.randn(n, k)
    model = te.patch(nn.ModuleDict({"proj": nn.Linear(k, n)}), layout=layout)
    codes, scale = EPILORA.quantize_fp8_weight(weight, layout)
    value = codes.double() * (
        scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k] if layout == "block" else scale
    )
    assert sqnr(value, weight) > 25
    assert model["proj"](torch.randn(m, k)).shape == (m, n)


@pytest.mark.parametrize(("compute", "least"), [("w8a16", 0.999), ("w8a8", 0.998)])
def test_case_16_gradients_pass_through_a_second_fp8_layer(compute: str, least: float) -> None:
    """pytorch/ao#4376, transformers#46736: no backward, or upstream gradients that vanished without a word."""
    plain = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 48))
    model = patched(plain, compute=compute)
    source = adapter(plain, targets=("0", "2"))
    te.load_adapter(model, "a", source)
    banks = [model[0].group.bank, model[2].group.bank]
    trained = [t.requires_grad_() for bank in banks for t in (bank.a[0], bank.b[0])]
    x = torch.randn(12, 64, requires_grad=True)
    grad = torch.randn(12, 48)
    with te.adapters(model, ["a"]):
        model(x).backward(grad)
    wide = [t.detach()[0].double().requires_grad_() for t in trained]
    start = x.detach().double().requires_grad_()
    hidden = nn.functional.silu(layer(model[0], start, wide[0][:8], wide[1][:, :8], 2.0))
    layer(model[2], hidden, wide[2][:8], wide[3][:, :8], 2.0).backward(grad.double())
    for got, want in [(x.grad, start.grad), *((t.grad[0], w.grad) for t, w in zip(trained, wide, strict=True))]:
        assert nn.functional.cosine_similarity(got.double().flatten(), want.flatten(), dim=0) > least
        assert 0.98 < got.double().norm() / want.norm() < 1.02
    assert model[0].weight.grad is None and model[2].weight.grad is None


def test_case_17_a_slot_is_replaced_in_place() -> None:
    """vllm#42125, #31326, SkyRL#1606, peft#2611: stale caches and columns, and pointers that changed under a graph."""
    plain = attention()
    large, small = adapter(plain, r=64, alpha=64, seed=1), adapter(plain, r=8, alpha=16, seed=2)
    model, fresh = patched(plain, max_rank=64), patched(plain, max_rank=64)
    te.load_adapter(model, "a", large)
    te.load_adapter(fresh, "a", small)
    bank, state = model.q_proj.group.bank, model.q_proj.group.state
    pointers = [t.data_ptr() for t in bank.buffers()]
    versions = state.version, bank.content_version
    x = torch.randn(3, 64)
    with torch.no_grad():
        with te.adapters(model, ["a"]):
            before = model(x)
            te.load_adapter(model, "a", small)
            after = model(x)
            for t in bank.a:
                t[0, 8:] = float("nan")
            for t in bank.b:
                t[0, :, 8:] = float("nan")
            poisoned = model(x)
        with te.adapters(fresh, ["a"]):
            want = fresh(x)
    assert [t.data_ptr() for t in bank.buffers()] == pointers
    assert state.version > versions[0] and bank.content_version > versions[1]
    for old, new, again, expected in zip(before, after, poisoned, want, strict=True):
        assert torch.equal(new, expected) and torch.equal(again, expected) and not torch.equal(old, new)


def test_case_18_ranks_scalings_and_token_counts_compile_at_most_twice() -> None:
    """peft#1199, #2416: graph breaks, and a compilation more because a scaling happened to be 1."""
    torch._dynamo.reset()
    plain = attention()
    model = patched(plain, max_rank=64)
    for name, r, alpha in (("one", 8, 8), ("half", 16, 8), ("two", 64, 128)):
        te.load_adapter(model, name, adapter(plain, r=r, alpha=alpha, size=0.05))
    assert sorted(model.q_proj.group.bank.scaling[0].tolist()) == [0.0, 0.5, 1.0, 2.0]
    counter = CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        for name in ("one", "half", "two", None):
            with te.adapters(model, [name]):
                for t in (5, 64, 1, 33):
                    x = torch.randn(t, 64)
                    assert all(torch.equal(a, b) for a, b in zip(compiled(x), model(x), strict=True))
    assert counter.frame_count <= 2
    torch._dynamo.reset()


def test_case_19_offsets_past_two_to_the_thirty_one() -> None:
    """vllm#53028, #53034, #39585: 32-bit offsets crashed, or were silently wrong in the shrink."""
    case = make_case(3, 64, [32], 8, 1, popularity="one", poison=False, mixed_ranks=False)
    stride = 2**30 + 64
    want, h = case.run(), EPILORA.shrink(case.x, case.a, case.rank, case.scaling, *case.groups[:4])
    y = torch.randn(3, 32).bfloat16()
    case.x, plain = torch.empty_strided((3, 64), (stride, 1), dtype=torch.bfloat16).copy_(case.x), y.clone()
    assert torch.equal(case.run(), want)
    assert torch.equal(EPILORA.shrink(case.x, case.a, case.rank, case.scaling, *case.groups[:4]), h)
    far = torch.empty_strided((3, 32), (stride, 1), dtype=torch.bfloat16).copy_(y)
    for target in (plain, far):
        EPILORA.expand_add_(target, h, case.b, [], case.rank, case.scaling, *case.groups[:4])
    assert torch.equal(far, plain) and not torch.equal(far, y)


@pytest.mark.parametrize("m", [1, 2, 7, 64])
def test_case_20_a_row_has_the_same_bits_run_to_run_and_in_any_company(m: int) -> None:
    """vllm#50602, #50278, #30097, sglang#38337: split-K atomics flipped greedy output."""
    case = make_case(m, 8192, [64], 32, 3, poison=False, mixed_ranks=False)
    case.row_slots = [1, *case.row_slots[1:]]
    case.groups = group_rows(case.row_slots, 3)
    first = case.run()
    assert all(torch.equal(case.run(), first) for _ in range(20))
    generator = torch.Generator().manual_seed(7)
    for slots in ([1] * m, [1] + [-1] * (m - 1), [1] + [(i % 4) - 1 for i in range(m - 1)]):
        case.x[1:] = torch.randn(m - 1, 8192, generator=generator)
        case.groups = group_rows(slots, 3)
        assert torch.equal(case.run()[0], first[0])


def test_case_21_a_patched_linear_has_the_attributes_of_a_quantized_one() -> None:
    """sglang#40171, vllm#9120: fast paths that read the wrapper's missing quantization attributes."""
    model = patched(attention(bias=True))
    for linear in (model.q_proj, model.k_proj, model.o_proj):
        n, k = linear.out_features, linear.in_features
        assert isinstance(linear, nn.Linear) and linear.weight.dtype == FP8 and linear.weight.shape == (n, k)
        assert linear.weight_scale.shape == (n, 1) and linear.weight_scale.dtype == torch.float32
        assert linear.bias.shape == (n,) and linear.input_scale is None


def compressed(strategy: str) -> dict:
    """A compressed-tensors quantization_config as llm-compressor writes it."""
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    method = {"quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed"}
    return {**method, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
METHODS = {  # the scale 2^-6 as each format stores it, and its quantization_config
    "ct-tensor": ({"weight_scale": torch.tensor([2.0**-6])}, compressed("tensor")),
    "ct-channel": ({"weight_scale": torch.full((256, 1), 2.0**-6, dtype=torch.bfloat16)}, compressed("channel")),
    "ct-block": ({"weight_scale": torch.full((2, 3), 2.0**-6)}, compressed("block")),
    "modelopt": (
        {"weight_scale": torch.tensor(2.0**-6), "input_scale": torch.tensor(0.5)},
        {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt"}},
    ),
    "fbgemm": (
        {"weight_scale": torch.full((256, 1), 2.0**-6), "input_scale_ub": torch.tensor([1200.0])},
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0},
    ),
    "fine-grained": ({"weight_scale_inv": torch.full((2, 3), 2.0**-6)}, BLOCKS),
    "transposed": ({"weight_scale_inv": torch.full((3, 2), 2.0**-6)}, BLOCKS),
    "e8m0": (
        {"weight_scale_inv": torch.full((2, 3), 121, dtype=torch.uint8).view(torch.float8_e8m0fnu)},
        {**BLOCKS, "scale_fmt": "ue8m0"},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("parts", "config"), METHODS.values(), ids=METHODS)
def test_case_21_every_checkpoint_format_has_the_same_values(tmp_path: Path, parts: dict, config: dict) -> None:
    raw = torch.arange(256 * 384, dtype=torch.int32).remainder(251).to(torch.uint8).view(256, 384)
    raw[(raw & 0x7F) == 0x7F] = 0x31
    codes = raw.view(FP8)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({"proj.weight": codes, **{f"proj.{k}": v for k, v in parts.items()}}, tmp_path / "model.safetensors")
    weight = read_checkpoint(tmp_path).weights["proj"]
    assert torch.equal(weight.dequantize(), codes.float() * 2.0**-6)
    model = te.load_quantized(tmp_path, nn.ModuleDict({"proj": nn.Linear(384, 256, bias=False)}), compute="w8a16")
    x = torch.randn(3, 384)
    assert sqnr(model["proj"](x), x.double() @ (codes.double() * 2.0**-6).t()) > 90
    static = parts.get("input_scale")
    assert (model["proj"].input_scale is None) == (static is None)
    assert static is None or model["proj"].input_scale == static


@pytest.mark.parametrize("layout", LAYOUTS)
def test_case_23_biases_count_once_and_after_the_scaling(layout: str) -> None:
    """vllm#5733, axolotl#3025, unsloth's block path: a bias lost, scaled or added twice."""
    plain = nn.ModuleDict({"proj": nn.Linear(256, 160)})
    model = patched(plain, layout=layout)
    state, config = adapter(plain, r=4, alpha=12, targets=("proj",), lora_bias=True)
    te.load_adapter(model, "a", (state, config))
    x = torch.zeros(3, 256)
    with torch.no_grad(), te.adapters(model, ["a", None, "a"]):
        y = model["proj"](x)
    bias, of_b = model["proj"].bias, state["base_model.model.proj.lora_B.bias"]
    assert torch.equal(y[1], bias) and torch.equal(bias, plain["proj"].bias)
    want = bias.double() + 3.0 * of_b.double()
    assert sqnr(y[0], want) > 120 and torch.equal(y[0], y[2])
    with pytest.raises(NotImplementedError, match="lora_only"):
        te.load_adapter(model, "b", (state, {**config, "bias": "lora_only"}))


def test_case_23_bias_only_in_one_of_two_adapters() -> None:
    plain = nn.ModuleDict({"proj": nn.Linear(64, 32)})
    model = patched(plain)
    te.load_adapter(model, "with", adapter(plain, r=4, alpha=4, targets=("proj",), lora_bias=True, size=0.0))
    te.load_adapter(model, "without", adapter(plain, r=4, alpha=4, targets=("proj",), size=0.0))
    x = torch.randn(2, 64)[:1].repeat(3, 1)
    with torch.no_grad(), te.adapters(model, ["without", "with", None]):
        y = model["proj"](x)
    assert torch.equal(y[0], y[2]) and not torch.equal(y[1], y[2])


def test_every_rank_that_is_read_is_the_files_own() -> None:
    """10 and 9 together: what the reader says an adapter is, without a model."""
    plain = attention()
    found = read_adapter(adapter(plain, r=16, alpha=32, use_rslora=True))
    assert found.rank == 16 and set(found.modules) == set(linear_shapes(plain))
    assert all(math.isclose(p.scaling, 8.0) for p in found.modules.values())
