"""Which kernel serves which device: the plain-torch reference on the CPU, Triton and the vendor's GEMM on CUDA.

The path of ``lora_linear`` is chosen here, in host code that ``torch.compile`` does not trace, by the token count at
hand.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from threading import Lock

import torch
from torch import Tensor
from torch.nn import functional

from torch_epilora.ops import checks, reference
from torch_epilora.ops.checks import Add, Call, Groups, On
from torch_epilora.ops.choice import choose, generation
from torch_epilora.ops.compiling import compiles_only
from torch_epilora.ops.memory import like, remember
from torch_epilora.ops.plan import Plan, Problem, make_plan, refusal, through, unsupported
from torch_epilora.ops.schemas import LINEAR_OPS, SCHEMAS, library

for _name in SCHEMAS:
    library.impl(_name, reference.lora_linear if _name in LINEAR_OPS else getattr(reference, _name), "CPU")


_UNKNOWN = torch.tensor([False], device="cpu")
"""The no-adapter flag of operators that are not told: any row may have an adapter."""


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def _problem(call: Call) -> Problem:
    (m, k), n = call.x.shape, call.weight.shape[0]
    # a batch of which no row has an adapter is planned as the bare layer
    lora = call.has_adapters
    rank, slices = (call.a[0].shape[1], len(call.a)) if lora else (0, 1)
    # as many as with an entry for the bare base, which metadata may leave out
    groups = call.ids.shape[0] + (call.ids.shape[0] <= call.a[0].shape[0]) if lora else 1
    kind = call.layout, call.compute, call.x.dtype, _capability(call.x.device), call.x_codes is not None
    return Problem(m, n, k, rank, slices, groups, *kind)


def plan_of(*arguments) -> Plan:
    """Make the plan that ``lora_linear`` follows for these arguments on their GPU; for tests and benchmarks."""
    call = Call(*arguments)
    checks.check_call(call)
    return choose(_problem(call), _gpu(call.x.device))


def _quantizer(call: Call) -> int:
    """Name the quantizer's mode for this call, -1 when nothing is to be quantized."""
    from torch_epilora.ops.triton import quantize as q

    if call.compute == "w8a16" or call.x_codes is not None:
        return -1
    if call.x_scale is not None:
        return q.STATIC
    return q.GROUP if call.layout == "block" else q.TOKEN


def _quantized(call: Call) -> tuple[Tensor, Tensor | None]:
    """Make the GEMM's operand and its scale."""
    from torch_epilora.ops.triton import quantize as q

    mode = _quantizer(call)
    return q.quantize(call.x, mode, call.x_scale) if mode >= 0 else _given(call)


def _given(call: Call) -> tuple[Tensor, Tensor | None]:
    """Name the GEMM's operand and its scale where nothing is to be quantized."""
    return (call.x, None) if call.compute == "w8a16" else (call.x_codes, call.x_scale)  # type: ignore[return-value]


def _own_gemm(call: Call, plan: Plan, x: Tensor, scale: Tensor | None) -> Tensor:
    """Multiply codes, or x itself, by the base weight with K2."""
    from torch_epilora.ops.triton.linear import linear

    return linear(x, scale, call.weight, call.weight_scale, call.bias, call.layout, call.x.dtype, plan.gemm)


