"""The parts of a graph the passes reason about.

Contract
    A region names nodes of one graph and is stale once that graph is edited.
    Regions are built only by the detectors and are consistent by construction.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch.fx as fx

from moe_compile.errors import ContractViolation

if TYPE_CHECKING:  # it names reasons of this module
    from moe_compile.analysis.count_facts import CountFacts


class Refusal(enum.Enum):
    """Why an exchange, or a matched region, is left as it is. Values are what reports print."""

    EVEN_SPLITS = "its split sizes are static: not an expert dispatch"
    INTEGER_PAYLOAD = "it carries integers, not rows of activations"
    NO_COMBINE = "no exchange with the split lists swapped is reachable from it"
    NO_COUNT_EXCHANGE = "its split sizes do not come from an exchange of integers"
    COUNT_EXCHANGE = "it carries the counts of a region"
    PART_OF_REGION = "it is inside a region"
    NOT_ALL_TO_ALL = "not an all-to-all"
    UNEVEN_EXPERTS = "the counts do not hold the same number of experts for every rank"
    ROWS_MIXED = "an operator of the experts mixes rows"
    ROWS_OUT_OF_ORDER = "the rows sent back are not proven to be in the order received"
    VALUE_FROM_COUNTS = "a value computed from the counts enters the arithmetic of the rows"
    SHARED_PARAMETER = (
        "a parameter is read by rows of several experts: "
        "its gradient would be summed in another order"
    )
    SIZE_FROM_COUNTS = "a dimension that does not hold the rows is as long as the counts say"
    ROUNDED_BY_POSITION = "a CPU rounds an operator by where an element or a row lies in memory"
    UNSTABLE_SORT = (
        "a sort that is not stable leaves the order of one expert's rows open: write stable=True"
    )
    PREMISE_FALSE = "an index and the group sizes computed from the counts disagree"
    PREMISE_UNCHECKED = "an index computed from the counts could not be evaluated on samples"
    FAILS_WITHOUT_ROWS = "what is computed from the counts fails where some experts have no rows"
    ROWS_FROM_OUTSIDE = "a tensor from outside the region is combined with rows, row by row"
    UNKNOWN_OPERATOR = "an operator whose effect on rows is not known"
    RANDOM = "an operator of the experts draws random numbers"
    HOST_READ_OF_ROWS = "the host reads a value of the rows"
    COMMUNICATES = "the experts communicate between dispatch and combine"
    MUTATES_OUTSIDE = "the experts write a tensor from outside the region"
    MUTATED_MEANWHILE = "counts or a tensor the region reads are written before the combine"
    STATE_CHANGES = "grad mode, autocast or vmap changes between dispatch and combine"
    GRADIENT_ORDER = (
        "a tensor the region reads is read by others meanwhile: its gradient would be summed in "
        "another order"
    )
    NO_GRADIENT = (
        "rows of some chunk get no gradient where others do: its exchanges would leave the "
        "backward pass"
    )
    ROWS_ESCAPE = "rows inside the region are read outside it"


@dataclass(frozen=True, kw_only=True, slots=True)
class MoERegion:
    """One dispatch -> experts -> combine, as data flow.

    Shapes: `rows` sends `[R, D]` routed rows, sorted by expert; `counts` holds the rows per
    expert, `num_ranks * num_local_experts` values, rank-major; `received_counts` the same as
    seen by the receiver.
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
    """The last wait of the combine: what the graph after the region reads."""
    body: tuple[fx.Node, ...]
    """Every node between rows, counts and result, those three excluded but for `result`, in
    graph order. Holds the dispatch, the combine and their waits, never `count_exchange`."""
    count_side: tuple[fx.Node, ...]
    """The part of the body computed from counts alone, in graph order."""
    others: tuple[fx.Node, ...]
    """Inputs of the body from outside: parameters and constants, in order of first use."""
    group: str
    """Name of the process group of the exchanges."""
    num_ranks: int
    num_local_experts: int

    def __post_init__(self) -> None:
        """Raise ContractViolation when the pieces do not fit together."""
        if not (self.count_exchange < self.dispatch < self.combine < self.result):
            raise ContractViolation(f"{self.name}: exchanges out of order")
        if self.num_ranks < 1 or self.num_local_experts < 1:
            raise ContractViolation(f"{self.name}: no ranks or no experts")

    @property
    def row_side(self) -> tuple[fx.Node, ...]:
        """The part of the body that depends on the dispatched rows, in graph order."""
        counted = set(self.count_side)
        return tuple(node for node in self.body if node not in counted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A candidate left alone, and why."""

    candidate: str
    reason: Refusal
    detail: str = ""
    is_region: bool = False
    """Whether a dispatch, its combine and its counts were matched: a region, not a decoy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowProof:
    """Evidence that a region's experts treat rows independently given the counts."""

    sliceable: tuple[fx.Node, ...] = ()
    """Grouped GEMMs of the body whose groups are the local experts and whose offsets give the
    experts of other chunks no rows: their weights and offsets may be sliced to one chunk's."""
    unsliceable: tuple[tuple[fx.Node, str], ...] = ()
    """The other grouped GEMMs of the body, each with the reason."""
    expert_rows: tuple[tuple[fx.Node, int], ...] = ()
    """Nodes of the body whose rows all belong to one local expert, and that expert's index;
    only nodes that have no rows at all when that expert's counts are zero."""
    facts: CountFacts | None = field(default=None, compare=False)
    """What every size the host computed from the counts is, as a formula in the counts."""
    joins: tuple[fx.Node, ...] = ()
    """Concatenations of the body along the dimension that holds the rows, of tensors of one type:
    they may do without inputs that have no rows."""
    sampled: int = 0
    """Vectors of counts on which indices that could not be followed were evaluated and found to
    agree with the group sizes; 0 where the proof followed every index."""
