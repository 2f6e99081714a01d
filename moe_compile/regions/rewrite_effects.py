"""Effects of rewriting regions on the graph around them: reads that remain, nodes that die.

Contract
    Rewrites with an `Effects` may be applied together: no node that stays can observe that
    their regions ran later. Every host integer that the graph outside needs is still read: by
    the region's one read if all its readers stand behind that, else at its old place.
    Assertions stay, except those that the dispatch's own demands imply.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from moe_compile.graph.effects import (
    is_host_arithmetic,
    is_pure,
    is_size_query,
    may_draw,
    only_writes,
)
from moe_compile.graph.gradient_order import find_later_reader
from moe_compile.graph.inner_graphs import inside
from moe_compile.graph.legality import Legality
from moe_compile.graph.query import is_assertion, operator_at, value_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.body_nodes import is_host_read
from moe_compile.regions.implied_assertions import is_implied
from moe_compile.regions.new_order import find_overtaken, order_of_gradients
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.replayable import memory_of
from moe_compile.regions.rewrites import Aftermath, Effects, Replacement


def find_effects(rewrites: Sequence[Replacement]) -> Aftermath:
    """Return the effects of these rewrites of regions on the graph."""
    if not rewrites:
        return Aftermath(effects={}, dead=())
    legality = rewrites[0].region.facts.legality
    found: dict[str, Effects | Left] = {}
    for rewrite in rewrites:
        if (refused := _check_motion(rewrite, legality)) is not None:
            found[rewrite.region.name] = refused
    while True:
        chosen = [rewrite for rewrite in rewrites if rewrite.region.name not in found]
        together = _Together(chosen, legality)
        escaping = together.escaping_rows()
        if not escaping:
            break
        found.update(escaping)
    found.update(together.read_hosts())
    return Aftermath(effects=found, dead=tuple(together.dead()))


def _check_motion(rewrite: Replacement, legality: Legality) -> Left | None:
    """Refuse a region whose move would change values, the order of gradients, or writes."""
    region = rewrite.region
    body = [n for n in (*region.body, *rewrite.before) if n is not region.result]
    behind = [n for n in rewrite.behind if n is not rewrite.replaced]
    bulk = _never_negative(_host_reads(region), rewrite.proof)
    part = order_of_gradients(rewrite, bulk)
    together = [*body, *region.between]
    copied, none = memory_of(region), frozenset[int]()
    for moved, anchor, anew in (
        (together, region.result, copied),
        (behind, rewrite.replaced, none),
    ):
        found = legality.obstacle(
            moved, anchor, part, enters_autocast=rewrite.enters_autocast, anew=anew
        )
        if (obstacle := found) is not None:
            return obstacle.left
    for source, served in rewrite.read_once:
        if (other := find_later_reader(served, source, legality.dependence)) is not None:
            detail = f"{operator_at(source)} is also read by {operator_at(other)}"
            return Left(Reason.GRADIENT_ORDER, detail)
    if (overtaken := find_overtaken(region, bulk)) is not None:
        writer, reader = overtaken
        detail = f"{operator_at(writer)} would write a tensor before {operator_at(reader)} reads it"
        return Left(Reason.MUTATED_MEANWHILE, detail)
    return None


class _Together:
    """Rewrites that are applied at once, and the nodes they leave alive."""

    def __init__(self, rewrites: Sequence[Replacement], legality: Legality) -> None:
        self._rewrites, self._legality = rewrites, legality
        self._dependence = legality.dependence
        self._replaced = {node for rewrite in rewrites for node in rewrite.made_anew}
        self._bodies = {node for r in rewrites for node in (*r.region.body, *r.behind)}
        others = {node for r in rewrites for node in (*r.before, *r.others)}
        self._implied = self._implied_assertions()
        below = self._dependence.below(self._bodies - self._replaced, stops=self._replaced)
        only_made = {node for node in below if only_writes(node)}
        self._candidates = {*self._bodies, *only_made, *others}
        self._candidates |= {node for node in self._implied if node in self._dependence.position}
        self._served: list[fx.Node] = []
        self._sizes_by_region = {r.region.name: self._sizes_of(r) for r in rewrites}
        self._sizes = {k: v for sizes in self._sizes_by_region.values() for k, v in sizes.items()}

    def _sizes_of(self, rewrite: Replacement) -> dict[fx.Node, fx.Node]:
        """Return sizes of rows asked for outside, each with an earlier host integer equal to it."""
        facts, place = rewrite.proof.facts, self._dependence.position
        if facts is None:
            return {}
        rows = set(rewrite.region.row_side)
        asked = [n for n in self._candidates - self._bodies if is_size_query(n) and _reads(n, rows)]
        on_host = {
            facts.formula(value): node
            for node in reversed(self._dependence.in_order(place))
            if isinstance(value := value_of(node), torch.SymInt)
            and (is_host_read(node) or is_host_arithmetic(node))
        }
        found = {}
        for size in asked:
            value = value_of(size)
            number = on_host.get(facts.formula(value)) if isinstance(value, torch.SymInt) else None
            if number is not None and place[number] < place[size]:
                found[size] = number
        return found

    def _implied_assertions(self) -> set[fx.Node]:
        """Return the assertions that are implied and may go, in inner graphs too."""
        nodes = [n for node in self._legality.graph.nodes for n in (node, *inside(node))]
        assertions = [node for node in nodes if is_assertion(node)]
        return {
            node
            for node in assertions
            for rewrite in self._rewrites
            if (facts := rewrite.proof.facts) is not None
            and is_implied(node, rewrite.region, facts)
        }

    def dead(self) -> list[fx.Node]:
        """Return the nodes that nothing needs any more."""
        made = dict.fromkeys([*self._replaced, *self._served])
        given: dict[fx.Node, fx.Node | None] = {**self._sizes, **made}
        inputs = {i for rewrite in self._rewrites for i in rewrite.inputs}
        return self._legality.unneeded(self._candidates, given, self._implied, inputs)

    def escaping_rows(self) -> dict[str, Left]:
        """Return the regions whose rows something outside needs."""
        dead = set(self.dead())
        found = {}
        for rewrite in self._rewrites:
            alive = [node for node in rewrite.rows if node not in dead]
            if alive:
                detail = f"{operator_at(alive[-1])} is read by {_a_reader(alive[-1], dead)}"
                found[rewrite.region.name] = Left(Reason.ESCAPES, detail)
        return found

    def read_hosts(self) -> dict[str, Effects]:
        """Return by region the host reads that its one read serves; a read is served once."""
        dead = set(self.dead())
        found = {}
        for rewrite in self._rewrites:
            region = rewrite.region
            reads = _host_reads(region)
            alive = [n for n in reads if n not in dead and n not in self._served]
            read_at = region.result if rewrite.at_result else self._first_read(region, reads)
            bulk = _never_negative(reads, rewrite.proof)
            may_serve = [n for n in alive if n in bulk and n not in rewrite.not_served]
            served, moved = self._servable(may_serve, read_at, dead)
            self._served += served
            found[region.name] = Effects(
                read_at=read_at,
                bulk=bulk,
                served=tuple(served),
                moved=tuple(moved),
                num_kept=len(alive) - len(served),
                sizes=self._sizes_by_region[region.name],
            )
        return found

    def _first_read(self, region: MoERegion, reads: list[fx.Node]) -> fx.Node:
        """Return the first host read of the region before which all of them may be made.

        Readers of their integers stand behind it, except readers of earlier reads.
        Returns the region's result where there is no such place.
        """
        place, body = self._dependence.position, set(region.body)
        given = {region.counts, region.received_counts}
        stops = {*region.inputs, *region.others}
        above = self._dependence.above(reads, stops=stops) & body
        inputs = {i for node in above for i in node.all_input_nodes if i not in body}
        there = max(place[node] for node in inputs | given)
        early = (r for r in reads if place[r] > there)
        return next((r for r in early if self._legality.obstacle(above, r) is None), region.result)

    def _servable(
        self, alive: list[fx.Node], read_at: fx.Node, dead: set[fx.Node]
    ) -> tuple[list[fx.Node], list[fx.Node]]:
        """Return the reads all of whose readers stand, or may be moved, behind `read_at`."""
        served, moved = [], set[fx.Node]()
        for read in alive:
            readers = self._readers_before(read, read_at, dead)
            if readers is not None and not self._follows_a_read(read):
                served.append(read)
                moved |= readers
        return served, self._dependence.in_order(moved)

    def _follows_a_read(self, read: fx.Node) -> bool:
        """Whether the host must read another integer before `read` can be computed."""
        above = self._dependence.above([read]) - {read}
        return any(is_host_read(node) for node in above & self._bodies)

    def _readers(self, number: fx.Node) -> list[fx.Node]:
        """Return the readers of a host integer, once sizes of rows are replaced by such."""
        sizes = [size for size, instead in self._sizes.items() if instead is number]
        return [user for node in (number, *sizes) for user in node.users]

    def _is_read_anew(self, number: fx.Node, read_at: fx.Node) -> bool:
        """Whether the new form of some region reads `number`, and before `read_at`."""
        place = self._dependence.position
        return any(
            number in rewrite.inputs and place[rewrite.region.dispatched[0].launch] < place[read_at]
            for rewrite in self._rewrites
        )

    def _readers_before(
        self, read: fx.Node, read_at: fx.Node, dead: set[fx.Node]
    ) -> set[fx.Node] | None:
        """Return the readers of `read` before `read_at`, indirect too; None if one may not move."""
        place = self._dependence.position
        found: set[fx.Node] = set()
        todo = [read]
        while todo:
            number = todo.pop()
            if self._is_read_anew(number, read_at):
                return None
            for user in self._readers(number):
                if user in dead or user in found or place[user] > place[read_at]:
                    continue
                if may_draw(user) or not (is_host_arithmetic(user) or is_pure(user)):
                    return None
                found.add(user)
                todo.append(user)
        return found if self._legality.obstacle(found, read_at) is None else None


def _host_reads(region: MoERegion) -> list[fx.Node]:
    return [node for node in region.count_side if is_host_read(node)]


def _never_negative(reads: list[fx.Node], proof: RowProof) -> frozenset[fx.Node]:
    """Return the reads of integers whose formulas in the counts are never negative."""
    facts = proof.facts
    if facts is None:
        return frozenset()
    values = ((node, value_of(node)) for node in reads)
    return frozenset(
        node
        for node, value in values
        if isinstance(value, torch.SymInt) and facts.formula(value).is_nonnegative
    )


def _reads(node: fx.Node, nodes: set[fx.Node]) -> bool:
    return any(i in nodes for i in node.all_input_nodes)


def _a_reader(node: fx.Node, dead: set[fx.Node]) -> str:
    return next((operator_at(user) for user in node.users if user not in dead), "nobody by name")
