"""Gradient of ``lora_linear``: through the dequantized weight to x, and to every slot's A, B and bias of B.

The codes are constants (a frozen base). Rounding the activations to codes counts as the identity, so with
``compute="w8a16"`` the gradient is that of the dequantized layer and with "w8a8" its straight-through estimate.
"""

import torch
from torch import Tensor

from torch_epilora.ops.reference import _members, _per_slot, dequantize_fp8
from torch_epilora.ops.schemas import library


def _setup(ctx, inputs, output) -> None:
    x, _, _, weight, weight_scale, bias, a, b, b_bias, rank, scaling, sorted_tokens, ids, counts, starts, none, _ = (
        inputs
    )
    ctx.slices, ctx.b_biases, ctx.has_bias = len(a), len(b_bias), bias is not None
    ctx.save_for_backward(
        x, weight, weight_scale, rank, scaling, sorted_tokens, ids, counts, starts, none, *a, *b, *b_bias
    )


def _backward(ctx, grad: Tensor):
    x, weight, weight_scale, rank, scaling, sorted_tokens, ids, counts, starts, none, *adapters = ctx.saved_tensors
    a, b = adapters[: ctx.slices], adapters[ctx.slices : 2 * ctx.slices]
    b_bias = adapters[2 * ctx.slices :]
    grad = grad.contiguous()
    dx, da, db, dbias = torch.ops.epilora.lora_linear_backward(
        grad, x, weight, weight_scale, a, b, b_bias, rank, scaling, sorted_tokens, ids, counts, starts, none
    )
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
) -> tuple[Tensor, list[Tensor], list[Tensor], list[Tensor]]:
    """Gradients to x, every A, every B and every bias of B, each in its tensor's dtype; sums in fp32.

    Plain torch on every device; it reads the groups on the host, so it does not run under a CUDA graph.
    """
    wide = grad.float()
    dx = wide @ dequantize_fp8(weight, weight_scale)
    da = [torch.zeros_like(t) for t in a]
    db = [torch.zeros_like(t) for t in b]
    dbias = [torch.zeros_like(t) for t in b_bias]
    members = _members(sorted_tokens, ids, counts, starts, a[0].shape[0]) if a and not no_adapter.item() else []
    for slot, rows in members:
        start = 0
        for s, (down, up) in enumerate(zip(a, b, strict=True)):
            stop = start + up.shape[1]
            r = min(int(_per_slot(rank, s, slot, down.shape[1])), down.shape[1])
            scale = _per_slot(scaling, s, slot, 1.0)
            if r > 0:
                g, inputs = wide[rows, start:stop], x[rows].float()
                down_r, up_r = down[slot, :r].float(), up[slot, :, :r].float()
                h = (inputs @ down_r.t() * scale).to(x.dtype).float()
                dh = g @ up_r * scale
                dx[rows] += dh @ down_r
                da[s][slot, :r] = (dh.t() @ inputs).to(down.dtype)
                db[s][slot, :, :r] = (g.t() @ h).to(up.dtype)
                if b_bias:
                    dbias[s][slot] = (g.sum(0) * scale).to(up.dtype)
            start = stop
    return dx.to(x.dtype), da, db, dbias


library.define(
    "lora_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor weight_scale, Tensor[] a, Tensor[] b, "
    "Tensor[] b_bias, Tensor? rank, Tensor? scaling, Tensor sorted_tokens, Tensor ids, Tensor counts, Tensor starts, "
    "Tensor no_adapter) -> (Tensor, Tensor[], Tensor[], Tensor[])",
    tags=(torch.Tag.pt2_compliant_tag,),
)
library.impl("lora_linear_backward", lora_linear_backward, "CompositeExplicitAutograd")


@torch.library.register_fake("epilora::lora_linear_backward", lib=library)
def _(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    b_bias: list[Tensor],
    *rest,
):
    return torch.empty_like(x), *([torch.empty_like(t) for t in group] for group in (a, b, b_bias))


torch.library.register_autograd("epilora::lora_linear", _backward, setup_context=_setup, lib=library)
