"""``lora_linear_train`` (EpiLoRA section 3.3): the linear layer that a LoRA trainer calls, and its gradients.

The base is the engine's own FP8 codes, frozen. Adapters are what is trained, so they may be fp32 masters of 16-bit
activations, and what their gradients need of the forward, h, is a second result that is kept for the backward.
Rounding activations to codes (``compute="w8a8"``) counts as the identity in the backward, whose products are 16-bit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_epilora.ops import checks
from torch_epilora.ops.reference import (
    _members,
    _per_slot,
    dequantize_fp8,
    expand_rows,
    multiply,
    shrink_rows,
    wide,
)
from torch_epilora.ops.schemas import HOST_TAGS, library

_GROUPS = "Tensor? sorted_tokens, Tensor? ids, Tensor? counts, Tensor? starts"
_ADAPTERS = f"Tensor[] a, Tensor[] b, Tensor? scaling, {_GROUPS}"
SCHEMAS = {
    "lora_linear_train": "(Tensor x, Tensor? adapter_x, Tensor? x_scale, Tensor weight, Tensor weight_scale, "
    f"Tensor? bias, {_ADAPTERS}, str compute) -> (Tensor y, Tensor h)",
    "lora_linear_train_backward": "(Tensor grad, Tensor x, Tensor? adapter_x, Tensor h, Tensor weight, "
    f"Tensor weight_scale, {_ADAPTERS}, bool to_x, bool to_adapters) -> (Tensor, Tensor, Tensor[], Tensor[])",
}
for _name, _schema in SCHEMAS.items():
    library.define(_name + _schema, tags=HOST_TAGS)


class Train(NamedTuple):
    """The arguments of ``lora_linear_train`` in the schema's order; the function of that name says what they are."""

    x: Tensor
    adapter_x: Tensor | None
    x_scale: Tensor | None
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    a: list[Tensor]
    b: list[Tensor]
    scaling: Tensor | None
    sorted_tokens: Tensor | None
    ids: Tensor | None
    counts: Tensor | None
    starts: Tensor | None
    compute: str

    @property
    def groups(self) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
        """Sorted tokens, ids, counts and starts; None where all rows use slot 0."""
        return None if self.ids is None else self[9:13]  # type: ignore[return-value]


def check_train(call: Train) -> None:
    """Raise unless the arguments of ``lora_linear_train`` fit together."""
    x, other, n = call.x, call.adapter_x, call.weight.shape[0] if call.weight.dim() else 0
    double = call.compute == "w8a16" and x.device.type in ("cpu", "meta")
    checks.check_matrix("x", x, (*checks.FLOATS, torch.float64) if double else checks.FLOATS)
    if other is not None and (other.shape != x.shape or other.dtype != x.dtype or other.device != x.device):
        raise ValueError(
            f"adapter_x: expected x's shape, dtype and device ({tuple(x.shape)}, {x.dtype}, {x.device}), got "
            f"{tuple(other.shape)}, {other.dtype}, {other.device}."
        )
    if other is not None:
        checks.check_matrix("adapter_x", other, (x.dtype,))
    layout = checks.check_weight(call.weight, call.weight_scale, x)
    checks.check_codes(x, None, call.x_scale, layout, call.compute)
    checks.check_bias(call.bias, n, x)
    if not call.a:
        raise ValueError("a: expected one tensor a slice, got none. Without adapters, use lora_linear.")
    kind = call.a[0].dtype
    if kind not in (x.dtype, torch.float32):
        raise TypeError(f"a[0]: expected dtype {x.dtype}, that of x, or torch.float32, got {kind}.")
    like = x if kind == x.dtype else x.new_empty((0, x.shape[1]), dtype=kind)
    slots, r = checks.check_a(like, call.a)
    checks.check_b(like, call.b, [], len(call.a), slots, r, n)
    on_host = call.scaling is not None and call.scaling.is_cpu and call.groups is None
    near = like.new_empty((), device="cpu") if on_host else x
    checks.check_per_slot("scaling", call.scaling, torch.float32, len(call.a), slots, near)
    given = [t is not None for t in call[9:13]]
    if any(given) != all(given):
        raise ValueError("sorted_tokens, ids, counts, starts: expected all of them or none.")
    if call.groups is not None:
        checks.check_groups(x, *call.groups)
    elif slots != 1:
        raise ValueError(
            f"ids: expected which row uses which of the {slots} slots of a, got None. Call adapter_groups."
        )


@torch.library.register_fake("epilora::lora_linear_train", lib=library)
def _(*arguments) -> tuple[Tensor, Tensor]:
    call = Train(*arguments)
    check_train(call)
    m = call.x.shape[0]
    return call.x.new_empty((m, call.weight.shape[0])), call.x.new_empty((m, len(call.a), call.a[0].shape[1]))


