"""Triton kernels and their launchers: one file a kernel family. Imported on first use of a CUDA tensor, never before."""
