"""Which parts of which dimensions of a tensor are heads, experts or sequences of the batch."""
