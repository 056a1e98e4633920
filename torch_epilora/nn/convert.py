"""Replacing selected linears by FP8 groups."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torch_epilora.formats.fp8 import Fp8Weight
from torch_epilora.nn.batch import AdapterState
from torch_epilora.nn.group import ProjectionGroup, can_fuse
from torch_epilora.nn.linear import LoraLinear
from torch_epilora.nn.select import Target

_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


@dataclass(frozen=True)
class Conversion:
    """A group that is ready to stand where its targets stand."""

    targets: Sequence[Target]
    group: ProjectionGroup


def prepare(
    families: Sequence[Sequence[Target]],
    weight_of: Callable[[Target], Fp8Weight],
    bias_of: Callable[[Target], Tensor | None],
    state: AdapterState,
    compute: str,
) -> list[Conversion]:
    """Make every target's group; the families whose weights fit together become one each. Changes no model.

    Everything that can fail, such as an allocation, fails here.
    """
    made: list[Conversion] = []
    # Parameters made in inference mode could not be loaded into or trained beside.
    with torch.inference_mode(False), torch.no_grad():
        for family in families:
            weights = [weight_of(target) for target in family]
            whole = len(family) == 1 or can_fuse(weights)
            parts = [slice(None)] if whole else [slice(i, i + 1) for i in range(len(family))]
            for part in parts:
                made.append(_prepare(family[part], weights[part], bias_of, state, compute))
    return made


def _prepare(
    targets: Sequence[Target],
    weights: Sequence[Fp8Weight],
    bias_of: Callable[[Target], Tensor | None],
    state: AdapterState,
    compute: str,
) -> Conversion:
    group = ProjectionGroup(
        weights,
        [bias_of(t) for t in targets],
        [t.path for t in targets],
        [t.widths for t in targets],
        state,
        0 if any(t.routed for t in targets) else state.num_slots,
        compute,
        targets[0].module.weight.dtype,
    )
    return Conversion(targets, group)


def swap(conversions: Sequence[Conversion]) -> None:
    """Put the groups' members where the plain linears stand."""
    for conversion in conversions:
        for index, target in enumerate(conversion.targets):
            linear = LoraLinear(conversion.group, index)
            linear.train(target.module.training)
            hand_over_hooks(target.module, linear)
            for parent, name in target.places:
                setattr(parent, name, linear)


def swap_back(conversions: Sequence[Conversion]) -> None:
    """Undo :func:`swap`."""
    for conversion in conversions:
        for target in conversion.targets:
            for parent, name in target.places:
                setattr(parent, name, target.module)


def hand_over_hooks(old: nn.Module, new: nn.Module) -> None:
    """Let a module have another one's hooks: the same dictionaries, from which their handles remove them."""
    for name in _HOOKS:
        setattr(new, name, getattr(old, name))
