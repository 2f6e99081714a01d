"""Findings and rewrites of each compilation of this process, kept for the report.

Contract
    Plain data: names, numbers, reasons. No graph node outlives its compilation through it.

Exchanges that belong to no region are listed with a reason, and the user's remedy. These are
all-to-alls, and gathers of tokens for experts: other gathers and reductions, as of sharded
parameters, are no candidates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import torch.fx as fx

from moe_compile.allowed_values import NAMED
from moe_compile.config import OF_REGION
from moe_compile.graph.query import is_all_to_all, is_launch, source_place
from moe_compile.journal.entries import Journal, PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import to_do, with_change
from moe_compile.plan.state import CompileState
from moe_compile.report.graph_breaks import (
    GraphBreak,
    frames_left_out,
    graph_break,
    warning_of,
)
from moe_compile.report.region_reports import STANDS_IN, AttentionReport, RegionReport
from passes.apply_scores import ApplyScores
from passes.fuse_token_sums import FuseTokenSums
from passes.kinds import KINDS
from passes.pipeline import NAMES
from passes.split_batch import SplitBatch


@dataclass(kw_only=True, slots=True)
class Compilation:
    """One call of the backend."""

    site: str
    regions: list[RegionReport] = field(default_factory=list)
    attention: list[AttentionReport] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)
    """Outcomes of every candidate of every pass, on graphs made later too."""
    names_parts: bool = False
    """Whether `recompute_modules` names parts of the model, which are looked for in all graphs."""
    left_out_of_regions: tuple[str, ...] = ()
    """Entries of `disable_passes` that name a region, which is looked for in all graphs."""
    settings: str = ""
    settings_off: tuple[str, ...] = ()
    """Settings of Inductor that were asked for and are off (`torch_quirks.inductor_settings`)."""
    unmatched: list[Verdict] = field(default_factory=list)
    """All-to-alls of no region, the most telling first."""
    place_of_exchange: str = ""
    """The user's line of the first all-to-all; "" without one."""
    graph_break: GraphBreak | None = None
    """Why the graph ends before its function does, None where it does not."""
    left_out: list[GraphBreak] = field(default_factory=list)
    """Functions with collectives that Dynamo has left to Python so far."""

    @property
    def has_regions(self) -> bool:
        """Whether later levels have anything to do."""
        return bool(self.regions) or any(a.is_region for a in self.attention)

    @property
    def region_names(self) -> list[str]:
        """Names of regions, attention too."""
        return [*(r.name for r in self.regions), *(a.name for a in self.attention if a.is_region)]

    def add_level(self, state: CompileState) -> None:
        """Add the results of the Dynamo-level passes on one graph."""
        said = [
            _named_in_full(kind.say(one, state.config), state)
            for kind in KINDS
            for one in state.planned.get(kind.name, ())
        ]
        self.regions += [report for report in said if isinstance(report, RegionReport)]
        self.attention += [report for report in said if isinstance(report, AttentionReport)]
        self.left_alone += [with_change(str(o), o.reason) for o in state.found.others]
        self.unmatched += unmatched(state.found.others)

    def stand_in(self) -> None:
        """Record that the program stands in for one without host reads."""
        self.regions = [replace(r, remarks=(STANDS_IN, *r.remarks)) for r in self.regions]

    def run_as_written(self, why: str) -> None:
        """Record that the program runs as it was written, for the reason `why`."""
        self.regions = [region.as_written(why) for region in self.regions]
        self.attention = [one.as_written(why) for one in self.attention]

    @property
    def dropped(self) -> list[str]:
        """Passes left out of some graph, and why."""
        return [
            f"{one.pass_name}{'' if graph.startswith('dynamo') else ' ' + graph}: {one.why}"
            for graph, one in self.journal.dropped()
        ]

    @property
    def has_failures(self) -> bool:
        """Whether one of the dropped passes raised."""
        return any(one.is_failure for _, one in self.journal.dropped())

    @property
    def rewrites(self) -> list[str]:
        """Rewrites of whole graphs, done and left, and the times predicted for them."""
        known = {*NAMES, NAMED} - {SplitBatch.name, ApplyScores.name, FuseTokenSums.name}
        results = (r for _, r in self.journal.records if r.pass_name not in known)
        return [line for r in results if isinstance(r, PassReport) for line in _rewritten(r)]

    @property
    def unmatched_dispatches(self) -> list[Verdict]:
        """Exchanges that dispatch rows as an expert dispatch does, and were not matched."""
        return [left for left in self.unmatched if left.is_dispatch and not left.is_region]

    def graph_breaks(self) -> list[GraphBreak]:
        """Return the places where a graph ends."""
        return [*([self.graph_break] if self.graph_break else []), *self.left_out]

    def warnings(self) -> list[str]:
        """Return the warnings."""
        return [*self._warnings_of_exchanges(), *map(warning_of, self.left_out)]

    def _warnings_of_exchanges(self) -> Iterator[str]:
        """Yield the warnings for this graph.

        They are about exchanges in a graph without a region; beside regions, about exchanges that
        dispatch rows; and about a graph that ends at a collective. One place has one text
        however often it is compiled: no node is named.
        """
        left = self.unmatched_dispatches if self.has_regions else self.unmatched
        ends = self.graph_break
        if (self.has_regions or not left) and ends and ends.is_collective:
            yield warning_of(ends)
        if not left:
            return
        first, others = left[0], ", like others" if len(left) > 1 else ""
        if self.has_regions:
            yield (
                f"megamoe: the exchange at {first.where or self.site} is left as it is{others}, "
                f"beside the MoE regions of its graph: {first.why}. {to_do(first.reason)}"
            )
            return
        attention = [f"; attention at {a.where}: {a.verdict}" for a in self.attention]
        change = to_do(first.reason)
        if ends is not None:
            change = f"The graph ends at {ends}. To do: {ends.remedy}"
        yield (
            f"megamoe: the exchange at {first.where or self.place_of_exchange} is left as it is"
            f"{others}, and no MoE region was found in its graph: {first.why}. {change}"
            f"{''.join(attention)}"
        )


