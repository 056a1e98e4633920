"""Triton kernels and their launchers, one file a kernel family; imported when first used, never before."""
