"""The parts of a graph the passes reason about.

Contract
    A region names nodes of one graph and is stale once that graph is edited.
    Regions are built only by the detectors and are consistent by construction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch.fx as fx

from moe_compile.errors import ContractViolation
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import waits_on

if TYPE_CHECKING:  # it names reasons of this module
    from moe_compile.regions.count_facts import CountFacts


class Region(Protocol):
    """Members common to regions of every kind."""

    @property
    def name(self) -> str:
        """Name of the region, unique in the graph."""

    @property
    def launches(self) -> tuple[fx.Node, ...]:
        """Its exchanges."""

    @property
    def body(self) -> tuple[fx.Node, ...]:
        """Nodes that run again for each part of the region, `result` included."""

    @property
    def result(self) -> fx.Node:
        """The last node of the region that the graph after it reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One tensor that an all-to-all takes from rank to rank, one entry along dim 0 per row."""

    sent: fx.Node
    launch: fx.Node
    result: fx.Node
    """The last wait on the launch, which its readers read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoERegion:
    """One dispatch -> experts -> combine, as data flow.

    Shapes: `rows` sends `[R, D]` routed rows, sorted by expert; `counts` holds the rows per
    expert, `num_ranks * num_local_experts` values, rank-major; `received_counts` the same as
    seen by the receiver. `beside` sends `[R, ...]`, one entry per row of `rows`, in its order:
    probabilities `[R]`, say. `back_beside` brings back `[R, ...]`, one entry per row of `result`.
    """

    name: str
    """`region 0`, `region 1`, ... in graph order."""
    rows: fx.Node
    counts: fx.Node
    count_exchange: fx.Node
    received_counts: fx.Node
    dispatch: fx.Node
    combine: fx.Node
    result: fx.Node
    """The last wait of the combine, which the graph after the region reads."""
    beside: tuple[Exchange, ...] = ()
    """Other tensors dispatched, split like the rows."""
    back_beside: tuple[Exchange, ...] = ()
    """Other tensors sent back, all before the combine."""
    between: tuple[fx.Node, ...] = ()
    """Nodes outside the body that read `back_beside` before the result: they move behind it."""
    body: tuple[fx.Node, ...]
    """Every node between rows, counts and result, those three excluded but for `result`, in
    graph order. Holds all dispatches, combines and their waits, never `count_exchange`."""
    count_side: tuple[fx.Node, ...]
    """The part of the body computed from counts alone, in graph order."""
    others: tuple[fx.Node, ...]
    """Inputs of the body from outside: parameters and constants, in order of first use."""
    group: str
    """Name of the process group of the exchanges."""
    num_ranks: int
    num_local_experts: int
    facts: GraphFacts = field(compare=False, repr=False)
    """Facts of its graph."""

    def __post_init__(self) -> None:
        """Raise ContractViolation when the pieces do not fit together."""
        ends = [back.result for back in self.back_beside]
        if not (self.count_exchange < self.dispatch < self.combine < self.result):
            raise ContractViolation(
                f"{self.name}: its dispatch must come before its combine, and does not"
            )
        if any(end >= self.result for end in ends):
            raise ContractViolation(
                f"{self.name}: all its exchanges must come before its result, and one comes "
                "after it"
            )
        if self.num_ranks < 1 or self.num_local_experts < 1:
            raise ContractViolation(
                f"{self.name}: it must have at least one rank and one expert, and has not"
            )

    @property
    def dispatched(self) -> tuple[Exchange, ...]:
        """Exchanges of all tensors dispatched, in graph order."""
        return _in_order((*exchanges([self.dispatch]), *self.beside))

    @property
    def combined(self) -> tuple[Exchange, ...]:
        """Exchanges of all tensors sent back, in graph order."""
        return _in_order((*self.back_beside, *exchanges([self.combine])))

    @property
    def launches(self) -> tuple[fx.Node, ...]:
        """The launches of all dispatches, then those of all combines."""
        return tuple(one.launch for one in (*self.dispatched, *self.combined))

    @property
    def inputs(self) -> frozenset[fx.Node]:
        """Nodes outside the body that change with the chunk: all tensors sent, and the counts."""
        sent = (one.sent for one in self.dispatched)
        return frozenset({*sent, self.counts, self.received_counts})

    @property
    def results(self) -> tuple[fx.Node, ...]:
        """Nodes that the graph after the region may read, in graph order; `result` is the last."""
        return tuple(one.result for one in self.combined)

    @property
    def row_side(self) -> tuple[fx.Node, ...]:
        """The part of the body that depends on the dispatched rows, in graph order."""
        counted = set(self.count_side)
        return tuple(node for node in self.body if node not in counted)


def exchanges(launches: Iterable[fx.Node]) -> list[Exchange]:
    """Return the exchange of each launch; its result is the launch where nothing waits for it."""
    found = []
    for launch in launches:
        (sent, *_), waits = launch.all_input_nodes, waits_on(launch)
        result = waits[-1] if waits else launch
        found.append(Exchange(sent=sent, launch=launch, result=result))
    return found


def _in_order(exchanges: tuple[Exchange, ...]) -> tuple[Exchange, ...]:
    return tuple(sorted(exchanges, key=lambda one: one.launch))


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProof:
    """Evidence that a region's experts treat rows independently given the counts."""

    sliceable: tuple[fx.Node, ...] = ()
    """Grouped GEMMs of the body whose groups are the local experts and whose offsets give the
    experts of other chunks no rows of theirs: weights and offsets may be sliced to one chunk's."""
    padding: Mapping[fx.Node, tuple[int, ...]] = field(default_factory=dict, hash=False)
    """Grouped GEMMs with padded groups: by expert, the rows of its group when it has none."""
    unsliceable: tuple[tuple[fx.Node, str], ...] = ()
    """The other grouped GEMMs of the body, each with the reason."""
    expert_rows: tuple[tuple[fx.Node, int], ...] = ()
    """Nodes of the body whose rows all belong to one local expert, and that expert's index: they
    have no rows at all when its counts are zero. Included are nodes that compute something else
    from such rows alone, which nothing joins."""
    facts: CountFacts | None = field(default=None, compare=False)
    """Facts about the counts, with a formula for every size that the host computed from them."""
    joins: tuple[fx.Node, ...] = ()
    """Concatenations of the body along the dimension that holds the rows, of tensors of one type:
    they may do without inputs that have no rows."""
    whole: tuple[tuple[fx.Node, frozenset[int]], ...] = ()
    """Nodes that read rows of these experts and are not proven row by row: right in a chunk that
    has all rows of an expert, if chunks without any do not run them."""
    writes: tuple[tuple[fx.Node, int], ...] = ()
    """Nodes that only write rows of one expert in place: they do nothing where it has none."""
    shared: tuple[fx.Node, ...] = ()
    """Parameters that rows of several experts read: chunks add up their gradients in another
    order, by the bound of `outside_reads`."""
    reordered: tuple[fx.Node, ...] = ()
    """Sorts that leave the order of one expert's rows open: chunks have them stable, so that sums
    over these rows, as gradients of weights are, add the same terms in another order."""
    searches: bool = False
    """Whether rows are found by a search: the host learns how many there are."""
    sampled: int = 0
    """Vectors of counts on which indices that could not be followed were evaluated and found to
    agree with the group sizes; 0 where the proof followed every index."""
    last_bits: str = ""
    """Why last bits of a row may depend on where the row lies in memory, "" where nothing says
    so."""
