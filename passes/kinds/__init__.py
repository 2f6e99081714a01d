"""The kinds of regions, one module or folder each; `passes.kinds.contract` defines a kind."""

from typing import Any, Final

from passes.kinds.by_capacity import ByCapacity
from passes.kinds.by_counts.kind import ByCounts
from passes.kinds.by_heads import ByHeads
from passes.kinds.contract import RegionKind

KINDS: Final[tuple[RegionKind[Any], ...]] = (ByCounts(), ByHeads(), ByCapacity())
"""Kinds in the order in which they look at a graph: each is given the findings of those before."""
