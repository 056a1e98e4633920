"""load_adapter, unload_adapter and adapters: what is in the slots, and which row uses which."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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
        What :func:`adapters` calls it.
    source : path, (state dict, config), or Adapter
        A PEFT folder with safetensors, or its content. See :func:`torch_epilora.formats.adapters.read_adapter`.
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
    for group in groups_of(linears):
        if group.bank.slots:
            group.bank.clear(slot)
    for group, index, a, b, bias, scaling in staged:
        group.bank.write(slot, index, a, b, bias, scaling)
    state.slots[name] = slot
    state.version += 1
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
        If the model is not patched, no such adapter is loaded, or it is in use by a context that has not ended.
    """
    state, linears = patched_parts(model)
    _check_name(name)
    slot = _slot(state, name)
    if slot in state.batch.used or slot in state.base.used:
        raise ValueError(f"name: expected an adapter that is not in use, {name!r} is chosen for rows right now.")
    for group in groups_of(linears):
        if group.bank.slots:
            group.bank.clear(slot)
    del state.slots[name]
    state.version += 1


def _slot(state: AdapterState, name: str) -> int:
    if name not in state.slots:
        loaded = ", ".join(map(repr, sorted(state.slots))) or "none"
        raise ValueError(f"names: expected loaded adapters, got {name!r}; loaded are {loaded}.")
    return state.slots[name]


def adapters(model: nn.Module, names: Sequence[str | None] | Tensor) -> AbstractContextManager[None]:
    """Choose the adapter of every row of the batches that run inside this context.

    The rows of a forward must be as many as the names or a multiple of them: each name then covers an equal run of
    consecutive rows, as beam search and several return sequences lay them out. With one name a token instead (packed
    input), each token has its own. Outside of any context rows are bare base. Contexts nest; they belong to the model,
    not to the thread: threads that share a model share its context.

    Parameters
    ----------
    model : nn.Module
        A patched model.
    names : sequence of str or None, or Tensor
        One a row or token; None is the bare base. Or slots as an integer tensor [n], -1 for the bare base, in the order
        that :func:`torch_epilora.nn.adapter_slots` tells.

    Returns
    -------
    context manager
        To be entered once.

    Raises
    ------
    TypeError, ValueError
        If the model is not patched, or a name is not loaded.
    """
    state, linears = patched_parts(model)
    batch = AdapterBatch(_slots_of(state, names), state.num_slots)
    for device in {m.group.codes.device for m in linears.values()}:
        if device.type != "meta":
            batch.prepare(device)
    return _under(model, state, batch)


@contextmanager
def _under(model: nn.Module, state: AdapterState, batch: AdapterBatch) -> Iterator[None]:
    follow_checkpointing(model, state)
    outside = None if state.batch is state.base else state.batch
    state.batch = batch
    try:
        yield
    finally:
        state.batch = state.base if outside is None else outside


def _slots_of(state: AdapterState, names: Sequence[str | None] | Tensor) -> list[int]:
    if isinstance(names, Tensor):
        return _checked_slots(state, names)
    if isinstance(names, str) or not isinstance(names, Sequence):
        hint = f" Use [{names!r}]." if isinstance(names, str) else ""
        raise TypeError(f"names: expected a list, one adapter name or None a row, got {type(names).__name__}.{hint}")
    for name in names:
        if name is not None and not isinstance(name, str):
            raise TypeError(f"names: expected adapter names or None, got an entry of type {type(name).__name__}.")
    if not names:
        raise ValueError("names: expected at least one entry, got an empty list.")
    return [-1 if name is None else _slot(state, name) for name in names]


def _checked_slots(state: AdapterState, slots: Tensor) -> list[int]:
    if slots.dtype not in _INTEGERS:
        raise TypeError(f"names: expected slots as an integer tensor, got {str(slots.dtype).removeprefix('torch.')}.")
    if slots.dim() != 1 or not slots.numel():
        raise ValueError(f"names: expected slots as a vector [n] that is not empty, got shape {list(slots.shape)}.")
    own = slots.tolist()
    unknown = set(own) - {-1, *state.slots.values()}
    if unknown:
        raise ValueError(f"names: expected slots of loaded adapters {state.slots} or -1, got {sorted(unknown)}.")
    return own


def adapter_slots(model: nn.Module) -> dict[str, int]:
    """Return the slot of every loaded adapter by name."""
    return dict(patched_parts(model)[0].slots)
