"""Masked replay: how a region runs in chunks. Used by `passes.rewrite_regions`."""