def _vendor(call: Call) -> Callable[[Call, Tensor, Tensor], Tensor]:
    """Prepare ``torch._scaled_mm`` of codes by the base weight, row-wise or 1x128 groups by 128x128 blocks."""
    m, n, dtype, layout = call.x.shape[0], call.weight.shape[0], call.x.dtype, call.layout

    def by_row(call: Call, x: Tensor, scale: Tensor) -> Tensor:
        if scale.shape != (m, 1):
            scale = scale.view(-1, 1) if scale.numel() == m else scale.view(1, 1).expand(m, 1).contiguous()
        weight_scale = call.weight_scale.view(1, -1)
        if layout == "tensor" and n > 1:
            weight_scale = weight_scale.expand(1, n).contiguous()
        return torch._scaled_mm(
            x.contiguous(), call.weight.t(), scale, weight_scale, bias=call.bias, out_dtype=dtype, use_fast_accum=True
        )

    def by_block(call: Call, x: Tensor, scale: Tensor) -> Tensor:
        # scales lie column by column, and columns start at multiples of 16 bytes: rows come in fours
        x = functional.pad(x.view(torch.uint8), (0, 0, 0, -m % 4)).view(x.dtype) if m % 4 else x.contiguous()
        scale = functional.pad(scale, (0, 0, 0, -m % 4)).t().contiguous().t()
        y = torch._scaled_mm(
            x, call.weight.t(), scale, call.weight_scale.t(), bias=call.bias, out_dtype=dtype, use_fast_accum=False
        )
        return y[:m] if m % 4 else y

    by = by_block if layout == "block" else by_row

    def multiply(call: Call, x: Tensor, scale: Tensor) -> Tensor:
        if compiles_only():  # the vendor's library would keep memory for each thread
            return torch.empty((m, n), dtype=dtype, device=x.device)
        return by(call, x, scale)

    return multiply


Run = Callable[[Call], Tensor]
"""A path that is prepared for all calls of the same sizes, strides and types."""


def _by_address(call: Call, run: Callable[[Call, Call, On], Tensor]) -> Run:
    """Make a path of what takes a call, what its launches are given for its tensors, and how they are launched.

    They are given tensors until Triton has compiled all kernels, then addresses, which are asked for once.
    """
    from torch_epilora.ops.triton.launch import stream_for

    device, compiled = call.x.get_device(), False

    def path(call: Call) -> Tensor:
        nonlocal compiled
        at, every = _addresses(call)
        stream = stream_for(device, every)
        if compiled and stream is not None:
            return run(call, at, stream)
        y = run(call, call, call.x)
        compiled = compiled or stream is not None
        return y

    return path


def _addresses(call: Call) -> tuple[Call, list[int]]:
    """Put addresses in the place of a call's tensors on the GPU, and list them all."""
    singles = [None if t is None else t.data_ptr() for t in (*call[:6], *call[9:15])]
    a, b, b_bias = [tuple([t.data_ptr() for t in several]) for several in call[6:9]]
    at = Call._make((*singles[:6], a, b, b_bias, *singles[6:], call.no_adapter, call.compute))
    return at, [*filter(None, singles), *a, *b, *b_bias]


def _pdl(call: Call) -> bool:
    """Whether kernels may be launched as dependents of the one before; finding out compiles a kernel, once."""
    device = call.x.device
    return _capability(device) >= (9, 0) and _pdl_module().pdl_works(device)


@cache
def _pdl_module():
    """Import what needs Triton once: the statement takes half a microsecond at each call."""
    from torch_epilora.ops.triton import pdl

    return pdl


def _k1(call: Call, plan: Plan, *, pdl: bool) -> Callable[[Call, On], tuple]:
    """Prepare K1; it returns h = x A^T and the memory to hold until h is used and what runs beside K1 is launched."""
    from torch_epilora.ops.triton.shrink import prepare_shrink

    shrink = prepare_shrink(call.x, call.a, call.rank, call.scaling, call.groups, plan.shrink, pdl=pdl)
    return lambda at, on: shrink(at.x, at.a, at.rank, at.scaling, at.rows, on)


def _operands(call: Call, plan: Plan) -> Callable[[Call, Call, On], tuple]:
    """Prepare h and beside K1 the GEMM's operand and its scale; what it returns ends with memory to hold until then."""
    from torch_epilora.ops.triton.quantize import empty_codes, prepare_quantize

    mode = _quantizer(call)
    beside = _pdl(call) and mode >= 0
    k1 = _k1(call, plan, pdl=beside)
    if mode < 0:
        return lambda call, at, on: (*k1(at, on), *_given(call))
    (m, k), device = call.x.shape, call.x.device
    quantize = prepare_quantize(call.x, mode, beside=beside)

    def run(call: Call, at: Call, on: On) -> tuple:
        codes, scale = empty_codes(m, k, mode, device)
        scale = call.x_scale if scale is None else scale
        h, held = k1(at, on)
        quantize(at.x, codes, scale, on)
        return h, held, codes, scale

    return run


