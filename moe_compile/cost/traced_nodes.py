"""Nodes of a Dynamo graph, a layer of it, traced by themselves and read as work.

Contract
    The graph stays as it is while its work is read.
    What a layer takes does not depend on which other layers stand beside it in the graph.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable
from typing import Final, TypeAlias

import torch.fx as fx

from moe_compile.cost.layer_program import LayerProgram, program_of
from moe_compile.cost.region_work import Work
from moe_compile.cost.stored_work import work_of
from moe_compile.regions.fused_sums import FusedSums

LOG: Final = logging.getLogger(__name__)

Phase: TypeAlias = tuple[tuple[Work, fx.Node | None], ...]
"""Work of the forward or the backward, each with the Dynamo node it comes from, if it has one."""


class TracedNodes:
    """Nodes of one graph as a program; it is traced when its work is first asked for."""

    def __init__(
        self,
        graph: fx.Graph,
        nodes: Collection[fx.Node] | None = None,
        num_rows: int = 1,
        *,
        is_recomputed: bool = False,
        sums: Iterable[FusedSums] = (),
    ) -> None:
        """Note what to trace: `nodes`, or all; not those given a size which only a run knows.

        `num_rows` is what the host reads where nothing in the graph explains it; `is_recomputed`
        says that the backward computes the nodes again, but for what exchanges received; of `sums`
        those among the nodes are traced as one operator.
        """
        self._graph, self._num_rows, self._is_recomputed = graph, num_rows, is_recomputed
        self._sums = tuple(sums)
        self.not_traced = ""
        """Why torch does not trace the nodes by themselves, once it was tried; "" if it does."""
        self.nodes = frozenset(graph.nodes) if nodes is None else nodes

    @functools.cached_property
    def program(self) -> LayerProgram:
        """Return the program."""
        program = program_of(self._graph, self.nodes, self._sums)
        program.rows, program.is_recomputed = self._num_rows, self._is_recomputed
        return program

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Return the forward and, where there is a gradient, the backward.

        () where torch does not trace the program by itself, as it does not on any rank.
        """
        try:
            traced = work_of(self.program)
        except Exception as error:  # noqa: BLE001  (the program is compiled whole all the same)
            first_line = str(error).partition("\n")[0]
            self.not_traced = f"{type(error).__name__}: {first_line}"
            LOG.info("not priced: a graph could not be traced by itself: %s", error)
            return ()
        origins = [*self.program.origins, None]  # the last for what no node stands for
        return tuple(tuple((work, origins[place]) for work, place in one) for one in traced)
