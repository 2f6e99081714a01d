"""Make a failing program plainer, as long as it fails in the same way.

Contract
    Deterministic and bounded: one choice after another becomes its plainest, rounds are repeated
    until nothing gives way or the number of trials is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Final

from moe_compile.testing.programs.grammar import SEVERAL, Layer, Program, changed
from moe_compile.testing.programs.legal import legal

CHOICES: Final = (
    "groups", "sharing", "wrapping", "running", "poison", "rewrite", "backward", "routing",
    "dynamic", "chunks",
)  # fmt: skip
"""Fields of programs that go before anything of a layer does."""

SETS: Final = tuple(SEVERAL.values())
"""Fields of layers that hold any number of choices."""


def simplest(program: Program, fails: Callable[[Program], bool], *, trials: int = 60) -> Program:
    """Return the plainest program found for which `fails` still holds, `program` being one."""
    tried: set[Program] = {program}
    found = True
    while found:
        found = False
        for plainer in plainer_programs(program):
            if plainer in tried:
                continue
            if len(tried) > trials:
                return program
            tried.add(plainer)
            if fails(plainer):
                program, found = plainer, True
                break
    return program


def plainer_programs(program: Program) -> Iterator[Program]:
    """Yield programs one choice plainer than `program`, the largest steps first."""
    for candidate in _candidates(program):
        candidate = legal(candidate)
        if candidate != program:
            yield candidate


def _candidates(program: Program) -> Iterator[Program]:
    layers = program.layers
    for i in range(len(layers)) if len(layers) > 1 else ():
        yield replace(program, layers=(*layers[:i], *layers[i + 1 :]))
    plain = Program()
    for name in CHOICES:
        yield changed(program, name, getattr(plain, name))
    tokens = program.tokens
    for i in range(len(tokens)) if len(tokens) > 1 else ():
        yield replace(program, tokens=(*tokens[:i], *tokens[i + 1 :]))
    for i, layer in enumerate(layers):
        for plainer in _plainer_layers(layer):
            yield replace(program, layers=(*layers[:i], plainer, *layers[i + 1 :]))
    for name in ("tokens", "width", "hidden", "dtype", "seed"):
        yield changed(program, name, getattr(plain, name))


def _plainer_layers(layer: Layer) -> Iterator[Layer]:
    plain = type(layer)()
    for name in SETS:
        chosen: frozenset[Any] = getattr(layer, name, frozenset())
        if len(chosen) > 1:
            yield changed(layer, name, frozenset())
        for member in sorted(chosen, key=lambda m: m.name):
            yield changed(layer, name, chosen - {member})
    for field in fields(layer):
        if field.name not in SETS:
            yield replace(layer, **{field.name: getattr(plain, field.name)})
