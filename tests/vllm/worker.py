"""What engines' workers get mixed in: how often each operator of the library ran in their processes."""

from collections import Counter

import torch

from torch_epilora.ops import reference

RAN: Counter[str] = Counter()
_library = torch.library.Library("epilora", "IMPL")


def _count(name: str) -> None:
    compute = getattr(reference, name)

    def counted(*arguments):
        RAN[name] += 1
        return compute(*arguments)

    _library.impl(name, counted, "CPU", allow_override=True)


for _name in ("lora_linear", "lora_add_"):
    _count(_name)


class Counters:
    """``worker_extension_cls`` of an engine; a call by name needs no pickled function."""

    def epilora_calls(self) -> dict[str, int]:
        """How often each operator ran in this worker."""
        return dict(RAN)
