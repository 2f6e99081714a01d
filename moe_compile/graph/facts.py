"""Facts about one graph as it stands: one object that all readers of the graph share.

Contract
    A fact is read off the graph when it is first asked for, and kept until `forget`.
    An edit of the graph must forget all facts; the runner of passes does so after each pass
    that changed the graph. A rewrite that needs facts about the old graph asks before it edits.
"""

from __future__ import annotations

import functools

import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.legality import Legality
from moe_compile.graph.modes import Mode, modes


class GraphFacts:
    """The facts of one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        """Look at nothing yet."""
        self.graph = graph

    @functools.cached_property
    def dependence(self) -> Dependence:
        """Return the dependences between nodes."""
        return Dependence(self.graph)

    @functools.cached_property
    def modes(self) -> dict[fx.Node, Mode]:
        """Return the modes that every node runs under."""
        return modes(self.graph)

    @functools.cached_property
    def legality(self) -> Legality:
        """Return the checks of motion and liveness."""
        return Legality(self.dependence, self.graph, self.modes)

    @property
    def has_any(self) -> bool:
        """Whether a fact was asked for."""
        return len(self.__dict__) > 1

    def forget(self) -> None:
        """Drop all facts: the graph is another now."""
        self.__dict__ = {"graph": self.graph}
