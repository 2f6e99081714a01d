"""Programs drawn for a purpose: a rewrite by name, or choices that a record lacks.

Contract
    `asked_programs`: operations around the rows keep most layers out of two hops, and most graphs
    whole. So two thirds of the programs that ask for hops or parts have little that reads or sends
    more than rows and their sums. Those in parts have attention over sequences beside their
    experts, and more tokens.
    `wanted_programs` is a function of the seed and of the coverage before and since. A choice that
    leaves a layer whole stands in a layer of its own, beside one that can be rewritten. The
    programs end when no program in a number of tries has a lacking choice.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Final

from hypothesis import strategies as st

from moe_compile.testing.programs.choices import (
    MIXES_SEQUENCES,
    Across,
    Backward,
    Counts,
    Cut,
    Decoy,
    Detail,
    Extra,
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
    Routing,
    Running,
    Sharing,
    Splits,
    Style,
    Tally,
    Unsort,
    Weighing,
    Within,
    Wrapping,
)
from moe_compile.testing.programs.coverage import Coverage, choices, feature, features
from moe_compile.testing.programs.grammar import (
    CHOICES_OF_CAPACITY,
    CHOICES_OF_EXPERTS,
    GROUPED_PRODUCTS,
    PARTED,
    SEVERAL,
    TWO_HOPS,
    WITHOUT_READS,
    Attention,
    Capacity,
    Experts,
    Layer,
    LayerOfExperts,
    OwnAttention,
    Program,
    Rewrite,
    changed,
    with_choice,
)
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.strategy import (
    FILLING,
    FORMATS_OF_CAPACITY,
    LEAVES_WHOLE,
    ROOMS,
    SLOTS_LEFT_WHOLE,
    programs,
)

SENDS_MORE: Final = frozenset({Detail.PROBS_TRAVEL, Detail.SURE, Detail.ONE_NUMBER})
"""Details by which tensors travel beside the rows, or in place of them."""

FOLLOWED: Final = frozenset(
    {
        Reader.SEEN, Reader.STATISTICS, Reader.LATE_STATISTICS, Reader.NO_DROPOUT, Reader.EXPANDED,
        Reader.REPEATED,
    }
)  # fmt: skip
"""Readers that the plainer programs may have."""

ROW_BY_ROW: Final = frozenset(
    {Detail.TIED, Detail.COLUMN_CAT, Detail.NAMED, Detail.IN_PLACE, Detail.CHECKPOINT}
)
"""Details that are followed with rows behind those of the counts."""

SORTS: Final = frozenset({Order.ARGSORT, Order.SORT})
"""Orders that passes follow whichever way rows are put back."""

WITHINS: Final = (
    *[within for within in Within if within not in MIXES_SEQUENCES] * 3,
    *(Within.CLASS_TOKEN, Within.QUERIES, Within.POSITION_BIAS, Within.NO_DROPOUT) * 3,
    *MIXES_SEQUENCES,
)
"""Attention of such programs: one decoy keeps the whole batch together, and hides a fault."""


@st.composite
def asked_programs(draw: st.DrawFn, rewrite: str = "", layers: str = "") -> Program:
    """Draw a program of such layers that asks for `rewrite`, where it may; "" is any."""
    program = draw(programs(layers))
    if rewrite:
        program = legal(replace(program, rewrite=Rewrite[rewrite]))
    if program.rewrite in PARTED:
        program = legal(draw(_in_sequences(program)))
    if program.rewrite in {*TWO_HOPS, *PARTED} and draw(st.sampled_from([True, True, False])):
        plainer = tuple(map(_plainer, program.layers))
        if program.rewrite in PARTED:  # one layer that is left whole keeps the others so
            plainer = tuple(map(_proven, plainer))
            width = FILLING[program.dtype]
            program = replace(program, width=width, hidden=width)
        program = legal(replace(program, layers=plainer))
    if program.rewrite in WITHOUT_READS and draw(st.sampled_from([True] * 7 + [False])):
        program = legal(_found_on_the_device(program))
    return program


def _found_on_the_device(program: Program) -> Program:
    """Return `program` with experts that find their rows without a read by the host.

    The number of rows is known when compiling, and equal on all ranks. No operator outside of the
    experts reads a number of the host.
    """
    first, *others = program.layers
    if not program.experts:  # only layers of experts by counts have a read to do without
        first = Experts(top_k=2)
    layers = tuple(
        replace(
            a,
            style=Style.PADDED,
            padding=Padding.NONE,
            tally=Tally.COMPARE if a.tally in LEAVES_WHOLE else a.tally,
            counts=Counts.FUNCTIONAL,
            splits=Splits.TOLIST if a.splits is Splits.RUNNING else a.splits,
            details=a.details & ROW_BY_ROW,
        )
        if isinstance(a, Experts)
        else a
        for a in map(_plainer, (first, *others))
    )
    tokens = tuple((max(1, step[0]),) * len(step) for step in program.tokens)
    if program.sharing is Sharing.INSIDE:  # scales a region by sizes of another
        program = replace(program, sharing=Sharing.NOTHING)
    return _of_width(replace(program, layers=layers, tokens=tokens, dynamic=False))


@st.composite
def _in_sequences(draw: st.DrawFn, program: Program) -> Program:
    """Return `program` with attention over sequences between its layers, and some tokens more."""
    layers: list[Layer] = []
    for layer in program.layers:
        attention = st.sampled_from(WITHINS).map(lambda within: OwnAttention(within=within))
        layers += [*draw(st.lists(attention, max_size=3)), layer]
    more = draw(st.sampled_from([0, 2, 3, 4]))
    tokens = tuple(tuple(n + more for n in step) for step in program.tokens)
    doubled = tuple(tuple(2 * n for n in step) for step in tokens)
    in_sequences = len(layers) > len(program.layers)
    return replace(program, layers=tuple(layers), tokens=doubled if in_sequences else tokens)


def _proven(layer: Layer) -> Layer:
    """Return a layer of experts without the choices that leave it whole."""
    if isinstance(layer, Attention | Capacity):
        return Experts(top_k=2)
    if not isinstance(layer, Experts):
        return layer
    if layer.order not in SORTS:
        layer = replace(layer, order=Order.ARGSORT)
    layer = replace(layer, padding=Padding.NONE)  # which experts a token chooses is not followed
    names = [f.name for f in fields(layer) if getattr(layer, f.name) in LEAVES_WHOLE]
    return replace(layer, **{name: getattr(Experts(), name) for name in names})


def _plainer(layer: Layer) -> Layer:
    """Return a layer of experts that sends only rows, and whose readers read rows and sums."""
    if not isinstance(layer, Experts):
        return layer
    return replace(
        layer,
        move=Move.FUNCTIONAL if layer.move in LEAVES_WHOLE else layer.move,
        readers=layer.readers & FOLLOWED,
        decoys=frozenset(),
        details=layer.details - LEAVES_WHOLE - SENDS_MORE,
    )


MOST: Final = 3
"""Lacking choices drawn for a layer, besides the choice that its program is for."""

TRIES: Final = 300
"""Programs made for one that is run: some choices are legal beside some others alone."""

AROUND: Final = (Routing, Groups, Sharing, Backward, Wrapping, Running, Poison)
"""Kinds of choices of a whole program that go with any layers."""

IN_PARTS: Final = (Weighing, Unsort, Loss, Find, Put, Cut)
"""Kinds of choices of experts that a graph in parts of the batch may have."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The number of programs that each choice lacks, and a source of random numbers."""

    lacking: dict[enum.Enum, int]
    random: Random

    def some(self, kinds: Collection[type[enum.Enum]], most: int) -> list[enum.Enum]:
        """Return up to `most` distinct choices of these kinds, weighted by what each lacks."""
        left = {choice: n for choice, n in self.lacking.items() if type(choice) in kinds}
        return self._drawn(left, most)

    def _drawn(self, left: dict[enum.Enum, int], most: int) -> list[enum.Enum]:
        found: list[enum.Enum] = []
        while left and len(found) < most:
            (one,) = self.random.choices([*left], [*left.values()])
            found.append(one)
            del left[one]
        return found

    def _any(self, kinds: Collection[type[enum.Enum]]) -> list[enum.Enum]:
        """Return up to two choices that leave no layer whole: rare ones meet common ones."""
        members = [choice for kind in kinds for choice in kind if not _leaves_whole(choice)]
        return self.random.sample(members, self.random.randrange(3))

    def program(self) -> Program:
        """Return a program with some of the choices."""
        (first,) = self._drawn(self.lacking.copy(), 1)
        if isinstance(first, Within) or first in PARTED:
            program = self._in_parts(first)
        elif type(first) in CHOICES_OF_CAPACITY:
            program = self._with_capacity(first)
        else:
            program = self._of_experts(first)
        for choice in (first, *self.some(AROUND, self.random.randrange(2))):
            if type(choice) in AROUND:
                program = changed(program, type(choice).__name__.lower(), choice)
        program = changed(program, "seed", self.random.randrange(1000))
        return legal(changed(program, "chunks", self.random.choice([2, 2, 3])))

    def _of_experts(self, first: enum.Enum) -> Program:
        rewrite = first if isinstance(first, Rewrite) else Rewrite.CHUNKS
        layers = self._layers(Experts(top_k=self.random.choice([1, 2])), first, CHOICES_OF_EXPERTS)
        if isinstance(first, Heads):
            layers += (Attention(heads=first),)
        dtype = self.random.choice(["bfloat16", "float32", "float64"])
        uneven = ((3, 6),) if not isinstance(first, Heads) else ((4, 4),)
        tokens = self.random.choice([((6, 6),), ((6, 6), (6, 6)), uneven, ((6, 6), (2, 2))])
        program = Program(layers=layers, rewrite=rewrite, tokens=tokens, dtype=dtype)
        if rewrite in WITHOUT_READS:
            program = _found_on_the_device(changed(program, "row_room", self.random.choice(ROOMS)))
        return _of_width(program)

    def _in_parts(self, first: enum.Enum) -> Program:
        rewrite = first if isinstance(first, Rewrite) else self.random.choice([*PARTED])
        within = [w for w in self.some([Within], 3) if w not in MIXES_SEQUENCES]
        within += [first] if isinstance(first, Within) and first not in within else []
        more = [c for c in self.some([*IN_PARTS, Reader], 2) if self._is_followed(c)]
        layers: list[Layer] = [OwnAttention(within=w) for w in within if isinstance(w, Within)]
        experts = _with_choices(Experts(top_k=self.random.choice([1, 2])), more)
        layers.insert(self.random.randrange(len(layers) + 1), experts)
        number = 2 * PARTED[rewrite] * self.random.choice([1, 2])
        dtype = self.random.choice(["bfloat16", "float32", "float64"])
        return _of_width(
            Program(layers=tuple(layers), rewrite=rewrite, tokens=((number, number),), dtype=dtype)
        )

    def _is_followed(self, choice: enum.Enum) -> bool:
        return choice in FOLLOWED if isinstance(choice, Reader) else choice not in LEAVES_WHOLE

    def _with_capacity(self, first: enum.Enum) -> Program:
        layers = self._layers(Capacity(top_k=2), first, CHOICES_OF_CAPACITY)
        layers = tuple(
            changed(a, "across", Across.BATCHED)
            if isinstance(a, Capacity) and Extra.BIAS in a.extras and a.across is Across.EINSUM
            else a
            for a in layers
        )
        formats = [f for f in FORMATS_OF_CAPACITY if f.dtype != "bfloat16"]  # of sixteen slots
        dtype, width, hidden = self.random.choice(formats)
        tokens = self.random.choice([((5, 5),), ((6, 6),), ((4, 4), (4, 4))])
        return Program(layers=layers, tokens=tokens, dtype=dtype, width=width, hidden=hidden)

    def _layers(
        self, plain: LayerOfExperts, first: enum.Enum, kinds: Collection[type[enum.Enum]]
    ) -> tuple[Layer, ...]:
        """Return a layer with some choices; a second layer has those that would leave it whole."""
        asked: list[enum.Enum] = [first] if type(first) in kinds else []
        drawn: list[enum.Enum] = self.some(kinds, self.random.randint(1, MOST))
        chosen: list[enum.Enum] = list(dict.fromkeys([*self._any(kinds), *drawn, *asked]))
        layers: list[Layer] = [_with_choices(plain, [c for c in chosen if not _leaves_whole(c)])]
        if whole := [c for c in chosen if _leaves_whole(c)]:
            layers.append(_with_choices(plain, whole[-1:]))
        self.random.shuffle(layers)
        return tuple(layers)


