"""The plainest program with every choice of the grammar alone: what a campaign begins with."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from moe_compile.testing.programs.choices import Decoy, Detail, Heads, Reader, Style
from moe_compile.testing.programs.grammar import Attention, Experts, Program, changed
from moe_compile.testing.programs.strategy import legal


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
    for tokens in (((1, 5), (0, 3), (2, 0)), ((5, 3),), ((4, 4), (6, 6)), ((0, 0),)):
        yield replace(plain, tokens=tokens)
    for width, dtype in ((17, "float32"), (24, "bfloat16"), (17, "bfloat16"), (16, "float64")):
        yield replace(plain, width=width, dtype=dtype)
    for name, choice in _choices(layer):
        value: Any = frozenset({choice}) if name in ("details", "readers", "decoys") else choice
        style = layer.style if name != "order" and name != "back" else Style.SORTED_LOOP
        other = changed(replace(layer, style=style), name, value)
        yield replace(plain, layers=(other,))
    for heads in Heads:
        yield replace(plain, layers=(Attention(heads=heads),), tokens=((4, 4),))
    for name, choice in _choices(plain):
        yield changed(plain, name, choice)


def _choices(part: Program | Experts) -> Iterator[tuple[str, enum.Enum]]:
    """Yield the name of every field of `part` with every choice that it takes."""
    sets: dict[str, type[enum.Enum]] = {"details": Detail, "readers": Reader, "decoys": Decoy}
    for field in fields(part):
        value = getattr(part, field.name)
        kind = sets.get(field.name, type(value))
        if issubclass(kind, enum.Enum):
            yield from ((field.name, choice) for choice in kind)
