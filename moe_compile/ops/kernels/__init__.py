"""Triton kernels, one per file with its launcher."""
