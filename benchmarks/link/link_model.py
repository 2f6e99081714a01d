"""When exchanges end on links of stated latency and bandwidth: one level, or two, nodes x local.

Contract
    A group's ranks are node after node, as `moe_compile.register_node_groups` has them. Two ranks
    of a node are joined by its inner link, others by the outer one. Each rank has a port to either
    with the rate of that level; with a shared adapter the ranks of a node have one outer port.
    An exchange starts when every rank of its group has posted it and the one before it in that
    group has ended. What it sends inside nodes and what it sends between them go at once, each as
    soon as that port of all ranks of the group is free, for
    latency + (most bytes any port sends or receives) / bandwidth; it ends when both have.
    Every rank launches the same kinds of exchange in the same order, or RuntimeError is raised.
    Every rank computes the same end of every exchange.

Exchanges of different groups that use one port follow one another, in launch order. Of exchanges
that equal places make with one another at a time, those of a shared adapter start together.
With nodes of one rank there is no inner link: one level, as `Topology` has it unless told.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.link.post_board import Post, PostBoard


class Span(enum.IntEnum):
    """Which ranks an exchange is among."""

    ALL = 0
    NODE = 1
    """Those of a node."""
    CROSS = 2
    """Those of equal place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Which ranks share a node."""

    num_ranks: int
    num_local: int = 1
    """Ranks of a node."""
    shares_adapter: bool = False
    """Whether the ranks of a node have one port to other nodes."""

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self.num_local

    def groups(self, span: Span) -> list[list[int]]:
        """Return the ranks of each group of that kind."""
        ranks = list(range(self.num_ranks))
        if span is Span.ALL:
            return [ranks]
        if span is Span.NODE:
            starts = range(0, self.num_ranks, self.num_local)
            return [ranks[first : first + self.num_local] for first in starts]
        return [ranks[place :: self.num_local] for place in range(self.num_local)]

    def together(self, span: Span) -> list[list[int]]:
        """Return the ranks whose exchanges of that kind start together."""
        joined = span is Span.CROSS and self.shares_adapter
        return self.groups(Span.ALL if joined else span)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """How fast the link is: the only one, or the one between nodes, and that inside them."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf
    inside_latency_s: float = 0.0
    inside_bytes_per_s: float = math.inf

    def duration_s(self, wire_bytes: float) -> float:
        """Return how long one exchange occupies the link."""
        return self.latency_s + wire_bytes / self.bytes_per_s

    def inside_s(self, wire_bytes: float) -> float:
        """Return how long one exchange occupies the link inside a node."""
        return self.inside_latency_s + wire_bytes / self.inside_bytes_per_s


NO_LINK: Final = LinkRate()
"""The control: exchanges take no time, so that nothing is left to hide."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """Bytes of one exchange that its busiest port has at each level; None for a level not used."""

    between: float | None = None
    inside: float | None = None

    def alone_s(self, rate: LinkRate) -> float:
        """Return how long it takes with nothing beside it."""
        between = 0.0 if self.between is None else rate.duration_s(self.between)
        inside = 0.0 if self.inside is None else rate.inside_s(self.inside)
        return max(between, inside)


@dataclass(slots=True)
class Traffic:
    """What crossed the links since it was reset, and what the model made of it."""

    crossings: list[Crossing] = field(default_factory=list)
    """Of exchanges of this rank's groups."""
    waited_s: float = 0.0
    """Time waits added to the clock: exposed communication, and waiting for slower ranks."""
    host_s: float = 0.0
    """CPU time this process group itself took on the main thread."""

    @property
    def num_exchanges(self) -> int:
        """Return how many there were."""
        return len(self.crossings)

    @property
    def num_between(self) -> int:
        """Return how many of them had a part between nodes."""
        return sum(crossing.between is not None for crossing in self.crossings)

    @property
    def wire_bytes(self) -> float:
        """Return the bytes that crossed the link, of two that between nodes."""
        return sum(crossing.between or 0.0 for crossing in self.crossings)

    @property
    def inside_bytes(self) -> float:
        """Return the bytes that crossed the link inside a node."""
        return sum(crossing.inside or 0.0 for crossing in self.crossings)

    def alone_s(self, rate: LinkRate) -> float:
        """Return how long these exchanges take one after the other with no compute at all."""
        return sum(crossing.alone_s(rate) for crossing in self.crossings)


@dataclass(slots=True)
class ExchangeEnds:
    """When each exchange ends, worked out in the order of the exchanges; all ranks are followed."""

    board: PostBoard
    topology: Topology
    rank: int
    known: dict[int, float] = field(default_factory=dict)
    """Of this rank's exchanges."""
    last: int = 0
    _between: dict[int, float] = field(default_factory=dict)
    """Outer port of a rank -> when it is free."""
    _inside: dict[int, float] = field(default_factory=dict)
    _groups: dict[tuple[Span, int], float] = field(default_factory=dict)
    """Kind of group and a rank of it -> when its last exchange ended."""

    def of(self, ordinal: int, rate: LinkRate, traffic: Traffic) -> float:
        """Return the end of one exchange, once; counts in `traffic` those not ended before."""
        while self.last < ordinal:
            self.last += 1
            posts = self.board.read(self.last)
            if len({post.span for post in posts}) > 1:
                raise RuntimeError(f"exchange {self.last} is of other kinds on other ranks")
            span = Span(posts[0].span)
            for ranks in self.topology.together(span):
                crossing = self._crossing(span, ranks, posts)
                end = self._end(span, ranks, posts, crossing, rate)
                if self.rank in ranks:
                    self.known[self.last] = end
                    traffic.crossings.append(crossing)
        return self.known.pop(ordinal)

    def _crossing(self, span: Span, ranks: Sequence[int], posts: Sequence[Post]) -> Crossing:
        """Return what the busiest ports have."""
        topology = self.topology
        nodes = {topology.node_of(rank) for rank in ranks}
        num_inside = 1 if span is Span.CROSS else topology.num_local
        between = max(self._port_bytes(ranks, posts)) if len(nodes) > 1 else None
        inside = max(posts[r].inside_bytes for r in ranks) if num_inside > 1 else None
        return Crossing(between, inside)

    def _port_bytes(self, ranks: Sequence[int], posts: Sequence[Post]) -> Iterator[float]:
        if not self.topology.shares_adapter:
            yield from (posts[rank].wire_bytes for rank in ranks)
            return
        for node in self.topology.groups(Span.NODE):
            yield sum(posts[rank].wire_bytes for rank in node)

    def _end(
        self,
        span: Span,
        ranks: Sequence[int],
        posts: Sequence[Post],
        crossing: Crossing,
        rate: LinkRate,
    ) -> float:
        """Return when an exchange ends; its ports are busy until then."""
        start = max(posts[rank].time_s for rank in ranks)
        start = max(start, *(self._groups.get((span, rank), -math.inf) for rank in ranks))
        ends = [start]
        if crossing.between is not None:
            ends.append(_occupy(self._between, ranks, start, rate.duration_s(crossing.between)))
        if crossing.inside is not None:
            ends.append(_occupy(self._inside, ranks, start, rate.inside_s(crossing.inside)))
        self._groups |= {(span, rank): max(ends) for rank in ranks}
        return max(ends)


def _occupy(free: dict[int, float], ranks: Sequence[int], start: float, takes: float) -> float:
    """Return when what takes the ports of `ranks` so long is through."""
    end = max(start, *(free.get(rank, -math.inf) for rank in ranks)) + takes
    free |= dict.fromkeys(ranks, end)
    return end
