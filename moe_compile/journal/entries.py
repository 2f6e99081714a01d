"""The outcome of every candidate of every pass on every graph of one compilation.

Contract
    Each candidate a pass looked at was applied, or skipped with a reason from the closed list; a
    pass that did not run to its end was dropped, with one as well.
    No decision reads the journal, except whether `strict` raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from moe_compile.config import MegaMoEConfig
from moe_compile.journal.reasons import Kind, Reason
from moe_compile.journal.remedies import ACTED_ON, REMEDIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """A candidate that was left as it is, and why."""

    candidate: str
    reason: Reason
    detail: str = ""
    option: str = ""
    """The option that asks for the rewrite; "" where none does."""
    is_asked: bool = False
    """Whether that option asks for it, not only allows it, as "auto" may."""
    where: str = ""
    """The user's line of the candidate, where it is known: `file.py:line in function`."""
    is_region: bool = False
    """Whether a dispatch, its combine and its counts were matched, and then refused."""
    is_told: bool = True
    """Whether a report lists it among exchanges of no region: no gather of parameters, say."""

    @property
    def is_dispatch(self) -> bool:
        """Whether it moves rows as an expert dispatch does, and so was meant to be a region."""
        return self.is_region or self.reason.kind in ACTED_ON

    @property
    def is_unmet(self) -> bool:
        """Whether it was asked for, is of the kind meant, and could not be proven."""
        return self.is_asked and self.reason.kind is Kind.UNPROVEN

    @property
    def why(self) -> str:
        """Return `reason (detail)`."""
        return self.reason.said(self.detail)

    def __str__(self) -> str:
        """Return `candidate: reason (detail)`."""
        return f"{self.candidate}: {self.why}"


def judged(config: MegaMoEConfig, option: str, verdict: Verdict) -> Verdict:
    """Return `verdict` as one on `option`, asked for if `config` says so."""
    return replace(verdict, option=option, is_asked=config.asks_for(option))


@dataclass(frozen=True, kw_only=True, slots=True)
class PassReport:
    """The outcome of one pass on one graph: `applied` and `skipped` together are its candidates."""

    pass_name: str
    applied: tuple[str, ...] = ()
    skipped: tuple[Verdict, ...] = ()
    measures: dict[str, float] = field(default_factory=dict)
    """Figures; each key ends in its unit: `exposed_us`, `num_host_reads`."""

    @property
    def changed(self) -> bool:
        """Whether the graph was edited."""
        return bool(self.applied)


@dataclass(frozen=True, slots=True)
class Dropped:
    """A pass that did not run to its end, and why."""

    pass_name: str
    reason: Reason
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it raised; if not it was disabled, or needs another dropped pass."""
        return self.reason is Reason.FAILED

    @property
    def why(self) -> str:
        """Return the error raised, or `reason (detail)`."""
        return self.detail if self.is_failure else self.reason.said(self.detail)


@dataclass(frozen=True, slots=True)
class GraphText:
    """The text of a graph at one step of its compilation."""

    graph: str
    """Name of the graph, as in the records of a journal."""
    step: str
    """Name of the pass that changed it; "" before the passes of a level."""
    lines: tuple[str, ...]


@dataclass(slots=True)
class Journal:
    """Reports of the passes of one compilation, in the order they ran."""

    records: list[tuple[str, PassReport | Dropped]] = field(default_factory=list)
    """Reports, each with its graph: `dynamo`, a body in it, `joint`, `forward` or `backward`."""
    texts: list[GraphText] | None = None
    """Texts of graphs before each level, and after each pass that changed one; None where no page
    is asked for."""

    def add(self, graph: str, result: PassReport | Dropped) -> None:
        """Add the report of one pass on one graph."""
        self.records.append((graph, result))

    def forget_all_but_failures(self, start: int) -> None:
        """Forget the records of an ended attempt, from number `start` on, except failures."""
        failures = [
            (graph, result)
            for graph, result in self.records[start:]
            if isinstance(result, Dropped) and result.is_failure
        ]
        self.records[start:] = failures

    def dropped(self) -> Iterator[tuple[str, Dropped]]:
        """Return the passes left out, each with the graph it was left out of."""
        for graph, result in self.records:
            if isinstance(result, Dropped):
                yield graph, result

    def verdicts(self) -> Iterator[Verdict]:
        """Yield the verdicts on skipped candidates, in order."""
        for _, result in self.records:
            if isinstance(result, PassReport):
                yield from result.skipped

    def first_left(self) -> Verdict | None:
        """Return the first verdict on a candidate asked for and meant; None without one."""
        asked = (verdict for verdict in self.verdicts() if verdict.is_asked)
        return next((one for one in asked if one.reason.kind in ACTED_ON), None)

    def as_data(self) -> list[dict[str, Any]]:
        """Return the records that say something as plain data."""
        return [data for graph, result in self.records if (data := _as_data(graph, result))]


OF_VERDICTS: Final = ("candidate", "reason", "detail", "option", "is_asked", "where")
"""Fields of a verdict that are recorded."""


def _as_data(graph: str, result: PassReport | Dropped) -> dict[str, Any]:
    said: dict[str, Any] = {"graph": graph, "pass": result.pass_name}
    if isinstance(result, Dropped):
        changes = REMEDIES[result.reason]
        return {**said, "dropped": result.reason.value, "detail": result.detail, "to_do": changes}
    if not (result.applied or result.skipped or result.measures):
        return {}
    skipped = [
        {name: getattr(verdict, name) for name in OF_VERDICTS}
        | {"reason": verdict.reason.value, "to_do": REMEDIES[verdict.reason]}
        for verdict in result.skipped
    ]
    return {
        **said,
        "applied": list(result.applied),
        "skipped": skipped,
        "measures": result.measures,
    }
