"""Gradients: of ``lora_linear`` through the dequantized weight to x, and to every slot's A, B and bias of B.

The codes are constants (a frozen base). Rounding the activations to codes counts as the identity, so with
``compute="w8a16"`` the gradient is that of the dequantized layer and with "w8a8" its straight-through estimate.
The other operators have none and say so, since torch would only warn and drop it.
"""

import torch
from torch import Tensor

from torch_epilora.ops.checks import Call
from torch_epilora.ops.reference import _members, _per_slot, dequantize_fp8
from torch_epilora.ops.schemas import HOST_TAGS, LINEAR_OPS, library

_CONSTANTS = {2: "x_scale", 4: "weight_scale", 10: "scaling"}


def _setup(ctx, inputs, output) -> None:
    call = Call(*inputs)
    ctx.slices, ctx.has_bias = len(call.a), call.bias is not None
    ctx.save_for_backward(
        call.x, call.weight, call.weight_scale, call.rank, call.scaling, *call.groups, *call.a, *call.b, *call.b_bias
    )


def _backward(ctx, grad: Tensor):
    x, weight, weight_scale, rank, scaling, sorted_tokens, ids, counts, starts, none, *adapters = ctx.saved_tensors
    a, b = adapters[: ctx.slices], adapters[ctx.slices : 2 * ctx.slices]
    b_bias = adapters[2 * ctx.slices :]
    for index, name in _CONSTANTS.items():
        if ctx.needs_input_grad[index]:
            raise NotImplementedError(f"{name}: lora_linear has no gradient for it. Pass it detached.")
    grad = grad.contiguous()
    trained = any(map(any, ctx.needs_input_grad[6:9]))
    dx, da, db, dbias = torch.ops.epilora.lora_linear_backward(
        grad, x, weight, weight_scale, a, b, b_bias, rank, scaling, sorted_tokens, ids, counts, starts, none, trained
    )
    if not trained:
        da, db, dbias = [None] * len(a), [None] * len(b), [None] * len(b_bias)
    base_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[5] else None
    return dx, None, None, None, None, base_bias, da, db, dbias, *([None] * 8)


def lora_linear_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    b_bias: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    sorted_tokens: Tensor,
    ids: Tensor,
    counts: Tensor,
    starts: Tensor,
    no_adapter: Tensor,
    trained: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Compute the gradients to x and, if ``trained``, to every A, B and bias of B, in their dtypes; sums in fp32.

    Plain torch on every device; it reads the groups on the host, so it does not run under a CUDA graph.
    """
    wide = grad.float()
    dx = wide @ dequantize_fp8(weight, weight_scale)
    da, db, dbias = ([torch.zeros_like(t) for t in group] if trained else [] for group in (a, b, b_bias))
    members = []
    if a and not no_adapter.item():
        members = _members(sorted_tokens, ids, counts, starts, a[0].shape[0], x.shape[0])
    for slot, rows in members:
        start = 0
        for s, (down, up) in enumerate(zip(a, b, strict=True)):
            stop = start + up.shape[1]
            r = max(min(int(_per_slot(rank, s, slot, down.shape[1])), down.shape[1]), 0)
            scale = _per_slot(scaling, s, slot, 1.0)
            if r > 0:
                g, inputs = wide[rows, start:stop], x[rows].float()
                down_r, up_r = down[slot, :r].float(), up[slot, :, :r].float()
                h = (inputs @ down_r.t() * scale).to(x.dtype).float()
                dh = g @ up_r * scale
                dx[rows] += dh @ down_r
                if not trained:
                    start = stop
                    continue
                da[s][slot, :r] = (dh.t() @ inputs).to(down.dtype)
                db[s][slot, :, :r] = (g.t() @ h).to(up.dtype)
                if b_bias:
                    dbias[s][slot] = (g.sum(0) * scale).to(up.dtype)
            start = stop
    return dx.to(x.dtype), da, db, dbias


library.define(
    "lora_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor weight_scale, Tensor[] a, Tensor[] b, "
    "Tensor[] b_bias, Tensor? rank, Tensor? scaling, Tensor sorted_tokens, Tensor ids, Tensor counts, Tensor starts, "
    "Tensor no_adapter, bool trained) -> (Tensor, Tensor[], Tensor[], Tensor[])",
    tags=HOST_TAGS,
)
library.impl("lora_linear_backward", lora_linear_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("epilora::lora_linear_backward", lib=library)
def _(grad: Tensor, x: Tensor, *rest):
    a, b, b_bias, trained = rest[2], rest[3], rest[4], rest[-1]
    return torch.empty_like(x), *([torch.empty_like(t) for t in g] if trained else [] for g in (a, b, b_bias))


for _name in LINEAR_OPS:
    torch.library.register_autograd(f"epilora::{_name}", _backward, setup_context=_setup, lib=library)


def _refuse(ctx, *grads: Tensor):
    raise NotImplementedError(
        "shrink and the quantizers have no gradient. Call them on detached tensors, or use lora_linear, which has one."
    )


def _refuse_twice(ctx, *grads):
    raise NotImplementedError("lora_linear has no second derivative.")


torch.library.register_autograd("epilora::lora_linear_backward", _refuse_twice, lib=library)
_QUANTIZERS = [f"quantize_fp8_{kind}" for kind in ("token", "group", "tensor", "static", "weight")]
for _name in ("shrink", *_QUANTIZERS):
    torch.library.register_autograd(f"epilora::{_name}", _refuse, lib=library)
