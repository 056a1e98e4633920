"""Every operator's schema and fake in one place (bitsandbytes' ``_ops.py`` is the model)."""

import torch
from torch import Tensor

from torch_epilora.ops import checks

library = torch.library.Library("epilora", "DEF")

_GROUPS = "Tensor sorted_tokens, Tensor ids, Tensor counts, Tensor starts"
_LINEAR = (
    "(Tensor x, Tensor? x_codes, Tensor? x_scale, Tensor weight, Tensor weight_scale, Tensor? bias, "
    "Tensor[] a, Tensor[] b, Tensor[] b_bias, Tensor? rank, Tensor? scaling, "
    f"{_GROUPS}, Tensor no_adapter, str compute) -> Tensor"
)
LINEAR_OPS = ("lora_linear", "lora_linear_decode", "lora_linear_fused", "lora_linear_hybrid")
"""The dispatching operator first, then one operator a path, all with the same arguments."""

SCHEMAS = {
    "quantize_fp8_token": "(Tensor x) -> (Tensor codes, Tensor scale)",
    "quantize_fp8_group": "(Tensor x) -> (Tensor codes, Tensor scale)",
    "quantize_fp8_tensor": "(Tensor x) -> (Tensor codes, Tensor scale)",
    "quantize_fp8_static": "(Tensor x, Tensor scale) -> Tensor codes",
    "quantize_fp8_weight": "(Tensor weight, str layout) -> (Tensor codes, Tensor scale)",
    "adapter_groups": "(Tensor slots, SymInt rows, int num_slots) -> "
    "(Tensor sorted_tokens, Tensor ids, Tensor counts, Tensor starts)",
    "shrink": f"(Tensor x, Tensor[] a, Tensor? rank, Tensor? scaling, {_GROUPS}) -> Tensor",
    "expand_add_": "(Tensor(a!) y, Tensor h, Tensor[] b, Tensor[] b_bias, Tensor? rank, Tensor? scaling, "
    f"{_GROUPS}) -> ()",
    "lora_add_": "(Tensor(a!) y, Tensor x, Tensor[] a, Tensor[] b, Tensor[] b_bias, Tensor? rank, Tensor? scaling, "
    f"{_GROUPS}, Tensor no_adapter) -> ()",
    **{name: _LINEAR for name in LINEAR_OPS},
}
TAGS = (torch.Tag.pt2_compliant_tag,)
HOST_TAGS = (*TAGS, torch.Tag.cudagraph_unsafe)
"""Of operators that read no_adapter on the host: a graph that inductor captures by itself would keep its first value.
Who captures a graph knows what it holds; inductor leaves these operators out of its graphs."""

for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=HOST_TAGS if "no_adapter" in _schema else TAGS)


def _codes_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format)


@torch.library.register_fake("epilora::quantize_fp8_token", lib=library)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    checks.check_matrix("x", x)
    return _codes_like(x), x.new_empty((x.shape[0], 1), dtype=torch.float32)


@torch.library.register_fake("epilora::quantize_fp8_group", lib=library)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    checks.check_matrix("x", x)
    groups = (x.shape[1] + checks.BLOCK - 1) // checks.BLOCK
    return _codes_like(x), x.new_empty((x.shape[0], groups), dtype=torch.float32)


@torch.library.register_fake("epilora::quantize_fp8_tensor", lib=library)
def _(x: Tensor) -> tuple[Tensor, Tensor]:
    checks.check_matrix("x", x)
    return _codes_like(x), x.new_empty((1,), dtype=torch.float32)


@torch.library.register_fake("epilora::quantize_fp8_static", lib=library)
def _(x: Tensor, scale: Tensor) -> Tensor:
    checks.check_static(x, scale)
    return _codes_like(x)


@torch.library.register_fake("epilora::quantize_fp8_weight", lib=library)
def _(weight: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    n, k = checks.check_quantizable_weight(weight, layout)
    shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // checks.BLOCK), -(-k // checks.BLOCK))}[layout]
    return _codes_like(weight), weight.new_empty(shape, dtype=torch.float32)


@torch.library.register_fake("epilora::adapter_groups", lib=library)
def _(slots: Tensor, rows: int, num_slots: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    checks.check_slots(slots, num_slots)
    groups = num_slots + 1
    return slots.new_empty(rows), slots.new_empty(groups), slots.new_empty(groups), slots.new_empty(groups + 1)


@torch.library.register_fake("epilora::shrink", lib=library)
def _(
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
    return x.new_empty((x.shape[0], len(a), r))


@torch.library.register_fake("epilora::expand_add_", lib=library)
def _(
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


@torch.library.register_fake("epilora::lora_add_", lib=library)
def _(*arguments) -> None:
    checks.check_add(checks.Add(*arguments))


def _fake_linear(*arguments) -> Tensor:
    call = checks.Call(*arguments)
    checks.check_call(call)
    return call.x.new_empty((call.x.shape[0], call.weight.shape[0]))


for _name in LINEAR_OPS:
    torch.library.register_fake(f"epilora::{_name}", _fake_linear, lib=library)
