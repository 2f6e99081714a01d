"""What a graph means for MoE training: regions and proofs. Reads, never edits."""