def _named_in_full(
    report: RegionReport | AttentionReport, state: CompileState
) -> RegionReport | AttentionReport:
    return replace(report, name=state.full_name(report.name))


def describe(gm: fx.GraphModule, state: CompileState) -> Compilation:
    """Return an empty description of the compilation of `gm`."""
    graphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    launches = [n for graph in graphs for n in graph.nodes if is_launch(n)]
    places = list(dict.fromkeys(source_place(node) for node in launches))
    exchanges = [source_place(node) for node in launches if is_all_to_all(node)]
    return Compilation(
        site="; ".join(places[:1]),
        names_parts=bool(state.config.recompute_modules),
        left_out_of_regions=tuple(e for e in state.config.disable_passes if OF_REGION in e),
        settings=state.config.digest_text(),
        journal=state.journal,
        place_of_exchange="; ".join(exchanges[:1]),
        graph_break=graph_break(gm),
        left_out=frames_left_out(),
    )


def _rewritten(report: PassReport) -> list[str]:
    price = ""
    if {"predicted_us", "predicted_us_before"} <= report.measures.keys():
        before, after = report.measures["predicted_us_before"], report.measures["predicted_us"]
        price = f"; predicted {before / 1e3:.3f} ms before, {after / 1e3:.3f} ms after"
    lines = [f"applied to {one}{price}" for one in report.applied]
    lines += [f"left alone {with_change(str(v), v.reason)}" for v in report.skipped]
    return [f"{report.pass_name}: {line}" for line in lines]


def regions_not_found(compilations: Sequence[Compilation]) -> list[str]:
    """Return a line for each entry of `disable_passes` whose region no compilation has."""
    known = dict.fromkeys(name for c in compilations for name in c.region_names)
    has = f"the regions are {', '.join(known)}" if known else "there are no regions"
    return [
        f"disable_passes: {entry!r} has no effect, since no graph has this region; {has}"
        for entry in dict.fromkeys(e for c in compilations for e in c.left_out_of_regions)
        if entry.partition(OF_REGION)[2] not in known
    ]


TELLING: Final = (
    Reason.NOT_AN_EXCHANGE,
    Reason.NO_COMBINE,
    Reason.NO_COUNT_EXCHANGE,
    Reason.SPLIT_OTHERWISE,
    Reason.COUNTS_NOT_COUNTED,
    Reason.UNEVEN_EXPERTS,
    Reason.TOKENS_GATHERED,
    Reason.EVEN_SPLITS,
    Reason.NO_ROWS,
)
"""Reasons in the order to report them; all others come after."""


def unmatched(others: Iterable[Verdict]) -> list[Verdict]:
    """Return the exchanges among `others` that a report lists, the most telling first."""
    rank = {reason: place for place, reason in enumerate(TELLING)}
    told = (one for one in others if one.is_told)
    return sorted(told, key=lambda one: (not one.is_region, rank.get(one.reason, len(rank))))
