"""``lora_linear_train`` on CUDA: the vendor's 16-bit GEMMs over codes dequantized a piece at a time, our adapter sums.

What the adapters add is written first and the base's GEMM adds to it, so that the output is read once and what is
rounded twice is the small part. Weights are dequantized into one piece of memory of at most 96 MiB, which the next call
uses again: in the forward by rows, in the backward by columns, so that no sum is cut.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_epilora.ops.dispatch import _capability
from torch_epilora.ops.plan import unsupported
from torch_epilora.ops.schemas import library
from torch_epilora.ops.training import Train, backward, check_train, train

SCRATCH = 96 << 20
"""Bytes of a weight's value that exist at once."""

FEW = 64
"""Tokens up to which the decode kernel, which widens codes in registers, is the base."""

_BARE = torch.tensor([True], device="cpu")


def _slices(widths: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for i, width in enumerate(widths):
        yield i, slice(start, start + width)
        start += width


def _product(x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply, with the sum rounded to ``dtype`` alone."""
    return torch.mm(x, y) if x.dtype == dtype else torch.mm(x, y, out_dtype=dtype)


def _cast(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [t.to(dtype) for t in tensors]


def _factors(call: Train) -> list[float]:
    """Scaling of each slice of the only slot, where the host knows it: a factor of the GEMM's own, before it rounds."""
    if call.scaling is None or not call.scaling.is_cpu:
        return [1.0] * len(call.a)
    found = call.scaling.flatten().tolist()
    return found if len(found) == len(call.a) else found * len(call.a)


def _scaled(call: Train, t: Tensor, index: int | None = None) -> Tensor:
    """Cast A or B of the only slot, of all slices or one, to x's dtype, and scale it where the GPU has the scaling."""
    scaling = call.scaling
    if scaling is None or scaling.is_cpu:
        return t.to(call.x.dtype)
    if index is not None and scaling.dim() == 2:
        scaling = scaling[index]
    out = torch.empty(t.shape, dtype=call.x.dtype, device=t.device)
    return torch.mul(t, scaling.view(-1, *[1] * (t.dim() - 1)), out=out)


def _down(call: Train, source: Tensor) -> Tensor:
    """Make h [M, slices, R]."""
    if call.groups is not None:
        return torch.ops.epilora.shrink(source, _cast(call.a, source.dtype), None, call.scaling, *call.groups)
    (m, _), slices, factors = source.shape, len(call.a), _factors(call)
    a = _scaled(call, torch.cat(call.a) if slices > 1 else call.a[0])
    h = source.new_empty((m, slices, a.shape[1]))
    if len(set(factors)) == 1:
        h.view(m, -1).addmm_(source, a.view(-1, a.shape[2]).t(), beta=0, alpha=factors[0])
    else:
        for i, factor in enumerate(factors):
            h[:, i].addmm_(source, a[i].t(), beta=0, alpha=factor)
    return h


def _unread(call: Train) -> tuple[Tensor, ...]:
    """Metadata of a call without adapters, which nothing reads."""
    new = call.x.new_empty
    return new(call.x.shape[0], dtype=torch.int32), *(new(n, dtype=torch.int32) for n in (1, 1, 2))


def _forward(*arguments) -> tuple[Tensor, Tensor]:
    call = Train(*arguments)
    check_train(call)
    x, (n, _), m = call.x, call.weight.shape, call.x.shape[0]
    if unsupported(_capability(x.device)) or not x.numel() or not n:
        return train(*arguments)
    h, b = _down(call, x if call.adapter_x is None else call.adapter_x), _cast(call.b, x.dtype)
    if call.compute == "w8a8" or m <= FEW:
        y = torch.ops.epilora.lora_linear(
            x, None, call.x_scale, call.weight, call.weight_scale, call.bias, [], [], [], None, None,
            *_unread(call), _BARE, call.compute,
        )  # fmt: skip
        _add(call, y, h, b)
        return y, h
    y = _up(call, h, b)
    for rows, weight in _pieces(call, 0):
        y[:, rows].addmm_(x, weight.t())
    return y, h


def _add(call: Train, y: Tensor, h: Tensor, b: list[Tensor]) -> None:
    """Add the up-projections to y."""
    if call.groups is not None:
        torch.ops.epilora.expand_add_(y, h, b, [], None, None, *call.groups)
        return
    for i, columns in _slices([t.shape[1] for t in b]):
        y[:, columns].addmm_(h[:, i], b[i][0].t())


def _up(call: Train, h: Tensor, b: list[Tensor]) -> Tensor:
    """Make what the adapters and the bias add, [M, N]."""
    m, n = h.shape[0], call.weight.shape[0]
    if call.groups is not None:
        y = h.new_zeros((m, n)) if call.bias is None else call.bias.expand(m, n).contiguous()
        _add(call, y, h, b)
        return y
    y = h.new_empty((m, n))
    for i, columns in _slices([t.shape[1] for t in b]):
        if call.bias is None:
            torch.mm(h[:, i], b[i][0].t(), out=y[:, columns])
        else:
            y[:, columns] = torch.addmm(call.bias[columns], h[:, i], b[i][0].t())
    return y


def _pieces(call: Train, dim: int) -> Iterator[tuple[slice, Tensor]]:
    """Rows (dim 0) or columns (1) of the weight and their value, in memory that the next ones overwrite."""
    from torch_epilora.ops.triton.dequantize import dequantize, scratch

    shape, room = tuple(call.weight.shape), scratch(call.weight, call.x.dtype, SCRATCH)
    for span in _spans(shape[dim], room.numel() // shape[1 - dim]):
        rows, columns = [span if d == dim else (0, size) for d, size in enumerate(shape)]
        size = rows[1] - rows[0], columns[1] - columns[0]
        out = room[: size[0] * size[1]].view(size)
        yield slice(*span), dequantize(call.weight, call.weight_scale, out, rows, columns)


def _spans(total: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut a dimension into as few even spans of at most ``most`` as there are, at multiples of 128 where it is long."""
    count = -(-total // most)
    span = -(-total // count)
    if count > 1 and most >= 128:
        span = min(-(-span // 128) * 128, most // 128 * 128)
    for first in range(0, total, span):
        yield first, min(first + span, total)


def _gradients(*arguments) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    grad, x, adapter_x, h, weight, weight_scale, *adapters, to_x, to_adapters = arguments
    call = Train._make((x, adapter_x, None, weight, weight_scale, None, *adapters, "w8a16"))
    if unsupported(_capability(x.device)) or not x.numel() or not grad.numel():
        return backward(*arguments)
    source = x if adapter_x is None else adapter_x
    dh = _grad_h(call, grad)
    da: list[Tensor] = []
    db: list[Tensor] = []
    if to_adapters:
        da, db = _grad_adapters(call, grad, source, h, dh)
    nothing = x.new_empty(0)
    if not to_x:
        return nothing, nothing, da, db
    low = _grad_down(call, dh)
    if adapter_x is None:
        dx = low
        for columns, value in _pieces(call, 1):
            dx[:, columns].addmm_(grad, value)
        return dx, nothing, da, db
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    for columns, value in _pieces(call, 1):
        torch.mm(grad, value, out=dx[:, columns])
    return dx, low, da, db


def _grad_h(call: Train, grad: Tensor) -> Tensor:
    """Make dh [M, slices, R] = scaling * grad B."""
    b, factors = call.b, _factors(call)
    dh = grad.new_empty((grad.shape[0], len(b), b[0].shape[2]))
    for i, columns in _slices([t.shape[1] for t in b]):
        if call.groups is None:
            dh[:, i].addmm_(grad[:, columns], _scaled(call, b[i], i)[0], beta=0, alpha=factors[i])
        else:
            scaling = call.scaling if call.scaling is None or call.scaling.dim() == 1 else call.scaling[i]
            turned = [b[i].to(grad.dtype).transpose(1, 2).contiguous()]
            dh[:, i] = torch.ops.epilora.shrink(grad[:, columns], turned, None, scaling, *call.groups)[:, 0]
    return dh


def _grad_down(call: Train, dh: Tensor) -> Tensor:
    """Make dh A, [M, K], summed over the slices."""
    m, k = call.x.shape
    a = (torch.cat(call.a, 1) if len(call.a) > 1 else call.a[0]).to(dh.dtype)
    if call.groups is None:
        return torch.mm(dh.view(m, -1), a[0])
    y = dh.new_zeros((m, k))
    flat = dh.view(m, 1, -1)
    torch.ops.epilora.expand_add_(y, flat, [a.transpose(1, 2).contiguous()], [], None, None, *call.groups)
    return y


def _grad_adapters(
    call: Train, grad: Tensor, source: Tensor, h: Tensor, dh: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """Make dA = dh^T x and dB = grad^T h of every slot."""
    from torch_epilora.ops.triton.outer import outer

    widths, kind = [t.shape[1] for t in call.b], call.a[0].dtype
    if call.groups is None:
        whole = _product(dh.view(dh.shape[0], -1).t(), source, kind)
        da = [t.clone() if len(call.a) > 1 else t for t in whole.view(len(call.a), 1, -1, whole.shape[1])]
        return da, [_product(grad[:, columns].t(), h[:, i], kind)[None] for i, columns in _slices(widths)]
    da, db = ([torch.empty_like(t, memory_format=torch.contiguous_format) for t in g] for g in (call.a, call.b))
    outer(source, dh, (call.x.shape[1],) * len(da), call.groups, da, by_rank=True)
    outer(grad, h, tuple(widths), call.groups, db, by_rank=False)
    return da, db


library.impl("lora_linear_train", _forward, "CUDA")
library.impl("lora_linear_train_backward", _gradients, "CUDA")