def _decode(call: Call, plan: Plan, *, bare: bool = False) -> Callable[..., Tensor]:
    """One kernel quantizes, shrinks, multiplies and adds the up-projections (EpiLoRA section 3.1, the decode path).

    ``bare``: it computes the base alone, beside the kernel that ``before`` launches, which what is returned takes too.
    """
    from torch_epilora.ops.triton.decode import prepare_decode
    from torch_epilora.ops.triton.quantize import TERMS

    lora = call.has_adapters and not bare
    quantize = TERMS if call.compute == "w8a16" else _quantizer(call)

    def adapters(call: Call) -> tuple[list[Tensor], list[Tensor], list[Tensor], Tensor | None, Tensor | None]:
        return (call.a, call.b, call.b_bias, call.rank, call.scaling) if lora else ([], [], [], None, None)

    decode = prepare_decode(
        call.x, call.x_codes, call.x_scale, call.weight, call.bias, call.layout, plan.decode, quantize,
        _pdl(call), *adapters(call), call.groups, beside=bare,
    )  # fmt: skip
    return lambda call, before=None: decode(
        call.x, call.x_codes, call.x_scale, call.weight, call.weight_scale, call.bias, *adapters(call), call.groups,
        before=before,
    )  # fmt: skip


K2 = Callable[..., Tensor]
"""A GEMM that is prepared.

It takes a call, what launches are given for it, and how they are launched; h (None for the bare base), the operand and
its scale, both tensors.
"""


def _fused(call: Call, plan: Plan) -> Run:
    """K1, then K2, which multiplies and adds the up-projections in its epilogue (EpiLoRA section 3.1)."""
    tma = _tma(call, plan, bare=not call.has_adapters)
    k2 = tma if tma is not None else _k2(call, plan)
    if not call.has_adapters:
        return lambda call: k2(call, call, call.x, None, *_quantized(call))
    operands = _operands(call, plan)

    def run(call: Call, at: Call, on: On) -> Tensor:
        h, _held, x, scale = operands(call, at, on)
        return k2(call, at, on, h, x, scale)

    return _by_address(call, run) if tma is not None else lambda call: run(call, call, call.x)


def _k2(call: Call, plan: Plan) -> K2:
    from torch_epilora.ops.triton.linear import linear

    def run(call: Call, at: Call, on: On, h: Tensor | None, x: Tensor, scale: Tensor | None) -> Tensor:
        if h is None:
            return _own_gemm(call, plan, x, scale)
        return linear(
            x, scale, call.weight, call.weight_scale, call.bias, call.layout, call.x.dtype, plan.gemm,
            h=h, b=call.b, b_bias=call.b_bias, rank=call.rank, scaling=call.scaling, groups=call.groups,
        )  # fmt: skip

    return run


def _tma(call: Call, plan: Plan, *, bare: bool) -> K2 | None:
    """Prepare K2 for more tokens than a decode batch, without the up-projections if ``bare``; None if it cannot run."""
    if plan.tma is None or not checks.aligned(call.weight):
        return None
    from torch_epilora.ops.triton.quantize import scale_stride
    from torch_epilora.ops.triton.tma import prepare_tma

    def adapters(call: Call) -> tuple:
        return ([], [], None, None, None) if bare else (call.b, call.b_bias, call.rank, call.scaling, call.groups)

    def run(call: Call, at: Call, on: On, h, x: Tensor, scale: Tensor) -> Tensor:
        return tma(x, scale, call.weight, at.weight_scale, at.bias, h, *adapters(at), on)

    k = call.x.shape[1]
    stride_cm, stride_sm = k, scale_stride(k, _quantizer(call))
    if call.x_codes is not None and call.x_scale is not None:
        stride_cm, stride_sm = call.x_codes.stride(0), checks.row_stride(call.x_scale)
    tma = prepare_tma(
        call.x, stride_cm, stride_sm, call.weight, call.bias, call.layout, plan.tma, *adapters(call)
    )  # fmt: skip
    return run