def wanted_programs(seed: int, covered: Coverage) -> Iterator[Program]:
    """Yield programs as long as `covered`, which the caller updates, lacks choices."""
    random = Random(seed)
    while lacking := {c: n for c in choices() if (n := covered.lacks(feature(c)))}:
        names = {*map(feature, lacking)}
        made = (_Wanted(lacking, random).program() for _ in range(TRIES))
        program = next((one for one in made if features(one) & names), None)
        if program is None:
            return
        yield program


def _leaves_whole(choice: enum.Enum) -> bool:
    whole = LEAVES_WHOLE | SLOTS_LEFT_WHOLE
    return choice in whole or isinstance(choice, Decoy | Mixing)


def _with_choices(layer: LayerOfExperts, chosen: list[enum.Enum]) -> LayerOfExperts:
    """Return `layer` with all of these choices, as far as they go together."""
    for choice in chosen:
        before, layer = layer, with_choice(layer, choice)
        if (name := SEVERAL.get(type(choice))) is not None:
            layer = changed(layer, name, getattr(before, name) | {choice})
    return layer


def _of_width(program: Program) -> Program:
    """Return `program` with widths that fill vectors, in a type that its products allow."""
    if any(layer.style in GROUPED_PRODUCTS for layer in program.experts):
        program = changed(program, "dtype", "bfloat16")
    width = FILLING[program.dtype]
    return changed(changed(program, "width", width), "hidden", width)
