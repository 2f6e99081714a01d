"""What became of one MoE region, or of one attention operator, as a report has it.

Contract
    Plain data: names, numbers, reasons. No graph node outlives its compilation through it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.graph.query import source_place
from moe_compile.journal.entries import Verdict
from moe_compile.journal.remedies import REMEDIES, changes_for
from moe_compile.plan.chunk_numbers import Bound, last_bits_remark
from moe_compile.plan.planned import PlannedAttention, PlannedExperts
from moe_compile.regions.regions import Refused, RowProof
from moe_compile.report.decisions import decision_figures, decision_remarks
from moe_compile.report.dispatch import dispatch_figures, dispatch_remarks, node_remarks

AS_WRITTEN: Final = "run as written: the ranks differ in what they made of it or in what they run"
DOES_NOT_COMPILE: Final = "run as written: what the passes made of it does not compile"
"""The verdict on all regions of a program that the ranks do not agree to run rewritten."""

CHUNKED: Final = "chunked"
ALL_GATHERED: Final = "all-gathered"
IN_TWO_HOPS: Final = "dispatched in two hops"
LEFT_WHOLE: Final = "left whole"
"""Verdicts on regions that are proven; on others it is the reason."""

BY_LOAD: Final = "each step's counts say which experts a chunk has: about as many rows in each"


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
    """`chunked`, `all-gathered` or `dispatched in two hops`, or why none of these."""
    sized_by: str = "counts"
    """What says how many rows an expert gets: `counts`, or a `capacity` in equal parts."""
    remedy: str = ""
    """What to change where the experts are not proven to run in chunks; "" else."""
    dispatch: str = "all_to_all"
    """What moves the tokens, as the option names it."""
    nodes: str = "off"
    """Whether a token crosses to a node once, as the option names it."""
    hop_slices: int = 1
    """Slices of tokens that hop 1 then goes in, beside the chunks."""
    chunk_edges: str = "even"
    """Where chunks begin and end, as the option names it."""
    num_tokens: int = 0
    """Tokens of each rank where they are gathered and known when compiling, else 0: all ranks must
    have as many, and compare this number before they run."""
    dispatch_figures: dict[str, float] = field(default_factory=dict)
    """Rows per token, bytes per token each way by either; {} if not known."""
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


def as_written(region: RegionReport, why: str) -> RegionReport:
    """Return the report of `region` where it runs as the program has it, for the reason `why`."""
    wires = {name: ("same", before, before) for name, (_, before, _) in region.wires.items()}
    return replace(
        region,
        num_chunks=1,
        verdict=why,
        dispatch="all_to_all",
        nodes="off",
        hop_slices=1,
        chunk_edges="even",
        num_tokens=0,
        wires=wires,
    )


def attention_report(one: PlannedAttention) -> AttentionReport:
    """Return what became of one attention operator."""
    region = one.found.region
    sizes = (0, 0)
    if isinstance(region, AttentionRegion):
        sizes = region.num_heads, region.num_kv_heads
    why = one.left.get("attention_chunks")
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
        remarks=(*decision_remarks(one.decision), *one.remarks),
        to_do=changes_for(left.reason for left in one.left.values()),
    )


def region_report(one: PlannedExperts, asked: str) -> RegionReport:
    """Return what became of a MoE region; `asked` is the option `dispatch`."""
    region, plan = one.found.region, one.plan
    left, chunks = dict(one.left), one.left.get("chunks")
    remarks = [chunks.why] if chunks and isinstance(one.proof, RowProof) else []
    remarks += [Bound.BY_TOKENS.value] if plan.by_tokens and not plan.is_divided else []
    remarks += [BY_LOAD] if plan.by_load else edges_remarks(left)
    remarks += decision_remarks(one.decision)
    remarks += [f"not decided by price: {one.not_priced}"] if one.not_priced else []
    remarks += dispatch_remarks(one, asked)
    remarks += node_remarks(one)
    remarks += [_wire(one, name) for name in ("dispatch", "combine") if plan.wire(name) != "same"]
    wires = [v for v in (left.get("dispatch_wire"), left.get("combine_wire")) if v and v.is_asked]
    remarks += [f"{v.option.removesuffix('_wire')} not quantised: {v.why}" for v in wires]
    if isinstance(one.proof, RowProof):
        if one.is_rewritten and one.proof.last_bits:
            remarks.append(last_bits_remark(one.proof.last_bits))
        if one.proof.sampled:
            remarks.append(f"indices checked on {one.proof.sampled} sampled vectors of counts")
        if plan.is_chunked:
            reasons = dict.fromkeys(reason for _, reason in one.proof.unsliceable)
            remarks += [f"weights not sliced: {reason}" for reason in reasons]
            remarks += [_rounds(node.name) for node in one.proof.shared]
            remarks += [_reorders(source_place(node)) for node in one.proof.reordered]
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
        nodes=plan.nodes,
        hop_slices=plan.hop_slices,
        chunk_edges="load" if plan.by_load else "even",
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


def edges_remarks(left: Mapping[str, Verdict]) -> list[str]:
    """Return why chunks have as many experts each, where options leave that open."""
    why = left.get("chunk_edges")
    return [f"as many experts in each chunk: {why.why}"] if why is not None else []


def _verdict(one: PlannedExperts) -> str:
    if one.plan.gathers:
        return ALL_GATHERED
    if one.plan.is_divided:
        return IN_TWO_HOPS
    if one.plan.is_chunked:
        return CHUNKED
    return one.left["chunks"].why if isinstance(one.proof, Refused) else LEFT_WHOLE


def _rounds(parameter: str) -> str:
    return (
        f"the gradient of {parameter}, which rows of several experts read, is added up in another "
        "order: off by at most m + 1 eps times the sum of the magnitudes of its m terms"
    )


def _reorders(where: str) -> str:
    return (
        f"the sort at {where} leaves the order of one expert's rows open, and is stable in chunks: "
        "gradients of weights, sums of m terms, are added up in another order, off by at most m "
        "eps times the sum of their magnitudes; a product that rounds by a row's place, by as many "
        "of its own"
    )


def _wire(one: PlannedExperts, name: str) -> str:
    now, before = one.row_bytes[name], one.found.row_bytes[name]
    return f"{name} in {one.plan.wire(name)}: {now} of {before} bytes per row ({now / before:.3f})"
