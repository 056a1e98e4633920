"""What the environment switches off or chooses."""

import os

DISABLE_PDL = "EPILORA_DISABLE_PDL"
TUNE, CACHE = "EPILORA_TUNE", "EPILORA_CACHE"
TUNES = ("off", "cached", "full")


def disabled_by(variable: str) -> str | None:
    """Return ``NAME=value`` where the environment switches a feature off, else None; empty and "0" do not."""
    value = os.environ.get(variable, "")
    return f"{variable}={value}" if value not in ("", "0") else None


def tune_mode() -> str:
    """Read where plans come from: "off", the rules; "cached" (the default), also tables; "full" times what they lack.

    Raises
    ------
    ValueError
        If ``EPILORA_TUNE`` is something else.
    """
    value = os.environ.get(TUNE) or "cached"
    if value not in TUNES:
        raise ValueError(f"{TUNE}: expected one of {', '.join(TUNES)}, got {value!r}.")
    return value
