"""Generated layer programs as frozen data, which `text.py` writes as Python source.

Contract
    Every program is for two ranks, or for four on two nodes where rows are to come in two hops;
    fields of layers hold choices of `choices.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from moe_compile.testing.programs.choices import (
    Across,
    Act,
    Back,
    Backward,
    Counts,
    Cut,
    Decoy,
    Detail,
    Extra,
    Fill,
    Find,
    Groups,
    Heads,
    Loss,
    Mixing,
    Move,
    Order,
    Padding,
    Poison,
    Put,
    Reader,
    Room,
    Routing,
    Running,
    Sent,
    Sharing,
    Splits,
    Style,
    Tally,
    Unsort,
    Weighing,
    Within,
    Wrapping,
)

NUM_RANKS: Final = 2


class Rewrite(enum.Enum):
    """Options asked of megamoe besides the number of chunks."""

    CHUNKS = "chunks alone"
    UNSCHEDULED = "schedule = False"
    RECOMPUTE = "recompute = recompute_exchanges"
    MODEL_RECOMPUTE = "recompute = model"
    FP8 = "dispatch_wire = fp8"
    PRODUCTS = "expert_compute = fp8_blockwise"
    TOKENS = "chunk_by = tokens"
    BY_LOAD = "chunk_edges = load"
    GATHERED = "dispatch = all_gather"
    HOPS = "nodes = exact, four ranks on two nodes"
    HOP_SLICES = "nodes = exact, chunk_by = tokens, four ranks on two nodes"
    HOPS_FP8 = "nodes = exact, dispatch_wire = fp8, four ranks on two nodes"
    NODE_SUMS = "nodes = rounded, four ranks on two nodes"
    SUM_SLICES = "nodes = rounded, chunk_by = tokens, four ranks on two nodes"
    HOP_BOTH = "nodes = exact, hop_slices = 2, four ranks on two nodes"
    SUM_BOTH = "nodes = rounded, hop_slices = 2, four ranks on two nodes"
    SCORES = "apply_scores = before_down"
    NO_READS = "host_reads = none, in one chunk"
    NO_READS_IN_CHUNKS = "host_reads = none, chunk_by = tokens"
    PARTS = "batch_parts = 2"
    THREE_PARTS = "batch_parts = 3"


GROUPED_PRODUCTS: Final = (Style.GROUPED, Style.FUSED, Style.PADDED)
"""Styles whose products torch has in bfloat16 alone, of rows of 16 bytes."""

WITHOUT_ORDER: Final = frozenset(
    {Style.LOOP, Style.DENSE, Style.SEARCHED, Style.RUNS, Style.PADDED}
)
"""Styles that sort no rows: their order is no feature of a program."""

WITHOUT_BACK: Final = WITHOUT_ORDER | {Style.INDEX_ADD, Style.INDEX_COPY, Style.ASSIGN}
"""Styles that put rows back as they run."""

READ_IN: Final[dict[str, frozenset[Style]]] = {
    "order": frozenset(Style) - WITHOUT_ORDER,
    "back": frozenset(Style) - WITHOUT_BACK,
    "find": frozenset({Style.SEARCHED}),
    "put": frozenset({Style.SEARCHED}),
    "cut": frozenset({Style.RUNS}),
}
"""Fields of a layer that have an effect in some styles only."""

OF_STYLE: Final[dict[enum.Enum, Style]] = {
    Detail.LONGEST: Style.SORTED_LOOP,
    Detail.WIDE: Style.SORTED_LOOP,
    Detail.SUMS_WRITTEN: Style.GROUPED,
    Detail.BANK: Style.GROUPED,
    Detail.CROSSED: Style.GROUPED,
    Decoy.COUNTS_LIST: Style.SORTED_LOOP,
}
"""Choices without effect in the plainest style, each with a style in which it has one."""

STYLE_OF: Final[dict[type[enum.Enum], Style]] = {
    Order: Style.SORTED_LOOP,
    Back: Style.SORTED_LOOP,
    Find: Style.SEARCHED,
    Put: Style.SEARCHED,
    Cut: Style.RUNS,
}
"""Kinds whose members have an effect in some styles only, each with one of these styles."""

SEVERAL: Final[dict[type[enum.Enum], str]] = {
    Detail: "details",
    Reader: "readers",
    Decoy: "decoys",
    Extra: "extras",
    Mixing: "mixing",
    Loss: "losses",
}
"""Kinds of which a layer may have several members, by the field that holds them."""

NODE_SUMMING: Final = frozenset({Rewrite.NODE_SUMS, Rewrite.SUM_SLICES, Rewrite.SUM_BOTH})
"""Rewrites by which sums per token are made on the nodes."""

TWO_HOPS: Final = NODE_SUMMING | {
    Rewrite.HOPS,
    Rewrite.HOP_SLICES,
    Rewrite.HOP_BOTH,
    Rewrite.HOPS_FP8,
}
"""Rewrites by which a token crosses to a node once."""

IN_EIGHT_BITS: Final = frozenset({Rewrite.FP8, Rewrite.HOPS_FP8})
"""Rewrites by which rows are dispatched in eight bits."""

WITHOUT_READS: Final = frozenset({Rewrite.NO_READS, Rewrite.NO_READS_IN_CHUNKS})
"""Rewrites by which the host reads no counts: a step whose rows have no room runs again."""

NUM_NODES: Final = 2
"""Nodes of such programs, two ranks on each."""

PARTED: Final[Mapping[Rewrite, int]] = {Rewrite.PARTS: 2, Rewrite.THREE_PARTS: 3}
"""Rewrites by which a graph runs on parts of its batch -> how many."""

POSITIONS: Final = 2
"""Tokens of a sequence."""

CHOICES_OF_EXPERTS: Final[tuple[type[enum.Enum], ...]] = (
    Tally, Padding, Counts, Splits, Move, Style, Order, Back, Find, Put, Cut, Act, Detail, Decoy,
    Reader, Weighing, Unsort, Loss,
)  # fmt: skip

CHOICES_OF_CAPACITY: Final[tuple[type[enum.Enum], ...]] = (Room, Fill, Sent, Across, Extra, Mixing)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention:
    """One attention layer, even exchanges around it."""

    heads: Heads = Heads.PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAttention:
    """One attention layer over sequences of a rank's own tokens."""

    within: Within = Within.PLAIN


