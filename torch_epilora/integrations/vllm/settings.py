"""What the user chooses: by environment variables, or for one engine by vLLM's ``--additional-config``."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch_epilora.ops.checks import COMPUTES

VLLM, MODE = "EPILORA_VLLM", "EPILORA_VLLM_MODE"
KEY = "epilora"
"""Of ``additional_config``: a dict with any of ``enabled`` and ``mode``."""
_SWITCH = {"on": True, "off": False}


@dataclass(frozen=True)
class Settings:
    """The switches of the plugin.

    Attributes
    ----------
    enabled : bool
        Without it vLLM is as it was.
    mode : str
        "w8a8", as vLLM computes FP8 layers, or "w8a16": activations as they are, on the same codes.
    """

    enabled: bool = True
    mode: str = "w8a8"


def read_settings(additional: Any) -> Settings:
    """Read the environment, and over it what an engine's ``additional_config`` says.

    ``EPILORA_VLLM=off`` is final: the plugin was not installed then.

    Raises
    ------
    TypeError, ValueError
        If a switch has a value that it does not have, or ``additional_config["epilora"]`` another entry.
    """
    switch, mode = os.environ.get(VLLM) or "on", os.environ.get(MODE) or "w8a8"
    if switch not in _SWITCH:
        raise ValueError(f"{VLLM}: expected one of {', '.join(_SWITCH)}, got {switch!r}.")
    if not _SWITCH[switch]:
        return Settings(enabled=False)
    _check_mode(MODE, mode)
    engine = additional.get(KEY, {}) if isinstance(additional, Mapping) else {}
    if not isinstance(engine, Mapping):
        raise TypeError(f"additional_config[{KEY!r}]: expected a dict, got {type(engine).__name__}.")
    unknown = set(engine) - {"enabled", "mode"}
    if unknown:
        names = ", ".join(sorted(map(str, unknown)))
        raise ValueError(f"additional_config[{KEY!r}]: expected the entries enabled and mode, got {names}.")
    enabled = engine.get("enabled", True)
    if not isinstance(enabled, bool):
        raise TypeError(f"additional_config[{KEY!r}]['enabled']: expected true or false, got {enabled!r}.")
    chosen = engine.get("mode", mode)
    _check_mode(f"additional_config[{KEY!r}]['mode']", chosen)
    return Settings(enabled, chosen)


def _check_mode(name: str, value: Any) -> None:
    if value not in COMPUTES:
        raise ValueError(f"{name}: expected one of {', '.join(COMPUTES)}, got {value!r}.")
