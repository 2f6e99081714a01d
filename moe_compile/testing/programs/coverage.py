"""What a fuzzing campaign tried: programs by what became of them, features by how often."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

from moe_compile.testing.programs.choices import MIXES_SEQUENCES
from moe_compile.testing.programs.features import all_features, feature
from moe_compile.testing.programs.judge import FAILURES, Kind

LEAST: Final = 40
"""Rewritten programs every feature should occur in, of 3,000."""

LEFT_WHOLE: Final = frozenset(map(feature, MIXES_SEQUENCES))
"""Features of which programs tried are counted: that they are left whole is right."""


class Coverage:
    """Counts over the programs of one campaign."""

    def __init__(self) -> None:
        """Start empty."""
        self.kinds: Counter[str] = Counter()
        self.num_rewritten = 0
        self.num_may_differ = 0
        self.num_second = 0
        self.cpu_s = 0.0
        self.tried: Counter[str] = Counter()
        self.rewritten: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []

    def add(self, line: dict[str, Any]) -> None:
        """Take in what became of one program."""
        self.kinds[line["kind"]] += 1
        self.cpu_s += line["cpu_s"]
        self.num_second += line["second"]
        if line["kind"] == Kind.INVALID.value:
            return
        self.num_rewritten += line["rewritten"]
        self.num_may_differ += line["may_differ"]
        self.tried.update(line["features"])
        self.rewritten.update(line["features"] if line["rewritten"] else [])
        self.failed.update(line["features"] if line["failed"] else [])
        if line["source"]:
            self.failures.append(line)

    def lacks(self, name: str) -> int:
        """Return how many programs more should have the choice of this name."""
        return max(0, LEAST - self._counted(name))

    def _counted(self, name: str) -> int:
        """Return how many programs say something of a choice: rewritten ones, but of a decoy."""
        return self.tried[name] if name in LEFT_WHOLE else self.rewritten[name]

    @property
    def num_valid(self) -> int:
        """Programs that say something about megamoe."""
        return self.kinds.total() - self.kinds[Kind.INVALID.value]

    @property
    def num_failed(self) -> int:
        """Programs megamoe failed."""
        return sum(self.kinds[kind.value] for kind in FAILURES)

    def progress(self) -> str:
        """Return one line on how far it is."""
        invalid = self.kinds[Kind.INVALID.value]
        each = self.cpu_s / max(1, self.kinds.total())
        return (
            f"{self.num_rewritten} rewritten, {self.num_failed} failed, {invalid} invalid, "
            f"{each:.1f} CPU s each, {self.num_valid} programs"
        )

    def summary(self, seconds: float) -> str:
        """Return the result in a few lines."""
        kinds = ", ".join(f"{self.kinds[kind.value]} {kind.value}" for kind in Kind)
        share = self.num_rewritten / max(1, self.num_valid)
        return (
            f"{self.num_valid} distinct programs in {seconds / 60:.0f} min ({kinds}); "
            f"{self.num_rewritten} rewritten ({share:.0%}): a region of them as asked; "
            f"{self.num_may_differ} compared within a bound of last bits; "
            f"{self.num_second} judged anew after a hang, a broken link or a process that died"
        )

    def table(self) -> str:
        """Return features by programs tried, rewritten and failed; rare ones are marked."""
        known = all_features()
        names = [*known, *sorted(set(self.tried) - set(known))]
        width = max(len(name) for name in names)
        rows = [f"{'feature':{width}}  tried  rewritten  failed"]
        for name in names:
            rare = f"  under {LEAST}" if self.lacks(name) else ""
            counts = f"{self.tried[name]:5}  {self.rewritten[name]:9}  {self.failed[name]:6}"
            rows.append(f"{name:{width}}  {counts}{rare}")
        return "\n".join(rows)
