"""PEFT: a PeftModel's LoRA adapters move into slots, and the PeftModel keeps choosing among them."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer, LoraModel
from safetensors.torch import save_file
from torch import Tensor, nn

from torch_epilora.formats.adapters import WEIGHTS, Adapter, read_adapter
from torch_epilora.nn.adapters import patched_parts, unload_adapter

_PREFIX = "base_model.model."


class SlotAdapters:
    """The LoRA adapters of a PeftModel, read and checked, on their way into slots.

    Parameters
    ----------
    model : PeftModel
        With LoRA adapters that are not merged, at most one of them active.

    Raises
    ------
    NotImplementedError
        If an adapter is not plain LoRA on linear layers, or several are active at once.
    ValueError
        If adapters are merged into the weights.
    """

    def __init__(self, model: Any) -> None:
        if type(model.base_model) is not LoraModel:
            raise NotImplementedError(
                f"model: expected a PeftModel with LoRA adapters, got one with {type(model.base_model).__name__}."
            )
        self._model = model
        self._layers = [
            (parent, name, child)
            for parent in model.base_model.model.modules()
            for name, child in parent._modules.items()
            if isinstance(child, LoraLayer)
        ]
        if any(layer.merged for _, _, layer in self._layers):
            raise ValueError("model: expected adapters that are not merged. Call unmerge_adapter() first.")
        self._active = _only_one(model.active_adapters)
        self._enabled = not any(layer.disable_adapters for _, _, layer in self._layers)
        self.adapters: dict[str, Adapter] = {
            name: read_adapter(
                (get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False), config.to_dict())
            )
            for name, config in model.peft_config.items()
        }

    @contextmanager
    def plain_linears(self) -> Iterator[nn.Module]:
        """Put the base layers where PEFT's stand; back again if the block fails."""
        for parent, name, layer in self._layers:
            setattr(parent, name, layer.get_base_layer())
        try:
            yield self._model.base_model.model
        except BaseException:
            for parent, name, layer in self._layers:
                setattr(parent, name, layer)
            raise

    def take_over(self) -> None:
        """Let the PeftModel's methods act on the slots."""
        self._model.base_model.__class__ = _SlotLoraModel
        self._model.__class__ = _slot_model(type(self._model))  # type: ignore[arg-type]
        state, _ = patched_parts(self._model)
        state.use_by_default(self._active if self._enabled else None)


def _only_one(names: str | Sequence[str]) -> str:
    chosen = [names] if isinstance(names, str) else list(names)
    if len(chosen) != 1:
        raise NotImplementedError(f"adapter_name: expected one active adapter, got {chosen}; slots do not add up.")
    return chosen[0]


def _refuse(what: str, instead: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{what} is not supported by a patched PeftModel. {instead}")

    method.__name__ = what
    return method


_LOAD = "Use torch_epilora.load_adapter, and adapters() to choose it."
_MERGE = "FP8 weights cannot take an adapter in; the slots apply it."


class _SlotLoraModel(LoraModel):
    """PEFT's LoraModel, with its choice of adapter acting on the slots."""

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        name = _only_one(adapter_name)
        state, _ = patched_parts(self)
        if name not in state.slots:
            raise ValueError(f"adapter_name: expected one of {sorted(state.slots)}, got {name!r}.")
        state.use_by_default(name)
        self.active_adapter = name

    def enable_adapter_layers(self) -> None:
        self.set_adapter(self.active_adapter)

    def disable_adapter_layers(self) -> None:
        patched_parts(self)[0].use_by_default(None)

    inject_adapter = _refuse("inject_adapter", _LOAD)
    add_weighted_adapter = _refuse("add_weighted_adapter", _LOAD)
    merge_adapter = _refuse("merge_adapter", _MERGE)
    merge_and_unload = _refuse("merge_and_unload", _MERGE)
    unload = _refuse("unload", "Use torch_epilora.unpatch on get_base_model().")


@cache
def _slot_model(kind: type[PeftModel]) -> type[PeftModel]:
    """Subclass of a PeftModel class whose methods act on the slots."""

    @contextmanager
    def disable_adapter(self: Any) -> Iterator[None]:
        state, _ = patched_parts(self)
        state.enter(state.bare)
        try:
            yield
        finally:
            state.leave(state.bare)

    def set_adapter(self: Any, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        kind.set_adapter(self, _only_one(adapter_name), inference_mode)

    def delete_adapter(self: Any, adapter_name: str) -> None:
        if adapter_name not in self.peft_config:
            raise ValueError(f"adapter_name: expected one of {sorted(self.peft_config)}, got {adapter_name!r}.")
        state, _ = patched_parts(self)
        if state.slots.get(adapter_name) in state.base.used:
            raise ValueError(
                f"adapter_name: {adapter_name!r} is the active adapter. Call set_adapter() with another one first, or "
                "base_model.disable_adapter_layers() to go on without."
            )
        unload_adapter(self, adapter_name)
        del self.peft_config[adapter_name]

    def save_pretrained(
        self: Any, save_directory: str | os.PathLike[str], selected_adapters: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        # PEFT's own looks for its layers, which are gone; the files are the same.
        for name in list(self.peft_config) if selected_adapters is None else selected_adapters:
            if name not in self.peft_config:
                raise ValueError(f"selected_adapters: expected names of {sorted(self.peft_config)}, got {name!r}.")
            folder = Path(save_directory) if name == "default" else Path(save_directory) / name
            folder.mkdir(parents=True, exist_ok=True)
            save_file(_slot_tensors(self, name), folder / WEIGHTS, metadata={"format": "pt"})
            config = copy(self.peft_config[name])
            config.inference_mode = True
            config.save_pretrained(str(folder), **kwargs)

    overrides = {
        "__doc__": f"{kind.__name__} whose adapters live in slots.",
        "disable_adapter": disable_adapter,
        "set_adapter": set_adapter,
        "delete_adapter": delete_adapter,
        "save_pretrained": save_pretrained,
        "add_adapter": _refuse("add_adapter", _LOAD),
        "load_adapter": _refuse("load_adapter", _LOAD),
    }
    return type(f"Slot{kind.__name__}", (kind,), overrides)


def _slot_tensors(model: Any, adapter: str) -> dict[str, Tensor]:
    """Return an adapter as PEFT stores it, in the model's dtype."""
    state, linears = patched_parts(model)
    slot, has_bias = state.slots[adapter], model.peft_config[adapter].lora_bias
    tensors: dict[str, Tensor] = {}
    for path, linear in linears.items():
        bank, member = linear.group.bank, linear.group.members[linear.index]
        rank = int(bank.rank[member.slice, slot]) if bank.slots else 0
        if not rank:
            continue
        # A linear that is several in one has PEFT's single A in each of its slices.
        indices = range(member.slice, member.slice + member.slices)
        tensors[f"{_PREFIX}{path}.lora_A.weight"] = bank.a[member.slice][slot, :rank].clone()
        tensors[f"{_PREFIX}{path}.lora_B.weight"] = torch.cat([bank.b[i][slot, :, :rank] for i in indices])
        if has_bias:
            tensors[f"{_PREFIX}{path}.lora_B.bias"] = torch.cat([bank.b_bias[i][slot] for i in indices])
    return tensors
