"""Whether the rows of a region may be computed apart: an interpreter of its body, and rules."""
