"""Every pair of choices of a layer and its rewrite that goes together, in few generated programs.

A fault of a rewrite seldom needs more than two choices to meet (Kuhn, Wallace and Gallo, Software
Fault Interactions and Implications for Software Testing, 2004). One process is both ranks, or all
four of two nodes (`moe_compile/testing/mirrored_rank.py`), so a program takes two seconds or three.
What ranks have to differ for is tried elsewhere: tokens gathered of all ranks, uneven numbers,
and steps without host reads, which ranks agree to run again.
"""

import itertools
import random
from collections import Counter, deque

import pytest

from moe_compile.report.region_reports import IN_TWO_HOPS
from moe_compile.testing.programs.choices import (
    Across,
    Act,
    Back,
    Counts,
    Cut,
    Detail,
    Extra,
    Fill,
    Find,
    Move,
    Order,
    Put,
    Reader,
    Room,
    Sent,
    Splits,
    Style,
    Unsort,
    Wrapping,
)
from moe_compile.testing.programs.grammar import (
    GROUPED_PRODUCTS,
    READ_IN,
    TWO_HOPS,
    Capacity,
    Experts,
    Program,
    Rewrite,
)
from moe_compile.testing.programs.judge import Outcome, judgement_of
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.run import run
from moe_compile.testing.programs.strategy import (
    BY_PLACE,
    FILLING,
    FORMATS_OF_CAPACITY,
    LEAVES_WHOLE,
    SLOTS_LEFT_WHOLE,
)
from moe_compile.testing.programs.text import source_of
from tests.this_torch import fills_memory_by_read_sizes, need


def pairs_of(row):
    return {*map(frozenset, itertools.combinations(row.items(), 2))}


def legal_pairs(kinds, go_together):
    several = itertools.combinations(kinds.items(), 2)
    rows = ({a: x, b: y} for (a, xs), (b, ys) in several for x in xs for y in ys)
    return [frozenset(row.items()) for row in rows if go_together(row)]


def covering_rows(paired, beside, go_together):
    """Return rows of choices with every legal pair of `paired`, those with most new ones first.

    Choices of `beside` occur as often as others of their kind.
    """
    kinds, used, rows = {**paired, **beside}, Counter(), []
    legal = legal_pairs(kinds, go_together)
    allowed, left = {*legal}, {pair: None for pair in legal if dict(pair).keys() <= paired.keys()}
    drawn = random.Random(0)

    def completed(pair):
        row = dict(pair)
        for name in [name for name in kinds if name not in row]:
            worth = {}
            for member in kinds[name]:
                pairs = [frozenset({(name, member), other}) for other in row.items()]
                if allowed.issuperset(pairs):
                    worth[member] = len(left.keys() & pairs), -used[name, member]
            row = {**row, name: max(worth, key=worth.__getitem__)} if worth else row
        return {name: row[name] for name in kinds if name in row}

    while left:
        several = [completed(pair) for pair in drawn.sample([*left], min(5, len(left)))]
        rows.append(max(several, key=lambda row: len(pairs_of(row) & left.keys())))
        used.update(rows[-1].items())
        made = pairs_of(rows[-1])
        left = {pair: None for pair in left if pair not in made}
    return rows


def slow_after(quick, rows):
    return [*quick, *(pytest.param(r, marks=pytest.mark.slow) for r in rows if r not in quick)]


def names_of(row):
    return "-".join(getattr(choice, "name", str(choice)) for choice in row.values())


def check(program, verdict):
    judgement = judgement_of([run(0, source_of(program))])
    assert judgement.kind is Outcome.SAME, judgement.detail
    assert judgement.is_chunked and verdict in judgement.verdicts, judgement.verdicts
    assert len(judgement.verdicts) == 1


# --- experts found by counts -------------------------------------------------------------------


def followed(kind):
    return [member for member in kind if member not in LEAVES_WHOLE]


ELSEWHERE = (
    Rewrite.GATHERED,  # a mirror gathers nothing: test_switched_dispatch.py
    Rewrite.HOPS, Rewrite.HOP_BOTH, Rewrite.SUM_SLICES,  # test_hop_programs.py
    Rewrite.SCORES,  # test_apply_scores.py
    Rewrite.PRODUCTS,  # test_programs.py
    Rewrite.UNSCHEDULED, Rewrite.MODEL_RECOMPUTE, Rewrite.THREE_PARTS,  # replay as others do
    Rewrite.NO_READS, Rewrite.NO_READS_IN_CHUNKS,  # test_programs_without_reads.py
    Style.PADDED,  # some rows of grouped products, once more
)  # fmt: skip

