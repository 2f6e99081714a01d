"""Carry the dispatches and combines of regions by the transport that the option names.

Contract
    Requires  PLANNED, REWRITTEN.
    Keeps     every collective but those of rows; by torch's own transport, the graph.

    launch(rows) -> wait    becomes    the transport's nodes in the places of the two
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch.fx as fx

from moe_compile.errors import ContractViolation
from moe_compile.graph.edit import Emitter, erase_unused, replace_uses, substitute
from moe_compile.graph.modes import Mode
from moe_compile.graph.query import waits_on
from moe_compile.journal.entries import Verdict, judged
from moe_compile.journal.reasons import Reason
from moe_compile.plan.planned import PlannedExperts
from moe_compile.plan.state import CompileState
from passes.contract import Fact
from passes.outside import find_transport
from passes.rewrite import Proposed, Rewrite
from passes.transport import FUNCTIONAL, Collective, Functional, Transport


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """One exchange of a region that another transport is to carry."""

    exchange: str
    """Its name: `dispatch of region 0`."""
    launches: tuple[str, ...]
    """Names of its launches."""
    transport: str
    loses: str
    """The transport's statement of its changes; "" for no bit."""
    row_bytes_before: float
    """Bytes of one row that leave a rank, by torch's collectives."""
    row_bytes: float

    @property
    def region(self) -> str:
        """Return the name of its region."""
        return self.exchange.partition(" of ")[2]

    def __str__(self) -> str:
        """Return its name in reports."""
        return f"{self.exchange} by {self.transport}{self.loses}"


@dataclass(frozen=True)
class RouteExchanges(Rewrite[Routed]):
    """See the module docstring."""

    name: ClassVar[str] = "route_exchanges"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLANNED, Fact.REWRITTEN})
    after: ClassVar[frozenset[str]] = frozenset({"quantize_products"})
    is_decided: ClassVar[bool] = True
    by_region: ClassVar[bool] = True

    def propose(self, graph: fx.Graph, state: CompileState) -> Proposed[Routed]:
        """Return the exchanges that the transport can carry, every launch of them."""
        if state.config.transport == FUNCTIONAL:
            return Proposed()
        in_force = state.facts_of(graph).modes
        found = [
            _routed(one, exchange, launches, state, in_force)
            for one in state.experts
            for exchange, launches in state.launches[one.found.region.name].items()
        ]
        return Proposed(
            proposals=tuple(one for one in found if isinstance(one, Routed)),
            skipped=tuple(one for one in found if isinstance(one, Verdict)),
        )

    def region_of(self, proposal: Routed) -> str:
        """Return the name of its region."""
        return proposal.region

    def apply(self, graph: fx.Graph, proposals: tuple[Routed, ...], state: CompileState) -> None:
        """Emit each exchange anew, and erase the nodes it replaces."""
        nodes = {node.name: node for node in graph.nodes}
        of_region = {one.found.region.name: one for one in state.experts}
        for one in proposals:
            exchange = one.exchange.partition(" of ")[0]
            for name in one.launches:
                collective = _collective(nodes[name], of_region[one.region], exchange)
                _route(nodes[name], collective, find_transport(one.transport))

    def measures(self, proposals: tuple[Routed, ...]) -> dict[str, float]:
        """Return the bytes of a row that leave a rank, all exchanges together."""
        return {
            "row_bytes_before": sum(one.row_bytes_before for one in proposals),
            "row_bytes": sum(one.row_bytes for one in proposals),
        }


def _routed(
    one: PlannedExperts,
    exchange: str,
    launches: tuple[fx.Node, ...],
    state: CompileState,
    in_force: Mapping[fx.Node, Mode],
) -> Routed | Verdict:
    """Return the exchange to be carried, or why it stays as it is."""
    transport = find_transport(state.config.transport)
    name = f"{exchange} of {one.found.region.name}"
    if one.plan.is_in_two_hops:
        two_hops = Verdict(candidate=name, reason=Reason.TWO_HOPS, where=one.found.where)
        return judged(state.config, "transport", two_hops)
    collectives = [_collective(launch, one, exchange) for launch in launches]
    left = [_left_by_form(launch, one.plan.wire(exchange), in_force) for launch in launches]
    left += [transport.needs(collective, state.config) for collective in collectives]
    verdict = next(filter(None, left), None)
    if verdict is not None:
        verdict = replace(verdict, candidate=name, where=one.found.where)
        return judged(state.config, "transport", verdict)
    payload = float(one.row_bytes[exchange])
    before, now = (way.bytes(collectives[0], payload) for way in (Functional(), transport))
    return Routed(
        exchange=name,
        launches=tuple(launch.name for launch in launches),
        transport=transport.name,
        loses=f" ({transport.numerics}: {transport.bound})" if transport.bound else "",
        row_bytes_before=before,
        row_bytes=now,
    )


def _left_by_form(launch: fx.Node, wire: str, in_force: Mapping[fx.Node, Mode]) -> Verdict | None:
    """Return why no transport could carry the collective of `launch`."""
    waits = waits_on(launch)
    if wire != "same":
        detail = "the gradient of rows of eight bits is sent by torch's collectives"
        return Verdict(candidate="", reason=Reason.OTHER, detail=detail)
    if len(launch.users) != 1 or not waits:
        return Verdict(candidate="", reason=Reason.UNKNOWN_FORM)
    if any(in_force[launch] != in_force[wait] for wait in waits):
        return Verdict(candidate="", reason=Reason.STATE_CHANGES)
    return None


def _collective(launch: fx.Node, one: PlannedExperts, exchange: str) -> Collective:
    return Collective.of(launch, one.plan.num_ranks, one.found.rows[exchange])


def _route(launch: fx.Node, collective: Collective, transport: Transport) -> None:
    first, *others = waits_on(launch)
    for wait in reversed(others):
        substitute(wait, first)
    received = transport.emit(Emitter(launch), Emitter(first.next), collective)
    received.meta.update({**first.meta, **received.meta})
    replace_uses({first: received})
    if erase_unused([launch, first]) != 2:
        raise ContractViolation(f"{transport.name}: {launch.name} is still read")
