"""Masked replay: how a region runs in chunks. Used by `passes.chunk_regions`."""