PAIRED = {
    "rewrite": [rewrite for rewrite in Rewrite if rewrite not in ELSEWHERE],
    "style": [style for style in followed(Style) if style not in ELSEWHERE],
    "order": followed(Order),
    "move": followed(Move),
    "dtype": [*FILLING],
}
BESIDE = {
    "counts": followed(Counts),
    "splits": followed(Splits),
    "unsort": followed(Unsort),
    "back": followed(Back),
    "find": followed(Find),
    "put": followed(Put),
    "cut": followed(Cut),
    "act": followed(Act),
}

FUZZED_ALONE = {
    Reader.FAILING_CHECK,  # ends the program
    Reader.METRICS,  # sums over ranks that mirror one another
    Reader.HOOK_COUNT,  # not every torch has it
    Detail.BANK, Detail.SUMS_WRITTEN,  # followed with few orders of rows
}  # fmt: skip
SEVERAL = {
    "details": [detail for detail in followed(Detail) if detail not in BY_PLACE | FUZZED_ALONE],
    "readers": [reader for reader in followed(Reader) if reader not in FUZZED_ALONE],
}
"""Kinds of which a layer may have several members: a row has one where one goes with it."""
ALONE = (*TWO_HOPS, Rewrite.PARTS, Rewrite.FP8)
"""Rewrites that leave layers whole for some details and readers."""
APART = (
    {Move.WRITTEN_OUT, Reader.ROWS_READ}, {Act.FUNCTION, Detail.DUMMY_SUM},
    {Rewrite.TOKENS, Reader.SHIFT_WRITTEN},
)  # fmt: skip
"""Pairs that leave a layer whole."""

SORTS = (Order.ARGSORT, Order.SORT, Order.DESCENDING)
BY_SORTS = (Style.INDEX_ADD, Style.INDEX_COPY, Style.ASSIGN, Back.INVERSE, Back.MORE_ROWS)
"""What is followed with such an order alone: the order is cut in slices, or sorted again."""


def program_of(row):
    asked = {"dtype": "bfloat16", "rewrite": Rewrite.CHUNKS, **row}
    asked |= {name: frozenset({asked[name]}) for name in asked.keys() & SEVERAL}
    dtype, rewrite = asked.pop("dtype"), asked.pop("rewrite")
    width, is_recomputed = FILLING[dtype], rewrite is Rewrite.RECOMPUTE
    kinds = {**PAIRED, **BESIDE, **SEVERAL, "style": [*PAIRED["style"], Style.PADDED]}
    seed = sum(kinds[name].index(choice) for name, choice in row.items())  # routed otherwise each
    program = Program(
        layers=(Experts(top_k=2, local=3, **asked),), tokens=((6, 6),), dtype=dtype,
        width=width, hidden=width, rewrite=rewrite, seed=seed,
        wrapping=Wrapping.CHECKPOINT if is_recomputed else Wrapping.BARE,
    )  # fmt: skip
    return legal(program)


def go_together(row):
    """Whether a program may have these choices, and is rewritten where it has."""
    style, order = row.get("style"), row.get("order")
    is_wide = row.get("dtype", "bfloat16") != "bfloat16"
    if style in GROUPED_PRODUCTS and (is_wide or order is Order.DESCENDING):
        return False  # torch has such products in bfloat16; weights turned round are not cut
    if style is not None and any(style not in READ_IN.get(name, Style) for name in row):
        return False
    if order not in (None, *SORTS) and not {*BY_SORTS}.isdisjoint(row.values()):
        return False
    if Back.PIECES in row.values() and order not in (None, Order.PIECES):
        return False
    return Splits.RUNNING not in row.values() or TWO_HOPS.isdisjoint(row.values())


def held_by(program, row):
    """Return what a program has of the kinds in `row`."""
    (layer,) = program.layers
    found = {name: getattr(layer, name, getattr(program, name, None)) for name in row}
    return {n: next(iter(x), None) if isinstance(x, frozenset) else x for n, x in found.items()}


