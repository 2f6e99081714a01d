"""MoE regions whose rows are split by counts."""
