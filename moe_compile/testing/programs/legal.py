"""Legal combinations of choices: the others are taken out of a drawn program.

Contract
    Every legal program runs eagerly, but where a rank's rows have a size that torch infers only
    from some.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from moe_compile.testing.programs.capacity_text import IN_LOOPS
from moe_compile.testing.programs.choices import (
    Back,
    Detail,
    Extra,
    Groups,
    Order,
    Padding,
    Poison,
    Reader,
    Routing,
    Running,
    Sharing,
    Splits,
    Style,
    Tally,
    Unsort,
    Within,
    Wrapping,
)
from moe_compile.testing.programs.expert_text import LOOPS, ONE_BY_ONE
from moe_compile.testing.programs.grammar import (
    GROUPED_PRODUCTS,
    IN_EIGHT_BITS,
    NUM_RANKS,
    PARTED,
    READ_IN,
    TWO_HOPS,
    WITHOUT_ORDER,
    WITHOUT_READS,
    Capacity,
    Experts,
    Layer,
    OwnAttention,
    Program,
    Rewrite,
    changed,
    ends_smaller,
)
from moe_compile.testing.programs.layer_text import BY_TOKEN
from moe_compile.testing.programs.text import BOUNDS, FLAT_BOUNDS

USED_BY: Final = {
    Detail.DUMMY: ONE_BY_ONE - {Style.DENSE},
    Detail.DUMMY_SUM: ONE_BY_ONE - {Style.DENSE},
    Detail.OWN_MEAN: frozenset({Style.LOOP, Style.SEARCHED, Style.RUNS}),
    Detail.NESTED_CAT: frozenset({Style.LOOP}),
    Detail.LONGEST: LOOPS - {Style.STACKED},
    Detail.WIDE: frozenset(Style) - WITHOUT_ORDER,
    Detail.EMPTY_JOIN: frozenset({Style.LOOP, Style.SORTED_LOOP, Style.STACKED}),
    Detail.SUMS_WRITTEN: frozenset({Style.GROUPED, Style.FUSED}),
    Detail.BANK: frozenset({Style.GROUPED}),
    Detail.CROSSED: frozenset({Style.GROUPED, Style.FUSED}),
    Detail.BESIDE: frozenset(Style) - {Style.BATCHED, Style.STACKED},
    Detail.BIAS: frozenset(Style) - {Style.PADDED},
}
"""Styles in which a detail has an effect; a detail not listed has one in every style."""

WRITES: Final = frozenset(
    {
        Reader.STATISTICS, Reader.STATISTICS_VIEW, Reader.LATE_STATISTICS, Reader.HOST_RATIO,
        Reader.HOST_VIEW, Reader.HOST_STATE, Reader.FAILING_CHECK, Reader.BREAK,
        Reader.EARLY_RATIO, Reader.EARLY_FOREACH, Reader.EARLY_NORM,
        Reader.EARLY_DATA, Reader.SHIFT_WRITTEN, Reader.HOOK_COUNT, Reader.HOOK_ROWS,
        Reader.AUTOCAST_SET, Reader.SEEN,
    }
)  # fmt: skip
"""Readers whose writes happen twice where a layer is recomputed."""

SAVE_ROWS: Final = frozenset(
    {
        Reader.ROWS_SQUARED, Reader.ROWS_NORMALIZED, Reader.ROWS_CHECKPOINTED,
        Reader.ROWS_HANDED_BACK,
    }
)  # fmt: skip
"""Readers for which autograd saves routed rows, which must then not be written."""

COUNTS_LAST: Final = frozenset({Tally.COMPARE, Tally.HISTC, Tally.BINCOUNT_CUT})
"""Ways to count that leave out an expert behind the last."""

ROUNDING: Final = (*IN_EIGHT_BITS, Rewrite.PRODUCTS, *BOUNDS)


def legal(program: Program) -> Program:
    """Return `program` without the choices that do not go together."""
    program = _with_losses(_on_its_ranks(_around_layers(program)))
    program = _of_whole_sequences(program)
    recomputed = program.wrapping is Wrapping.CHECKPOINT
    banned: set[Reader | Detail] = set(WRITES) if recomputed else set()
    is_certain = len(program.layers) == 1 and program.running is Running.ALWAYS
    if recomputed or not is_certain or program.dynamic:
        banned.add(Reader.FAILING_CHECK)
    if program.poison is not Poison.NONE:  # NaN does not equal itself
        banned.add(Reader.CHECK_EQUAL)
    if program.sharing is Sharing.ROUTING:  # the second region repeats what the counts say
        banned.add(Reader.ARRIVED_WRITTEN)
    if program.routing is not Routing.SCORES:  # of no rows torch infers no size
        banned.add(Detail.INFERRED)
    layers = tuple(_legal_layer(layer, banned, program.width) for layer in program.layers)
    program = replace(program, layers=layers)
    if program.sharing is Sharing.INSIDE and not isinstance(layers[0], Experts):
        program = replace(program, sharing=Sharing.NOTHING)
    may_round = program.rewrite in BOUNDS or program.rewrite in FLAT_BOUNDS
    may_round = may_round or program.is_called_in_parts
    if may_round:  # an update would carry it into the next step
        program = replace(program, tokens=program.tokens[:1])
    if _may_rewrite(program):
        return program
    return _on_its_ranks(replace(program, rewrite=Rewrite.CHUNKS))


def _around_layers(program: Program) -> Program:
    """Return `program` without the choices around its layers that do not go together.

    A program that shares a routing, or nests a layer in another, has no layer that runs in some
    steps only. NaNs of one step would spread to all numbers of the next.
    """
    if program.running is not Running.ALWAYS and program.sharing is not Sharing.WEIGHTS:
        program = replace(program, sharing=Sharing.NOTHING)
    padded = any(a.padding is not Padding.NONE for a in program.experts)
    if program.poison is Poison.PADDING and not padded:
        program = replace(program, poison=Poison.NONE)
    if program.poison is not Poison.NONE:
        program = replace(program, tokens=program.tokens[:1])
    return program


def _with_losses(program: Program) -> Program:
    """Return `program` with losses only where they are not NaN and can be compared.

    A mean over no tokens is NaN, and so are its gradients. In parts, a loss is that of the whole
    batch, and an expert's mean over its rows is that of a part: no eager run has both.
    """
    if not program.has_losses:
        return program
    of_nothing = any(0 in step for step in program.tokens)
    grouped = any(a.style in GROUPED_PRODUCTS for a in program.experts)
    averages = any(Detail.OWN_MEAN in a.details for a in program.experts)
    is_parted = program.rewrite in PARTED
    if of_nothing or (is_parted and (grouped or averages)):
        bare = (
            replace(a, losses=frozenset()) if isinstance(a, Experts) else a for a in program.layers
        )
        return replace(program, layers=tuple(bare))
    if is_parted:
        return replace(program, dtype="float64", tokens=program.tokens[:1])
    return program


def _on_its_ranks(program: Program) -> Program:
    """Return `program` for four ranks where its rows are to come in two hops, else for two.

    Programs in two hops have one layer: combinations of layers are tried on two ranks, in half the
    time. Nodes are registered for the default group.
    """
    if program.rewrite not in TWO_HOPS:
        return replace(program, tokens=tuple(step[:NUM_RANKS] for step in program.tokens))
    layer = next(iter(program.experts), Experts(top_k=2))
    if layer.splits is Splits.RUNNING:
        layer = replace(layer, splits=Splits.TOLIST)
    return replace(
        program,
        layers=(layer,),
        groups=Groups.WORLD,
        sharing=Sharing.NOTHING,
        tokens=tuple(map(_of_four, program.tokens)),
    )


def _of_four(tokens: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens of four ranks: equal on all if those of the first two are equal."""
    first, second, *_ = tokens
    return (first,) * 4 if first == second else (first, second, second + 1, first)


