"""Hooks of a patched model as a whole."""

import logging

import torch
from torch import nn

from torch_epilora.nn.batch import AdapterState
from torch_epilora.nn.checkpointing import follow_checkpointing, leave_checkpointing
from torch_epilora.nn.refusals import allow_methods, refuse_methods

logger = logging.getLogger("torch_epilora")


class TraceStart:
    """Forward pre-hook: while dynamo traces the model, its layers share the batch's metadata."""

    def __init__(self, state: AdapterState) -> None:
        self.state = state

    def __call__(self, model: nn.Module, *_: object) -> None:
        """Begin to share; in eager training, find layers whose checkpointing was switched on meanwhile."""
        if torch.compiler.is_dynamo_compiling():
            self.state.traced = []
        elif model.training and torch.is_grad_enabled():
            follow_checkpointing(model, self.state)


class TraceEnd:
    """Forward hook: nothing of the traced forward stays behind."""

    def __init__(self, state: AdapterState) -> None:
        self.state = state

    def __call__(self, *_: object) -> None:
        """Cease to share."""
        if torch.compiler.is_dynamo_compiling():
            self.state.traced = None


def hook(model: nn.Module, state: AdapterState) -> None:
    """Let one compiled forward of the model make the batch's metadata once, and checkpointing follow the batch.

    Methods of transformers that do not know FP8 codes raise from now on. Where PEFT is installed, adapters that it
    makes over the model's linears are our layers from now on, whether a program imports PEFT before or after.
    """
    try:
        from torch_epilora.integrations.peft_training import enable
    except ImportError as error:
        logger.info("PEFT cannot train adapters on the patched model: %s.", error)
    else:
        enable()
    model.register_forward_pre_hook(TraceStart(state))
    model.register_forward_hook(TraceEnd(state))
    refuse_methods(model)


def unhook(model: nn.Module) -> None:
    """Remove what :func:`hook` added, on the model and on its parts."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, function in hooks.items() if isinstance(function, TraceStart | TraceEnd)]:
                del hooks[key]
    leave_checkpointing(model)
    allow_methods(model)
