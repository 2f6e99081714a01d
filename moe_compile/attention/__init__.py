"""Attention between exchanges of heads: how it is found, and proven to run by groups of heads."""
