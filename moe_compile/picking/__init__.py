"""Experts that pick their rows from tokens which the model itself gathers."""
