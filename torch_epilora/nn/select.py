"""Which linears of a model to replace, which of them share an input, and how wide their output slices are."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_epilora.nn.patterns import matches
from torch_epilora.nn.placing import FUSED_NAMES, Spot
from torch_epilora.ops.checks import MAX_SLICES

FAMILIES = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("query", "key", "value"),
    ("wq", "wk", "wv"),
)
"""Names of linears that read the same input where they have one parent."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_EXPERTS = re.compile(r"(^|\.)experts\.")
_CROSS = re.compile(r"cross|encoder_attn")


@dataclass(frozen=True, eq=False)
class Target:
    """A linear to replace: its path, its module, every (parent, name) under which it hangs, its output slices."""

    path: str
    module: nn.Linear
    places: tuple[tuple[nn.Module, str], ...]
    widths: tuple[int, ...]

    @property
    def routed(self) -> bool:
        """Whether it is an expert, which sees some tokens in an order of its own and so cannot have adapter slots."""
        return _EXPERTS.search(self.path) is not None

    @property
    def spot(self) -> Spot:
        """What an adapter must fit."""
        return Spot(self.module.in_features, self.widths, self.module.weight.dtype, not self.routed)


@dataclass
class Selection:
    """Linears to replace, by the group they may share a buffer with; and linears left alone, each with the reason."""

    families: list[list[Target]] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def targets(self) -> list[Target]:
        """All linears to replace."""
        return [target for family in self.families for target in family]


def select(
    model: nn.Module,
    targets: Sequence[str] | None,
    exclude: Sequence[str],
    slices: Mapping[str, Sequence[int]],
    exact: Collection[str] | None = None,
    tied: Collection[str] = (),
) -> Selection:
    """Find the linears of a model that the patterns (or exact paths) name and that behave as ``nn.Linear`` does.

    ``tied`` names parameters that will be tied to another module's once the model is loaded.

    Raises
    ------
    TypeError
        If slices are not a mapping to sequences.
    ValueError
        If a target pattern names no linear that can be replaced, there is none at all, or slices do not fit.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    found: dict[int, tuple[str, nn.Linear]] = {}
    check_slices(slices)
    result, by_path = Selection(), {}
    for prefix, parent in model.named_modules():
        for name, child in parent._modules.items():
            path = plain_path(f"{prefix}.{name}" if prefix else name)
            if type(child).__name__ == "Conv1D" and (targets is None or any(matches(path, p) for p in targets)):
                result.skipped[path] = "Conv1D, GPT-2's layer with a transposed weight, is no nn.Linear"
            if isinstance(child, nn.Linear):
                found.setdefault(id(child), (path, child))
                places.setdefault(id(child), []).append((parent, name))
    shared = _shared_parameters(model)
    shared |= {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in tied}
    head = output_embedding(model) if targets is None and exact is None else None
    for key, (path, module) in found.items():
        if targets is not None and not any(matches(path, p) for p in targets):
            continue
        if exact is not None and path not in exact:
            continue
        reason = _why_not(module, shared)
        if module is head:
            reason = "it is the output embedding"
        if any(matches(path, p) for p in exclude):
            reason = "it is excluded"
        if reason is not None:
            result.skipped[path] = reason
            continue
        by_path[path] = Target(path, module, tuple(places[key]), _widths(model, path, module, slices))
    _check_patterns(targets, slices, by_path, result.skipped)
    result.families = _families(by_path)
    return result


def plain_path(path: str) -> str:
    """Return a module's path without what torch.compile puts into it."""
    return path.replace("_orig_mod.", "")


def check_slices(slices: Mapping[str, Sequence[int]]) -> None:
    """Raise TypeError unless slices are a mapping of names to sequences."""
    if not isinstance(slices, Mapping):
        raise TypeError(f"slices: expected a mapping of name to widths, got {type(slices).__name__}.")
    for pattern, widths in slices.items():
        if not isinstance(pattern, str) or not isinstance(widths, Sequence):
            raise TypeError(f"slices[{pattern!r}]: expected a name and a sequence of widths, got {widths!r}.")


def _check_patterns(
    targets: Sequence[str] | None,
    slices: Mapping[str, Sequence[int]],
    chosen: Mapping[str, Target],
    skipped: Mapping[str, str],
) -> None:
    reasons = "; ".join(f"{path}: {reason}" for path, reason in list(skipped.items())[:5])
    note = f" (skipped: {reasons})." if reasons else "."
    for pattern in targets or ():
        if not any(matches(path, pattern) for path in chosen):
            raise ValueError(f"targets: expected {pattern!r} to name a linear that can be patched, it names none{note}")
    if not chosen:
        raise ValueError(f"model: expected at least one nn.Linear to patch, found none{note}")
    for pattern in slices:
        if not any(matches(path, pattern) for path in chosen):
            raise ValueError(f"slices: expected {pattern!r} to name a layer to patch, it names none.")


