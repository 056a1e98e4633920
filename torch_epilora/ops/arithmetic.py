"""Whole numbers that plans and launchers share."""


def cdiv(a: int, b: int) -> int:
    """Quotient rounded up. Triton's own, made for kernels too, takes microseconds of host time at each call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
