"""Argument checks shared by the kernels of every device and by the fakes: one place says what a valid call is."""

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 128
"""Side of a weight-scale block and length of an activation group, in elements."""

MAX_SLICES = 16
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
LAYOUTS = ("tensor", "channel", "block")
COMPUTES = ("w8a8", "w8a16")


class Groups(NamedTuple):
    """Which rows use which adapter slot: rows sorted by slot, then one entry a group, int32 on the data's device.

    Attributes
    ----------
    sorted_tokens : Tensor
        [M] row numbers, grouped by slot: its first T = ``counts.sum()`` entries are a permutation of rows 0 to T-1.
        Entries past them may be stale; rows T to M-1 are padding and bare base.
    ids : Tensor
        [G] slot of each group, no slot twice; -1 (or anything outside the slots) is the bare base. At least one.
    counts : Tensor
        [G] rows of each group; 0 for an unused entry.
    starts : Tensor
        [G] or more; first position of each group in ``sorted_tokens``.
    no_adapter : Tensor
        CPU bool [1]; True when no row has an adapter. Read on the host, so it costs no synchronization.
    """

    sorted_tokens: Tensor
    ids: Tensor
    counts: Tensor
    starts: Tensor
    no_adapter: Tensor


_CLONE = "Call .clone(memory_format=torch.contiguous_format) on both; .contiguous() keeps strides of dimensions of 1."


def _fail(name: str, expected: str, got: object, advice: str = "") -> ValueError:
    return ValueError(f"{name}: expected {expected}, got {got}." + (f" {advice}" if advice else ""))


def _dtype(name: str, t: Tensor, allowed: tuple[torch.dtype, ...], advice: str = "") -> None:
    if t.dtype not in allowed:
        names = " or ".join(str(d).removeprefix("torch.") for d in allowed)
        got = str(t.dtype).removeprefix("torch.")
        raise TypeError(f"{name}: expected dtype {names}, got {got}." + (f" {advice}" if advice else ""))


def _device(name: str, t: Tensor, like: Tensor) -> None:
    if t.device != like.device:
        raise _fail(name, f"a tensor on {like.device}, where x is", f"one on {t.device}", "Move it there first.")


def _inner_contiguous(name: str, t: Tensor) -> None:
    if t.shape[-1] > 1 and t.stride(-1) != 1 and t.numel():
        raise _fail(name, "a contiguous last dimension", f"strides {tuple(t.stride())}", "Call .contiguous() on it.")


