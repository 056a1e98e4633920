"""Threads that compile kernels without launching them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    compiles_only = False


_thread = _Thread()


@contextmanager
def compiling_only() -> Iterator[None]:
    """Within it this thread's operators compile their kernels and multiply nothing, so their outputs are undefined.

    Several threads can so compile at a time. They could not launch: Triton's first launch of a kernel takes what
    another thread's has just put into a module that both share.
    """
    before, _thread.compiles_only = _thread.compiles_only, True
    try:
        yield
    finally:
        _thread.compiles_only = before


def compiles_only() -> bool:
    """Whether this thread is within :func:`compiling_only`."""
    return _thread.compiles_only
