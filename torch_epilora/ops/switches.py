"""What the environment switches off."""

import os

DISABLE_PDL = "EPILORA_DISABLE_PDL"


def disabled_by(variable: str) -> str | None:
    """Return ``NAME=value`` where the environment switches a feature off, else None; empty and "0" do not."""
    value = os.environ.get(variable, "")
    return f"{variable}={value}" if value not in ("", "0") else None
