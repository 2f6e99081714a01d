"""What a kind of region is: how it is found, planned, emitted anew and reported.

Contract
    Finding and planning leave the graph as it is, and follow from graph, options, profile and sizes
    of groups: the same on every rank. Emitting adds nodes that nothing outside of them reads yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.traced_nodes import Layers
from moe_compile.graph.facts import GraphFacts
from moe_compile.journal.entries import Verdict
from moe_compile.plan.planned import Findings, Found, Planned
from moe_compile.plan.state import CompileState
from moe_compile.report.region_reports import AttentionReport, RegionReport

P = TypeVar("P", bound=Planned[Any])


@dataclass(frozen=True, kw_only=True, slots=True)
class Finds:
    """What one kind found in a graph."""

    found: tuple[Found[Any], ...]
    """What is planned, with or without a region."""
    others: tuple[Verdict, ...] = ()
    """Exchanges, and regions that were matched, of which nothing is planned."""
    exchanges: frozenset[str] = frozenset()
    """Names of the exchanges that other kinds are to say nothing of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """A region's new form."""

    instead: Mapping[fx.Node, fx.Node]
    """Node of the graph as it was -> what its readers are to read."""
    moved: tuple[tuple[Sequence[fx.Node], fx.Node], ...] = ()
    """Nodes that go in front of another then, in this order."""
    body: Sequence[fx.Node] = ()
    """Nodes in graph order to be erased where nothing reads them any more."""
    num_host_reads: int = 0
    """Reads by the host that it has, of several integers at once."""


class RegionKind(ABC, Generic[P]):
    """One way in which a model dispatches, or one operator between exchanges."""

    name: ClassVar[str]
    """Key of its regions in the plan that ranks compare."""

    @abstractmethod
    def find(self, facts: GraphFacts, config: MegaMoEConfig, before: Findings) -> Finds:
        """Return what a graph has of this kind; `before` is what kinds before it found."""

    @abstractmethod
    def plan(self, state: CompileState, layers: Layers) -> tuple[P, ...]:
        """Return the plan of all that was found of this kind; `layers` are the graph's.

        Notes in `state` what later passes need to know of the graph as it is.
        """

    @abstractmethod
    def emit(self, one: P, state: CompileState) -> Emitted:
        """Emit one region as it is planned; facts are of the graph as it was before the first."""

    @abstractmethod
    def say(self, one: P, config: MegaMoEConfig) -> RegionReport | AttentionReport:
        """Return what became of one that was planned."""
