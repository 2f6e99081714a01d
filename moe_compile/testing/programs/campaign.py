"""Draw programs one after another, judge each, make failing ones plainer.

Contract
    The programs are a function of the seed; a text that was judged before is not judged again.
    With what earlier campaigns covered, those that add to it come first (`wanted.py`).
    A failure whose plainest form is part of an earlier one's kind is counted with that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Final

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

from moe_compile.testing.programs.asked_strategy import asked_programs
from moe_compile.testing.programs.coverage import Coverage
from moe_compile.testing.programs.features import features
from moe_compile.testing.programs.grammar import Program
from moe_compile.testing.programs.judge import Judge, Judgement, Kind
from moe_compile.testing.programs.shrink import simplest
from moe_compile.testing.programs.text import source_of
from moe_compile.testing.programs.wanted import wanted_programs

UNMENDED: Final[Mapping[frozenset[str], str]] = {}
"""What together shows a fault that is known, and the fault: not drawn until it is mended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How far a campaign goes."""

    programs: int
    seconds: float
    timeout_s: float
    trials: int
    """Of one failure to be made plainer."""
    keep: Path | None = None
    """Folder of failing programs."""
    rewrite: str = ""
    """What is asked of megamoe in each program, "" for what is drawn."""
    layers: str = ""
    """Of which kind the layers of each program are, "" for what is drawn."""


class Campaign:
    """One pair of ranks and the programs it runs."""

    def __init__(self, seed: int, limits: Limits, covered: Coverage | None = None) -> None:
        """Prepare a campaign from `seed`, and from what earlier ones covered."""
        self._seed = seed
        self._limits = limits
        self._covered = covered
        self._known: list[tuple[Kind, frozenset[str]]] = []

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield what became of every program, as plain data."""
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
        """Return the plainest program that fails so, "" where one like it was shown before."""
        if judgement.kind is Kind.INVALID:
            self._keep(source_of(program), judgement, number)
        if not judgement.failed:
            return ""
        kind, own = judgement.kind, features(program)
        if any(kind is k and plain <= own for k, plain in self._known):
            return ""
        trials = self._limits.trials if kind is not Kind.HANG else self._limits.trials // 8
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

    Those that would show an unmended fault are left out. With `rewrite`, a name of `Rewrite`, those
    that it may be asked of; with `layers`, a key of `PROGRAMS_OF`, those of such layers.
    """
    number = 0
    while True:
        drawn = _draw(seed * 1_000_000 + number, rewrite, layers)
        drawn = [one for one in drawn if not any(u <= features(one) for u in UNMENDED)]
        yield from (one for one in drawn if rewrite in ("", one.rewrite.name))
        number += 1


def _draw(seed: int, rewrite: str, layers: str) -> list[Program]:
    """Return what hypothesis draws second from `seed`; its first is always the plainest."""
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


def _same_failure(judge: Judge, kind: Kind) -> Any:
    return lambda program: judge.judge(source_of(program)).kind is kind
