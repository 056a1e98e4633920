"""Which kernel serves which device: the plain-torch reference on the CPU, Triton and the vendor's GEMM on CUDA.

The path of ``lora_linear`` is chosen here, in host code that ``torch.compile`` does not trace, by the token count at
hand.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from torch_epilora.ops import checks, reference
from torch_epilora.ops.checks import Call, Groups
from torch_epilora.ops.memory import remember
from torch_epilora.ops.plan import DECODE_MAX_TOKENS, Plan, Problem, make_plan, refusal, unsupported
from torch_epilora.ops.schemas import LINEAR_OPS, SCHEMAS, library

for _name in SCHEMAS:
    library.impl(_name, reference.lora_linear if _name in LINEAR_OPS else getattr(reference, _name), "CPU")


_UNKNOWN = torch.tensor([False], device="cpu")
"""The no-adapter flag of operators that are not told: any row may have an adapter."""


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _problem(call: Call) -> Problem:
    (m, k), n = call.x.shape, call.weight.shape[0]
    # a batch of which no row has an adapter is planned as the bare layer
    lora = call.has_adapters
    rank, slices = (call.a[0].shape[1], len(call.a)) if lora else (0, 1)
    # as many as with an entry for the bare base, which metadata may leave out
    groups = call.ids.shape[0] + (call.ids.shape[0] <= call.a[0].shape[0]) if lora else 1
    return Problem(m, n, k, rank, slices, groups, call.layout, call.compute, call.x.dtype, _capability(call.x.device))


def plan_of(*arguments) -> Plan:
    """Make the plan that ``lora_linear`` follows for these arguments on their GPU; for tests and benchmarks."""
    call = Call(*arguments)
    checks.check_call(call)
    return make_plan(_problem(call))


def _quantizer(call: Call) -> int:
    """Name the quantizer's mode for this call, -1 when nothing is to be quantized."""
    from torch_epilora.ops.triton import quantize as q

    if call.compute == "w8a16" or call.x_codes is not None:
        return -1
    if call.x_scale is not None:
        return q.STATIC
    return q.GROUP if call.layout == "block" else q.TOKEN


def _quantized(call: Call) -> tuple[Tensor, Tensor | None]:
    """Make the GEMM's operand and its scale, without an adapter kernel to share the launch with."""
    from torch_epilora.ops.triton import quantize as q

    mode = _quantizer(call)
    if mode >= 0:
        return q.quantize(call.x, mode, call.x_scale)
    return (call.x, None) if call.compute == "w8a16" else (call.x_codes, call.x_scale)  # type: ignore[return-value]


def _own_gemm(call: Call, plan: Plan, x: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply codes, or x itself, by the base weight with K2."""
    from torch_epilora.ops.triton.linear import linear

    return linear(x, scale, call.weight, call.weight_scale, call.bias, call.layout, call.x.dtype, plan.gemm)


def _vendor_gemm(call: Call, x: Tensor, scale: Tensor) -> Tensor:
    """Multiply codes by the base weight with ``torch._scaled_mm``, row-wise or 1x128 groups by 128x128 blocks."""
    m, n = x.shape[0], call.weight.shape[0]
    if call.layout == "block":
        # scales lie column by column, and columns start at multiples of 16 bytes: rows come in fours
        x = functional.pad(x.view(torch.uint8), (0, 0, 0, -m % 4)).view(x.dtype) if m % 4 else x
        x_scale = functional.pad(scale, (0, 0, 0, -m % 4)).t().contiguous().t()
        weight_scale = call.weight_scale.t()
    else:
        x_scale = scale.view(-1, 1) if scale.numel() == m else scale.view(1, 1).expand(m, 1).contiguous()
        weight_scale = call.weight_scale.view(1, -1)
        if n != weight_scale.shape[1]:
            weight_scale = weight_scale.expand(1, n).contiguous()
    y = torch._scaled_mm(
        x.contiguous(), call.weight.t(), x_scale, weight_scale, bias=call.bias, out_dtype=call.x.dtype,
        use_fast_accum=call.layout != "block",
    )  # fmt: skip
    return y if y.shape[0] == m else y[:m]


def _base(call: Call, plan: Plan, x: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply by the base weight with the plan's GEMM."""
    if plan.base == "vendor" and scale is not None and checks.aligned(x, call.weight, call.bias):
        return _vendor_gemm(call, x, scale)
    return _own_gemm(call, plan, x, scale)


Run = Callable[[Call], Tensor]
"""A path that is prepared for all calls of the same sizes, strides and types."""


def _k1(call: Call, plan: Plan) -> Callable[[Call], tuple[Tensor, Tensor, Tensor | None]]:
    """Prepare h, and the GEMM's operand with its scale: made in the same launch, handed in, or x itself."""
    from torch_epilora.ops.triton.shrink import prepare_planes

    planes = prepare_planes(call.x, call.a, call.rank, call.scaling, call.groups, plan.shrink, _quantizer(call))

    def run(call: Call) -> tuple[Tensor, Tensor, Tensor | None]:
        h, x, scale = planes(call.x, call.a, call.rank, call.scaling, call.groups, call.x_scale)
        return h, x if call.x_codes is None else call.x_codes, scale

    return run


def _decode(call: Call, plan: Plan) -> Run:
    """One kernel quantizes, shrinks, multiplies and adds the up-projections (EpiLoRA section 3.1, the decode path)."""
    from torch_epilora.ops.triton.decode import prepare_decode
    from torch_epilora.ops.triton.pdl import pdl_works
    from torch_epilora.ops.triton.quantize import TERMS

    lora, quantize = call.has_adapters, TERMS if call.compute == "w8a16" else _quantizer(call)

    def adapters(call: Call) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor | None, Tensor | None]:
        return (call.a, call.b, call.b_bias, call.rank, call.scaling) if lora else ([], [], [], None, None)

    decode = prepare_decode(
        call.x, call.x_codes, call.x_scale, call.weight, call.bias, call.layout, plan.decode, quantize,
        pdl_works(call.x.device), *adapters(call), call.groups,
    )  # fmt: skip
    return lambda call: decode(
        call.x, call.x_codes, call.x_scale, call.weight, call.weight_scale, call.bias, *adapters(call), call.groups
    )


