"""Plain functions over the operators, for people.

Keyword arguments and one ``Groups`` instead of seventeen positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_epilora.ops.checks import Groups


def adapter_groups(slots: Tensor, rows: int, num_slots: int, *, any_adapter: bool = True) -> Groups:
    """Sort rows by adapter slot, on the slots' device and without a host synchronization.

    Parameters
    ----------
    slots : Tensor
        int32 [n], the slot of each of n equal runs of rows; -1 is the bare base.
    rows : int
        Number of rows M, a multiple of n: entry i covers rows ``i*M/n`` to ``(i+1)*M/n``, so one entry a
        sequence serves any sequence length, and beams or several return sequences repeat it.
    num_slots : int
        Slots of the adapter bank.
    any_adapter : bool
        False if the caller knows that every entry is -1; the operators then skip the adapter work.

    Returns
    -------
    Groups
        Metadata for ``lora_linear``.

    Raises
    ------
    ValueError
        If ``rows`` is not a multiple of n, or (on the CPU) a slot is outside [-1, num_slots).
    TypeError
        If ``slots`` is not int32.
    """
    order, ids, counts, starts = torch.ops.epilora.adapter_groups(slots, rows, num_slots)
    return Groups(order, ids, counts, starts, torch.tensor([not any_adapter], device="cpu"))


def lora_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    groups: Groups,
    *,
    bias: Tensor | None = None,
    b_bias: Sequence[Tensor] = (),
    rank: Tensor | None = None,
    scaling: Tensor | None = None,
    x_codes: Tensor | None = None,
    x_scale: Tensor | None = None,
    compute: str = "w8a8",
) -> Tensor:
    """Apply an FP8 linear layer together with every row's LoRA adapter (EpiLoRA section 3.1).

    Computes ``y = x W^T + bias + scaling * (x A_s^T) B_s^T`` for each row's slot s, rounded once to x's dtype.

    Parameters
    ----------
    x : Tensor
        [M, K] bf16, fp16 or fp32, K contiguous. The adapter reads it as it is, never its codes.
    weight : Tensor
        e4m3 codes [N, K].
    weight_scale : Tensor
        fp32; one element (per tensor), [N] or [N, 1] (per channel) or [ceil(N/128), ceil(K/128)] (per block).
    a : sequence of Tensor
        A of each output slice, [slots, R, K] in x's dtype. Empty, as ``b`` then is: no slots.
    b : sequence of Tensor
        B of each output slice, [slots, N_i, R] in x's dtype, with the N_i summing to N.
    groups : Groups
        Which row uses which slot.
    bias : Tensor, optional
        [N] in x's dtype.
    b_bias : sequence of Tensor
        PEFT's ``lora_bias``: [slots, N_i] a slice, multiplied by ``scaling`` as PEFT does.
    rank : Tensor, optional
        int32 [slots] or [slices, slots]; columns at or beyond it are not read. 0 leaves the slice bare.
    scaling : Tensor, optional
        fp32 [slots] or [slices, slots]; 1 if None.
    x_codes : Tensor, optional
        The engine's own activation codes, e4m3 [M, K]; they come with ``x_scale``.
    x_scale : Tensor, optional
        fp32 scale of ``x_codes``, [M, 1] ([M, ceil(K/128)] for block weights). Without codes, one element: a static
        scale to quantize x with.
    compute : str
        "w8a8" multiplies codes by codes; "w8a16" multiplies the widened weight codes by x itself.

    Returns
    -------
    Tensor
        [M, N] in x's dtype.

    Raises
    ------
    ValueError, TypeError
        Naming the argument, what was expected and what came.
    """
    return torch.ops.epilora.lora_linear(
        x, x_codes, x_scale, weight, weight_scale, bias, list(a), list(b), list(b_bias), rank, scaling, *groups, compute
    )
