"""Hypothesis strategies over layer programs.

Contract
    Every drawn program runs eagerly; combinations that torch itself does not take are not drawn.
    The plainest member of a choice is drawn most often, so that programs with few features are
    common.
    Most programs have a layer without choices that leave a region whole, alone or beside a layer
    with some: a fault of a rewrite shows only where something is rewritten.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeVar

from hypothesis import strategies as st

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
    Wrapping,
)
from moe_compile.testing.programs.expert_text import LISTED
from moe_compile.testing.programs.grammar import (
    CHOICES_OF_EXPERTS,
    GROUPED_PRODUCTS,
    Attention,
    Capacity,
    Experts,
    Layer,
    Program,
    Rewrite,
    with_choice,
)
from moe_compile.testing.programs.legal import legal

Choice = TypeVar("Choice", bound=enum.Enum)


def mostly(members: Iterable[Choice], plain_of: int = 2) -> st.SearchStrategy[Choice]:
    """Draw one of `members`, the first in `1 / plain_of` of the draws or more."""
    drawn: Sequence[Choice] = list(members)
    return st.sampled_from([drawn[0]] * (len(drawn) // plain_of) + [*drawn])


def few(kind: Iterable[Choice], most: int) -> st.SearchStrategy[frozenset[Choice]]:
    """Draw none or up to `most` of `kind`."""
    drawn: st.SearchStrategy[Any] = st.sampled_from(list(kind))
    some = st.frozensets(drawn, min_size=1, max_size=most)
    return st.one_of(st.just(frozenset()), some, some)


SLOTS_LEFT_WHOLE: Final[frozenset[enum.Enum]] = frozenset(
    {Act.FUNCTION, Act.WHERE, Act.MASKED_FILL, Extra.SENT_READ, Extra.CHECKPOINT}
)
"""Choices that leave a layer with a capacity whole and mix no experts."""

FILLING_SLOTS: Final = frozenset({Act.SILU, Act.GELU, Act.SIGMOID})
"""Activations a CPU rounds alike where an expert's slots fill whole blocks, as sixteen do."""

AT_ONCE: Final = (Across.OUTERMOST, Across.BATCHED, Across.MATMUL)
"""Ways that keep experts outermost, as sums of the gradient of a bias need it."""


class Formats(NamedTuple):
    """Widths whose slots fill 64 bytes; with others a CPU's products round by position."""

    dtype: str
    width: int
    hidden: int


FORMATS_OF_CAPACITY: Final = (
    Formats("float32", 16, 32),
    Formats("float32", 32, 16),
    Formats("float32", 16, 16),
    Formats("float64", 16, 8),
    Formats("float64", 8, 16),
    Formats("bfloat16", 32, 32),
    Formats("bfloat16", 32, 64),
    Formats("bfloat16", 16, 32),
)


@st.composite
def capacities(draw: st.DrawFn, *, dtype: str, whole: bool = False) -> Capacity:
    """Draw a layer with a capacity; `whole` allows what leaves it whole but mixes no experts."""
    kept = frozenset[enum.Enum]() if whole else SLOTS_LEFT_WHOLE
    act = draw(st.sampled_from([a for a in Act if a not in kept]))
    extras = draw(few([e for e in Extra if e not in kept], 3))
    across = draw(st.sampled_from(Across))
    full = dtype == "bfloat16" or act in FILLING_SLOTS
    if Extra.BIAS in extras and across is Across.EINSUM and not whole:
        across = draw(st.sampled_from(AT_ONCE))
    return Capacity(
        local=draw(st.sampled_from([2, 2, 2, 3, 4, *([1] if whole else [])])),
        top_k=draw(st.sampled_from([1, 2, 2])),
        room=Room.SIXTEEN if full and not whole else draw(mostly(Room, 4)),
        fill=draw(st.sampled_from(Fill)),
        sent=draw(st.sampled_from(Sent)),
        move=draw(st.sampled_from([Move.FUNCTIONAL, Move.OF_ITSELF])),
        across=across,
        act=act,
        extras=extras,
    )


@st.composite
def mixed_capacities(draw: st.DrawFn, *, dtype: str) -> Capacity:
    """Draw a layer with a capacity that must stay whole, plain or not."""
    layer = draw(st.one_of(st.just(Capacity(top_k=2)), capacities(dtype=dtype)))
    least, most = draw(st.sampled_from([(1, 1), (1, 1), (4, 6)]))  # several hide a fault with one
    mixing = st.frozensets(st.sampled_from(Mixing), min_size=least, max_size=most)
    return replace(layer, mixing=draw(mixing))


