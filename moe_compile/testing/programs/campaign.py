"""Draw programs one after another, judge each, make failing ones plainer.

Contract
    The programs are a function of the seed; a text that was judged before is not judged again.
    Programs that add to the coverage of earlier campaigns come first (`wanted.py`).
    `sweep` has the plainest program with every choice of the grammar alone.
    A failing program is made plainer as long as it fails in the same way. That is deterministic and
    bounded: one choice after another becomes its plainest, rounds are repeated until nothing gives
    way or the number of trials is used up.
    A failure whose plainest form is part of an earlier one's kind is counted with that one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from moe_compile.testing.programs.choices import (
    Backward,
    Groups,
    Heads,
    Padding,
    Poison,
    Room,
    Routing,
    Running,
    Sharing,
    Within,
    Wrapping,
)
from moe_compile.testing.programs.coverage import Coverage, features
from moe_compile.testing.programs.grammar import (
    CHOICES_OF_CAPACITY,
    CHOICES_OF_EXPERTS,
    SEVERAL,
    Attention,
    Capacity,
    Experts,
    Layer,
    OwnAttention,
    Program,
    Rewrite,
    changed,
    with_choice,
)
from moe_compile.testing.programs.judge import Judge, Judgement, Outcome
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.text import source_of
from moe_compile.testing.programs.wanted import asked_programs, wanted_programs

CHOICES: Final = (
    "groups", "sharing", "wrapping", "running", "poison", "rewrite", "backward", "routing",
    "dynamic", "chunks", "row_room",
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


UNMENDED: Final[Mapping[frozenset[str], str]] = {}
"""Sets of choices that show a known fault, and the fault: not drawn until it is mended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a campaign, and the programs it is restricted to."""

    programs: int
    seconds: float
    timeout_s: float
    trials: int
    """Trials to make one failing program plainer."""
    keep: Path | None = None
    """Folder of failing programs."""
    rewrite: str = ""
    """Name of the rewrite each program asks for, "" for a drawn one."""
    layers: str = ""
    """Kind of the layers of each program, "" for a drawn one."""


class Campaign:
    """One pair of ranks and the programs it runs."""

    def __init__(self, seed: int, limits: Limits, covered: Coverage | None = None) -> None:
        """Prepare a campaign from `seed` and the coverage of earlier ones."""
        self._seed = seed
        self._limits = limits
        self._covered = covered
        self._known: list[tuple[Outcome, frozenset[str]]] = []

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield the outcome of every program, as plain data."""
        limits, began = self._limits, monotonic()
        seen: set[str] = set()
        with Judge(timeout_s=limits.timeout_s) as judge:
            for program in self._drawn():
                if len(seen) >= limits.programs or monotonic() - began > limits.seconds:
                    return
                text = source_of(program)
                if text in seen:
                    continue
                seen.add(text)
                judgement = judge.judge(text)
                line = {
                    "kind": judgement.kind.value,
                    "failed": judgement.failed,
                    "rewritten": judgement.is_chunked,
                    "may_differ": judgement.may_differ,
                    "features": sorted(features(program)),
                    "verdicts": judgement.verdicts,
                    "cpu_s": judgement.cpu_s,
                    "second": judgement.is_second,
                    "detail": judgement.detail,
                    "number": len(seen),
                    "source": self._shown(judge, program, judgement, len(seen)),
                }
                if self._covered is not None:
                    self._covered.add(line)
                yield line

    def _drawn(self) -> Iterator[Program]:
        rewrite, layers = self._limits.rewrite, self._limits.layers
        drawn = drawn_programs(self._seed, rewrite, layers)
        if self._covered is None or rewrite or layers:
            return drawn
        return chain(wanted_programs(self._seed, self._covered), drawn)

    def _shown(self, judge: Judge, program: Program, judgement: Judgement, number: int) -> str:
        """Return the plainest program with this failure, "" where one like it was shown before."""
        if judgement.kind is Outcome.INVALID:
            self._keep(source_of(program), judgement, number)
        if not judgement.failed:
            return ""
        kind, own = judgement.kind, features(program)
        if any(kind is k and plain <= own for k, plain in self._known):
            return ""
        trials = self._limits.trials if kind is not Outcome.HANG else self._limits.trials // 8
        fails = _same_failure(judge, kind)
        plainest = simplest(program, fails, trials=trials)
        self._known.append((kind, features(plainest)))
        text = source_of(plainest)
        self._keep(text, judge.judge(text) if plainest != program else judgement, number)
        return text

    def _keep(self, text: str, judgement: Judgement, number: int) -> None:
        if self._limits.keep is not None:
            self._limits.keep.mkdir(parents=True, exist_ok=True)
            said = f"{judgement.kind.value}: {judgement.detail}\n{judgement.verdicts}"
            comment = "".join(f"# {line}\n" for line in said.splitlines())
            name = f"{judgement.kind.name.lower()}_{self._seed}_{number}.py"
            (self._limits.keep / name).write_text(f"{comment}\n{text}")


def drawn_programs(seed: int, rewrite: str = "", layers: str = "") -> Iterator[Program]:
    """Yield programs without end, each drawn afresh: hypothesis would go on with variants.

    Programs that would show an unmended fault are left out. `rewrite`, a name of `Rewrite`, and
    `layers`, a key of `PROGRAMS_OF`, restrict the programs.
    """
    number = 0
    while True:
        drawn = _draw(seed * 1_000_000 + number, rewrite, layers)
        drawn = [one for one in drawn if not any(u <= features(one) for u in UNMENDED)]
        yield from (one for one in drawn if rewrite in ("", one.rewrite.name))
        number += 1


def _draw(seed: int, rewrite: str, layers: str) -> list[Program]:
    """Return hypothesis's second draw from `seed`; its first is always the plainest."""
    drawn: list[Program] = []

    @hypothesis_seed(seed)
    @settings(
        max_examples=2,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(asked_programs(rewrite, layers))
    def take(program: Program) -> None:
        drawn.append(program)

    take()
    return drawn[1:]


def _same_failure(judge: Judge, kind: Outcome) -> Any:
    return lambda program: judge.judge(source_of(program)).kind is kind
