"""Checks of a machine or a job: timed sections, items that ranks do together, bars, forms of code.

Programs that check a machine (`benchmarks.gpu`, `benchmarks.node`) are made of this, and so is
`megamoe check`, which checks a job.
"""