STYLES: Final = (Style.LOOP, Style.SORTED_LOOP, Style.INDEX_ADD, Style.SEARCHED, Style.RUNS)
BESIDE_SLOTS: Final = (
    ("nothing",) * 8 + ("mixed",) * 6 + ("whole",) * 4 + ("experts", "heads", "two") * 2
)
"""Layers beside a layer that can be chunked; other experts are plain."""


@st.composite
def layers_with_capacity(draw: st.DrawFn, *, dtype: str) -> tuple[Layer, ...]:
    """Draw a layer with a capacity that can be chunked, and perhaps a second layer."""
    first, beside = draw(capacities(dtype=dtype)), draw(st.sampled_from(BESIDE_SLOTS))
    others: dict[str, st.SearchStrategy[Layer]] = {
        "mixed": mixed_capacities(dtype=dtype),
        "whole": capacities(dtype=dtype, whole=True),
        "experts": st.sampled_from(STYLES).map(lambda style: Experts(top_k=2, style=style)),
        "heads": st.sampled_from(Heads).map(lambda heads: Attention(heads=heads)),
        "two": capacities(dtype=dtype),
    }
    if beside not in others:
        return (first,)
    layers = (first, draw(others[beside]))
    return layers if draw(st.booleans()) else layers[::-1]


SEARCHING: Final = (Style.SEARCHED, Style.SEARCHED, Style.RUNS)
"""Styles that have choices of their own, drawn more often."""

DETAILS_OF: Final[dict[Style, tuple[Detail, ...]]] = {
    **dict.fromkeys(LISTED, (Detail.DUMMY, Detail.NESTED_CAT, Detail.EMPTY_JOIN) * 2),
    **dict.fromkeys(SEARCHING, (Detail.DUMMY, Detail.DUMMY_SUM, Detail.OWN_MEAN) * 2),
    Style.GROUPED: (*(Detail.SUMS_WRITTEN,) * 8, *(Detail.BANK,) * 24, *(Detail.CROSSED,) * 12),
    Style.FUSED: (Detail.SUMS_WRITTEN, Detail.CROSSED) * 8,
}
"""Details that have an effect in these styles only, and are drawn more often in them."""

SELDOM: Final[frozenset[enum.Enum]] = frozenset(
    {
        Detail.NAMED, Detail.BIAS, Style.ASSIGN, Style.INDEX_COPY,
        Reader.ROWS_WRITTEN, Reader.EARLY_SET, Reader.EARLY_DATA, Reader.COUNTS_WRITTEN,
        Reader.ARRIVED_WRITTEN, Reader.HOST_VMAP, Reader.BREAK, Reader.ROWS_HANDED_BACK,
        Reader.AUTOCAST_SET, Reader.HOOK_ROWS, Reader.ROWS_ACROSS, Reader.ROWS_NORMALIZED,
        Reader.ROWS_VIEWED, Reader.ROWS_SQUARED, Detail.BANK, Detail.SUMS_WRITTEN,
        Reader.SEEN, Reader.NO_DROPOUT, Reader.EXPANDED, Reader.REPEATED, Back.COLUMNS_PUT,
    }
)  # fmt: skip
"""Choices that would occur in fewer than 40 rewritten programs of 3,000; drawn thrice."""

FILLING: Final = {"bfloat16": 64, "float32": 32, "float64": 16}
"""Widths that fill two vectors of 64 bytes: in others a CPU rounds some operators, and products of
4 or 8 bytes a value, by where a row stands, and layers are left whole."""

