"""One decoder layer's four projections with LoRA adapters: the library's paths beside vLLM's kernels, in one run.

    python -m benchmarks.layer --tokens 16 256 2048 --adapters 1 32 --out benchmarks/results/layer.json

Prints microseconds a layer (the four projections summed) and writes every figure with GPU, versions and commit.
Weights are rotated so that none comes from L2. Each system's output is compared with fp64 before it is timed. vLLM's
columns appear where vLLM is installed: ``vllm_bare`` is its quantization and CUTLASS GEMM (Marlin for W8A16), ``vllm``
adds its shrink and expand with their default launch configurations.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks.timing import copies, environment
from tests.cases import Case, make_case, oracle, sqnr
from torch_epilora.cli.timing import median_times
from torch_epilora.ops.dispatch import plan_of

MODELS = {
    "qwen3-8b": {
        "qkv": (4096, [4096, 1024, 1024]),
        "o": (4096, [4096]),
        "gate_up": (4096, [12288, 12288]),
        "down": (12288, [4096]),
    },
    "llama-3.1-8b": {
        "qkv": (4096, [4096, 1024, 1024]),
        "o": (4096, [4096]),
        "gate_up": (4096, [14336, 14336]),
        "down": (14336, [4096]),
    },
    "qwen3-0.6b": {
        "qkv": (1024, [2048, 1024, 1024]),
        "o": (2048, [1024]),
        "gate_up": (1024, [3072, 3072]),
        "down": (3072, [1024]),
    },
}


def vllm_gemm(case: Case) -> Callable[[torch.Tensor], Callable[[], torch.Tensor]]:
    """Make vLLM's base projection of one weight: CUTLASS by row or by block after its quantizer, Marlin for W8A16."""
    from vllm import _custom_ops as ops

    n, dtype = case.weight.shape[0], case.x.dtype
    if case.compute == "w8a16":
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp8 as marlin

        def widened(weight: torch.Tensor) -> Callable[[], torch.Tensor]:
            layer = torch.nn.Module()
            layer.orig_dtype, layer.output_size_per_partition, layer.input_size_per_partition = dtype, *weight.shape
            layer.weight = torch.nn.Parameter(weight, requires_grad=False)
            layer.weight_scale = torch.nn.Parameter(case.weight_scale.clone(), requires_grad=False)
            marlin.prepare_fp8_layer_for_marlin(layer, size_k_first=False)
            args = layer.weight, layer.weight_scale, layer.workspace, *weight.shape, None
            return lambda: marlin.apply_fp8_marlin_linear(case.x, *args)

        return widened
    if case.layout == "block":
        from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8

        def blocks(weight: torch.Tensor) -> torch.Tensor:
            codes, x_scale = per_token_group_quant_fp8(case.x, 128, column_major_scales=True, use_ue8m0=False)
            return ops.cutlass_scaled_mm(codes, weight.t(), x_scale, case.weight_scale.t(), dtype)

        return lambda weight: partial(blocks, weight)
    scale = case.weight_scale.expand(n, 1).contiguous() if case.layout == "tensor" else case.weight_scale

    def rows(weight: torch.Tensor) -> torch.Tensor:
        codes, x_scale = ops.scaled_fp8_quant(case.x, use_per_token_if_dynamic=True)
        return ops.cutlass_scaled_mm(codes, weight.t(), x_scale, scale, dtype)

    return lambda weight: partial(rows, weight)


def vllm_systems(case: Case, weights: list[torch.Tensor], slots: int) -> dict[str, list[Callable]]:
    """Make vLLM's calls where it is installed; it folds the scaling into B, so B is scaled here."""
    try:
        from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink
    except ImportError:
        return {}
    m, rank = case.x.shape[0], case.a[0].shape[1]
    a = [t[:, None] for t in case.a]
    b = [(t * case.scaling[i, :, None, None]).to(t.dtype)[:, None].contiguous() for i, t in enumerate(case.b)]
    meta = LoRAKernelMeta.make(slots, m, "cuda")
    meta.prepare_tensors(torch.tensor(case.row_slots, dtype=torch.int32, device="cuda"))
    args = meta.meta_args(m, True)
    bare = [vllm_gemm(case)(weight) for weight in weights]

    def full(base: Callable[[], torch.Tensor]) -> torch.Tensor:
        y = base()
        h = torch.empty(len(a), m, rank, device="cuda")
        lora_shrink(case.x, a, h, *args, 1.0)
        lora_expand(h, b, y, *args, 0, True)
        return y

    return {"vllm_bare": bare, "vllm": [partial(full, base) for base in bare]}


def measure(k: int, widths: list[int], m: int, slots: int, options: argparse.Namespace) -> tuple[dict, dict]:
    """Microseconds and decibels of every system on one projection."""
    case = make_case(
        m, k, widths, options.rank, slots, layout=options.layout, compute=options.compute, popularity="distinct",
        mixed_ranks=False, poison=False, bias=False, device="cuda",
    )  # fmt: skip
    weights = [
        case.weight,
        *(case.weight[torch.randperm(sum(widths), device="cuda")] for _ in range(copies(sum(widths) * k) - 1)),
    ]

    def ours(op: str, call: Case, weight: torch.Tensor) -> torch.Tensor:
        args = list(call.args())
        args[3] = weight
        return getattr(torch.ops.epilora, op)(*args)

    bare = Case(**{**vars(case), "a": [], "b": [], "rank": None, "scaling": None})
    systems = {
        "bare": [partial(ours, "lora_linear", bare, w) for w in weights],
        "fused": [partial(ours, "lora_linear_fused", case, w) for w in weights],
        "hybrid": [partial(ours, "lora_linear_hybrid", case, w) for w in weights],
    }
    systems |= vllm_systems(case, weights, slots)
    want = oracle(case)
    base = oracle(Case(**{**vars(case), "row_slots": [-1] * m}))
    db = {name: round(sqnr(calls[0](), base if name.endswith("bare") else want), 1) for name, calls in systems.items()}
    wrong = {name: value for name, value in db.items() if not value > 40}
    if wrong:
        raise RuntimeError(f"not timed, since these differ from fp64 (decibels): {wrong}")
    rounds = {name: lambda copy, calls=calls: calls[copy]() for name, calls in systems.items()}
    times = median_times(rounds, len(weights), case.x.device)
    times["ours"] = times[plan_of(*case.args()).path]
    return times, db


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["qwen3-8b"], choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 64, 256, 2048])
    parser.add_argument("--adapters", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--layout", default="channel", choices=["tensor", "channel", "block"])
    parser.add_argument("--compute", default="w8a8", choices=["w8a8", "w8a16"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for model in options.models:
        for m in options.tokens:
            for slots in options.adapters:
                if slots > max(m, 1):
                    continue
                layer: dict[str, float] = {}
                detail = {}
                for name, (k, widths) in MODELS[model].items():
                    times, db = measure(k, widths, m, slots, options)
                    detail[name] = {"us": {s: round(t, 2) for s, t in times.items()}, "sqnr": db}
                    for system, t in times.items():
                        layer[system] = layer.get(system, 0.0) + t
                    torch.cuda.empty_cache()
                layer = {system: round(t, 1) for system, t in layer.items()}
                head = {"model": model, "tokens": m, "adapters": slots, "rank": options.rank}
                rows.append(
                    {**head, "layout": options.layout, "compute": options.compute, "us": layer, "projections": detail}
                )
                print(" ".join(f"{v}" for v in head.values()), layer, flush=True)
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
