"""Which tensors the forward keeps for the backward, and what the backward computes again."""