LEAVES_WHOLE: Final[frozenset[enum.Enum]] = frozenset(
    {
        Tally.BINCOUNT, Move.HALVED, Move.HANDLE,
        Style.DENSE, Style.BATCHED, Style.STACKED,
        Order.MISMATCHED, Order.UNSTABLE, Order.PLACE_AMONG_ALL,
        Detail.NO_GRAD_TWIN,
        Detail.VIEW_WRITE, Detail.LISTS, Detail.LONGEST,
        Reader.HOST_VMAP, Reader.ARRIVED_WRITTEN, Reader.BREAK, Reader.COUNTS_WRITTEN,
        Reader.ROWS_TWICE, Reader.ROWS_WRITTEN, Reader.ROWS_SQUARED, Reader.ROWS_NORMALIZED,
        Reader.ROWS_CHECKPOINTED, Reader.ROWS_VIEWED, Reader.ROWS_HANDED_BACK, Reader.EARLY_DATA,
        Reader.EARLY_SET, Back.INVERSE_WRITTEN, Reader.HOOK_ROWS, Reader.ROWS_ACROSS,
        Reader.AUTOCAST_SET,
    }
)  # fmt: skip
"""Choices each of which alone leaves a layer whole (`sweep` has these programs)."""


BY_PLACE: Final = frozenset({Detail.OUTER_ROW, Detail.BESIDE})
"""Details a CPU rounds by the place of rows in memory in 4 and 8 bytes a value, not in 2."""


@st.composite
def experts(draw: st.DrawFn, *, dtype: str, grouped: bool, whole: bool = False) -> Experts:
    """Draw an MoE layer; `grouped` allows grouped products, `whole` choices that leave it whole."""
    kept = LEAVES_WHOLE if dtype == "bfloat16" else LEAVES_WHOLE | BY_PLACE

    def among(kind: Iterable[Choice]) -> list[Choice]:
        return _weighted(member for member in kind if whole or member not in kept)

    local = draw(st.sampled_from([*[2] * 6, 3, 4, *([1] if whole else [])]))
    styles = [*among(Style), Style.LOOP, Style.SORTED_LOOP, *SEARCHING, *GROUPED_PRODUCTS]
    style = draw(st.sampled_from([s for s in styles if grouped or s not in GROUPED_PRODUCTS]))
    orders = [o for o in among(Order) if not (style is Style.BATCHED and o is Order.MISMATCHED)]
    order = draw(st.sampled_from(orders))
    listed = style in LISTED
    splits = draw(mostly(Splits))
    find, put, cut = draw(st.tuples(*map(st.sampled_from, (Find, Put, Cut))))
    details = among(Detail)
    details += [member for member in details if member in BY_PLACE]  # else drawn seldom
    return Experts(
        local=local,
        top_k=draw(st.sampled_from([1, 2, 2])),
        tally=draw(mostly(among(Tally))),
        counts=draw(mostly(Counts, 6)),
        splits=Splits.SLICE_SUM if listed and draw(st.booleans()) else splits,
        move=draw(st.sampled_from([Move.FUNCTIONAL] * 2 + among(Move))),
        style=style,
        order=order,
        back=draw(st.sampled_from(among(Back) + [Back.PIECES] * 9 * (order is Order.PIECES))),
        find=find,
        put=put,
        cut=cut,
        act=draw(st.sampled_from(among(Act))),
        details=draw(few([*details, *DETAILS_OF.get(style, ())], 4)),
        readers=draw(_readers(among(Reader))),
        late=draw(st.booleans()),
        padding=draw(st.sampled_from([Padding.NONE] * 7 + list(Padding))),
        weighing=draw(mostly(Weighing, 4)),
        unsort=draw(mostly(Unsort, 3)),
        losses=draw(few(Loss, 2)) if draw(st.booleans()) else frozenset(),
    )


@st.composite
def programs(draw: st.DrawFn, layers: str = "") -> Program:
    """Draw a program, for two ranks but where rows are to come in two hops.

    `layers` is a key of `PROGRAMS_OF`, "" for a drawn one.
    """
    return legal(draw(PROGRAMS_OF[layers or draw(st.sampled_from(KINDS))]))


@st.composite
def _programs_of_experts(draw: st.DrawFn) -> Program:
    dtype = draw(st.sampled_from(["bfloat16", "bfloat16", "bfloat16", "float32", "float64"]))
    filling = [FILLING[dtype]] * 15
    width = draw(st.sampled_from([16, 16, 24, 17, 8, *filling]))
    hidden = draw(st.sampled_from([32, 16, 32, 8, 20, *filling]))
    grouped = dtype == "bfloat16" and width % 8 == 0 and hidden % 8 == 0
    layers = draw(_layers(dtype=dtype, grouped=grouped))
    even = any(isinstance(layer, Attention) for layer in layers)
    program = draw(around(layers, (dtype, width, hidden), even=even))
    return replace(program, rewrite=draw(st.sampled_from(REWRITES_DRAWN)))


