"""Triton kernels, each with its launcher."""
