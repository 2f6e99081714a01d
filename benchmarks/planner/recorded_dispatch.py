"""What `dispatch = "auto"` would have cost in steps that were measured on the emulated link.

Contract
    Times are those of recorded results of `benchmarks.link.overlap --preset dispatch`; the planner
    is told the shapes, the profile and the link they were taken with, and nothing of the times.
    A way is compared with what its options allowed and was recorded; nothing is measured here.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.link.cases import Case
from benchmarks.link.layer import MoELayer
from benchmarks.planner.dispatch_layers import GatherableLayer
from benchmarks.planner.planned_models import capture, fake_group
from benchmarks.planner.recorded_case import case_of, profile_of, with_link
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.choose_plan import Decision

RECORDED: Final = Path(__file__).parents[1] / "results" / "overlap_dispatch_cpu.json"
TOP_K: Final = (1, 2, 3, 4)
WAYS: Final = {
    "megamoe N=1": Candidate(),
    "megamoe N=2": Candidate(num_chunks=2),
    "megamoe N=4": Candidate(num_chunks=4),
    "ag/rs exact N=1": Candidate(dispatch="all_gather"),
}
"""Variants without slices of tokens, which other options ask for."""
ASKED: Final[tuple[int | str, ...]] = ("auto", 1)
"""Values of `chunks`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedChoice:
    """One decision, and what the ways it was among had taken; times in milliseconds."""

    case: Case
    ratio: str
    chunks: int | str
    decision: Decision
    recorded_ms: dict[Candidate, float]

    @property
    def regret(self) -> float:
        """Return by which share the chosen way was slower than the fastest."""
        return self.chosen_ms / min(self.recorded_ms.values()) - 1.0

    @property
    def dispatch_regret(self) -> float:
        """Return by which share the chosen dispatch, at its fastest, was slower than the other."""
        dispatch = self.decision.chosen.candidate.dispatch
        ours = [ms for way, ms in self.recorded_ms.items() if way.dispatch == dispatch]
        return min(ours) / min(self.recorded_ms.values()) - 1.0

    @property
    def chosen_ms(self) -> float:
        """Return what the chosen way had taken; raises KeyError where it was not recorded."""
        return self.recorded_ms[self.decision.chosen.candidate]


def recorded_choices(
    path: Path = RECORDED, top_k: Collection[int] = TOP_K
) -> Iterator[RecordedChoice]:
    """Return the planner's choices at every recorded ratio, for so many experts a token."""
    report = json.loads(path.read_text())
    heads = [head for head in report["cases"] if head["top_k"] in top_k]
    for head in sorted(heads, key=lambda head: int(head["top_k"])):
        case = case_of(head)
        layer = _capture(case)
        profile = profile_of(head)
        for ratio in head["links"]:
            told = with_link(profile, head, ratio)
            for chunks in ASKED:
                yield RecordedChoice(
                    case=case,
                    ratio=ratio,
                    chunks=chunks,
                    decision=layer.decide(told, chunks=chunks),
                    recorded_ms=_recorded(report["rows"], case.name, ratio, chunks),
                )


def _recorded(
    rows: list[dict[str, Any]], case: str, ratio: str, chunks: int | str
) -> dict[Candidate, float]:
    return {
        way: row["ms"]
        for row in rows
        if (row["case"], row["ratio"]) == (case, ratio)
        and (way := WAYS.get(row["variant"])) is not None
        and chunks in ("auto", way.num_chunks)
    }


def _capture(case: Case) -> GatherableLayer:
    layer = MoELayer(case, fake_group(case.num_ranks))
    x = torch.zeros(case.tokens, case.width, dtype=torch.bfloat16, requires_grad=True)
    return GatherableLayer.of(capture(layer, x))