def _base(call: Call, plan: Plan) -> K2:
    """Prepare the plan's GEMM."""
    tma = _tma(call, plan, bare=True) if plan.base == "tma" else None
    if tma is not None:
        return tma
    # codes that are made have rows of K
    aligned = checks.aligned(call.x_codes, call.weight, call.bias) and call.x.shape[1] % 16 == 0
    if plan.base == "vendor" and call.compute == "w8a8" and aligned:
        vendor = _vendor(call)
        return lambda call, at, on, h, x, scale: vendor(call, x, scale)
    return lambda call, at, on, h, x, scale: _own_gemm(call, plan, x, scale)


def _hybrid(call: Call, plan: Plan) -> Run:
    """K1, a GEMM, then the expand into its output, which is so rounded twice: by the GEMM and by the addition."""
    from torch_epilora.ops.triton.expand import prepare_expand
    from torch_epilora.ops.triton.launch import address

    if not call.has_adapters:
        base = _base(call, plan)
        return lambda call: base(call, call, call.x, None, *_quantized(call))
    expand = prepare_expand(
        call.x.shape[0], call.weight.shape[0], call.a[0].shape[1], call.b, call.b_bias, call.rank, call.scaling,
        call.groups, plan.expand, pdl=_pdl(call),
    )  # fmt: skip
    product = _around_decode(call, plan) if plan.base == "decode" else _around(call, plan)

    def run(call: Call, at: Call, on: On) -> Tensor:
        h, _held, y = product(call, at, on)
        expand(address(y, on), h, at.b, at.b_bias, at.rank, at.scaling, at.rows, on)
        return y

    return _by_address(call, run)


def _around(call: Call, plan: Plan) -> Callable[[Call, Call, On], tuple]:
    """Prepare h, memory to hold while it is used, and the base's output."""
    operands, base = _operands(call, plan), _base(call, plan)

    def run(call: Call, at: Call, on: On) -> tuple:
        h, held, x, scale = operands(call, at, on)
        return h, held, base(call, at, on, None, x, scale)

    return run


_pair = Lock()
"""Held while K1 and a decode kernel beside it are launched: two such kernels of one stream would share counters."""


def _around_decode(call: Call, plan: Plan) -> Callable[[Call, Call, On], tuple]:
    """K1 and beside it a decode kernel, which quantizes and multiplies."""
    k1, decode = _k1(call, plan, pdl=_pdl(call)), _decode(call, plan, bare=True)

    def run(call: Call, at: Call, on: On) -> tuple:
        made: list = []
        with _pair:
            y = decode(call, lambda: made.extend(k1(at, on)))
        return *made, y

    return run


def _reference(call: Call, plan: Plan) -> Run:
    return lambda call: reference.lora_linear(*call)


_PATHS = {"decode": _decode, "fused": _fused, "hybrid": _hybrid, "reference": _reference}


def prepare(call: Call, plan: Plan) -> Run:
    """Prepare what runs a checked call, and all calls like it, under a plan that can run it."""
    return _PATHS[plan.path](call, plan)


def _prepare(name: str | None, call: Call) -> Run:
    """Check a call, plan it, and prepare what runs it and all calls like it."""
    checks.check_call(call)
    problem = _problem(call)
    plan = choose(problem, _gpu(call.x.device))
    if call.x.numel() == 0 or call.weight.shape[0] == 0:
        return _reference(call, plan)
    if name is not None and plan.path == "reference":
        raise ValueError(f"lora_linear_{name}: cannot run on this GPU: {plan.reason}. Use lora_linear.")
    plan = plan if name in (None, plan.path) else _forced(name, problem)
    if name == "decode" and (why := refusal(plan.decode, problem)):
        raise ValueError(f"lora_linear_decode: cannot run this call: {why}. Use lora_linear.")
    return prepare(call, plan)