@st.composite
def _programs_with_capacity(draw: st.DrawFn) -> Program:
    format = draw(st.sampled_from(FORMATS_OF_CAPACITY))
    layers = draw(layers_with_capacity(dtype=format[0]))
    program = draw(around(layers, format, even=True))
    rewrite = draw(st.sampled_from([Rewrite.CHUNKS] * 8 + list(Rewrite)))
    is_dynamic = program.dynamic and draw(st.booleans())  # these are left whole
    return replace(program, rewrite=rewrite, dynamic=is_dynamic)


REWRITES_DRAWN: Final = (
    *[*Rewrite] * 4, *[Rewrite.FP8] * 24, *[Rewrite.TOKENS] * 26, *[Rewrite.PARTS] * 16,
    *[Rewrite.THREE_PARTS] * 6, *[Rewrite.GATHERED] * 2, *[Rewrite.PRODUCTS] * 8,
    *[Rewrite.NO_READS] * 4, *[Rewrite.NO_READS_IN_CHUNKS] * 4,
)  # fmt: skip
"""Rewrites, with those that few programs allow, or that leave many whole, repeated."""

BESIDE: Final = ("nothing",) * 14 + ("whole",) * 14 + ("decoy",) * 8 + ("heads",) * 5 + ("alone",)
"""Layers beside a layer that can be chunked; "alone" is any layer by itself."""

READERS_OF_ONE_LAYER: Final = (
    *[frozenset[Reader]()] * 4,
    *[frozenset({Reader.FAILING_CHECK})] * 8,
    *[
        frozenset({reader})
        for reader in 3
        * (
            Reader.ROWS_TWICE,
            Reader.ROWS_SQUARED,
            Reader.ROWS_NORMALIZED,
            Reader.ROWS_CHECKPOINTED,
            Reader.ROWS_VIEWED,
            Reader.ROWS_HANDED_BACK,
        )
    ],
)
"""Readers of a program's only layer: a check fails in such programs alone. A layer that gradients
of three terms leave whole must have no other cause, or a fault is hidden."""


@st.composite
def _layers(draw: st.DrawFn, *, dtype: str, grouped: bool) -> tuple[Layer, ...]:
    beside = draw(st.sampled_from(BESIDE))
    if beside == "alone":
        return (draw(experts(dtype=dtype, grouped=grouped, whole=True)),)
    first = draw(experts(dtype=dtype, grouped=grouped))
    if beside == "nothing":
        first = replace(first, readers=first.readers | draw(st.sampled_from(READERS_OF_ONE_LAYER)))
    layers: list[Layer] = [first]
    if beside == "whole":
        layers.append(draw(_left_whole()))
    elif beside == "decoy":
        # one or several: several make rare choices frequent, but hide a fault of one of them
        least, most = draw(st.sampled_from([(1, 1), (5, 8), (5, 8)]))
        decoys = draw(st.frozensets(st.sampled_from(Decoy), min_size=least, max_size=most))
        layers.append(
            Experts(
                local=draw(st.sampled_from([2, 3])),
                top_k=draw(st.sampled_from([1, 2])),
                style=draw(st.sampled_from([Style.LOOP, Style.SORTED_LOOP])),
                order=draw(st.sampled_from([Order.ARGSORT, Order.DESCENDING])),
                decoys=decoys,
            )
        )
    elif beside == "heads":
        several = st.lists(st.sampled_from(Heads), min_size=1, max_size=4, unique=True)
        heads = draw(several)
        layers += [Attention(heads=h) for h in heads]
    return tuple(reversed(layers) if draw(st.booleans()) else layers)


@st.composite
def _left_whole(draw: st.DrawFn) -> Experts:
    """Draw a layer that is plain but for one or several choices that leave it whole."""
    if not draw(st.integers(0, 2)):  # several hide a fault with one of them
        kept = [member for kind in CHOICES_OF_EXPERTS for member in _whole(kind)]
        return with_choice(Experts(top_k=2), draw(st.sampled_from(kept)))

    def one(plain: Choice) -> Choice:
        return draw(st.sampled_from([plain, *_whole(type(plain)) * 3]))

    details = draw(few(_whole(Detail), 5))
    style, order = one(Style.SORTED_LOOP), one(Order.ARGSORT)
    style = Style.SORTED_LOOP if Detail.LONGEST in details else style
    clash = style is Style.BATCHED and order is Order.MISMATCHED
    return Experts(
        tally=one(Tally.COMPARE),
        move=one(Move.FUNCTIONAL),
        style=style,
        order=Order.PLACES if clash else order,
        back=one(Back.INDEX_COPY),
        act=one(Act.RELU),
        details=details,
        readers=draw(few(_whole(Reader), 4)),
    )


