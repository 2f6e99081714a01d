"""Proof that a region's rows may be computed apart: an interpreter of its body, and rules."""
