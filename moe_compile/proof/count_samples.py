"""Counts to try a region's count side on: small, drawn at its real size, large, of one expert.

Contract
    The same counts on every rank and in every process: drawn from a fixed seed.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import sympy

from moe_compile.regions.count_facts import CountFacts

SEED = 20240229
NUM_DRAWN = 200
"""Vectors drawn at the region's real size."""
MOST_ENUMERATED = 4
"""Counts up to which every vector of small values is tried: `SMALL ** 4` are 256."""
SMALL = range(4)
SKEWED = 70
"""Most rows of a run where few runs hold most rows: beyond twice the alignments in use, 8 to 32."""
LARGE = (300, 5_000, 70_000, 300_000)
"""Rows: more than bfloat16 (256), float16 (2048; infinite from 65520) and int16 hold exactly, and
as many as a rank receives of 8 sequences of 4,096 tokens for 8 experts each."""

Sample = dict[sympy.Symbol, int]


def draw_samples(facts: CountFacts, num_drawn: int = NUM_DRAWN) -> Iterator[Sample]:
    """Yield counts received and sent, one value per symbol."""
    own = [segment.length for segment in facts.root]
    source = random.Random(SEED)
    if len(own) <= MOST_ENUMERATED:
        for values in itertools.product(SMALL, repeat=len(own)):
            yield _filled(facts, dict(zip(own, values, strict=True)), source)
    for i in range(num_drawn):
        yield _filled(facts, _drawn(facts, own, i, source), source)


def single_samples(facts: CountFacts) -> Iterator[Sample]:
    """Yield no rows, then one row, and some, of each local expert alone, as a chunk may have."""
    own = [segment.length for segment in facts.root]
    source = random.Random(SEED)
    yield _filled(facts, dict.fromkeys(own, 0), source)
    for expert in range(facts.num_local_experts):
        mine = [s for s in own if facts.expert_with(s) == expert]
        for values in ([1], [source.choice(SMALL[1:]) for _ in mine]):
            alone = dict(zip(mine, values, strict=False))
            yield _filled(facts, {s: alone.get(s, 0) for s in own}, source)


def large_samples(facts: CountFacts, *, spread: bool = True) -> Iterator[Sample]:
    """Yield counts of `LARGE` rows in all: in one run, and where `spread` in equal runs too."""
    own = [segment.length for segment in facts.root]
    source = random.Random(SEED)
    for size in LARGE:
        values = {symbol: source.choice(SMALL) for symbol in own}
        yield _filled(facts, {**values, source.choice(own): size}, source)
        if spread:
            yield _filled(facts, dict.fromkeys(own, size // len(own)), source)


def _drawn(facts: CountFacts, own: list[sympy.Symbol], i: int, source: random.Random) -> Sample:
    """Return zero, balanced or skewed counts; or those of some experts alone, as of a chunk."""
    num_local = facts.num_local_experts
    if i == 0:
        return dict.fromkeys(own, 0)
    if i % 3 == 0:
        return {s: source.randrange(SKEWED) if source.random() < 0.2 else 0 for s in own}
    values = {s: source.choice(SMALL) for s in own}
    if i % 3 == 1:
        return values
    first = source.randrange(num_local)
    chunk = range(first, source.randint(first, num_local))
    return {s: v if facts.expert_with(s) in chunk else 0 for s, v in values.items()}


def _filled(facts: CountFacts, values: Sample, source: random.Random) -> Sample:
    """Return `values` with small counts added for the symbols that have none."""
    for symbol in (*facts.received, *facts.sent):
        values.setdefault(symbol, source.choice(SMALL))
    if facts.num_ranks == 1:  # what one rank sends it receives
        values |= {s: values[r] for s, r in zip(facts.sent, facts.received, strict=False)}
    return values
