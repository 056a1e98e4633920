"""Which plan a problem runs under: one that was measured on its GPU, or the rules'.

Two tables are read: the one shipped for a GPU (``configs/<gpu>.json``, written by ``epilora tune``) and the user's,
which has what was timed on this machine and comes first. They choose among candidates that compute one function.
"""

import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock

import torch

from torch_epilora.ops import candidates, tables
from torch_epilora.ops.plan import Plan, Problem, bucketed, make_plan, through
from torch_epilora.ops.switches import CACHE, tune_mode
from torch_epilora.ops.tables import Key, Measured, key_of, near

logger = logging.getLogger("torch_epilora")

_OPS = Path(__file__).parent
_generation = 0
_changing = Lock()


def choose(problem: Problem, gpu: str) -> Plan:
    """Choose the plan of a problem: the fastest measured on this GPU where a table has one, else that of the rules.

    Parameters
    ----------
    problem : Problem
        ``problem.m`` may be any token count; those of a bucket (a power of two) share a plan.
    gpu : str
        Name of the GPU, as CUDA reports it.

    Returns
    -------
    Plan
        Its reason says whether it was measured.

    Raises
    ------
    ValueError
        If ``EPILORA_TUNE`` is none of its values.
    """
    return _choose(bucketed(problem), gpu, tune_mode() != "off", generation())


@lru_cache(maxsize=4096)
def _choose(problem: Problem, gpu: str, measured: bool, tables_of: int) -> Plan:
    rules = make_plan(problem)
    plans = _table(gpu, tables_of) if measured else {}
    found = next((plans[key] for key in near(key_of(problem)) if key in plans), None)
    if found is None:
        return rules
    # kernels that the plan does not use keep the rules' tiles: those of the key's problem may not run this one
    tiles = {kernel: getattr(found.plan, kernel) for kernel in candidates.used(found.plan, problem)}
    plan = replace(through(problem, found.plan.path, found.plan.base, _reason(found, gpu)), **tiles)
    why = candidates.refused(plan, problem)
    if why is not None:
        logger.info("The plan measured for %s cannot run %s: %s.", key_of(problem), problem, why)
        return rules
    return plan


def _reason(found: Measured, gpu: str) -> str:
    how = "in CUDA graphs" if found.graph else "launched one by one"
    return f"the fastest when measured on {gpu}, {how}"


def generation() -> int:
    """Count how often tables changed in this process; what was chosen under another count may be outdated."""
    return _generation


def table(gpu: str) -> dict[Key, Measured]:
    """Read what was measured on a GPU: the shipped table, and over it the user's own."""
    return _table(gpu, _generation)


@lru_cache(maxsize=16)
def _table(gpu: str, tables_of: int) -> dict[Key, Measured]:
    try:
        own = tables.read(cached(gpu), gpu)
    except OSError:  # there is no place for one
        own = {}
    return tables.read(shipped(gpu), gpu) | own


def keep(gpu: str, capability: tuple[int, int], plans: Mapping[Key, Measured]) -> Path:
    """Add measured plans to the user's table; return where it is.

    Calls that are planned from now on in this process follow them.

    Raises
    ------
    OSError
        If it cannot be written; nothing changes then.
    """
    global _generation
    path = cached(gpu)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # other threads and processes add to it too
        with open(path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            tables.write(path, gpu, capability, {**tables.read(path, gpu), **plans}, versions())
    except OSError as error:
        raise OSError(f"{CACHE}: expected a folder to write measured plans to, got {path.parent}: {error}") from error
    with _changing:
        _generation += 1
    return path


def shipped(gpu: str) -> Path:
    """Path of the table that comes with the library."""
    return _OPS / "configs" / f"{_file_name(gpu)}.json"


def cached(gpu: str) -> Path:
    """Path of the user's table; what else a time depends on is in its name, so that another version begins anew.

    Raises
    ------
    OSError
        If the environment names no folder and the user has no home.
    """
    folder, home = os.environ.get(CACHE), os.environ.get("XDG_CACHE_HOME")
    try:
        place = Path(folder).expanduser() if folder else Path(home or Path.home() / ".cache") / "torch_epilora"
    except RuntimeError as error:
        raise FileNotFoundError(f"{CACHE}: expected a folder for measured plans, got none: {error}") from error
    return place / f"{_file_name(gpu)}-{_digest()}.json"


def _file_name(gpu: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_")


def versions() -> dict[str, str | None]:
    """Versions that a measured time depends on."""
    found: dict[str, str | None] = {"torch": torch.__version__}
    for package in ("triton", "torch-epilora"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


@lru_cache(maxsize=1)
def _digest() -> str:
    """Hash the versions, and the sources of plans and kernels."""
    whole = hashlib.sha256(json.dumps(versions()).encode())
    for path in (*sorted(_OPS.glob("*.py")), *sorted((_OPS / "triton").glob("*.py"))):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:16]
