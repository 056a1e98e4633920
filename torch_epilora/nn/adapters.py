"""load_adapter, unload_adapter and adapters: what is in the slots, and which row uses which."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from torch_epilora.formats.adapters import Adapter, read_adapter
from torch_epilora.nn.batch import AdapterBatch, AdapterState
from torch_epilora.nn.checkpointing import follow_checkpointing
from torch_epilora.nn.linear import LoraLinear, groups_of, lora_linears
from torch_epilora.nn.placing import Spot, place

logger = logging.getLogger("torch_epilora")

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)


def patched_parts(model: nn.Module) -> tuple[AdapterState, dict[str, LoraLinear]]:
    """Return a patched model's state and its linears by path.

    Raises
    ------
    TypeError
        If it is not a module.
    ValueError
        If it is not patched, or two of its parts were patched by themselves.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a patched nn.Module, got {type(model).__name__}.")
    linears = lora_linears(model)
    states = {id(m.group.state): m.group.state for m in model.modules() if isinstance(m, LoraLinear)}
    if not states:
        raise ValueError("model: expected a patched model, found no patched layer in it. Call patch(model) first.")
    if len(states) > 1:
        raise ValueError(f"model: expected one patched model, found {len(states)} parts patched by themselves.")
    return next(iter(states.values())), linears


def load_adapter(
    model: nn.Module,
    name: str,
    source: str | os.PathLike[str] | tuple[Mapping[str, Tensor], Mapping[str, Any]] | Adapter,
    *,
    strict: bool = True,
) -> tuple[str, ...]:
    """Load a LoRA adapter into a free slot, or over the adapter of the same name, in place.

    Everything is checked before the first byte is copied: a failed call leaves the model as it was. Rank, alpha and
    their patterns, rsLoRA and ``lora_bias`` are honored; fused names (``qkv_proj``) fit split linears and the other way
    round.

    Parameters
    ----------
    model : nn.Module
        A patched model.
    name : str
        What ``adapters`` calls it.
    source : path, (state dict, config), or Adapter
        A PEFT folder with safetensors, or its content. See ``torch_epilora.formats.read_adapter``.
    strict : bool
        False leaves out what the model has no place for, and returns it.

    Returns
    -------
    tuple of str
        Keys and modules left out; empty if ``strict``.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        If there is no free slot, a rank exceeds the slots', the adapter is damaged or does not fit the model, or it
        needs what is not supported.
    """
    state, linears = patched_parts(model)
    _check_name(name)
    if not state.num_slots:
        raise ValueError(
            "model: expected slots for adapters, the model has no slots. Load it again, with max_adapters >= 1."
        )
    slot = state.slots.get(name, _free_slot(state))
    if slot is None:
        raise ValueError(
            f"name: expected a free slot for {name!r}, all {state.num_slots} hold adapters: {sorted(state.slots)}. "
            "Unload one, or patch with a larger max_adapters."
        )
    adapter = source if isinstance(source, Adapter) else read_adapter(source, strict=strict)
    spots = {path: _spot(linear) for path, linear in linears.items()}
    parts, unmatched = place(name, adapter, spots, state.max_rank, strict=strict)
    if any(linear.weight.is_meta for linear in linears.values()):
        raise ValueError("model: expected tensors with values, it is on the meta device. Load its weights first.")
    staged = []
    for (path, index), part in parts.items():
        group, member = linears[path].group, linears[path].group.members[linears[path].index]
        device = group.codes.device
        bias = None if part.b_bias is None else part.b_bias.to(device)
        staged.append((group, member.slice + index, part.a.to(device), part.b.to(device), bias, part.scaling))
    stale = any(bias is not None and group.bank.captured_without_bias for group, _, _, _, bias, _ in staged)
    for group in groups_of(linears):
        if group.bank.slots:
            group.bank.clear(slot)
    for group, index, a, b, bias, scaling in staged:
        group.bank.write(slot, index, a, b, bias, scaling)
    state.slots[name] = slot
    state.version += 1
    if stale:
        logger.warning("adapter %r: its bias of B is not in the CUDA graphs captured so far; capture them again.", name)
    left_out = (*adapter.skipped, *unmatched)
    if left_out:
        logger.warning("adapter %r: left out: %s", name, ", ".join(left_out))
    return left_out


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"name: expected a string, got {type(name).__name__}.")
    if not name:
        raise ValueError("name: expected a name that is not empty.")


def _free_slot(state: AdapterState) -> int | None:
    return next((i for i in range(state.num_slots) if i not in state.slots.values()), None)


def _spot(linear: LoraLinear) -> Spot:
    bank, member = linear.group.bank, linear.group.members[linear.index]
    widths = tuple(b.shape[1] for b in bank.b[member.slice : member.slice + member.slices])
    return Spot(linear.in_features, widths, bank.dtype, bank.slots > 0)


def unload_adapter(model: nn.Module, name: str) -> None:
    """Zero an adapter's slot and free it.

    Parameters
    ----------
    model : nn.Module
        A patched model.
    name : str
        A loaded adapter.

    Raises
    ------
    TypeError, ValueError
        If the model is not patched, no such adapter is loaded, or a context that has not ended uses it.
    """
    state, linears = patched_parts(model)
    _check_name(name)
    slot = _slot(state, name, "name: expected a loaded adapter")
    if state.in_use(slot):
        raise ValueError(f"name: expected an adapter that is not in use, {name!r} is chosen for rows right now.")
    for group in groups_of(linears):
        if group.bank.slots:
            group.bank.clear(slot)
    del state.slots[name]
    state.version += 1


