"""Checks of a machine: timed sections, items that ranks do together, and bars for the results.

Programs that check a machine (`benchmarks.gpu`, `benchmarks.node`) are made of this.
"""
