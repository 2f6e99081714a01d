"""The interface of a kind of region: finding, planning, emitting and reporting it.

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
    """The findings of one kind in a graph."""

    found: tuple[Found[Any], ...]
    """Candidates to be planned, with or without a region."""
    others: tuple[Verdict, ...] = ()
    """Exchanges, and matched regions, for which nothing is planned."""
    exchanges: frozenset[str] = frozenset()
    """Names of the exchanges that other kinds must not report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """A region's new form."""

    instead: Mapping[fx.Node, fx.Node]
    """Node of the graph as it was -> the node that its readers are to read."""
    moved: tuple[tuple[Sequence[fx.Node], fx.Node], ...] = ()
    """(nodes, place): the nodes are then moved in front of the place, in this order."""
    body: Sequence[fx.Node] = ()
    """Nodes in graph order to be erased where nothing reads them any more."""
    num_host_reads: int = 0
    """Number of its host reads, each of several integers at once."""


class RegionKind(ABC, Generic[P]):
    """One way in which a model dispatches, or one operator between exchanges."""

    name: ClassVar[str]
    """Key of its regions in the plan that ranks compare."""

    @abstractmethod
    def find(self, facts: GraphFacts, config: MegaMoEConfig, before: Findings) -> Finds:
        """Return the regions of this kind in a graph; `before` has the finds of earlier kinds."""

    @abstractmethod
    def plan(self, state: CompileState, layers: Layers) -> tuple[P, ...]:
        """Return the plans of all findings of this kind; `layers` are the graph's.

        Notes in `state` the facts that later passes need of the graph as it is.
        """

    @abstractmethod
    def emit(self, one: P, state: CompileState) -> Emitted:
        """Emit one region as it is planned; facts are of the graph as it was before the first."""

    @abstractmethod
    def say(self, one: P, config: MegaMoEConfig) -> RegionReport | AttentionReport:
        """Return the report on one planned candidate."""
