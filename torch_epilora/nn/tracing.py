"""What the group protocol needs at trace time, where a tensor's version cannot be compared in the graph."""

from itertools import count
from typing import Any

from torch import Tensor
from torch._guards import TracingContext

_ATTRIBUTE = "_epilora_version"
_NUMBER = "_epilora_number"
_numbers = count(1)


def trace_number() -> int:
    """Return the number of the graph that dynamo traces now, as a constant of it."""
    context = TracingContext.get()
    if not hasattr(context, _NUMBER):
        setattr(context, _NUMBER, next(_numbers))
    return getattr(context, _NUMBER)


# What torch.compiler.assume_constant_result sets; calling it here would import dynamo along with this package.
trace_number._dynamo_marked_constant = True  # type: ignore[attr-defined]


def note_version(x: Tensor) -> None:
    """While dynamo traces, note x's version at the first member's call. Adds nothing to the graph."""
    from torch._dynamo.comptime import comptime

    comptime(_note)


def check_version(x: Tensor) -> None:
    """While dynamo traces, raise if x was modified in place since :func:`note_version`."""
    from torch._dynamo.comptime import comptime

    comptime(_check)


def _note(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    setattr(fake, _ATTRIBUTE, fake._version)


def _check(context: Any) -> None:
    fake = context.get_local("x").as_fake()
    if getattr(fake, _ATTRIBUTE) != fake._version:
        raise RuntimeError(
            "x: it was modified in place between two linears that share it and run as one. Run the model once without "
            "torch.compile, which makes it compute them separately."
        )
