"""What is made once for everything alike, and how much of it is kept."""

from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")

MOST = 1 << 15
"""Things that one memory keeps. A new number of tokens is a new one; past this many all are made anew."""


def remember(memory: dict[tuple, Made], key: tuple, make: Callable[[], Made]) -> Made:
    """Find what was made for a key, or make it; what raises is not kept."""
    found = memory.get(key)
    if found is None:
        found = make()
        if len(memory) >= MOST:
            memory.clear()
        memory[key] = found
    return found
