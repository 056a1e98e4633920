"""Low-precision weights and LoRA adapters as other tools store them, read into one canonical form and written back."""

from torch_epilora.formats.adapters import Adapter, LoraPair, read_adapter
from torch_epilora.formats.checkpoints import Fp8Checkpoint, read_checkpoint, write_checkpoint
from torch_epilora.formats.fp8 import LAYOUTS, Fp8Weight, canonical_scale

__all__ = [
    "LAYOUTS",
    "Adapter",
    "Fp8Checkpoint",
    "Fp8Weight",
    "LoraPair",
    "canonical_scale",
    "read_adapter",
    "read_checkpoint",
    "write_checkpoint",
]
