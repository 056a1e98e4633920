"""Facts about this machine: library versions and GPUs, read without importing optional libraries."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from dataclasses import dataclass

from torch_epilora import __version__

__all__ = ["Gpu", "driver_version", "gpus", "versions", "why_no_gpu"]

LIBRARIES = ("torch", "triton", "transformers", "peft", "vllm", "safetensors", "numpy")


@dataclass(frozen=True)
class Gpu:
    """One CUDA device.

    Attributes
    ----------
    index : int
        Its number in torch.
    name : str
        The driver's name for it.
    arch : int
        Compute capability times ten, such as 90.
    sms : int
        Number of multiprocessors.
    memory : int
        Bytes in all.
    """

    index: int
    name: str
    arch: int
    sms: int
    memory: int

    @property
    def device(self) -> str:
        """The device's name in torch."""
        return f"cuda:{self.index}"


def versions() -> dict[str, str]:
    """Return version of Python, of this package and of each library it works with; "not installed" where it is not."""
    found = {"python": platform.python_version(), "torch-epilora": __version__}
    for name in LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def why_no_gpu() -> str | None:
    """Return None where torch finds a CUDA device, otherwise the reason it does not."""
    import torch

    if torch.version.hip is not None:
        return f"torch {torch.__version__} is built for ROCm; the kernels are for CUDA"
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch is built with CUDA but finds no device; see nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def gpus() -> list[Gpu]:
    """Return the CUDA devices torch finds; empty where there are none."""
    if why_no_gpu() is not None:
        return []
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(index)
        found.append(Gpu(index, p.name, p.major * 10 + p.minor, p.multi_processor_count, p.total_memory))
    return found


def driver_version() -> str:
    """Return the NVIDIA driver's version as nvidia-smi gives it, or why it is not known."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not known ({type(error).__name__} from nvidia-smi)"
    return answer[0] if answer else "not known (nvidia-smi names no GPU)"
