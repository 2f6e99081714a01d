"""Layers and models of other packages, as they come, compiled by megamoe."""
