"""What each compilation of this process found and did, kept for the report.

Contract
    Plain data: names, numbers, reasons. No graph node outlives its compilation through it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

import torch.fx as fx

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.graph.query import is_all_to_all, is_launch, source_place
from moe_compile.journal.entries import Journal, PassReport
from moe_compile.journal.remedies import REMEDIES, changes_for, to_do, with_change
from moe_compile.plan.chunk_numbers import Bound
from moe_compile.plan.planned import PlannedAttention, PlannedExperts
from moe_compile.plan.state import CompileState
from moe_compile.regions.regions import Refused, RowProof
from moe_compile.report.decisions import decision_figures, decision_remarks
from moe_compile.report.dispatch import dispatch_figures, dispatch_remarks
from moe_compile.report.graph_breaks import (
    GraphBreak,
    frames_left_out,
    graph_break,
    warning_of,
)
from moe_compile.report.unmatched import Unmatched, unmatched
from passes.pipeline import NAMES

AS_WRITTEN: Final = "run as written: the ranks differ in what they made of it or in what they run"
"""The verdict on all regions of a program that the ranks do not agree to run rewritten."""

CHUNKED: Final = "chunked"
ALL_GATHERED: Final = "all-gathered"
LEFT_WHOLE: Final = "left whole"
"""Verdicts on regions that are proven; on others it is the reason."""

HANDED_OVER: Final = "handed to Inductor's async TP: the sum over ranks is taken in another order"
LEFT: Final = {
    "projections of q, k and v": "projections of q, k and v whole",
    "output projection": "output projection whole",
    "async_tp": "not handed to Inductor's async TP",
}
"""What of attention is left as it is -> what to say of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionReport:
    """What became of one MoE region."""

    name: str
    where: str
    """`file.py:line in function` of the dispatch."""
    num_ranks: int
    num_local_experts: int
    num_chunks: int
    num_host_reads: int
    """Blocking reads by the host per forward pass of the region."""
    verdict: str
    """`chunked` or `all-gathered`, or why neither."""
    remedy: str = ""
    """What to change where the experts are not proven to run in chunks; "" else."""
    dispatch: str = "all_to_all"
    """What moves the tokens, as the option names it."""
    num_tokens: int = 0
    """Tokens of each rank where they are gathered and known when compiling, else 0: all ranks must
    have as many, and compare this number before they run."""
    dispatch_figures: dict[str, float] = field(default_factory=dict)
    """Rows per token, bytes per token each way by either, worst-case padding; {} if not known."""
    wires: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """`dispatch` and `combine` -> number format, bytes of a row before, bytes of a row now."""
    decision: dict[str, object] = field(default_factory=dict)
    """What the planner chose, the runner-up, margin, why, advice; {} where it had no say."""
    remarks: tuple[str, ...] = ()
    to_do: tuple[str, ...] = ()
    """What to change so that what was left is done, a sentence for each reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionReport:
    """What became of one attention operator."""

    name: str
    where: str
    """`file.py:line in function` of the attention."""
    is_region: bool
    """Whether it stands between exchanges of heads for sequence."""
    num_ranks: int
    num_heads: int
    """Query heads of a rank; 0 where there is no region."""
    num_kv_heads: int
    num_chunks: int
    verdict: str
    """`chunked`, or why not."""
    decision: dict[str, object] = field(default_factory=dict)
    """What the planner chose, the runner-up, margin, why; {} where it had no say."""
    remarks: tuple[str, ...] = ()
    to_do: tuple[str, ...] = ()
    """What to change so that what was left is done, a sentence for each reason."""
    is_handed_over: bool = False
    """Whether Inductor's async TP has its collectives."""