@torch.library.register_fake("epilora::lora_linear_train_backward", lib=library)
def _(grad: Tensor, x: Tensor, adapter_x: Tensor | None, h: Tensor, *rest):
    a, b, to_x, to_adapters = rest[2], rest[3], rest[-2], rest[-1]
    return (
        torch.empty_like(x) if to_x else x.new_empty(0),
        torch.empty_like(x) if to_x and adapter_x is not None else x.new_empty(0),
        *(
            [torch.empty_like(t, memory_format=torch.contiguous_format) for t in g] if to_adapters else []
            for g in (a, b)
        ),
    )


def _setup_operator(ctx, inputs, output) -> None:
    ctx.mark_non_differentiable(output[1])
    _setup(ctx, inputs, output)


def _setup(ctx, inputs, output) -> None:
    call = Train(*inputs)
    ctx.slices, ctx.has_bias = len(call.a), call.bias is not None
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        call.x, call.adapter_x, output[1], call.weight, call.weight_scale, call.scaling, *call[9:13], *call.a, *call.b
    )


def _backward(ctx, grad: Tensor | None, grad_h: None) -> tuple:
    return _gradients_of(ctx, grad, ctx.needs_input_grad)


def _gradients_of(ctx, grad: Tensor | None, needs: tuple) -> tuple:
    """Gradients to the operator's arguments, in their order, of which ``needs`` says which are asked for."""
    for index, name in ((2, "x_scale"), (4, "weight_scale"), (8, "scaling")):
        if needs[index]:
            raise NotImplementedError(f"{name}: lora_linear_train has no gradient for it. Pass it detached.")
    nothing = [None] * ctx.slices
    if grad is None:
        return (*[None] * 6, nothing, nothing, *[None] * 6)
    x, adapter_x, h, weight, weight_scale, scaling, *rest = ctx.saved_tensors
    groups, a, b = rest[:4], rest[4 : 4 + ctx.slices], rest[4 + ctx.slices :]
    grad = grad.contiguous()
    to_x, to_adapters = needs[0] or needs[1], any(needs[6]) or any(needs[7])
    dx, d_adapter_x, da, db = torch.ops.epilora.lora_linear_train_backward(
        grad, x, adapter_x, h, weight, weight_scale, a, b, scaling, *groups, to_x, to_adapters
    )
    bias = grad.sum(0) if ctx.has_bias and needs[5] else None
    return (
        dx if to_x else None, d_adapter_x if to_x and adapter_x is not None else None, None, None, None, bias,
        da if to_adapters else nothing, db if to_adapters else nothing, *[None] * 6,
    )  # fmt: skip


def _refuse(ctx, *grads):
    raise NotImplementedError("lora_linear_train has no second derivative.")


torch.library.register_autograd("epilora::lora_linear_train", _backward, setup_context=_setup_operator, lib=library)
torch.library.register_autograd("epilora::lora_linear_train_backward", _refuse, lib=library)


class _Eager(torch.autograd.Function):
    """The operator with its gradients, by a shorter way through Python than torch.library's own."""

    @staticmethod
    def forward(ctx, slices, *flat):
        given = *flat[:6], list(flat[12 : 12 + slices]), list(flat[12 + slices :]), *flat[6:12]
        output = torch.ops.epilora.lora_linear_train(*given)
        _setup(ctx, given, output)
        return output[0]

    @staticmethod
    def backward(ctx, grad):
        needs = ctx.needs_input_grad[1:]
        a, b = needs[12 : 12 + ctx.slices], needs[12 + ctx.slices :]
        found = _gradients_of(ctx, grad, (*needs[:6], a, b, *needs[6:12]))
        return None, *found[:6], *found[8:], *found[6], *found[7]


def _groups_of(call: Train) -> list[tuple[int, Tensor]]:
    """(slot, its rows); reads the metadata on the host."""
    m = call.x.shape[0]
    if call.groups is None:
        return [(0, torch.arange(m, device=call.x.device))]
    return _members(*call.groups, call.a[0].shape[0], m)


def _weight(call: Train) -> Tensor:
    """Value of the codes, in the dtype that sums are taken in."""
    return dequantize_fp8(call.weight, call.weight_scale).to(wide(call.x))


def train(*arguments) -> tuple[Tensor, Tensor]:
    """Compute the layer in fp32 (fp64 for fp64), rounded once, and h [M, slices, R] in x's dtype: plain torch."""
    call = Train(*arguments)
    check_train(call)
    x = call.x
    acc = multiply(x, None, call.x_scale, call.weight, call.weight_scale, call.compute)
    source, members = x if call.adapter_x is None else call.adapter_x, _groups_of(call)
    a, b = ([t.to(x.dtype) for t in group] for group in (call.a, call.b))
    h = shrink_rows(source, a, None, call.scaling, members)
    expand_rows(acc, h, b, [], None, None, members)
    if call.bias is not None:
        acc += call.bias.to(acc.dtype)
    return acc.to(x.dtype), h


