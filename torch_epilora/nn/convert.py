"""Replacing selected linears by FP8 groups."""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from torch_epilora.formats.fp8 import Fp8Weight
from torch_epilora.nn.batch import AdapterState, TraceEnd, TraceStart
from torch_epilora.nn.group import ProjectionGroup, can_fuse
from torch_epilora.nn.linear import LoraLinear
from torch_epilora.nn.select import Target


def convert(
    families: Sequence[Sequence[Target]],
    weight_of: Callable[[Target], Fp8Weight],
    state: AdapterState,
    compute: str,
) -> None:
    """Replace every target; the families whose weights fit together become one group each.

    A family's plain weights are released before the next family's are quantized.
    """
    # Parameters made in inference mode could not be loaded into or trained beside.
    with torch.inference_mode(False), torch.no_grad():
        for family in families:
            weights = [weight_of(target) for target in family]
            if len(family) == 1 or can_fuse(weights):
                _replace(family, weights, state, compute)
            else:
                for target, weight in zip(family, weights, strict=True):
                    _replace([target], [weight], state, compute)


def hook(model: nn.Module, state: AdapterState) -> None:
    """Let one compiled forward of the model make the batch's metadata once."""
    model.register_forward_pre_hook(TraceStart(state))
    model.register_forward_hook(TraceEnd(state))


def unhook(model: nn.Module) -> None:
    """Remove what :func:`hook` added."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key in [key for key, function in hooks.items() if isinstance(function, TraceStart | TraceEnd)]:
            del hooks[key]


def _replace(family: Sequence[Target], weights: Sequence[Fp8Weight], state: AdapterState, compute: str) -> None:
    group = ProjectionGroup(
        weights,
        [t.module.bias for t in family],
        [t.path for t in family],
        [t.widths for t in family],
        state,
        0 if any(t.routed for t in family) else state.num_slots,
        compute,
        family[0].module.weight.dtype,
    )
    for index, target in enumerate(family):
        linear = LoraLinear(group, index)
        linear.train(target.module.training)
        for hooks in (
            "_forward_hooks",
            "_forward_hooks_with_kwargs",
            "_forward_hooks_always_called",
            "_forward_pre_hooks",
            "_forward_pre_hooks_with_kwargs",
            "_backward_hooks",
            "_backward_pre_hooks",
        ):
            getattr(linear, hooks).update(getattr(target.module, hooks))
        for parent, name in target.places:
            setattr(parent, name, linear)
