"""What a model learns where rows travel, or experts compute, in eight bits."""
