"""The interface of every pass: its inputs and its report.

Contract
    A pass decides completely before it edits anything, so a refusal leaves the graph untouched.
    The only effects of `run` are on the graph and the state it was given.
    Every candidate a pass looked at ends up applied, or skipped with a reason from a closed enum.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from typing import ClassVar

import torch.fx as fx

from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState


class Fact(enum.Enum):
    """A property of the graph that later passes may rely on. Values are printed in reports."""

    WAITS_VISIBLE = "every exchange is a launch and a wait of `_c10d_functional`"
    REGIONS_FOUND = "every MoE region and attention is known, with its proof or its refusal"
    PLANNED = "the plan says how every region runs"
    REWRITTEN = "every region has the form it was planned to have"
    FUNCTIONAL = "no op writes its inputs, but for copies back into graph inputs"


class GraphPass(ABC):
    """One rewrite of one graph. Subclasses are frozen dataclasses of their settings."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()
    invalidates: ClassVar[frozenset[Fact]] = frozenset()
    after: ClassVar[frozenset[str]] = frozenset()
    """Names of passes of the same level that must come before, though no fact says so."""
    commutes_with: ClassVar[frozenset[str]] = frozenset()
    """Names of passes of the same level that may come before or after, with the same result."""
    is_check: ClassVar[bool] = False
    """Whether the pass only checks: its failure is never passed over, since the graph is wrong."""
    is_needed: ClassVar[bool] = False
    """Whether values may be wrong without the pass, or ranks wait in vain: it mends what is not
    ours, or ranks find by it that they differ. A search for a wrong pass leaves it out last."""

    by_region: ClassVar[bool] = False
    """Whether the pass changes one region after another: it can be left out of one of them."""

    @abstractmethod
    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Decide, then edit `graph` in place, then report."""
