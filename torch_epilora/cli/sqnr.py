"""How close a result is to its reference, in decibels."""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["sqnr_db"]


def sqnr_db(expected: Tensor, actual: Tensor) -> float:
    """Compute the signal to quantization noise ratio 10 log10(sum expected^2 / sum (expected - actual)^2) in dB.

    Parameters
    ----------
    expected, actual : Tensor
        Two tensors of one shape, any float dtype; summed in fp64.

    Returns
    -------
    float
        Infinite where they are equal, minus infinity where `actual` is not finite.

    Raises
    ------
    ValueError
        The shapes differ.
    """
    if expected.shape != actual.shape:
        raise ValueError(f"actual: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}")
    noise = (expected.double() - actual.double()).square().sum().item()
    signal = expected.double().square().sum().item()
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise)