def _slot(state: AdapterState, name: str, expected: str = "names: expected loaded adapters") -> int:
    if name not in state.slots:
        loaded = ", ".join(map(repr, sorted(state.slots))) or "none"
        raise ValueError(f"{expected}, got {name!r}; loaded are {loaded}.")
    return state.slots[name]


def adapters(model: nn.Module, names: Sequence[str | None] | Tensor) -> AbstractContextManager[None]:
    """Choose the adapter of every row of the batches that run inside this context.

    The rows of a forward must be as many as the names or a multiple of them: each name then covers an equal run of
    consecutive rows, as beam search and several return sequences lay them out. With one name a token instead (packed
    input), each token has its own. Rows are the first axis of every layer's input: a model that puts tokens first
    ([T, B, K]) needs one name a token. Outside of any context rows are bare base. Contexts nest; they belong to the
    model, not to the thread: threads that share a model share its context, and the last one entered that has not ended
    is in force. Linears that share an input (q, k and v) return views of one tensor, which are not contiguous: use
    ``reshape`` on them, not ``view``, where axes are merged.

    Parameters
    ----------
    model : nn.Module
        A patched model.
    names : sequence of str or None, or Tensor
        One a row or token; None is the bare base. Or slot numbers as an integer tensor [n]: those that
        ``torch_epilora.nn.adapter_slots`` gives for the names, and -1 for the bare base. A tensor on a GPU is copied to
        the host, which waits for it.

    Returns
    -------
    context manager
        To be entered once; as a decorator, at every call. It takes the names' slots as it is entered.

    Raises
    ------
    TypeError, ValueError
        If the model is not patched, or a name is not loaded, now or as the context is entered.
    RuntimeError
        If the context is entered a second time.
    """
    state, linears = patched_parts(model)
    checked = _checked_names(state, names)
    return _Context(lambda: _under(model, state, linears, checked))


class _Context(ContextDecorator, AbstractContextManager[None]):
    """What :func:`adapters` returns: a context to enter once; as a decorator, a new one every call."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: AbstractContextManager[None] | None = None

    def _recreate_cm(self) -> Self:
        return type(self)(self._make)

    def __enter__(self) -> None:
        if self._entered is not None:
            raise RuntimeError("adapters: this context was entered before. Call adapters(model, names) again for each.")
        context = self._make()
        context.__enter__()
        self._entered = context

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.__exit__(*error) if self._entered is not None else None


@contextmanager
def _under(
    model: nn.Module, state: AdapterState, linears: Mapping[str, LoraLinear], names: Sequence[str | None]
) -> Iterator[None]:
    # Only now: an adapter may have been unloaded since adapters() was called, and its slot may hold another.
    slots = [-1 if name is None else _slot(state, name) for name in names]
    batch = AdapterBatch(slots, state.num_slots, {name: state.slots[name] for name in names if name is not None})
    for device in {m.group.codes.device for m in linears.values()}:
        if device.type != "meta":
            batch.prepare(device)
    follow_checkpointing(model, state)
    state.enter(batch)
    try:
        yield
    finally:
        state.leave(batch)


def _checked_names(state: AdapterState, names: Sequence[str | None] | Tensor) -> list[str | None]:
    if isinstance(names, Tensor):
        return _names_of(state, names)
    if isinstance(names, str) or not isinstance(names, Sequence):
        hint = f" Use [{names!r}]." if isinstance(names, str) else ""
        raise TypeError(f"names: expected a list, one adapter name or None a row, got {type(names).__name__}.{hint}")
    for name in names:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"names: expected adapter names or None, got an entry of type {type(name).__name__}.")
        if name is not None:
            _slot(state, name)
    if not names:
        raise ValueError("names: expected at least one entry, got an empty list.")
    return list(names)


def _names_of(state: AdapterState, slots: Tensor) -> list[str | None]:
    if slots.dtype not in _INTEGERS:
        raise TypeError(f"names: expected slots as an integer tensor, got {str(slots.dtype).removeprefix('torch.')}.")
    if slots.is_meta:
        raise TypeError("names: expected slots as a tensor with values, got one on the meta device.")
    if slots.dim() != 1 or not slots.numel():
        raise ValueError(f"names: expected slots as a vector [n] that is not empty, got shape {list(slots.shape)}.")
    by_slot: dict[int, str | None] = {-1: None, **{slot: name for name, slot in state.slots.items()}}
    own = slots.tolist()
    unknown = set(own) - by_slot.keys()
    if unknown:
        raise ValueError(f"names: expected slots of loaded adapters {state.slots} or -1, got {sorted(unknown)}.")
    return [by_slot[slot] for slot in own]


def adapter_slots(model: nn.Module) -> dict[str, int]:
    """Return the slot of every loaded adapter, for the slot tensor that ``adapters`` takes in place of names.

    Parameters
    ----------
    model : nn.Module
        A patched model.

    Returns
    -------
    dict of str to int
        By name, 0 to ``max_adapters - 1``. A slot keeps its number until its adapter is unloaded.

    Raises
    ------
    TypeError, ValueError
        If the model is not patched.
    """
    return dict(patched_parts(model)[0].slots)
