"""The peers beside which a projection is timed, each where it is installed.

vLLM's base is its quantizer with its CUTLASS GEMM (Marlin for W8A16), its LoRA the shrink and expand: ``vllm`` in their
default launch configurations, ``vllm_tuned`` in those of the folder that VLLM_TUNED_CONFIG_FOLDER names, as
:mod:`benchmarks.tune_vllm` writes it; a size that is not in there takes the nearest one's, as in vLLM. SGLang's planned
LoRA runner (see :mod:`benchmarks.sglang_part`) takes vLLM's base for its own. All have the scaling folded into B here:
vLLM always does that, and SGLang has one scaling for all slices of a slot.
"""

import importlib.util
import os
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from benchmarks import sglang_part
from tests.cases import Case

Call = Callable[[], Tensor]
Lookup = Callable[..., dict[str, int | None]]
"""What vLLM's shrink and expand ask for their launch configuration."""

NAMES = ("vllm_bare", "vllm_gemm", "vllm", "vllm_tuned", "sglang")
TUNED = "VLLM_TUNED_CONFIG_FOLDER"
VARIABLES = {"vllm_tuned": TUNED, "sglang": sglang_part.VARIABLE}
"""What must be set, besides vLLM being installed, for a system to be measured."""
SGLANG_DECODE_TOKENS = 256
"""Up to here SGLang's plan is that of a decode batch, above that of a prefill."""


def installed() -> list[str]:
    """The peers' systems that can be measured here."""
    if importlib.util.find_spec("vllm") is None:
        return []
    missing = {"vllm_tuned": TUNED not in os.environ, "sglang": sglang_part.folder() is None}
    return [name for name in NAMES if not missing.get(name)]


def systems(case: Case, coded: Case | None, weights: list[Tensor]) -> dict[str, Callable[[], list[Call]]]:
    """What makes each installed system's calls, one a weight; ``coded`` is the case with its codes, for W8A8."""
    bases = cache(partial(vllm_bases, case, weights))
    makers: dict[str, Callable[[], list[Call]]] = {
        "vllm_bare": bases,
        "vllm": lambda: vllm_lora(case, bases(), vllm_default),
        "vllm_tuned": lambda: vllm_lora(case, bases(), vllm_tuned()),
        "sglang": lambda: sglang_lora(case, bases()),
    }
    if coded is not None:
        makers["vllm_gemm"] = partial(vllm_gemms, coded, weights)
    return {name: makers[name] for name in installed() if name in makers}


def _row_scale(case: Case) -> Tensor:
    n = case.weight.shape[0]
    return case.weight_scale.expand(n, 1).contiguous() if case.layout == "tensor" else case.weight_scale


def vllm_bases(case: Case, weights: list[Tensor]) -> list[Call]:
    """vLLM's projection without adapters, from x alone."""
    from vllm import _custom_ops as ops

    dtype = case.x.dtype
    if case.compute == "w8a16":
        return [_marlin(case, weight) for weight in weights]
    if case.layout == "block":
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        def blocks(weight: Tensor) -> Tensor:
            codes, x_scale = per_token_group_quant_fp8(case.x, 128, column_major_scales=True, use_ue8m0=False)
            return ops.cutlass_scaled_mm(codes, weight.t(), x_scale, case.weight_scale.t(), dtype)

        return [partial(blocks, weight) for weight in weights]
    scale = _row_scale(case)

    def rows(weight: Tensor) -> Tensor:
        codes, x_scale = ops.scaled_fp8_quant(case.x, use_per_token_if_dynamic=True)
        return ops.cutlass_scaled_mm(codes, weight.t(), x_scale, scale, dtype)

    return [partial(rows, weight) for weight in weights]


def _marlin(case: Case, weight: Tensor) -> Call:
    """vLLM's W8A16 projection; a weight's codes and scales are repacked once, here."""
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8 as marlin

    layer = torch.nn.Module()
    layer.orig_dtype, layer.output_size_per_partition, layer.input_size_per_partition = case.x.dtype, *weight.shape
    if case.layout == "block":
        layer.weight_block_size = [128, 128]
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(case.weight_scale.clone(), requires_grad=False)
    marlin.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
    args = layer.weight, layer.weight_scale, layer.workspace, *weight.shape, None
    return lambda: marlin.apply_fp8_marlin_linear(case.x, *args)


def vllm_gemms(coded: Case, weights: list[Tensor]) -> list[Call]:
    """vLLM's CUTLASS GEMM alone, from codes."""
    from vllm import _custom_ops as ops

    codes, dtype = coded.x_codes, coded.x.dtype
    if coded.layout == "block":
        x_scale, scale = coded.x_scale.t().contiguous().t(), coded.weight_scale.t()
    else:
        x_scale, scale = coded.x_scale, _row_scale(coded)
    return [partial(ops.cutlass_scaled_mm, codes, weight.t(), x_scale, scale, dtype) for weight in weights]


def _scaled_b(case: Case) -> list[Tensor]:
    return [(b * case.scaling[i, :, None, None]).to(b.dtype) for i, b in enumerate(case.b)]


def _ranks(case: Case) -> Tensor:
    """Each adapter's rank, the same in every slice here."""
    slots, rank = case.a[0].shape[:2]
    full = torch.full((slots,), rank, dtype=torch.int32, device=case.x.device)
    return full if case.rank is None else case.rank[0].clone()


