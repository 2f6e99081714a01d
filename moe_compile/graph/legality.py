"""Checks that nodes may run later, and the nodes that a rewritten graph needs no more.

The one check of motion and liveness: every rewrite of a Dynamo graph asks here before it edits.

Contract
    Motion    nodes run later only if this changes no write through any alias, no grad or autocast
              mode, no random draw and no order of gradients (gradient_order.py). No node moves in a
              graph that gives some tensor other memory: aliases cannot be told there.
    Liveness  a node dies only where no value, no write that somebody reads, through any alias, no
              mode, no random draw, no collective and no assertion that stays needs it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch.fx as fx

from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.effects import draws_random, is_pure, may_attend, moves_memory
from moe_compile.graph.gradient_order import Part, find_reordered
from moe_compile.graph.memory import tensors_in
from moe_compile.graph.modes import (
    Mode,
    changes_autocast,
    changes_mode,
    chooses_attention,
    entered_since,
)
from moe_compile.graph.query import has_gradient, is_launch, is_wait, operator_at, value_of
from moe_compile.journal.reasons import Left, Reason


class Hazard(enum.Enum):
    """Reasons why nodes must not run later."""

    WRITTEN_MEANWHILE = "one of these nodes reads a tensor that is written in between"
    MODE_CHANGES = "grad mode or autocast is different at the new place"
    RANDOM = "one of these nodes draws random numbers"
    GRADIENT_ORDER = (
        "the terms of a gradient would be added in a different order than in the program"
    )


REASONS: Final = {
    Hazard.WRITTEN_MEANWHILE: Reason.MUTATED_MEANWHILE,
    Hazard.MODE_CHANGES: Reason.STATE_CHANGES,
    Hazard.RANDOM: Reason.RANDOM,
    Hazard.GRADIENT_ORDER: Reason.GRADIENT_ORDER,
}


@dataclass(frozen=True, slots=True)
class Obstacle:
    """The first thing found that forbids a motion."""

    hazard: Hazard
    moved: fx.Node
    """The node that must not run later."""
    because_of: fx.Node
    """The write, the switch of a mode, or the tensor whose gradient is added up."""

    @property
    def left(self) -> Left:
        """Return the refusal of the rewrite that needs the motion."""
        return Left(REASONS[self.hazard], str(self))

    def __str__(self) -> str:
        """Return the text of refusals: the two operators; for a random draw, that one alone."""
        if self.hazard is Hazard.RANDOM:
            return operator_at(self.moved)
        return f"{operator_at(self.moved)}, because of {operator_at(self.because_of)}"


class Legality:
    """The checks of motion and liveness of one graph; stale once the graph is edited."""

    def __init__(
        self, dependence: Dependence, graph: fx.Graph, modes: Mapping[fx.Node, Mode]
    ) -> None:
        """Read `graph`, given its `dependence` and the modes of all nodes."""
        self.dependence, self.graph, self._modes = dependence, graph, modes
        self._position = dependence.position
        self._moves_memory = next(filter(moves_memory, graph.nodes), None)

    def obstacle(
        self,
        moved: Collection[fx.Node],
        anchor: fx.Node,
        part: Part | None = None,
        *,
        enters_autocast: bool = False,
        keeps_modes: bool = False,
        anew: frozenset[int] = frozenset(),
    ) -> Obstacle | None:
        """Return why `moved` must not run just before `anchor`, or None.

        They run in their order, or part by part, if the caller has checked all but gradients. With
        `enters_autocast` the new place enters the autocast of the old one; with `keeps_modes` it
        has all of its modes. `anew` as in `written_meanwhile`.
        """
        in_order = self.dependence.in_order(moved)
        found = self.written_meanwhile(in_order, anchor, anew) or self._random(in_order, anchor)
        if found is not None:
            return found
        found = self._mode(in_order, anchor, enters_autocast=enters_autocast)
        if found is not None and not keeps_modes:
            return found
        parts = (part,) if part is not None else ()
        if (reordered := find_reordered(in_order, anchor, self.dependence, *parts)) is not None:
            return Obstacle(Hazard.GRADIENT_ORDER, *reordered)
        return None

    def written_meanwhile(
        self, moved: Collection[fx.Node], anchor: fx.Node, anew: frozenset[int] = frozenset()
    ) -> Obstacle | None:
        """Return a write by others to memory that one of `moved` touches, between it and `anchor`.

        Storages in `anew` are made by nodes whose copies are moved: the copies make others.
        """
        if moved and self._moves_memory is not None:
            return Obstacle(Hazard.WRITTEN_MEANWHILE, next(iter(moved)), self._moves_memory)
        together = set(moved)
        there = self._position[anchor]
        for writer, all_written in self.dependence.writes.items():
            at, written = self._position[writer], all_written - anew
            if all_written and not written:
                continue
            for node in moved if writer not in together else ():
                between = self._position[node] < at < there or there <= at < self._position[node]
                if between and self._touches(node, written):
                    return Obstacle(Hazard.WRITTEN_MEANWHILE, node, writer)
        return None

    def _touches(self, node: fx.Node, written: frozenset[int]) -> bool:
        """Whether `node` reads or makes memory in `written`, which may be any if unknown."""
        return not written or bool((self.dependence.reads(node) | storages(node)) & written)

    def _mode(
        self, moved: Collection[fx.Node], anchor: fx.Node, *, enters_autocast: bool
    ) -> Obstacle | None:
        there = self._modes[anchor]
        for node in moved:
            here = self._modes[node]
            entered = entered_since(here, there) if enters_autocast else None
            if entered is not None and all(map(changes_autocast, entered)):
                continue
            differs = here[0] != there[0] and (has_gradient(node) or _reads_gradient(node))
            if differs or (here[1] != there[1] and not self._is_untouched(node, here, there)):
                return Obstacle(Hazard.MODE_CHANGES, node, self._switch_between(node, anchor))
        return None

    def _is_untouched(self, node: fx.Node, here: Mode, there: Mode) -> bool:
        """Whether the modes that differ, besides that of gradients, do not affect `node`.

        Autocast does not affect integers; a choice of attention backend affects attention only.
        """
        switches = {*here[1]} ^ {*there[1]}
        return bool(switches) and all(
            _is_of_integers(node)
            if changes_autocast(switch)
            else chooses_attention(switch) and not may_attend(node)
            for switch in switches
        )

    def _switch_between(self, node: fx.Node, anchor: fx.Node) -> fx.Node:
        first, last = sorted((self._position[node], self._position[anchor]))
        switches = (n for n in self.graph.nodes if changes_mode(n))
        return next((n for n in switches if first < self._position[n] < last), anchor)

    def _random(self, moved: Collection[fx.Node], anchor: fx.Node) -> Obstacle | None:
        drawing = next((node for node in moved if draws_random(node)), None)
        return None if drawing is None else Obstacle(Hazard.RANDOM, drawing, anchor)

    def unneeded(
        self,
        candidates: Collection[fx.Node],
        replaced: Mapping[fx.Node, fx.Node | None],
        dropped: Collection[fx.Node] = (),
        read_anew: Collection[fx.Node] = (),
    ) -> list[fx.Node]:
        """Return those of `candidates` that nothing needs, in graph order.

        Readers of a key of `replaced` will read its value instead; None: a node still to be
        made. `dropped` are assertions among the candidates that need not stay for their own sake.
        `read_anew` are the nodes that nodes still to be made will read.
        """
        may_die = set(candidates)
        live: set[fx.Node] = set()
        todo = [n for n in self.graph.nodes if n not in may_die or self._acts(n, dropped)]
        todo += _present(read_anew, replaced)
        while todo:
            node = todo.pop()
            if node not in live:
                live.add(node)
                todo += _present(self.dependence.needs(node), replaced)
        return [n for n in self.dependence.in_order(may_die) if n not in live]

    def _acts(self, node: fx.Node, dropped: Collection[fx.Node]) -> bool:
        """Whether a candidate stays for an effect besides making its value."""
        if node in dropped:
            return False
        if node in self.dependence.writes:
            written = self.dependence.writes[node]
            return not written or bool(written & self._given_from_outside())
        return not (is_pure(node, dropped) or is_launch(node) or is_wait(node))

    def _given_from_outside(self) -> frozenset[int]:
        given = [n for n in self.graph.nodes if n.op in ("placeholder", "get_attr")]
        return frozenset(s for node in given for s in storages(node))


def _present(nodes: Iterable[fx.Node], replaced: Mapping[fx.Node, fx.Node | None]) -> list[fx.Node]:
    """Return the nodes that will be read in place of `nodes`, without those still to be made."""
    return [n for n in (replaced.get(n, n) for n in nodes) if n is not None]


def _is_of_integers(node: fx.Node) -> bool:
    """Whether the node reads and makes integers alone."""
    tensors = tensors_in([value_of(node), *map(value_of, node.all_input_nodes)])
    return not any(t.dtype.is_floating_point or t.dtype.is_complex for t in tensors)


def _reads_gradient(node: fx.Node) -> bool:
    return any(has_gradient(i) for i in node.all_input_nodes)
