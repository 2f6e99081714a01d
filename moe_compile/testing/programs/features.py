"""What generated programs have, by name: the rows of the table of what a campaign covered."""

from __future__ import annotations

import enum
from dataclasses import fields
from typing import Any

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
    READ_IN,
    Experts,
    Layer,
    Program,
    ends_smaller,
)


def features(program: Program) -> frozenset[str]:
    """Return the names of what `program` has, as the coverage table shows them."""
    found = {f"tokens: {name}" for name in _token_features(program.tokens)}
    found |= {f"width: {program.width}", f"dtype: {program.dtype}"}
    found |= {"dynamic: asked for"} if program.dynamic else set()
    found |= {f"layers: {min(len(program.layers), 3)}"}
    for part in (program, *program.layers):
        values = [getattr(part, field.name) for field in fields(part)]
        found |= {feature(c) for value in values for c in _choices(value)} - _unused(part)
    return frozenset(found)


def choices() -> list[enum.Enum]:
    """Return every choice of the grammar, in its order."""
    of_programs = (
        Heads, Within, Routing, Groups, Sharing, Backward, Wrapping, Running, Poison, Rewrite,
    )  # fmt: skip
    kinds: tuple[type[enum.Enum], ...] = CHOICES_OF_EXPERTS + CHOICES_OF_CAPACITY + of_programs
    return [member for kind in kinds for member in kind]


def all_features() -> list[str]:
    """Return the name of every choice of the grammar, in its order."""
    return [*map(feature, choices())]


def _unused(part: Program | Layer) -> set[str]:
    """Return what stands in a field that the layer's style does not read."""
    if not isinstance(part, Experts):
        return set()
    unread = [name for name, styles in READ_IN.items() if part.style not in styles]
    return {feature(getattr(part, name)) for name in unread}


def _choices(value: Any) -> list[enum.Enum]:
    values = value if isinstance(value, frozenset) else (value,)
    return [v for v in values if isinstance(v, enum.Enum)]


def feature(choice: enum.Enum) -> str:
    """Return the name of a choice in the table of what a campaign covered."""
    return f"{type(choice).__name__.lower()}: {choice.name.lower()}"


def _token_features(tokens: tuple[tuple[int, ...], ...]) -> list[str]:
    found = ["uneven"] if any(len({*step}) > 1 for step in tokens) else []
    found += ["empty rank"] if any(0 in step for step in tokens) else []
    found += ["changing"] if len(set(tokens)) > 1 else []
    found += ["smaller last"] if ends_smaller(tokens) else []
    return found