def _fused(call: Call, plan: Plan) -> Run:
    """K1 quantizes and shrinks, K2 multiplies and adds the up-projections in its epilogue (EpiLoRA section 3.1)."""
    from torch_epilora.ops.triton.linear import linear

    if not call.has_adapters:
        return lambda call: _own_gemm(call, plan, *_quantized(call))
    k1 = _k1(call, plan)

    def run(call: Call) -> Tensor:
        h, x, scale = k1(call)
        return linear(
            x, scale, call.weight, call.weight_scale, call.bias, call.layout, call.x.dtype, plan.gemm,
            h=h, b=call.b, b_bias=call.b_bias, rank=call.rank, scaling=call.scaling, groups=call.groups,
        )  # fmt: skip

    return run


def _hybrid(call: Call, plan: Plan) -> Run:
    """K1, a GEMM, then the expand into its output, which is so rounded twice: by the GEMM and by the addition."""
    from torch_epilora.ops.triton.expand import prepare_expand

    if not call.has_adapters:
        return lambda call: _base(call, plan, *_quantized(call))
    k1, split = _k1(call, plan), plan.shrink.split_k
    expand = prepare_expand(
        call.x.shape[0], call.weight.shape[0], call.a[0].shape[1], 1 if plan.shrink.reduce else split, call.b,
        call.b_bias, call.rank, call.scaling, call.groups, plan.expand,
    )  # fmt: skip

    def run(call: Call) -> Tensor:
        h, x, scale = k1(call)
        y = _base(call, plan, x, scale)
        expand(y, h, call.b, call.b_bias, call.rank, call.scaling, call.groups)
        return y

    return run


def _reference(call: Call, plan: Plan) -> Run:
    return lambda call: reference.lora_linear(*call)


_PATHS = {"decode": _decode, "fused": _fused, "hybrid": _hybrid, "reference": _reference}


def _prepare(name: str | None, call: Call) -> Run:
    """Check a call, plan it, and prepare what runs it and all calls like it."""
    checks.check_call(call)
    problem = _problem(call)
    plan = make_plan(problem)
    if call.x.numel() == 0 or call.weight.shape[0] == 0:
        return _reference(call, plan)
    if name is not None and plan.path == "reference":
        raise ValueError(f"lora_linear_{name}: cannot run on this GPU: {plan.reason}. Use lora_linear.")
    if name == "decode" and (why := refusal(plan.decode, problem)):
        raise ValueError(f"lora_linear_decode: cannot run this call: {why}. Use lora_linear.")
    return _PATHS[name or plan.path](call, plan)


_runs: dict[tuple, Run] = {}


