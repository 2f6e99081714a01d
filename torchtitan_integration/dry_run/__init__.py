"""Dry run of a job on a laptop: its chunks, collectives and memory without GPU or ranks."""
