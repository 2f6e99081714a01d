"""Checks of a machine: sections in their time, items that ranks do together, what they are held to.

Programs that check a machine (`benchmarks.gpu`, `benchmarks.node`) are made of this.
"""