@dataclass(kw_only=True, slots=True)
class Compilation:
    """One call of the backend."""

    site: str
    regions: list[RegionReport] = field(default_factory=list)
    attention: list[AttentionReport] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    journal: Journal = field(default_factory=Journal)
    """What became of every candidate of every pass, on graphs made later too."""
    settings: str = ""
    settings_off: tuple[str, ...] = ()
    """Settings of Inductor that were asked for and are off: see `moe_compile.inductor_settings`."""
    unmatched: list[Unmatched] = field(default_factory=list)
    """All-to-alls of no region, the most telling first."""
    place_of_exchange: str = ""
    """The user's line of the first all-to-all; "" without one."""
    graph_break: GraphBreak | None = None
    """Why the graph ends before the function that it is of, None where it does not."""
    left_out: list[GraphBreak] = field(default_factory=list)
    """Functions with collectives that Dynamo has left to Python so far."""

    @property
    def has_regions(self) -> bool:
        """Whether there is anything for later levels to do."""
        return bool(self.regions) or any(a.is_region or a.is_handed_over for a in self.attention)

    def add_level(self, state: CompileState) -> None:
        """Take over what the Dynamo-level passes did to one graph."""
        self.regions += [_region_report(one, state.config.dispatch) for one in state.experts]
        self.left_alone += [with_change(str(o), o.reason) for o in state.found.others]
        self.unmatched += unmatched(state.found.others, _places(state))
        self.attention += [_attention_report(one) for one in state.attention]

    def run_as_written(self) -> None:
        """Take in that the ranks agreed to run the program as it was written."""
        self.regions = [_as_written(region) for region in self.regions]
        self.attention = [
            replace(a, num_chunks=1, verdict=AS_WRITTEN) if a.is_region else a
            for a in self.attention
        ]

    @property
    def dropped(self) -> list[str]:
        """Passes left out of some graph, and why."""
        return [
            f"{one.pass_name}{'' if graph.startswith('dynamo') else ' ' + graph}: "
            + with_change(one.why, one.reason)
            for graph, one in self.journal.dropped()
        ]

    @property
    def has_failures(self) -> bool:
        """Whether one of these raised."""
        return any(one.is_failure for _, one in self.journal.dropped())

    @property
    def rewrites(self) -> list[str]:
        """What rewrites of other distributions did and left, and what was predicted of it."""
        results = (r for _, r in self.journal.records if r.pass_name not in NAMES)
        return [line for r in results if isinstance(r, PassReport) for line in _rewritten(r)]

    @property
    def unmatched_dispatches(self) -> list[Unmatched]:
        """Exchanges that dispatch rows as those of experts do, and were not matched."""
        return [left for left in self.unmatched if left.is_dispatch and not left.is_region]

    def graph_breaks(self) -> list[GraphBreak]:
        """Return where no graph goes on."""
        return [*([self.graph_break] if self.graph_break else []), *self.left_out]

    def warnings(self) -> list[str]:
        """Return what to warn of."""
        warning = self._warning_of_exchanges()
        return [*([warning] if warning else []), *map(warning_of, self.left_out)]

    def _warning_of_exchanges(self) -> str:
        """Return what to warn of in this graph, "" where there is nothing.

        That is exchanges in a graph without a region, and beside regions those that dispatch rows;
        and a graph that ends at a collective. It is the same text for one place however often that
        is compiled: no node is named.
        """
        left = self.unmatched_dispatches if self.has_regions else self.unmatched
        ends = self.graph_break
        if not left:
            return warning_of(ends) if ends and ends.is_collective else ""
        first, others = left[0], ", as others are" if len(left) > 1 else ""
        if self.has_regions:
            return (
                f"megamoe: the exchange at {first.where or self.site} is left as it is{others}, "
                f"beside the MoE regions of its graph: {first.why}. {to_do(first.reason)}"
            )
        attention = [f"; attention at {a.where}: {a.verdict}" for a in self.attention]
        change = to_do(first.reason)
        if ends is not None:
            change = f"The graph ends at {ends}. To do: {ends.remedy}"
        return (
            f"megamoe: the exchange at {first.where or self.place_of_exchange} is left as it is"
            f"{others}, and no MoE region was found in its graph: {first.why}. {change}"
            f"{''.join(attention)}"
        )


def describe(gm: fx.GraphModule, state: CompileState) -> Compilation:
    """Return an empty description of the compilation of `gm`."""
    graphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    launches = [n for graph in graphs for n in graph.nodes if is_launch(n)]
    places = list(dict.fromkeys(source_place(node) for node in launches))
    exchanges = [source_place(node) for node in launches if is_all_to_all(node)]
    return Compilation(
        site="; ".join(places[:1]),
        settings=state.config.digest_text(),
        journal=state.journal,
        place_of_exchange="; ".join(exchanges[:1]),
        graph_break=graph_break(gm),
        left_out=frames_left_out(),
    )


def _places(state: CompileState) -> dict[str, str]:
    """Return the user's line of each exchange of no region in the Dynamo graph at hand."""
    mine = (r for graph, r in state.journal.records if graph == state.graph_name)
    reports = (r for r in mine if isinstance(r, PassReport) and r.pass_name == "detect_regions")
    return {verdict.candidate: verdict.where for r in reports for verdict in r.skipped}


