"""What the results of a check's sections say of the bars that it is held to.

Contract
    A bar holds, is missed, or is open: its section did not run, or not to the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Section = Mapping[str, Any]
Look = Callable[[Section], tuple[bool, str]]

OTHERS: Final = "inductor"
"""How names of items begin that only compare with others: they may be skipped."""


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar, and what was found."""

    what: str
    holds: bool | None
    """None where it is open."""
    found: str = ""


def judge(sections: Mapping[str, Section], bars: Sequence[tuple[str, str, Look]]) -> list[Bar]:
    """Return what became of `bars`: of each its section, what is wanted, and how it is told.

    `sections` are results by name, {} of one that did not run.
    """
    return [_judged(what, sections.get(name, {}), look) for name, what, look in bars]


def _judged(what: str, section: Section, look: Look) -> Bar:
    if not section.get("is_complete") or not section.get("rows"):
        return Bar(what, None, "not run to its end")
    try:
        return Bar(what, *look(section))
    except (LookupError, TypeError, ValueError) as error:  # skipped, or no number was found
        return Bar(what, None, f"not measured: {error}")


def no_failure(section: Section) -> tuple[bool, str]:
    """Return whether nothing failed; raises LookupError where something of ours was skipped."""
    failures = [failure["what"] for failure in section["failures"]]
    skipped = [one["what"] for one in section.get("skipped", [])]
    ours = [what for what in skipped if not what.startswith(OTHERS)]
    if ours and not failures:
        raise LookupError(f"skipped {ours[0]}")
    return not failures, ", ".join(failures[:3]) or f"none failed, {len(skipped)} skipped"
