"""The plainest program with every choice of the grammar alone: what a campaign begins with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from moe_compile.testing.programs.capacity_choices import Room
from moe_compile.testing.programs.choices import (
    Backward,
    Groups,
    Heads,
    Poison,
    Rewrite,
    Routing,
    Running,
    Sharing,
    Within,
    Wrapping,
)
from moe_compile.testing.programs.grammar import (
    CHOICES_OF_CAPACITY,
    CHOICES_OF_EXPERTS,
    Attention,
    Capacity,
    Experts,
    OwnAttention,
    Program,
    changed,
    with_choice,
)
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.sender_choices import Padding

WIDE_CAPACITY: Final = Capacity(top_k=2, room=Room.SIXTEEN)
"""Two bytes a value are followed where slots fill 64 bytes."""


def sweep() -> Iterator[Program]:
    """Yield one program per choice, then token counts and widths; each once."""
    seen: set[Program] = set()
    for program in map(legal, _all()):
        if program not in seen:
            seen.add(program)
            yield program


def _all() -> Iterator[Program]:
    plain = Program(layers=(Experts(top_k=2),), tokens=((5, 5),))
    (layer,) = plain.layers
    assert isinstance(layer, Experts)
    yield plain
    smaller_last = ((6, 6), (1, 1))
    for tokens in (((1, 5), (0, 3), (2, 0)), ((5, 3),), ((4, 4), (6, 6)), smaller_last, ((0, 0),)):
        yield replace(plain, tokens=tokens)
    for width, dtype in ((17, "float32"), (24, "bfloat16"), (17, "bfloat16"), (16, "float64")):
        yield replace(plain, width=width, dtype=dtype)
    for kind in CHOICES_OF_EXPERTS:
        yield from (replace(plain, layers=(with_choice(layer, c),)) for c in kind)
    for heads in Heads:
        yield replace(plain, layers=(Attention(heads=heads),), tokens=((4, 4),))
    parts = replace(plain, tokens=((6, 6),), rewrite=Rewrite.PARTS)
    yield from (replace(parts, layers=(OwnAttention(within=kind), layer)) for kind in Within)
    slots = Program(layers=(Capacity(top_k=2),), tokens=((5, 5),), dtype="float32")
    yield slots
    yield replace(slots, width=32, hidden=32, dtype="bfloat16", layers=(WIDE_CAPACITY,))
    for kind in CHOICES_OF_CAPACITY:
        layers = (with_choice(Capacity(top_k=2), choice) for choice in kind)
        yield from (replace(slots, layers=(layer,)) for layer in layers)
    padded = replace(plain, layers=(with_choice(layer, Padding.SENT),))
    yield replace(padded, poison=Poison.PADDING)
    yield replace(plain, tokens=((5, 5), (5, 5), (1, 1)), running=Running.IF_ANY)
    for kind in (Routing, Groups, Sharing, Backward, Wrapping, Running, Poison, Rewrite):
        yield from (changed(plain, kind.__name__.lower(), choice) for choice in kind)