def _as_written(region: RegionReport) -> RegionReport:
    wires = {name: ("same", before, before) for name, (_, before, _) in region.wires.items()}
    return replace(
        region, num_chunks=1, verdict=AS_WRITTEN, dispatch="all_to_all", num_tokens=0, wires=wires
    )


def _attention_report(one: PlannedAttention) -> AttentionReport:
    region = one.found.region
    sizes = (0, 0)
    if isinstance(region, AttentionRegion):
        sizes = region.num_heads, region.num_kv_heads
    why = one.left.get("attention_chunks")
    handed_over = (HANDED_OVER,) if one.plan.is_handed_over else ()
    return AttentionReport(
        name=region.name,
        where=one.found.where,
        is_region=bool(one.plan.group),
        num_ranks=region.num_ranks if isinstance(region, AttentionRegion) else 1,
        num_heads=sizes[0],
        num_kv_heads=sizes[1],
        num_chunks=one.plan.num_chunks,
        verdict=why.why if why else CHUNKED,
        decision=decision_figures(one.decision),
        remarks=(
            *decision_remarks(one.decision),
            *one.remarks,
            *(f"{LEFT[what]}: {left.why}" for what, left in one.left.items() if what in LEFT),
            *handed_over,
        ),
        to_do=changes_for(left.reason for left in one.left.values()),
        is_handed_over=one.plan.is_handed_over,
    )


def _region_report(one: PlannedExperts, asked: str) -> RegionReport:
    region, plan = one.found.region, one.plan
    left, chunks = dict(one.left), one.left.get("chunks")
    remarks = [chunks.reason.value] if chunks and isinstance(one.proof, RowProof) else []
    remarks += [Bound.BY_TOKENS.value] if plan.by_tokens else []
    remarks += decision_remarks(one.decision)
    remarks += [f"not decided by price: {one.not_priced}"] if one.not_priced else []
    remarks += dispatch_remarks(one, asked)
    remarks += [_wire(one, name) for name in ("dispatch", "combine") if plan.wire(name) != "same"]
    wires = [v for v in (left.get("dispatch_wire"), left.get("combine_wire")) if v and v.is_asked]
    remarks += [f"{v.option.removesuffix('_wire')} not quantised: {v.why}" for v in wires]
    if isinstance(one.proof, RowProof):
        if one.proof.sampled:
            remarks.append(f"indices checked on {one.proof.sampled} sampled vectors of counts")
        if plan.is_chunked:
            reasons = dict.fromkeys(reason for _, reason in one.proof.unsliceable)
            remarks += [f"weights not sliced: {reason}" for reason in reasons]
    return RegionReport(
        name=region.name,
        where=one.found.where,
        num_ranks=region.num_ranks,
        num_local_experts=region.num_local_experts,
        num_chunks=plan.num_chunks,
        num_host_reads=one.num_host_reads,
        verdict=_verdict(one),
        remedy=REMEDIES[one.proof.reason] if isinstance(one.proof, Refused) else "",
        dispatch=plan.dispatch,
        num_tokens=plan.num_tokens,
        dispatch_figures=dispatch_figures(one),
        wires={
            name: (plan.wire(name), before, one.row_bytes[name])
            for name, before in one.found.row_bytes.items()
        },
        decision=decision_figures(one.decision),
        remarks=tuple(remarks),
        to_do=changes_for(verdict.reason for verdict in left.values()),
    )


def _verdict(one: PlannedExperts) -> str:
    if one.plan.gathers:
        return ALL_GATHERED
    if one.plan.is_chunked:
        return CHUNKED
    return one.left["chunks"].why if isinstance(one.proof, Refused) else LEFT_WHOLE


def _rewritten(report: PassReport) -> list[str]:
    price = ""
    if {"predicted_us", "predicted_us_before"} <= report.measures.keys():
        before, after = report.measures["predicted_us_before"], report.measures["predicted_us"]
        price = f"; predicted {before / 1e3:.3f} ms before, {after / 1e3:.3f} ms after"
    lines = [f"applied to {one}{price}" for one in report.applied]
    lines += [f"left alone {with_change(str(v), v.reason)}" for v in report.skipped]
    return [f"{report.pass_name}: {line}" for line in lines]


def _wire(one: PlannedExperts, name: str) -> str:
    now, before = one.row_bytes[name], one.found.row_bytes[name]
    return f"{name} in {one.plan.wire(name)}: {now} of {before} bytes per row ({now / before:.3f})"