def _likeness(call: Call) -> tuple:
    """All that checking, planning and preparing a call ask of it: calls with the same likeness run the same way."""
    found = [call.compute, len(call.a), len(call.b)]
    for t in (*call[:6], *call.a, *call.b, *call.b_bias, *call[9:16]):
        found += (None,) if t is None else (t.shape, t.stride(), t.dtype, t.get_device())
    flag = call.no_adapter
    found.append(flag.item() if flag.numel() == 1 and flag.device.type == "cpu" else None)
    found.append(call.weight.data_ptr() % 16)
    return tuple(found)


def _dependent(call: Call) -> bool:
    """Whether a decode kernel for this call would be launched as a dependent; finding out compiles a kernel, once."""
    x = call.x
    if x.dim() != 2 or x.shape[0] > DECODE_MAX_TOKENS or _capability(x.device) < (9, 0):
        return False
    from torch_epilora.ops.triton.pdl import pdl_works

    return pdl_works(x.device)


def _linear(name: str | None):
    """Make the CUDA kernel of one operator: ``name`` forces a path, None lets the plan choose."""

    def kernel(*arguments) -> Tensor:
        call = Call(*arguments)
        key = name, _dependent(call), _likeness(call)
        return remember(_runs, key, lambda: _prepare(name, call))(call)

    return kernel


for _name in LINEAR_OPS:
    library.impl(_name, _linear(_name.removeprefix("lora_linear").removeprefix("_") or None), "CUDA")


def _cuda_quantize(mode_name: str):
    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        checks.check_matrix("x", x)
        if unsupported(_capability(x.device)):
            return getattr(reference, f"quantize_fp8_{mode_name}")(x)
        from torch_epilora.ops.triton import quantize as q

        return q.quantize(x, q.TOKEN if mode_name == "token" else q.GROUP)

    return kernel


def _cuda_quantize_static(x: Tensor, scale: Tensor) -> Tensor:
    checks.check_static(x, scale)
    if unsupported(_capability(x.device)):
        return reference.quantize_fp8_static(x, scale)
    from torch_epilora.ops.triton import quantize as q

    return q.quantize(x, q.STATIC, scale)[0]


def _cuda_shrink(
    x: Tensor,
    a: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    sorted_tokens: Tensor,
    ids: Tensor,
    counts: Tensor,
    starts: Tensor,
) -> Tensor:
    r = checks.check_shrink(x, a, rank, scaling, sorted_tokens, ids, counts, starts)
    capability = _capability(x.device)
    if unsupported(capability) or x.numel() == 0:
        return reference.shrink(x, a, rank, scaling, sorted_tokens, ids, counts, starts)
    from torch_epilora.ops.triton.shrink import shrink

    plan = make_plan(Problem(x.shape[0], 0, x.shape[1], r, len(a), ids.shape[0], dtype=x.dtype, capability=capability))
    groups = Groups(sorted_tokens, ids, counts, starts, _UNKNOWN)
    return shrink(x, a, rank, scaling, groups, plan.shrink)


def _cuda_expand(
    y: Tensor,
    h: Tensor,
    b: list[Tensor],
    b_bias: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    sorted_tokens: Tensor,
    ids: Tensor,
    counts: Tensor,
    starts: Tensor,
) -> None:
    checks.check_expand(y, h, b, b_bias, rank, scaling, sorted_tokens, ids, counts, starts)
    capability = _capability(y.device)
    if unsupported(capability) or y.numel() == 0:
        return reference.expand_add_(y, h, b, b_bias, rank, scaling, sorted_tokens, ids, counts, starts)
    from torch_epilora.ops.triton.expand import expand_add

    plan = make_plan(
        Problem(y.shape[0], y.shape[1], 0, h.shape[2], len(b), ids.shape[0], dtype=y.dtype, capability=capability)
    )
    groups = Groups(sorted_tokens, ids, counts, starts, _UNKNOWN)
    expand_add(y, h[None], b, b_bias, rank, scaling, groups, plan.expand)


library.impl("quantize_fp8_token", _cuda_quantize("token"), "CUDA")
library.impl("quantize_fp8_group", _cuda_quantize("group"), "CUDA")
library.impl("quantize_fp8_static", _cuda_quantize_static, "CUDA")
library.impl("shrink", _cuda_shrink, "CUDA")
library.impl("expand_add_", _cuda_expand, "CUDA")
# the rest is plain torch on every device: weights are quantized once, and row groups are made once a batch
for _name in ("quantize_fp8_tensor", "quantize_fp8_weight", "adapter_groups"):
    library.impl(_name, getattr(reference, _name), "CUDA")