@dataclass(frozen=True, kw_only=True, slots=True)
class Experts:
    """One MoE layer."""

    local: int = 2
    """Experts of a rank."""
    ranks: int = NUM_RANKS
    """Number of ranks of the program, with which its text is written."""
    top_k: int = 1
    tally: Tally = Tally.COMPARE
    padding: Padding = Padding.NONE
    counts: Counts = Counts.FUNCTIONAL
    splits: Splits = Splits.TOLIST
    move: Move = Move.FUNCTIONAL
    style: Style = Style.LOOP
    order: Order = Order.ARGSORT
    back: Back = Back.INDEX_COPY
    find: Find = Find.WHERE
    put: Put = Put.INDEX_ADD
    cut: Cut = Cut.SLICES
    act: Act = Act.RELU
    details: frozenset[Detail] = frozenset()
    readers: frozenset[Reader] = frozenset()
    late: bool = False
    """Whether readers between the exchanges stand after the experts, not before."""
    decoys: frozenset[Decoy] = frozenset()
    weighing: Weighing = Weighing.COLUMN
    unsort: Unsort = Unsort.INDEX_ADD
    losses: frozenset[Loss] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """One MoE layer whose experts have a capacity, even exchanges around them."""

    local: int = 2
    """Experts of a rank."""
    top_k: int = 1
    room: Room = Room.EVEN
    fill: Fill = Fill.EINSUM
    sent: Sent = Sent.EXPERTS
    move: Move = Move.FUNCTIONAL
    """One of `FUNCTIONAL` and `OF_ITSELF`."""
    across: Across = Across.EINSUM
    act: Act = Act.RELU
    extras: frozenset[Extra] = frozenset()
    mixing: frozenset[Mixing] = frozenset()


Layer = Experts | Attention | OwnAttention | Capacity


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """Layers, the steps they run and the options they are compiled with."""

    layers: tuple[Layer, ...] = (Experts(),)
    width: int = 16
    """Model width D."""
    hidden: int = 16
    dtype: str = "bfloat16"
    tokens: tuple[tuple[int, ...], ...] = ((3, 3),)
    """Tokens per step and rank."""
    routing: Routing = Routing.SCORES
    groups: Groups = Groups.WORLD
    sharing: Sharing = Sharing.NOTHING
    backward: Backward = Backward.ONCE
    wrapping: Wrapping = Wrapping.BARE
    running: Running = Running.ALWAYS
    poison: Poison = Poison.NONE
    rewrite: Rewrite = Rewrite.CHUNKS
    dynamic: bool = False
    """Whether `torch.compile(dynamic=True)` is asked for."""
    chunks: int = 2
    row_room: float = 2.0
    """The option, where the host is to read no counts: by 2, all rows of two ranks have room."""
    seed: int = 0

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks it is for."""
        return len(self.tokens[0])

    @property
    def experts(self) -> list[Experts]:
        """Its layers of experts that have no capacity."""
        return [layer for layer in self.layers if isinstance(layer, Experts)]

    @property
    def is_called_in_parts(self) -> bool:
        """Whether the parts of one checkpointed call are added up before those of another."""
        is_shared = self.sharing is Sharing.WEIGHTS and self.wrapping is Wrapping.CHECKPOINT
        return is_shared and self.rewrite in PARTED

    @property
    def positions(self) -> int:
        """Return the number of tokens of a sequence."""
        attends = any(isinstance(layer, OwnAttention) for layer in self.layers)
        return POSITIONS if attends or any(Loss.SEQUENCE in a.losses for a in self.experts) else 1

    @property
    def has_losses(self) -> bool:
        """Return whether layers compute losses in the graph."""
        return any(a.losses for a in self.experts)


def ends_smaller(tokens: tuple[tuple[int, ...], ...]) -> bool:
    """Whether the last step has fewer tokens than the first, and as many on each rank."""
    return max(tokens[-1]) < min(tokens[0]) and len({*tokens[-1]}) == 1


LayerOfExperts = TypeVar("LayerOfExperts", Experts, Capacity)
Part = TypeVar("Part", Program, Experts, Attention, OwnAttention, Capacity, Layer)


def changed(part: Part, name: str, value: Any) -> Part:
    """Return `part` with the field `name` at `value`."""
    return replace(part, **{name: value})


def with_choice(layer: LayerOfExperts, choice: enum.Enum) -> LayerOfExperts:
    """Return `layer` with `choice`, alone of its kind, in a style that uses it."""
    kind = type(choice)
    if isinstance(layer, Experts):
        layer = replace(layer, style=STYLE_OF.get(kind, layer.style))
        layer = replace(layer, style=OF_STYLE.get(choice, layer.style))
        layer = replace(layer, order=Order.PIECES) if choice is Back.PIECES else layer
    if kind in SEVERAL:
        return changed(layer, SEVERAL[kind], frozenset({choice}))
    return changed(layer, kind.__name__.lower(), choice)