def check_matrix(name: str, t: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Raise unless ``t`` is a matrix [M, K] of an allowed dtype with K contiguous."""
    if t.dim() != 2:
        raise _fail(name, "a matrix [M, K]", f"shape {tuple(t.shape)}", "Flatten the leading dimensions.")
    _dtype(name, t, dtypes)
    _inner_contiguous(name, t)


def scale_layout(weight_shape: tuple[int, ...] | torch.Size, scale: Tensor) -> str:
    """Name the layout of an FP8 weight scale by its shape.

    Parameters
    ----------
    weight_shape : sequence of int
        (N, K) of the codes.
    scale : Tensor
        fp32; one element is "tensor", [N] or [N, 1] is "channel", [ceil(N/128), ceil(K/128)] is "block".

    Returns
    -------
    str
        "tensor", "channel" or "block".

    Raises
    ------
    ValueError
        If the shape is none of these.
    """
    n, k = weight_shape
    if scale.numel() == 1:
        return "tensor"
    shape = tuple(scale.shape)
    if shape in ((n,), (n, 1)):
        return "channel"
    blocks = (-(-n // BLOCK), -(-k // BLOCK))
    if shape == blocks:
        return "block"
    raise _fail(
        "weight_scale",
        f"one element, [{n}] or [{n}, 1] (per channel) or {list(blocks)} (128x128 blocks) for a weight [{n}, {k}]",
        f"shape {list(shape)}",
    )


def check_weight(weight: Tensor, weight_scale: Tensor, x: Tensor) -> str:
    """Raise unless the codes and their scale fit each other and x; return the scale layout."""
    if weight.dim() != 2:
        raise _fail("weight", "codes [N, K]", f"shape {tuple(weight.shape)}")
    _dtype("weight", weight, (torch.float8_e4m3fn,), "Quantize it with quantize_fp8_weight.")
    if weight.shape[1] != x.shape[1]:
        raise _fail("weight", f"[N, {x.shape[1]}] to match x [M, {x.shape[1]}]", f"shape {tuple(weight.shape)}")
    _inner_contiguous("weight", weight)
    _dtype("weight_scale", weight_scale, (torch.float32,))
    _device("weight", weight, x)
    _device("weight_scale", weight_scale, x)
    if not weight_scale.is_contiguous():
        raise _fail("weight_scale", "a contiguous tensor", f"strides {tuple(weight_scale.stride())}")
    return scale_layout(weight.shape, weight_scale)


def check_codes(x: Tensor, x_codes: Tensor | None, x_scale: Tensor | None, layout: str, compute: str) -> None:
    """Raise unless the handed-in activation codes and scale are a usable pair (or a static scale alone)."""
    if compute not in COMPUTES:
        raise _fail("compute", f"one of {COMPUTES}", repr(compute))
    if x_codes is None and x_scale is None:
        return
    if compute == "w8a16":
        raise ValueError("x_codes and x_scale: expected None with compute='w8a16', which reads x itself, got a tensor.")
    if x_scale is None:
        raise ValueError("x_scale: expected the scale of x_codes, got None. Codes without their scale have no value.")
    _dtype("x_scale", x_scale, (torch.float32,))
    _device("x_scale", x_scale, x)
    if not x_scale.is_contiguous():
        raise _fail("x_scale", "a contiguous tensor", f"strides {tuple(x_scale.stride())}")
    m, k = x.shape
    if x_codes is None:
        if x_scale.numel() != 1:
            raise _fail("x_scale", "one element (a static scale) when x_codes is None", f"shape {tuple(x_scale.shape)}")
        if layout == "block":
            raise ValueError("x_scale: a static scale was given with a block-scaled weight, which quantizes per group.")
        return
    check_matrix("x_codes", x_codes, (torch.float8_e4m3fn,))
    _device("x_codes", x_codes, x)
    if x_codes.shape != x.shape:
        raise _fail("x_codes", f"shape {tuple(x.shape)}, that of x", tuple(x_codes.shape))
    expected = (m, -(-k // BLOCK)) if layout == "block" else (m, 1)
    if tuple(x_scale.shape) != expected and not (layout != "block" and tuple(x_scale.shape) == (m,)):
        raise _fail("x_scale", f"shape {expected} for x {tuple(x.shape)} and a {layout} weight", tuple(x_scale.shape))


def row_stride(x_scale: Tensor | None) -> int:
    """Elements between two rows' scales; 0 where one scale serves all rows, whatever its shape."""
    return 0 if x_scale is None or x_scale.numel() == 1 else x_scale.stride(0)


def check_groups(x: Tensor, sorted_tokens: Tensor, ids: Tensor, counts: Tensor, starts: Tensor) -> None:
    """Raise unless the batch metadata has the shapes of :class:`Groups` for x's rows."""
    device = x.device
    for name, t in (("sorted_tokens", sorted_tokens), ("ids", ids), ("counts", counts), ("starts", starts)):
        if t.dtype == torch.int32 and t.dim() == 1 and t.device == device and t.is_contiguous():
            continue
        _dtype(name, t, (torch.int32,))
        if t.dim() != 1 or not t.is_contiguous():
            raise _fail(name, "a contiguous vector", f"shape {tuple(t.shape)}, strides {tuple(t.stride())}")
        _device(name, t, x)
    if sorted_tokens.shape[0] < x.shape[0]:
        raise _fail("sorted_tokens", f"an entry for each of x's {x.shape[0]} rows", f"{sorted_tokens.shape[0]} entries")
    if ids.shape[0] < 1:
        raise _fail("ids", "at least one group (-1, the bare base, if there is no other)", "an empty vector")
    if counts.shape[0] != ids.shape[0]:
        raise _fail("counts", f"{ids.shape[0]} entries, as ids has", f"{counts.shape[0]} entries")
    if starts.shape[0] < ids.shape[0]:
        raise _fail("starts", f"at least {ids.shape[0]} entries, as ids has", f"{starts.shape[0]} entries")


def check_a(x: Tensor, a: list[Tensor]) -> tuple[int, int]:
    """Raise unless every A is [slots, rank, K] alike and fits x; return (slots, rank)."""
    if not 1 <= len(a) <= MAX_SLICES:
        raise _fail("a", f"1 to {MAX_SLICES} tensors, one a slice", f"{len(a)}")
    first, dtype, device = a[0], x.dtype, x.device
    shape, strides, k = first.shape, first.stride(), x.shape[1]
    for i, t in enumerate(a):
        # one test for the usual case, since this runs at every call of the operator; what follows says what is wrong
        if t.dtype == dtype and t.device == device and t.shape == shape and t.stride() == strides:
            if len(shape) == 3 and shape[2] == k and strides[2] == 1:
                continue
        name = f"a[{i}]"
        if t.dim() != 3:
            raise _fail(name, f"[slots, rank, {x.shape[1]}]", f"shape {tuple(t.shape)}")
        _dtype(name, t, (x.dtype,), "Adapters are stored in x's dtype.")
        _device(name, t, x)
        if t.shape[2] != x.shape[1]:
            raise _fail(name, f"[slots, rank, {x.shape[1]}] to match x", f"shape {tuple(t.shape)}")
        if t.shape != shape:
            raise _fail(name, f"the shape of a[0], {tuple(shape)}", tuple(t.shape))
        if t.stride() != strides:
            raise _fail(name, f"the strides of a[0], {tuple(strides)}", tuple(t.stride()), _CLONE)
        _inner_contiguous(name, t)
    if shape[0] < 1 or shape[1] < 1:
        raise _fail("a[0]", "at least one slot and rank 1", f"shape {tuple(shape)}")
    return shape[0], shape[1]


def check_b(x: Tensor, b: list[Tensor], b_bias: list[Tensor], slices: int, slots: int, rank: int, n: int) -> None:
    """Raise unless every B is [slots, N_i, rank], the widths sum to n, and b_bias is empty or [slots, N_i] each."""
    if len(b) != slices:
        raise _fail("b", f"{slices} tensors, one a slice as in a", f"{len(b)}")
    if len(b_bias) not in (0, slices):
        raise _fail("b_bias", f"no tensors or {slices}, one a slice", f"{len(b_bias)}")
    total, dtype, device = 0, x.dtype, x.device
    row = b[0].stride(1) if b[0].dim() == 3 else 0
    for i, t in enumerate(b):
        shape, strides = t.shape, t.stride()
        if t.dtype == dtype and t.device == device and len(shape) == 3 and strides[1:] == (row, 1):
            if shape[0] == slots and shape[2] == rank and shape[1] > 0:
                total += shape[1]
                continue
        name = f"b[{i}]"
        if t.dim() != 3:
            raise _fail(name, f"[{slots}, width, {rank}]", f"shape {tuple(t.shape)}")
        _dtype(name, t, (x.dtype,), "Adapters are stored in x's dtype.")
        _device(name, t, x)
        if t.shape[0] != slots or t.shape[2] != rank or t.shape[1] < 1:
            raise _fail(name, f"[{slots}, width, {rank}] to match a", f"shape {tuple(t.shape)}")
        _inner_contiguous(name, t)
        if t.stride(1) != row:
            raise _fail(name, f"row stride {row}, that of b[0]", f"{t.stride(1)}", _CLONE)
        total += t.shape[1]
    if total != n:
        raise _fail("b", f"slice widths that sum to the output width {n}", f"{[t.shape[1] for t in b]}")
    for i, t in enumerate(b_bias):
        name = f"b_bias[{i}]"
        _dtype(name, t, (x.dtype,))
        _device(name, t, x)
        if tuple(t.shape) != (slots, b[i].shape[1]) or not t.is_contiguous():
            raise _fail(name, f"a contiguous [{slots}, {b[i].shape[1]}]", f"shape {tuple(t.shape)}")


def check_per_slot(name: str, t: Tensor | None, dtype: torch.dtype, slices: int, slots: int, x: Tensor) -> None:
    """Raise unless ``t`` is None, [slots] or [slices, slots] of ``dtype`` on x's device."""
    if t is None:
        return
    _dtype(name, t, (dtype,))
    _device(name, t, x)
    if tuple(t.shape) not in ((slots,), (slices, slots)) or not t.is_contiguous():
        raise _fail(name, f"a contiguous [{slots}] or [{slices}, {slots}]", f"shape {tuple(t.shape)}")


class Call(NamedTuple):
    """The arguments of ``lora_linear`` in the schema's order; the function of that name says what they are."""

    x: Tensor
    x_codes: Tensor | None
    x_scale: Tensor | None
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    a: list[Tensor]
    b: list[Tensor]
    b_bias: list[Tensor]
    rank: Tensor | None
    scaling: Tensor | None
    sorted_tokens: Tensor
    ids: Tensor
    counts: Tensor
    starts: Tensor
    no_adapter: Tensor
    compute: str

    @property
    def groups(self) -> Groups:
        """Which row uses which slot."""
        return Groups(self.sorted_tokens, self.ids, self.counts, self.starts, self.no_adapter)

    @property
    def rows(self) -> tuple:
        """Which row uses which slot, without the flag: what kernels are given."""
        return self[11:15]

    @property
    def layout(self) -> str:
        """Layout of the weight's scale."""
        return scale_layout(self.weight.shape, self.weight_scale)

    @property
    def has_adapters(self) -> bool:
        """Say whether any row may have an adapter."""
        return bool(self.a) and not self.no_adapter.item()


On = Tensor | int
"""Where kernels are launched, and what they are given: a tensor of the device, and tensors; or a stream of the current
device, and addresses of tensors, which are multiples of 16 (``launch``)."""


def _check_flag(no_adapter: Tensor) -> None:
    _dtype("no_adapter", no_adapter, (torch.bool,))
    if no_adapter.device.type not in ("cpu", "meta") or no_adapter.numel() != 1:
        raise _fail(
            "no_adapter", "one bool on the CPU, read on the host", f"{no_adapter.numel()} on {no_adapter.device}"
        )


def check_bias(bias: Tensor | None, n: int, x: Tensor) -> None:
    """Raise unless ``bias`` is None or a contiguous [n] of x's dtype, on its device."""
    if bias is None:
        return
    _dtype("bias", bias, (x.dtype,))
    _device("bias", bias, x)
    if tuple(bias.shape) != (n,) or not bias.is_contiguous():
        raise _fail("bias", f"a contiguous [{n}]", f"shape {tuple(bias.shape)}")


def check_call(call: Call) -> None:
    """Raise unless the arguments of ``lora_linear`` fit together."""
    x, bias, no_adapter, n = call.x, call.bias, call.no_adapter, call.weight.shape[0] if call.weight.dim() else 0
    check_matrix("x", x)
    layout = check_weight(call.weight, call.weight_scale, x)
    check_codes(x, call.x_codes, call.x_scale, layout, call.compute)
    check_bias(bias, n, x)
    _check_flag(no_adapter)
    if call.a or call.b:
        slots, r = check_a(x, call.a)
        check_b(x, call.b, call.b_bias, len(call.a), slots, r, n)
        check_per_slot("rank", call.rank, torch.int32, len(call.a), slots, x)
        check_per_slot("scaling", call.scaling, torch.float32, len(call.a), slots, x)
    elif call.b_bias:
        raise _fail("b_bias", "no tensors when a and b are empty", f"{len(call.b_bias)}")
    check_groups(x, call.sorted_tokens, call.ids, call.counts, call.starts)


def aligned(*tensors: Tensor | None) -> bool:
    """Say whether rows start at multiples of 16 bytes, as the vendor's GEMM and reads of whole words ask."""
    return all(t is None or not (t.data_ptr() % 16 or (t.dim() == 2 and t.stride(0) % 16)) for t in tensors)


def check_static(x: Tensor, scale: Tensor) -> None:
    """Raise unless x is a matrix and ``scale`` one fp32 element on its device."""
    check_matrix("x", x)
    _dtype("scale", scale, (torch.float32,))
    _device("scale", scale, x)
    if scale.numel() != 1:
        raise _fail("scale", "one element", f"shape {tuple(scale.shape)}")


def check_quantizable_weight(weight: Tensor, layout: str) -> tuple[int, int]:
    """Raise unless ``weight`` is a non-empty float matrix and ``layout`` a known one; return (N, K)."""
    check_matrix("weight", weight)
    if layout not in LAYOUTS:
        raise _fail("layout", f"one of {LAYOUTS}", repr(layout))
    if weight.shape[0] < 1 or weight.shape[1] < 1:
        raise _fail("weight", "at least one row and one column", f"shape {tuple(weight.shape)}")
    return weight.shape[0], weight.shape[1]


def check_slots(slots: Tensor, num_slots: int) -> None:
    """Raise unless ``slots`` is an int32 vector and ``num_slots`` is positive."""
    _dtype("slots", slots, (torch.int32,))
    if slots.dim() != 1:
        raise _fail("slots", "a vector, one entry a sequence or a token", f"shape {tuple(slots.shape)}")
    if num_slots < 1:
        raise _fail("num_slots", "at least 1", num_slots)


def check_shrink(
    x: Tensor,
    a: list[Tensor],
    rank: Tensor | None,
    scaling: Tensor | None,
    sorted_tokens: Tensor,
    ids: Tensor,
    counts: Tensor,
    starts: Tensor,
) -> int:
    """Raise unless the arguments of ``shrink`` fit together; return R, the slots' rank."""
    check_matrix("x", x)
    slots, r = check_a(x, a)
    check_per_slot("rank", rank, torch.int32, len(a), slots, x)
    check_per_slot("scaling", scaling, torch.float32, len(a), slots, x)
    check_groups(x, sorted_tokens, ids, counts, starts)
    return r


def _check_target(y: Tensor) -> None:
    check_matrix("y", y)
    if y.shape[0] > 1 and y.stride(0) < y.shape[1]:
        raise _fail("y", "rows with memory of their own", f"strides {tuple(y.stride())}", "Call .clone() on it.")


def check_expand(
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
    """Raise unless the arguments of ``expand_add_`` fit together."""
    _check_target(y)
    if torch.is_grad_enabled() and any(t.requires_grad for t in (y, h, *b, *b_bias)):
        raise NotImplementedError(
            "y, h, b, b_bias: expand_add_ has no gradient, and one of them requires it. Call it under torch.no_grad(), "
            "or use lora_linear, which has one."
        )
    if h.dim() != 3 or h.shape[0] != y.shape[0] or not h.is_contiguous():
        raise _fail("h", f"a contiguous [{y.shape[0]}, slices, rank] from shrink", f"shape {tuple(h.shape)}")
    _dtype("h", h, (y.dtype,))
    _device("h", h, y)
    if not 1 <= len(b) <= MAX_SLICES or b[0].dim() != 3:
        raise _fail("b", f"1 to {MAX_SLICES} tensors [slots, width, rank], one a slice", f"{len(b)}")
    slots = b[0].shape[0]
    check_b(y, b, b_bias, h.shape[1], slots, h.shape[2], y.shape[1])
    check_per_slot("rank", rank, torch.int32, len(b), slots, y)
    check_per_slot("scaling", scaling, torch.float32, len(b), slots, y)
    check_groups(y, sorted_tokens, ids, counts, starts)


class Add(NamedTuple):
    """The arguments of ``lora_add_`` in the schema's order."""

    y: Tensor
    x: Tensor
    a: list[Tensor]
    b: list[Tensor]
    b_bias: list[Tensor]
    rank: Tensor | None
    scaling: Tensor | None
    sorted_tokens: Tensor
    ids: Tensor
    counts: Tensor
    starts: Tensor
    no_adapter: Tensor

    @property
    def groups(self) -> Groups:
        """Which row uses which slot."""
        return Groups(self.sorted_tokens, self.ids, self.counts, self.starts, self.no_adapter)


def check_add(add: Add) -> None:
    """Raise unless the arguments of ``lora_add_`` fit together."""
    y, x, a, b, b_bias, scaling = add.y, add.x, add.a, add.b, add.b_bias, add.scaling
    r = check_shrink(x, a, add.rank, scaling, *add.groups[:4])
    _check_target(y)
    _dtype("y", y, (x.dtype,))
    _device("y", y, x)
    if y.shape[0] != x.shape[0]:
        raise _fail("y", f"{x.shape[0]} rows, as x has", f"{y.shape[0]}")
    check_b(y, b, b_bias, len(a), a[0].shape[0], r, y.shape[1])
    _check_flag(add.no_adapter)
    given = (y, x, *a, *b, *b_bias, *(() if scaling is None else (scaling,)))
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise NotImplementedError(
            "y, x, a, b, b_bias, scaling: lora_add_ has no gradient, and one of them requires it. Call it under "
            "torch.no_grad(), or use lora_linear, which has one."
        )
