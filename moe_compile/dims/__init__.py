"""Factors of a tensor's dimensions that are heads, experts or sequences of the batch."""
