"""The operator surface: every path of the library calls the operators of ``torch.ops.epilora``.

Importing this package registers the operators; it touches no GPU and compiles nothing.
"""

from torch_epilora.ops import autograd, dispatch, schemas
from torch_epilora.ops.checks import BLOCK, Groups, scale_layout
from torch_epilora.ops.functional import adapter_groups, lora_linear
from torch_epilora.ops.reference import dequantize_fp8

__all__ = [
    "BLOCK",
    "Groups",
    "adapter_groups",
    "autograd",
    "dequantize_fp8",
    "dispatch",
    "lora_linear",
    "scale_layout",
    "schemas",
]