def _of_whole_sequences(program: Program) -> Program:
    """Return `program` with no sequence cut short; where it is to run in parts, all steps alike.

    Such steps have one size, the last perhaps a smaller one on all ranks. Where a sequence is one
    token and sizes are symbols, they may have any size of at least as many sequences as parts.
    """
    number = program.positions
    if program.rewrite in PARTED:
        is_batch, least = program.dynamic and number == 1, PARTED[program.rewrite]
        steps = program.tokens[:1] * len(program.tokens)
        if is_batch:
            steps = tuple(tuple(max(n, least) for n in step) for step in program.tokens)
        if ends_smaller(program.tokens):
            steps = (*steps[:-1], program.tokens[-1])
        program = replace(program, tokens=steps, dynamic=is_batch)
    whole = tuple(tuple(-(-n // number) * number for n in step) for step in program.tokens)
    return replace(program, tokens=whole)


def _may_rewrite(program: Program) -> bool:
    """Whether the rewrite asked for is allowed, and its roundings reach no second routing."""
    if program.rewrite in WITHOUT_READS and not all(len({*step}) == 1 for step in program.tokens):
        return False
    if program.rewrite is Rewrite.GATHERED:  # a product with weights rounds each rank's share
        weights = (a.unsort is Unsort.EINSUM for a in program.experts)
        return all(len({*step}) == 1 for step in program.tokens) and not any(weights)
    if program.rewrite is Rewrite.PRODUCTS and not all(
        layer.style in GROUPED_PRODUCTS for layer in program.experts
    ):
        return False
    alone = len(program.layers) == 1 and program.sharing is Sharing.NOTHING
    return program.rewrite not in ROUNDING or alone


def _legal_layer(layer: Layer, banned: set[Reader | Detail], width: int) -> Layer:
    if isinstance(layer, OwnAttention) and layer.within is Within.HEADS and width % 2:
        return OwnAttention()
    if not isinstance(layer, Experts):
        return _legal_capacity(layer) if isinstance(layer, Capacity) else layer
    details = {*layer.details} - banned
    if Detail.CHECKPOINT in details:
        details -= {Detail.IN_PLACE_ROWS}
    details = {d for d in details if layer.style in USED_BY.get(d, Style)}
    if Detail.NESTED_CAT in details:
        details -= {Detail.EMPTY_JOIN}
    if Detail.ONE_NUMBER in details:
        banned = {*banned, Reader.ROWS_READ, Reader.ROWS_TWICE}
    if layer.readers & SAVE_ROWS:
        banned = {*banned, Reader.ROWS_WRITTEN}
    return replace(
        _of_its_tokens(_read_by_style(layer), details),
        top_k=min(layer.top_k, 2 * layer.local),
        readers=frozenset(layer.readers - banned),
        details=frozenset(details),
    )


def _of_its_tokens(layer: Experts, details: set[Detail]) -> Experts:
    """Return `layer` without the ways of sending and taking rows that do not go together.

    Padding tokens have no rows to take: sums by token are over the rows that were sent.
    """
    is_padded = layer.padding is not Padding.NONE
    if Detail.ONE_NUMBER in details or (is_padded and layer.unsort in BY_TOKEN):
        layer = replace(layer, unsort=Unsort.INDEX_ADD)
    if is_padded and layer.tally not in COUNTS_LAST:
        layer = replace(layer, tally=Tally.COMPARE)
    return layer


def _read_by_style(layer: Experts) -> Experts:
    """Return `layer` with its plainest choices where the style of its experts reads none."""
    for name, styles in READ_IN.items():
        if layer.style not in styles:
            layer = changed(layer, name, getattr(Experts(), name))
    if layer.back is Back.PIECES and layer.order is not Order.PIECES:
        layer = replace(layer, back=Experts().back)
    return layer


def _legal_capacity(layer: Capacity) -> Capacity:
    in_loops = layer.across in IN_LOOPS
    return replace(
        layer,
        top_k=min(layer.top_k, 2 * layer.local),
        extras=layer.extras - {Extra.EXPANDED} if in_loops else layer.extras,
    )