def backward(
    grad: Tensor,
    x: Tensor,
    adapter_x: Tensor | None,
    h: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    a: list[Tensor],
    b: list[Tensor],
    scaling: Tensor | None,
    sorted_tokens: Tensor | None,
    ids: Tensor | None,
    counts: Tensor | None,
    starts: Tensor | None,
    to_x: bool,
    to_adapters: bool,
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Compute the gradients to x, adapter_x, and every A and B, as they are asked for: plain torch."""
    groups = sorted_tokens, ids, counts, starts
    call = Train(x, adapter_x, None, weight, weight_scale, None, a, b, scaling, *groups, "w8a16")
    source, into = x if adapter_x is None else adapter_x, wide(x)
    g = grad.to(into)
    dx = g @ _weight(call) if to_x else g.new_empty(0)
    other = torch.zeros_like(dx) if adapter_x is not None else dx
    da, db = ([torch.zeros_like(t, dtype=into) for t in group] for group in (call.a, call.b))
    for slot, rows in _groups_of(call):
        start = 0
        for s, (down, up) in enumerate(zip(call.a, call.b, strict=True)):
            stop = start + up.shape[1]
            part = g[rows, start:stop]
            dh = part @ up[slot].to(x.dtype).to(into) * _per_slot(call.scaling, s, slot, 1.0)
            dh = dh.to(x.dtype).to(into)
            if to_x:
                other[rows] += dh @ down[slot].to(x.dtype).to(into)
            da[s][slot] = dh.t() @ source[rows].to(into)
            db[s][slot] = part.t() @ h[rows, s].to(into)
            start = stop
    apart = other.to(x.dtype) if to_x and adapter_x is not None else x.new_empty(0)
    made = [[t.to(like.dtype) for t, like in zip(*pair, strict=True)] for pair in ((da, call.a), (db, call.b))]
    da, db = made if to_adapters else ([], [])
    return dx.to(x.dtype), apart, da, db


library.impl("lora_linear_train", train, "CPU")
library.impl("lora_linear_train_backward", backward, "CPU")


def lora_linear_train(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    *,
    bias: Tensor | None = None,
    scaling: Tensor | None = None,
    groups: Sequence[Tensor] | None = None,
    adapter_x: Tensor | None = None,
    x_scale: Tensor | None = None,
    compute: str = "w8a16",
) -> Tensor:
    """Apply an FP8 linear layer together with adapters that are trained (EpiLoRA section 3.3).

    Computes ``y = x W^T + bias + scaling * (adapter_x A^T) B^T`` with gradients to x, adapter_x, bias, A and B; the FP8
    base has none. On a GPU its 16-bit value exists in at most 96 MiB at a time.

    Parameters
    ----------
    x : Tensor
        [M, K] bf16, fp16 or fp32 (fp64 too on the CPU under "w8a16", for gradcheck), K contiguous.
    weight : Tensor
        e4m3 codes [N, K].
    weight_scale : Tensor
        fp32 in any layout of :func:`scale_layout`.
    a : sequence of Tensor
        A [slots, R, K] of each output slice, in x's dtype or fp32. One adapter is used as a view, ``lora_a[None]``;
        several are stacked, those of lower rank filled up with zeros.
    b : sequence of Tensor
        B [slots, N_i, R] of each output slice, in the dtype of ``a``.
    bias : Tensor, optional
        [N] in x's dtype.
    scaling : Tensor, optional
        fp32 [slots] or [slices, slots]; 1 if None. Without groups it may lie on the CPU, whatever x does: it is then a
        factor of the GPU's GEMMs, and costs no launch.
    groups : Groups, optional
        Which row uses which slot; without it there is one slot, which all rows use.
    adapter_x : Tensor, optional
        [M, K] in x's dtype: what the adapters read in x's place, say x after dropout.
    x_scale : Tensor, optional
        fp32, one element: the checkpoint's static activation scale, with ``compute="w8a8"``.
    compute : str
        "w8a16" multiplies x itself by the codes' value, "w8a8" codes by codes.

    Returns
    -------
    Tensor
        [M, N] in x's dtype.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came.
    NotImplementedError
        In the backward, if a gradient to a scale is asked for, or a second derivative.
    """
    a, b, rows = list(a), list(b), (None,) * 4 if groups is None else groups[:4]
    given = x, adapter_x, x_scale, weight, weight_scale, bias, a, b, scaling, *rows, compute
    trained = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, adapter_x, bias, *a, *b))
    if torch.compiler.is_compiling() or not trained:
        return torch.ops.epilora.lora_linear_train(*given)[0]
    return _Eager.apply(len(a), *given[:6], *given[8:], *a, *b)
