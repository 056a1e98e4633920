"""SGLang's planned LoRA runner without SGLang's server.

The environment variable SGLANG_PART names a folder whose ``pk`` holds the packages ``sglang/srt/lora`` and
``sglang/kernels`` of the wheel, with empty ``__init__.py`` above them. The runner names a few of the server's modules,
of which it needs next to nothing; those are stood in for here. It also needs msgspec, pydantic and, with apache-tvm-ffi
and nvcc, compiles the sort of its larger batches on first use.
"""

import hashlib
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace

VARIABLE = "SGLANG_PART"
RELEASES = {"3366e3898eac5916f07ecdb29300d578eb6ded19ff7a757827fa990d35561660": "0.5.23"}
"""Releases by the SHA-256 of what decides their speed: the runner, its plan rules and Hopper's tuned plans."""


class Defaults:
    """SGLang's settings, each at its default: unset or off."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: None)


STAND_INS: dict[str, dict[str, object]] = {
    "sglang.srt.environ": {"envs": Defaults()},
    "sglang.srt.utils": {},
    "sglang.srt.utils.common": {"is_cuda": lambda: True, "direct_register_custom_op": lambda **_: None},
    "sglang.srt.utils.hf_transformers_utils": {"AutoConfig": object},
    "sglang.srt.model_executor": {},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardBatch": object},
}


def folder() -> Path | None:
    """Where SGLang's packages lie, or None where SGLANG_PART is not set."""
    part = os.environ.get(VARIABLE)
    if part is None:
        return None
    packages = Path(part) / "pk"
    if not (packages / "sglang" / "srt" / "lora" / "dense").is_dir():
        raise ValueError(f"{VARIABLE}: expected a folder with pk/sglang/srt/lora/dense, but {part} has none")
    return packages


def release() -> str | None:
    """The release whose runner this is, or the start of its digest where that is not a known one."""
    packages = folder()
    if packages is None:
        return None
    dense = packages / "sglang" / "srt" / "lora" / "dense"
    files = ("runner.py", "plan.py", "configs/sm90.plans.json")
    digest = hashlib.sha256(b"".join((dense / name).read_bytes() for name in files)).hexdigest()
    return RELEASES.get(digest, f"unknown ({digest[:12]})")


@cache
def load() -> SimpleNamespace:
    """Import the runner: its class, its workspace's class, and the two enumerations that its calls take."""
    packages = folder()
    if packages is None:
        raise ValueError(f"{VARIABLE}: expected the folder of SGLang's packages, but it is not set")
    sys.path.insert(0, str(packages))
    for name, attributes in STAND_INS.items():
        module = ModuleType(name)
        vars(module).update(attributes)
        sys.modules[name] = module
    from sglang.srt.lora.dense.plan import DenseLoraKind
    from sglang.srt.lora.dense.runner import DenseLoraRunner
    from sglang.srt.lora.utils import Phase
    from sglang.srt.lora.workspace import LoraWorkspace

    return SimpleNamespace(Runner=DenseLoraRunner, Workspace=LoraWorkspace, Kind=DenseLoraKind, Phase=Phase)
