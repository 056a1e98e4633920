"""The operator surface: every path of the library calls the operators of ``torch.ops.epilora``.

Importing this package registers the operators; it touches no GPU and compiles nothing.
"""

from torch_epilora.ops import autograd, dispatch, schemas, training, training_cuda
from torch_epilora.ops.checks import BLOCK, Groups, scale_layout
from torch_epilora.ops.functional import adapter_groups, lora_linear
from torch_epilora.ops.reference import dequantize_fp8
from torch_epilora.ops.training import lora_linear_train

__all__ = [
    "BLOCK",
    "Groups",
    "adapter_groups",
    "autograd",
    "dequantize_fp8",
    "dispatch",
    "lora_linear",
    "lora_linear_train",
    "scale_layout",
    "schemas",
    "training",
    "training_cuda",
]