def _shared_parameters(model: nn.Module) -> set[int]:
    """Ids of the parameters that more than one module owns (tied weights)."""
    seen: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                seen[id(parameter)] = seen.get(id(parameter), 0) + 1
    return {key for key, count in seen.items() if count > 1}


def output_embedding(model: nn.Module) -> nn.Module | None:
    """Return what a transformers model calls its output embedding, or None."""
    try:
        return model.get_output_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def _why_not(module: nn.Linear, shared: set[int]) -> str | None:
    """Reason why a linear cannot be replaced, or None. A subclass is taken only if its forward is nn.Linear's own."""
    kind = type(module).__name__
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return f"{kind}: nn.MultiheadAttention reads its weight past its forward"
    if type(module).forward is not nn.Linear.forward or _wrapped(module):
        return f"{kind} has a forward of its own"
    if _offloaded(module):
        return "accelerate offloads its weight"
    if hasattr(module, "parametrizations") or set(module._parameters) != {"weight", "bias"} or module._buffers:
        return f"{kind} has parametrizations or tensors beside weight and bias"
    if module.weight.dtype not in _DTYPES:
        return f"its weight is {str(module.weight.dtype).removeprefix('torch.')}, not bfloat16, float16 or float32"
    if not module.weight.numel():
        return "its weight is empty"
    if any(id(p) in shared for p in module._parameters.values()):
        return "its weight is tied to another module's"
    return None


def _wrapped(module: nn.Linear) -> bool:
    """Say whether the instance's forward was replaced, other than by accelerate's placement hook around nn.Linear's."""
    own = vars(module).get("_old_forward") if hasattr(module, "_hf_hook") else vars(module).get("forward")
    return own is not None and getattr(own, "__func__", None) is not nn.Linear.forward


def _offloaded(module: nn.Linear) -> bool:
    hook = getattr(module, "_hf_hook", None)
    return any(getattr(part, "offload", False) for part in getattr(hook, "hooks", (hook,)))


def _widths(model: nn.Module, path: str, module: nn.Linear, slices: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
    """Output slices of a linear: those the caller gives, those the model's config implies for a fused name, or one."""
    n = module.out_features
    for pattern, widths in slices.items():
        if matches(path, pattern):
            if not all(type(w) is int and w > 0 for w in widths) or sum(widths) != n or len(widths) > MAX_SLICES:
                raise ValueError(
                    f"slices[{pattern!r}]: expected at most {MAX_SLICES} positive integers that sum to {n}, the width "
                    f"of {path}, got {list(widths)}."
                )
            return tuple(widths)
    return _config_widths(getattr(model, "config", None), path.rpartition(".")[2], n) or (n,)


def _config_widths(config: Any, name: str, n: int) -> tuple[int, ...] | None:
    if config is None or name not in FUSED_NAMES:
        return None
    if name == "gate_up_proj":
        return (n // 2, n // 2) if n % 2 == 0 else None
    heads, hidden = getattr(config, "num_attention_heads", None), getattr(config, "hidden_size", None)
    if not heads or not hidden:
        return None
    size = getattr(config, "head_dim", None) or hidden // heads
    kv = getattr(config, "num_key_value_heads", None) or heads
    widths = (heads * size, kv * size, kv * size)
    return widths if sum(widths) == n else None


def _families(by_path: Mapping[str, Target]) -> list[list[Target]]:
    families: list[list[Target]] = []
    placed: set[str] = set()
    for path, target in by_path.items():
        if path in placed:
            continue
        family = _family(path, target, by_path)
        placed.update(t.path for t in family)
        families.append(family)
    return families


def _family(path: str, target: Target, by_path: Mapping[str, Target]) -> list[Target]:
    parent, _, name = path.rpartition(".")
    names = next((f for f in FAMILIES if name in f), None)
    if names is None or _CROSS.search(parent):
        return [target]
    prefix = f"{parent}." if parent else ""
    family = [by_path[prefix + n] for n in names if prefix + n in by_path]
    alike = (
        all(
            t.module.in_features == target.module.in_features
            and (t.module.bias is None) == (target.module.bias is None)
            and t.module.weight.dtype == target.module.weight.dtype
            and t.module.weight.device == target.module.weight.device
            and len(t.places) == 1
            for t in family
        )
        and sum(len(t.widths) for t in family) <= MAX_SLICES
    )
    return family if alike else [target]
