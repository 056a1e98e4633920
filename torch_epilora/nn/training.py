"""train_linear: a patched linear together with adapters that are trained outside of its slots."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_epilora.nn.linear import LoraLinear
from torch_epilora.ops.functional import adapter_groups
from torch_epilora.ops.training import lora_linear_train


def train_linear(
    linear: LoraLinear,
    x: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    scaling: Sequence[float | Tensor],
    rows: Tensor | None = None,
    adapter_x: Tensor | None = None,
) -> Tensor:
    """Apply a patched linear's base and its bias, and to every row one of some adapters; the slots are not read.

    Gradients reach x and every A and B, in their own dtypes. The codes, the scales and the base's bias are constants.

    Parameters
    ----------
    linear : LoraLinear
        The layer, of K inputs and N outputs.
    x : Tensor
        [..., K] in the layer's dtype (any under autocast, as for the layer itself).
    a : sequence of Tensor
        Each adapter's A, [r, K] of any floating-point dtype. Ranks may differ.
    b : sequence of Tensor
        Each adapter's B, [N, r].
    scaling : sequence of float or Tensor
        Each adapter's scaling, a number or a tensor of one element.
    rows : Tensor, optional
        int32 [n], on x's device: the adapter (its place in ``a``) of each of n equal runs of rows, -1 for the bare
        base. None gives the only adapter to all rows.
    adapter_x : Tensor, optional
        [..., K] of x's dtype: what the adapters read in x's place, say x after dropout.

    Returns
    -------
    Tensor
        [..., N] in x's dtype (that of autocast under it).

    Raises
    ------
    ValueError, TypeError
        If a shape or dtype does not fit, or ``rows`` is None and there are several adapters.
    """
    if not len(a) == len(b) == len(scaling):
        raise ValueError(f"a, b, scaling: expected one of each an adapter, got {len(a)}, {len(b)} and {len(scaling)}.")
    if rows is None:
        if len(a) != 1:
            raise ValueError(f"rows: expected the adapter of every run of rows where there are {len(a)}, got None.")
    flat, dtype = linear.group.rows_of(x)
    rank, compute = max(t.shape[0] for t in a), linear.group.compute
    # masters of the activations' own precision or better are taken as they are
    kind = flat.dtype if all(t.dtype == flat.dtype for t in (*a, *b)) else torch.float32
    y = lora_linear_train(
        flat,
        linear.weight,
        linear.weight_scale,
        [_stack([_fill(t, 0, rank) for t in a], kind)],
        [_stack([_fill(t, 1, rank) for t in b], kind)],
        bias=linear.bias,
        scaling=_scalings(scaling, None if rows is None else flat.device),
        groups=None if rows is None else adapter_groups(rows, flat.shape[0], len(a)),
        adapter_x=None if adapter_x is None else linear.group.rows_of(adapter_x)[0],
        x_scale=linear.input_scale if compute == "w8a8" else None,
        compute=compute,
    )
    return y.view(*x.shape[:-1], linear.out_features).to(dtype)


def _fill(t: Tensor, dim: int, rank: int) -> Tensor:
    """Fill an A (dim 0) or B (dim 1) up with zeros to a rank; one that has it is taken as it is, which pad copies."""
    missing = rank - t.shape[dim]
    return t if not missing else pad(t, (0, 0, 0, missing) if dim == 0 else (0, missing))


def _stack(adapters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Put matrices of one shape into one tensor, a view where there is one of that dtype, row by row."""
    cast = [t.to(dtype).contiguous() for t in adapters]
    return cast[0].unsqueeze(0) if len(cast) == 1 else torch.stack(cast)


def _scalings(scaling: Sequence[float | Tensor], device: torch.device | None) -> Tensor:
    """Return scalings as fp32 on a device, numbers without one on the host; without a copy from the host."""
    return torch.cat(
        [
            s.detach().to(device, torch.float32).reshape(1)
            if isinstance(s, Tensor)
            else torch.full((1,), s, dtype=torch.float32, device=device or "cpu")
            for s in scaling
        ]
    )
