"""What patch leaves in the model's own dtype although nobody asked for that: experts held as one parameter."""

import logging
import re
from collections.abc import Sequence

import torch
from torch import nn

from torch_epilora.nn.patterns import matches
from torch_epilora.nn.select import output_embedding, plain_path

logger = logging.getLogger("torch_epilora")

_LEAST = 0.01
_SHOWN = 5


def warn_of_leftovers(model: nn.Module, targets: Sequence[str] | None, exclude: Sequence[str]) -> None:
    """Log one warning that names the large floating-point matrices of a patched model that are not FP8.

    Those of all layers count as one: the numbers in their paths are shown as ``*``. Embeddings and the output embedding
    are meant to stay, and so is what ``targets`` and ``exclude`` leave out.
    """
    sizes: dict[str, int] = {}
    total, head = 0, output_embedding(model)
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            total += parameter.nbytes
            path = plain_path(f"{prefix}.{name}" if prefix else name)
            if module is head or isinstance(module, nn.Embedding) or parameter.dim() < 2:
                continue
            if not parameter.is_floating_point() or parameter.dtype == torch.float8_e4m3fn or "embed" in path:
                continue
            if targets is not None and not any(matches(path, p) for p in targets):
                continue
            if not any(matches(path, p) for p in exclude):
                key = re.sub(r"(?<=\.)\d+(?=\.)", "*", path)
                sizes[key] = sizes.get(key, 0) + parameter.nbytes
    large = {name: size for name, size in sizes.items() if size > _LEAST * total}
    if not large:
        return
    largest = sorted(large, key=large.__getitem__, reverse=True)
    shares = [f"{name} ({large[name] / total:.0%})" for name in largest[:_SHOWN]]
    more = f" and {len(large) - _SHOWN} more" if len(large) > _SHOWN else ""
    logger.warning(
        "%.0f%% of the patched model's weight bytes are not FP8 and have no adapter slots, as they are no nn.Linear "
        "that can be patched: %s%s.",
        100 * sum(large.values()) / total,
        ", ".join(shares),
        more,
    )