def _whole(kind: type[Choice]) -> list[Choice]:
    """Return the members of `kind` that leave a layer whole, in their order."""
    return _weighted(member for member in kind if member in LEAVES_WHOLE)


def _weighted(members: Iterable[Choice]) -> list[Choice]:
    return [m for member in members for m in [member] * (3 if member in SELDOM else 1)]


def _readers(kind: list[Reader]) -> st.SearchStrategy[frozenset[Reader]]:
    """Draw none, few or several readers, without the failing check."""
    drawn = st.sampled_from([reader for reader in kind if reader is not Reader.FAILING_CHECK])
    few, several = (st.frozensets(drawn, min_size=a, max_size=b) for a, b in ((1, 2), (3, 5)))
    return st.one_of(st.just(frozenset()), few, several, several)


PROGRAMS_OF: Final = {
    "experts": _programs_of_experts(),
    "capacity": _programs_with_capacity(),
}
"""Programs by what their layers are: of experts found by counts, attention beside them perhaps; of
experts with a capacity."""

KINDS: Final = ("experts",) * 14 + ("capacity",) * 4


ROOMS: Final = (2.0, 0.5, 1.0, 1.0, 1.25, 1.5)
"""Room for rows where the host reads no counts: all but the first are too small in some steps."""


@st.composite
def around(
    draw: st.DrawFn, layers: tuple[Layer, ...], format: tuple[str, int, int], *, even: bool
) -> Program:
    """Draw a program of these layers; `format` is the dtype, the width and the hidden width."""
    dtype, width, hidden = format
    return Program(
        layers=layers, width=width, hidden=hidden, dtype=dtype,
        tokens=draw(tokens(even=even)),
        routing=draw(mostly(Routing)),
        groups=draw(st.sampled_from([Groups.WORLD] * 12 + list(Groups))),
        sharing=draw(st.sampled_from([Sharing.NOTHING] * 5 + list(Sharing))),
        backward=draw(st.sampled_from([Backward.ONCE] * 5 + list(Backward))),
        wrapping=draw(st.sampled_from([Wrapping.BARE] * 3 + list(Wrapping))),
        running=draw(st.sampled_from([Running.ALWAYS] * 9 + [Running.IF_ANY])),
        poison=draw(st.sampled_from([Poison.NONE] * 9 + [Poison.PADDING] * 3 + list(Poison))),
        dynamic=draw(st.sampled_from([False, False, False, True])),
        chunks=draw(st.sampled_from([2, 2, 2, 3, 4])),
        row_room=draw(st.sampled_from(ROOMS)),
        seed=draw(st.integers(0, 999)),
    )  # fmt: skip


@st.composite
def tokens(draw: st.DrawFn, *, even: bool) -> tuple[tuple[int, int], ...]:
    """Draw the tokens of both ranks in one step or several; `even` has equally many on both.

    A last batch is smaller more often than steps are of any other sizes.
    """
    one = st.integers(1, 6).map(lambda t: (t, t))
    if draw(st.integers(0, 9)) == 9:
        most = draw(st.integers(3, 6))
        last = draw(st.integers(1, most - 1))
        return ((most, most),) * draw(st.sampled_from([1, 1, 2])) + ((last, last),)
    if even:
        return tuple(draw(st.lists(one, min_size=1, max_size=2)))
    number = st.sampled_from([0, *range(7)])
    uneven = st.tuples(number, number)
    first = draw(uneven if draw(st.integers(0, 4)) == 4 else one)
    rest = draw(st.sampled_from([*[0] * 20, 1, 1, 2]))  # each new size may cost a compilation
    if not rest:
        return (first,) * draw(st.sampled_from([1, 1, 2]))
    return (first, *(draw(st.one_of(one, uneven, st.just(first))) for _ in range(rest)))