def stacked_a(case: Case) -> Tensor:
    """A of all slices, one below the other by each adapter's own rank, where SGLang's kernels look for them."""
    slots, rank, k = case.a[0].shape
    stacked = case.a[0].new_zeros(slots, len(case.a) * rank, k)
    for slot, own in enumerate(_ranks(case).tolist()):
        stacked[slot, : len(case.a) * own] = torch.cat([a[slot, :own] for a in case.a])
    return stacked


def _row_slots(case: Case) -> Tensor:
    return torch.tensor(case.row_slots, dtype=torch.int32, device=case.x.device)


@cache
def vllm_default(*args: object, **kwargs: object) -> dict[str, int | None]:
    """vLLM's lookup as it is where VLLM_TUNED_CONFIG_FOLDER is not set, whether it is or not."""
    from vllm.lora.ops.triton_ops import utils

    with mock.patch.object(utils, "load_lora_op_config", lambda *_: None):
        return utils.get_lora_op_configs.__wrapped__(*args, **kwargs)


def vllm_tuned() -> Lookup:
    """vLLM's own lookup, if it finds both files: where one is missing it would silently take its defaults."""
    from vllm.lora.ops.triton_ops import utils

    if utils.load_lora_op_config("shrink", None) is None or utils.load_lora_op_config("expand", True) is None:
        raise ValueError(f"{TUNED}: expected this GPU's _SHRINK.json and _EXPAND_TRUE.json in {os.environ.get(TUNED)}")
    return utils.get_lora_op_configs


def launch_by(ops: ModuleType, lookup: Lookup) -> None:
    """Let vLLM's shrink and expand launch by a lookup from now on: each asks the one that its module names."""
    ops.lora_shrink_op.get_lora_op_configs = ops.lora_expand_op.get_lora_op_configs = lookup


def forget_adapters(ops: ModuleType) -> None:
    """Let vLLM forget what it knows of adapters by their addresses, at which others may lie by now."""
    ops.utils._LORA_A_PTR_DICT.clear()
    ops.utils._LORA_B_PTR_DICT.clear()


def vllm_meta(row_slots: Tensor, slots: int) -> tuple:
    """The metadata that vLLM's shrink and expand take."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta

    meta = LoRAKernelMeta.make(slots, len(row_slots), row_slots.device)
    meta.prepare_tensors(row_slots)
    return meta.meta_args(len(row_slots), True)


def vllm_lora(case: Case, bases: list[Call], lookup: Lookup) -> list[Call]:
    """vLLM's shrink and expand after its base, launched by a lookup."""
    from vllm.lora.ops import triton_ops as ops

    m, (slots, rank) = case.x.shape[0], case.a[0].shape[:2]
    a = [t[:, None] for t in case.a]
    b = [t[:, None] for t in _scaled_b(case)]
    args = vllm_meta(_row_slots(case), slots)
    forget_adapters(ops)

    def full(base: Call) -> Tensor:
        y = base()
        h = torch.empty(len(a), m, rank, device=case.x.device)
        launch_by(ops, lookup)  # at every call: systems take turns
        ops.lora_shrink(case.x, a, h, *args, 1.0)
        ops.lora_expand(h, b, y, *args, 0, True)
        return y

    return [partial(full, base) for base in bases]


def sglang_lora(case: Case, bases: list[Call]) -> list[Call]:
    """SGLang's runner around vLLM's base: the plan says which of its kernels run beside the base, on a second stream.

    One runner serves all calls, as it does in a server. It sorts the batch by adapter on the first call of a stream.
    """
    sglang = sglang_part.load()
    (m, k), n = case.x.shape, case.weight.shape[0]
    (slots, rank), device = case.a[0].shape[:2], case.x.device
    phase = sglang.Phase.DECODE if m <= SGLANG_DECODE_TOKENS else sglang.Phase.PREFILL
    runner = sglang.Runner(sglang.Workspace(), max_loras=slots, device=device)
    runner.begin_batch(
        token_slots=_row_slots(case),
        lora_ranks=_ranks(case),
        scalings=torch.ones(slots, device=device),
        num_tokens=m,
        phase=phase,
        graph_mode=True,
        is_prefill_graph=phase is sglang.Phase.PREFILL,
    )
    plan = runner.plan_for(sglang.Kind.LINEAR, rank, k, n, num_tokens=m)
    adapters = {
        "a": stacked_a(case),
        "b": torch.cat(_scaled_b(case), 1),
        "offsets": tuple(accumulate((t.shape[1] for t in case.b), initial=0)),
    }
    return [partial(runner.apply, case.x, base, plan, **adapters) for base in bases]


def vllm_shrinks(case: Case, operands: list[tuple[Tensor, list[Tensor]]]) -> list[Call]:
    """vLLM's shrink alone in its default configurations, one call for each x and its A: [M, slices, R], unscaled fp32.

    Each was called once: vLLM copies the addresses of several slices' A to the GPU the first time it sees them, and a
    graph must not hold that copy.
    """
    from vllm.lora.ops import triton_ops as ops

    m, (slots, rank) = case.x.shape[0], case.a[0].shape[:2]
    args = vllm_meta(_row_slots(case), slots)

    def shrink(x: Tensor, a: list[Tensor]) -> Tensor:
        launch_by(ops, vllm_default)
        h = torch.empty(len(a), m, rank, device=x.device)
        ops.lora_shrink(x, a, h, *args, 1.0)
        return h.transpose(0, 1)

    calls = [partial(shrink, x, [t[:, None] for t in a]) for x, a in operands]
    for call in calls:
        call()
    return calls
