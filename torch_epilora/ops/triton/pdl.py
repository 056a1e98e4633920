"""Whether kernels may be launched as programmatic dependents of the kernel before them."""

import logging
from functools import lru_cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from torch_epilora.ops.switches import DISABLE_PDL, disabled_by
from torch_epilora.ops.triton.common import on_device

_log = logging.getLogger(__name__)


@triton.jit
def probe_kernel():
    """Nothing but the two instructions."""
    gdc_wait()
    gdc_launch_dependents()


@lru_cache(maxsize=64)
def pdl_works(device: torch.device) -> bool:
    """Say whether to launch decode kernels as programmatic dependents; decided once a device and process.

    No where ``EPILORA_DISABLE_PDL`` is set to anything but 0, where the GPU has no such launch, and where this Triton
    cannot compile one (it could not on some architectures: vllm-project/vllm#30872). Results are the same bits either
    way.
    """
    if disabled_by(DISABLE_PDL) or torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        with on_device(torch.empty(0, device=device)):
            probe_kernel.warmup(grid=(1,), launch_pdl=True)
    except Exception as error:  # whatever a compiler raises: the launch without it is slower, never wrong
        _log.warning("no programmatic dependent launch on %s, decode kernels start later: %s", device, error)
        return False
    return True
