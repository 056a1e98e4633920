"""Many LoRA adapters together with a low-precision base GEMM, for PyTorch (EpiLoRA).

``patch`` makes a model's linears FP8 with adapter slots, ``load_adapter`` fills a slot, and ``adapters`` says which row
uses which. Importing the package touches no GPU and no optional library.
"""

from typing import TYPE_CHECKING

from torch_epilora.nn import (
    adapters,
    load_adapter,
    load_quantized,
    patch,
    save_quantized,
    tune,
    unload_adapter,
    unpatch,
)

if TYPE_CHECKING:
    from torch_epilora.integrations.transformers_quantizer import EpiLoraConfig as EpiLoraConfig

__version__ = "0.1.0"

__all__ = [
    "__version__",
    "adapters",
    "load_adapter",
    "load_quantized",
    "patch",
    "save_quantized",
    "tune",
    "unload_adapter",
    "unpatch",
]


def __getattr__(name: str) -> object:
    """Import ``EpiLoraConfig``, which needs transformers, once it is asked for."""
    if name == "EpiLoraConfig":
        from torch_epilora.integrations.transformers_quantizer import EpiLoraConfig

        return EpiLoraConfig
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
