"""Modules: FP8 linears with adapter slots, and what puts them into a model and names its rows' adapters."""

from torch_epilora.nn.adapters import adapter_slots, adapters, load_adapter, unload_adapter
from torch_epilora.nn.bank import AdapterBank
from torch_epilora.nn.batch import AdapterBatch
from torch_epilora.nn.describe import ProjectionInfo, describe
from torch_epilora.nn.group import ProjectionGroup
from torch_epilora.nn.linear import LoraLinear
from torch_epilora.nn.patch import patch, unpatch
from torch_epilora.nn.state import load_quantized, save_quantized
from torch_epilora.nn.tuning import tune

__all__ = [
    "AdapterBank",
    "AdapterBatch",
    "LoraLinear",
    "ProjectionGroup",
    "ProjectionInfo",
    "adapter_slots",
    "adapters",
    "describe",
    "load_adapter",
    "load_quantized",
    "patch",
    "save_quantized",
    "tune",
    "unload_adapter",
    "unpatch",
]