def _forced(name: str, problem: Problem) -> Plan:
    """Make the plan of a path that another one is faster than."""
    base = make_plan(problem).base
    return through(problem, name, "own" if base == "decode" and name != "hybrid" else base)


_runs: dict[tuple, Run] = {}
_last: dict[tuple, tuple[Callable[..., bool], Run]] = {}
"""By the cheap half of what they ask of a call: the runs that were found last, and what tells the other half."""


def _traits(call: Call, tensors: list[Tensor]) -> tuple:
    """All that checking, planning and preparing a call ask of it, but for its tensors' sizes, strides and so on."""
    flag = call.no_adapter
    return (
        call.compute, len(call.a), len(call.b), len(tensors), call.x_codes is None, call.x_scale is None,
        call.bias is None, call.rank is None, call.scaling is None,
        *[0 if t is None else t.data_ptr() % 16 for t in (call.x_codes, call.weight, call.bias)],
        flag.item() if flag.is_cpu and flag.numel() == 1 else None, call.x.shape, call.weight.shape,
    )  # fmt: skip


def _find(name: str | None, call: Call) -> Run:
    """Prepare a call, or find what was prepared for one like it: all that has been asked of them is the same."""
    tensors = [t for t in (*call[:6], *call[9:16], *call.a, *call.b, *call.b_bias) if t is not None]
    traits = name, _pdl(call), generation(), *_traits(call, tensors)
    alike, run = _last.get(traits, (None, None))
    if alike is None or run is None or not alike(*tensors):
        key = *traits, *[(t.shape, t.stride(), t.dtype, t.get_device()) for t in tensors]
        run = remember(_runs, key, lambda: _prepare(name, call))
        _last.pop(traits, None)
        remember(_last, traits, lambda: (like(tensors), run))
    return run


def _linear(name: str | None):
    """Make the CUDA kernel of one operator: ``name`` forces a path, None lets the plan choose."""

    def kernel(*arguments) -> Tensor:
        call = Call(*arguments)
        run = _find(name, call)
        device = call.x.get_device()
        if device < 0 or device == torch.cuda.current_device():
            return run(call)
        with torch.cuda.device(device):
            return run(call)

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
    h = torch.zeros((x.shape[0], len(a), r), dtype=x.dtype, device=x.device)
    return shrink(x, a, rank, scaling, groups, plan.shrink, out=h)


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
    expand_add(y, h, b, b_bias, rank, scaling, groups, plan.expand)


def _cuda_add(*arguments) -> None:
    add = Add(*arguments)
    checks.check_add(add)
    if add.no_adapter.item() or add.y.numel() == 0:
        return  # nothing is launched, so nothing of it is in a graph of the bare base
    (m, k), n, capability = add.x.shape, add.y.shape[1], _capability(add.x.device)
    if unsupported(capability) or k == 0:
        return reference.lora_add_(*arguments)
    from torch_epilora.ops.triton.expand import expand_add
    from torch_epilora.ops.triton.shrink import shrink

    rank, slices, dtype = add.a[0].shape[1], len(add.a), add.x.dtype
    plan = make_plan(Problem(m, n, k, rank, slices, add.ids.shape[0], dtype=dtype, capability=capability))
    h = shrink(add.x, add.a, add.rank, add.scaling, add.groups, plan.shrink)
    expand_add(add.y, h, add.b, add.b_bias, add.rank, add.scaling, add.groups, plan.expand)


library.impl("quantize_fp8_token", _cuda_quantize("token"), "CUDA")
library.impl("quantize_fp8_group", _cuda_quantize("group"), "CUDA")
library.impl("quantize_fp8_static", _cuda_quantize_static, "CUDA")
library.impl("shrink", _cuda_shrink, "CUDA")
library.impl("expand_add_", _cuda_expand, "CUDA")
library.impl("lora_add_", _cuda_add, "CUDA")
# the rest is plain torch on every device: weights are quantized once, and row groups are made once a batch
for _name in ("quantize_fp8_tensor", "quantize_fp8_weight", "adapter_groups"):
    library.impl(_name, getattr(reference, _name), "CUDA")
