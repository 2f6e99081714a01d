"""Triton kernels, one per file with its launcher; nothing else in the package imports triton."""
