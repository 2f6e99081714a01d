"""Small kernels and bytes that our rewrites add to a region, for all that price it.

Contract
    Counted in the graphs that the rewrites emit, as `cost/amounts.py` counts kernels; tests hold
    them against such graphs.
    Without torch: `megamoe simulate` prices with them too.
"""

from __future__ import annotations

from typing import Final

ORDER_KERNELS: Final = 9.25
"""Kernels that find each row's place by chunk and back, and gather what the host reads
(passes/replay/masked_replay.py, chunk_axis.py)."""
PLACE_KERNELS: Final = 2.25
"""Kernels that exchange the routing of gathered tokens and find which rows are this rank's, and of
which tokens, less those the old form had for its split sizes (passes/replay/gathered.py).
"""
PLACE_BYTES: Final = 8 * 12
"""Read and written per row to tell which rows are this rank's: a dozen int64, fused in kernels."""
