"""Draw changes by seed, spread evenly over the modules."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest

from tests.mutants.operators import Point, mutate, points
from tests.mutants.sandbox import ROOT
from tests.mutants.suites import Group


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one module."""

    group: Group
    module: str
    """Path from the repository's root."""
    point: Point

    def __str__(self) -> str:
        """Return place and change on one line."""
        return f"{self.module}:{self.point.line}: {self.point.change}"

    @property
    def source_line(self) -> str:
        """The line of source, without its indent."""
        return (ROOT / self.module).read_text().splitlines()[self.point.line - 1].strip()

    def changed(self, source: str) -> str:
        """Return `source`, the module's, with the change."""
        return mutate(source, self.point)


def drawn(groups: Iterable[Group], seed: int, count: int) -> list[Mutant]:
    """Return `count` mutants: one of every module, then another of every module, and so on.

    Which of a module come first depends on the seed and the module alone.
    """
    modules = [_of_module(group, module, seed) for group in groups for module in group.modules]
    turns = (m for turn in zip_longest(*modules) for m in turn if m is not None)
    return list(islice(turns, count))


def _of_module(group: Group, module: str, seed: int) -> Iterator[Mutant]:
    found = points((ROOT / module).read_text())
    random.Random(f"{seed}: {module}").shuffle(found)
    return (Mutant(group, module, point) for point in found)
