"""Many LoRA adapters together with a low-precision base GEMM, for PyTorch (EpiLoRA).

``patch`` makes a model's linears FP8 with adapter slots, ``load_adapter`` fills a slot, and ``adapters`` says which row
uses which. Importing the package touches no GPU and no optional library.
"""

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
