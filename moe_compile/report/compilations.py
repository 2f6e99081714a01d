"""What each compilation of this process found and did, kept for the report.

Contract
    Plain data: names, numbers, reasons. No graph node outlives its compilation through it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final

import torch.fx as fx

from moe_compile.analysis.regions import Refused, RowProof
from moe_compile.graph.query import is_all_to_all, is_launch, source_place
from moe_compile.planning.async_tp import AsyncTP
from moe_compile.planning.state import AttentionVerdict, CompileState, Exchange, RegionPlan
from moe_compile.report.decisions import decision_figures, decision_remarks
from moe_compile.report.dispatch import dispatch_figures, dispatch_remarks
from moe_compile.report.unmatched import Unmatched, unmatched
from passes.contract import PassReport, verdict
from passes.pipeline import Dropped

AS_WRITTEN: Final = "run as written: the ranks differ in what they made of it or in what they run"
"""The verdict on all regions of a program that the ranks do not agree to run rewritten."""


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
    is_handed_over: bool = False
    """Whether Inductor's async TP has its collectives."""


@dataclass(kw_only=True, slots=True)
class Compilation:
    """One call of the backend."""

    family: str
    regions: list[RegionReport] = field(default_factory=list)
    attention: list[AttentionReport] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    has_failures: bool = False
    """Whether one of the dropped passes raised."""
    settings: str = ""
    unmatched: list[Unmatched] = field(default_factory=list)
    """All-to-alls of no region, the most telling first."""
    place_of_exchange: str = ""
    """The user's line of the first all-to-all; "" without one."""

    @property
    def has_regions(self) -> bool:
        """Whether there is anything for later levels to do."""
        return bool(self.regions) or any(a.is_region or a.is_handed_over for a in self.attention)

    def add_level(self, results: Iterable[PassReport | Dropped], state: CompileState) -> None:
        """Take over what the Dynamo-level passes did to one graph."""
        chunked: set[str] = set()
        for result in results:
            if isinstance(result, Dropped):
                self.add_dropped(f"{result.pass_name}: {result.reason}", result.is_failure)
            elif result.pass_name == "chunk_regions":
                chunked |= set(result.applied)
        asked = state.config.dispatch
        self.regions += [
            _region_report(plan, asked, chunked=plan.region.name in chunked) for plan in state.plans
        ]
        self.left_alone += [str(verdict(decoy)) for decoy in state.decoys]
        self.unmatched += unmatched(state.decoys)
        self.attention += [_attention_report(verdict) for verdict in state.attention]
        state.plans, state.decoys, state.attention = [], [], []

    def run_as_written(self) -> None:
        """Take in that the ranks agreed to run the program as it was written."""
        self.regions = [_as_written(region) for region in self.regions]
        self.attention = [
            replace(a, num_chunks=1, verdict=AS_WRITTEN) if a.is_region else a
            for a in self.attention
        ]

    def add_dropped(self, line: str, is_failure: bool) -> None:
        """Take in a pass left out of some graph, and whether it raised."""
        self.dropped.append(line)
        self.has_failures |= is_failure

    @property
    def unmatched_dispatches(self) -> list[Unmatched]:
        """Exchanges that dispatch rows as those of experts do, and were not matched."""
        return [left for left in self.unmatched if left.is_dispatch and not left.is_region]

    def warning(self) -> str:
        """Return what to warn of, "" where there is nothing.

        That is exchanges in a graph without a region, and beside regions those that dispatch rows.
        """
        left = self.unmatched_dispatches if self.has_regions else self.unmatched
        if not left:
            return ""
        first, others = left[0], f"; so are {len(left) - 1} others" if len(left) > 1 else ""
        if self.has_regions:
            return (
                f"megamoe: an exchange beside the MoE regions at {self.family} is left as it is"
                f"{others}. {first}. To do: {first.remedy}"
            )
        attention = [f"; attention at {a.where}: {a.verdict}" for a in self.attention]
        return (
            f"megamoe: the exchange at {self.place_of_exchange} is left as it is{others}: no MoE "
            f"region was found in its graph. {first}. To do: {first.remedy}{''.join(attention)}"
        )


