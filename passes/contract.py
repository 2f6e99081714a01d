"""What every pass is, what it is given, and what it reports.

Contract
    A pass decides completely before it edits anything, so a refusal leaves the graph untouched.
    The only effects of `run` are on the graph and the state it was given.
    Every candidate a pass looked at ends up applied, or skipped with a reason from a closed enum.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

import torch.fx as fx

from moe_compile.analysis.regions import Refused
from moe_compile.planning.state import CompileState


class Fact(enum.Enum):
    """Something later passes may rely on. Values are what reports print."""

    WAITS_VISIBLE = "every exchange is a launch and a wait of `_c10d_functional`"
    REGIONS_FOUND = "every MoE region of the graph is known, with its proof or its refusal"
    ATTENTION_FOUND = "every attention of the graph is known, split in groups or left"
    PLANNED = "every region has a number of chunks"
    CHUNKED = "every chosen region runs as chunks"
    FUNCTIONAL = "no op writes its inputs, but for copies back into graph inputs"
    SCHEDULED = "launches, waits and compute stand in the order that runs"
    VERIFIED = "each launch has one wait, and the order of collectives is the planned one"
    RECORDED = "the graph carries its order of collectives, for reports and for other ranks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What became of one candidate that was not applied."""

    candidate: str
    reason: enum.Enum
    detail: str = ""

    def __str__(self) -> str:
        """Return `candidate: reason (detail)`."""
        extra = f" ({self.detail})" if self.detail else ""
        return f"{self.candidate}: {self.reason.value}{extra}"


def verdict(refused: Refused) -> Verdict:
    """Return a refusal of the analysis as a pass's verdict."""
    return Verdict(candidate=refused.candidate, reason=refused.reason, detail=refused.detail)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """What one pass did to one graph: `applied` and `skipped` together are its candidates."""

    pass_name: str
    applied: tuple[str, ...] = ()
    skipped: tuple[Verdict, ...] = ()
    measures: dict[str, float] = field(default_factory=dict)
    """Figures; each key ends in its unit: `exposed_us`, `num_host_reads`."""

    @property
    def changed(self) -> bool:
        """Whether the graph was edited."""
        return bool(self.applied)


class GraphPass(ABC):
    """One rewrite of one graph. Subclasses are frozen dataclasses of their settings."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[Fact]] = frozenset()
    provides: ClassVar[frozenset[Fact]] = frozenset()
    invalidates: ClassVar[frozenset[Fact]] = frozenset()
    is_check: ClassVar[bool] = False
    """Whether the pass only looks: its failure is never passed over, since the graph is wrong."""

    @abstractmethod
    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Decide, then edit `graph` in place, then report."""
