"""What became of the mutants: a table, and a record with hardware, versions and command."""

from __future__ import annotations

import enum
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from moe_compile.report.provenance import describe_machine, recorded_command
from tests.mutants.draw import Mutant
from tests.mutants.equivalent import EQUIVALENT, HARMLESS, Key
from tests.mutants.sandbox import Outcome

LEAST_KILLED: Final = 0.9
"""Share of the changes, equivalent ones apart, that tests must notice."""


class Verdict(enum.Enum):
    """What became of a mutant."""

    KILLED = "killed"
    EQUIVALENT = "equivalent"
    EXPLAINED = "survived, explained"
    SURVIVED = "survived"


@dataclass(frozen=True, slots=True)
class Result:
    """A mutant and how the tests ended with it."""

    mutant: Mutant
    outcome: Outcome

    @property
    def key(self) -> Key:
        """What explanations are found by."""
        return self.mutant.module, self.mutant.source_line, self.mutant.point.change

    @property
    def verdict(self) -> Verdict:
        """What became of it; tests decide before any argument does."""
        if not self.outcome.passed:
            return Verdict.KILLED
        if self.key in EQUIVALENT:
            return Verdict.EQUIVALENT
        return Verdict.EXPLAINED if self.key in HARMLESS else Verdict.SURVIVED

    @property
    def reason(self) -> str:
        """The test that failed, or why none can or does."""
        return self.outcome.said or EQUIVALENT.get(self.key) or HARMLESS.get(self.key, "")


def counts(results: Iterable[Result]) -> Counter[Verdict]:
    """Return how many results there are of each kind."""
    return Counter(r.verdict for r in results)


def killed_share(results: Iterable[Result]) -> float:
    """Return the share killed of those that are not equivalent; 1 for none."""
    found = counts(results)
    total = found.total() - found[Verdict.EQUIVALENT]
    return found[Verdict.KILLED] / total if total else 1.0


def is_enough(results: list[Result]) -> bool:
    """Whether enough were killed and nothing that survived lacks an explanation."""
    return killed_share(results) >= LEAST_KILLED and not counts(results)[Verdict.SURVIVED]


def table(results: list[Result]) -> str:
    """Return killed and not killed per group, then every survivor with its explanation."""
    made = Table("group", *(v.value for v in Verdict), "killed share")
    for name in [*dict.fromkeys(r.mutant.group.name for r in results), "all"]:
        own = [r for r in results if name in ("all", r.mutant.group.name)]
        found = counts(own)
        numbers = [str(found[v]) for v in Verdict]
        made.add_row(name, *numbers, f"{killed_share(own):.0%}")
    console = Console(width=100)
    with console.capture() as captured:
        console.print(made)
    survivors = [r for r in results if r.verdict is not Verdict.KILLED]
    lines = [f"{r.verdict.value}: {r.mutant}\n    {r.reason or 'unexplained'}\n" for r in survivors]
    return captured.get() + "".join(lines)


def write_record(
    path: Path, seed: int, unchanged: Mapping[str, Outcome], results: list[Result]
) -> None:
    """Write all results, with what they were taken on."""
    record: dict[str, Any] = {
        "command": recorded_command("tests.mutants", sys.argv[1:]),
        "machine": describe_machine(),
        "seed": seed,
        "suites_cpu_s": {name: round(o.cpu_s, 1) for name, o in unchanged.items()},
        "counts": {v.value: counts(results)[v] for v in Verdict},
        "killed_share": round(killed_share(results), 3),
        "mutants": [
            {
                "group": r.mutant.group.name,
                "at": f"{r.mutant.module}:{r.mutant.point.line}",
                "change": r.mutant.point.change,
                "verdict": r.verdict.value,
                "reason": r.reason,
                "cpu_s": round(r.outcome.cpu_s, 1),
            }
            for r in results
        ],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