def with_several(rows):
    """Yield `rows` with a member of each kind of `SEVERAL`, in turn, of those that go with them."""
    turns = {name: deque(members) for name, members in SEVERAL.items()}
    for row in rows:
        for name, turn in turns.items() if row["rewrite"] not in ALONE else ():
            wider = ((member, {**row, name: member}) for member in turn)
            found = ((m, r) for m, r in wider if held_by(program_of(r), r) == r)
            member, row = next(
                (m, r) for m, r in found if not any(pair <= {*r.values()} for pair in APART)
            )
            turn.remove(member)
            turn.append(member)
        yield row


def padded(rows):
    """Return one of the rows of grouped products for each rewrite, with padded groups.

    These have an order of rows of their own.
    """
    found = {}
    for row in (row for row in rows if row["style"] is Style.GROUPED):
        other = {**row, "style": Style.PADDED}
        del other["order"], other["back"]
        if held_by(program_of(other), other) == other:
            found.setdefault(row["rewrite"], other)
    return [*found.values()]


EVERY_PAIR = [*with_several(covering_rows(PAIRED, BESIDE, go_together))]
ROWS = EVERY_PAIR + padded(EVERY_PAIR)


def first_with_each_choice():
    """Return the first rows with each choice of `PAIRED`.

    Rows in hops are for four ranks and take three times as long: test_hop_programs.py has some.
    """
    seen, rows = set(), []
    for row in (row for row in EVERY_PAIR if row["rewrite"] not in TWO_HOPS):
        new = {(name, choice) for name, choice in row.items() if name in PAIRED} - seen
        rows += [row] if new else []
        seen |= new
    return rows


QUICK = first_with_each_choice()


def choices_of(rows):
    return {choice for row in rows for choice in row.items()}


def test_few_programs_have_every_pair_of_choices_and_quick_ones_each_choice():
    assert len(ROWS) < 130 and len(QUICK) < 16
    assert set().union(*map(pairs_of, ROWS)) >= {*legal_pairs(PAIRED, go_together)}
    every = {**PAIRED, **BESIDE, **SEVERAL}
    paired, every = ({(n, m) for n in kinds for m in kinds[n]} for kinds in (PAIRED, every))
    assert choices_of(QUICK) >= paired - {("rewrite", rewrite) for rewrite in TWO_HOPS}
    assert choices_of(ROWS) == every | {("style", Style.PADDED)}
    assert {row["rewrite"] for row in padded(EVERY_PAIR)} == {*PAIRED["rewrite"]}
    assert all(held_by(program_of(row), row) == row for row in ROWS)


@pytest.mark.parametrize("row", slow_after(QUICK, ROWS), ids=names_of)
def test_a_layer_is_rewritten_and_equals_eager(row):
    if row["move"] in (Move.WRITTEN_OUT, Move.OF_ITSELF):
        need(fills_memory_by_read_sizes)
    program = program_of(row)
    check(program, IN_TWO_HOPS if program.rewrite in TWO_HOPS else "chunked")


# --- experts with a capacity -------------------------------------------------------------------

FORMAT_OF = {format.dtype: format for format in reversed(FORMATS_OF_CAPACITY)}
SLOTS = {
    "across": [*Across],
    "sent": [*Sent],
    "fill": [*Fill],
    "dtype": [*FORMAT_OF],
    "extra": [extra for extra in Extra if extra not in SLOTS_LEFT_WHOLE],
}
BESIDE_SLOTS = {"room": [*Room], "move": [Move.FUNCTIONAL, Move.OF_ITSELF]}


def program_of_slots(row):
    asked = {"dtype": "float32", **row}
    format, extra = FORMAT_OF[asked.pop("dtype")], asked.pop("extra", Extra.LOSS)
    layer = Capacity(top_k=2, local=3, extras=frozenset({extra}), **asked)
    return legal(Program(layers=(layer,), tokens=((6, 6),), **format._asdict()))


def slots_go_together(row):
    (layer,) = program_of_slots(row).layers
    if row.get("extra") is Extra.BIAS and row.get("across") is Across.EINSUM:
        return False  # a gradient of a bias is a sum over ranks then
    if row.get("dtype") == "bfloat16":
        return row.get("room", Room.SIXTEEN) is Room.SIXTEEN
    return row.get("extra", Extra.LOSS) in (Extra.LOSS, *layer.extras)


SLOT_ROWS = covering_rows(SLOTS, BESIDE_SLOTS, slots_go_together)


@pytest.mark.parametrize("row", slow_after(SLOT_ROWS[:3], SLOT_ROWS), ids=names_of)
def test_a_layer_with_a_capacity_is_chunked_and_equals_eager(row):
    check(program_of_slots(row), "chunked")