def describe(gm: fx.GraphModule, state: CompileState) -> Compilation:
    """Return an empty description of the compilation of `gm`."""
    graphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    launches = [n for graph in graphs for n in graph.nodes if is_launch(n)]
    places = list(dict.fromkeys(source_place(node) for node in launches))
    exchanges = [source_place(node) for node in launches if is_all_to_all(node)]
    return Compilation(
        family="; ".join(places[:1]),
        settings=state.config.digest_text(),
        place_of_exchange="; ".join(exchanges[:1]),
    )


def _as_written(region: RegionReport) -> RegionReport:
    wires = {name: ("same", before, before) for name, (_, before, _) in region.wires.items()}
    return replace(
        region, num_chunks=1, verdict=AS_WRITTEN, dispatch="all_to_all", num_tokens=0, wires=wires
    )


def _attention_report(found: AttentionVerdict) -> AttentionReport:
    detail = f" ({found.detail})" if found.detail else ""
    return AttentionReport(
        name=found.name,
        where=found.where,
        is_region=found.is_region,
        num_ranks=found.num_ranks,
        num_heads=found.num_heads,
        num_kv_heads=found.num_kv_heads,
        num_chunks=found.num_chunks,
        verdict=found.reason.value + detail if found.reason else "chunked",
        decision=decision_figures(found.decision),
        remarks=(
            *decision_remarks(found.decision),
            *_said(found.rounding),
            *found.projections_cut,
            *found.projections_whole,
            *_said(found.async_tp),
        ),
        is_handed_over=found.async_tp == AsyncTP.HANDED.value,
    )


def _said(text: str) -> tuple[str, ...]:
    return (text,) if text else ()


def _region_report(plan: RegionPlan, asked: str, *, chunked: bool) -> RegionReport:
    region, switched = plan.region, plan.switch.is_switched
    refused = plan.proof if isinstance(plan.proof, Refused) else None
    remarks = [plan.remark.value] if plan.remark else []
    remarks += decision_remarks(plan.decision)
    remarks += dispatch_remarks(plan, asked)
    remarks += [_wire(e) for e in (plan.dispatch, plan.combine) if e.wire != "same" or e.refusal]
    if isinstance(plan.proof, RowProof) and plan.proof.sampled:
        remarks.append(f"indices checked on {plan.proof.sampled} sampled vectors of counts")
    if refused is None and chunked:
        remarks += [f"weights not sliced: {why}" for why in _unsliced(plan)]
    return RegionReport(
        name=region.name,
        where=plan.where,
        num_ranks=region.num_ranks,
        num_local_experts=region.num_local_experts,
        num_chunks=plan.num_chunks if chunked or switched else 1,
        num_host_reads=plan.num_host_reads,
        verdict=_verdict(plan, chunked=chunked),
        dispatch="all_gather" if switched else "all_to_all",
        num_tokens=plan.switch.num_tokens,
        dispatch_figures=dispatch_figures(plan),
        wires={
            e.name: (e.wire, e.row_bytes_before, e.row_bytes) for e in (plan.dispatch, plan.combine)
        },
        decision=decision_figures(plan.decision),
        remarks=tuple(remarks),
    )


def _verdict(plan: RegionPlan, *, chunked: bool) -> str:
    if plan.switch.is_switched:
        return "all-gathered"
    if chunked:
        return "chunked"
    if not isinstance(plan.proof, Refused):
        return "left whole"
    detail = f" ({plan.proof.detail})" if plan.proof.detail else ""
    return plan.proof.reason.value + detail


def _wire(exchange: Exchange) -> str:
    if exchange.refusal:
        return f"{exchange.name} not quantised: {exchange.refusal}"
    share = exchange.row_bytes / exchange.row_bytes_before
    return (
        f"{exchange.name} in {exchange.wire}: {exchange.row_bytes} of {exchange.row_bytes_before} "
        f"bytes per row ({share:.3f})"
    )


def _unsliced(plan: RegionPlan) -> list[str]:
    pairs = [] if isinstance(plan.proof, Refused) else list(plan.proof.unsliceable)
    return list(dict.fromkeys(reason for _, reason in pairs))
