"""Benchmarks: what each variant costs, measured side by side."""
