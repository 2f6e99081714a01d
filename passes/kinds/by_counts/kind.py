"""MoE regions whose rows are split by counts: in chunks, on gathered tokens, in two hops, in equal
parts; how they are found, run and reported.

Contract
    A region that a proof refuses is found all the same: its rows may travel in another format.
    Rewritten, a region has one exchange of counts and one bulk host read whatever the number of
    chunks, beside reads whose integers others need before it; where edges follow from counts, one
    gather of counts. In equal parts it has no host read.
    Every figure of the report comes from static facts of the region; bytes are per token and
    direction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple

import torch
import torch.distributed as dist
import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.traced_nodes import Layers
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import bytes_of_row, known_rows, source_place, tensor_of
from moe_compile.graph.torch_calls import make_stable
from moe_compile.journal.reasons import Left, Reason
from moe_compile.journal.remedies import REMEDIES, changes_for
from moe_compile.ops.wire_format import BLOCK
from moe_compile.plan.chunk_numbers import NumericalChange, last_bits_remark
from moe_compile.plan.dispatch_rules import (
    EXACT_ADDENDS,
    MEASURED_SHARE,
    DispatchCosts,
    Rounding,
)
from moe_compile.plan.hop_prices import HopPrices
from moe_compile.plan.node_rounding import NodeRounding
from moe_compile.plan.planned import Findings, FoundExperts, PlannedExperts
from moe_compile.plan.state import CompileState
from moe_compile.proof.row_proof import prove_rows_independent
from moe_compile.regions.body_nodes import count_host_reads
from moe_compile.regions.detect_moe import find_moe_regions
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.report.region_reports import (
    ALL_GATHERED,
    CHUNKED,
    IN_TWO_HOPS,
    LEFT_WHOLE,
    NO_READS,
    RegionReport,
    decision_figures,
    decision_remarks,
    edges_remarks,
)
from passes.kinds.by_counts.experts import plan_experts
from passes.kinds.by_counts.products import find_products
from passes.kinds.contract import Emitted, Finds, RegionKind
from passes.replay.even_rows import emit_even
from passes.replay.gathered import emit_gathered
from passes.replay.hops import HopSplit
from passes.replay.masked_replay import chunk_bounds, emit_chunks
from passes.replay.two_hops import emit_two_hops

BY_LOAD: Final = (
    "in each step the counts decide which experts a chunk has, so that all chunks have about "
    "equally many rows"
)


class ByCounts(RegionKind[PlannedExperts]):
    """Regions of experts by counts; see the module docstring."""

    name: ClassVar[str] = "experts"

    def find(self, facts: GraphFacts, config: MegaMoEConfig, before: Findings) -> Finds:
        """Return the regions, each with its proof."""
        del before
        regions, others = find_moe_regions(facts)
        found = tuple(_found(region, config) for region in regions)
        return Finds(found=found, others=tuple(others))

    def plan(self, state: CompileState, layers: Layers) -> tuple[PlannedExperts, ...]:
        """Return the plan of every region; note launches, results and nodes that will be dead."""
        planned, state.dead = plan_experts(state, layers)
        regions = [one.found.region for one in planned]
        state.launches = {
            region.name: {"dispatch": (region.dispatch,), "combine": (region.combine,)}
            for region in regions
        }
        state.results = {region.name: region.result for region in regions}
        return planned

    def emit(self, one: PlannedExperts, state: CompileState) -> Emitted:
        """Emit a region in its form; note its launches and its result."""
        region, effects, form = one.found.region, one.effects, _form(one)
        assert effects is not None
        state.launches[region.name] = {
            "dispatch": tuple(form.dispatches),
            "combine": tuple(form.combines),
        }
        if form.overflow is not None:
            state.overflows.append(form.overflow)
        if region.result in form.instead:
            state.results[region.name] = form.instead[region.result]
        else:
            state.results.pop(region.name, None)
        return Emitted(
            instead={**effects.sizes, **form.instead},
            moved=((effects.moved, effects.read_at), (region.between, region.result)),
            num_host_reads=0 if one.plan.room else 1,
        )

    def say(self, one: PlannedExperts, config: MegaMoEConfig) -> RegionReport:
        """Return the report on a region."""
        return region_report(one, config.dispatch)


def _found(region: MoERegion, config: MegaMoEConfig) -> FoundExperts:
    rows = {"dispatch": _payload(region.dispatch), "combine": _payload(region.combine)}
    return FoundExperts(
        region=region,
        proof=prove_rows_independent(region, may_round=config.allows("bounded")),
        where=source_place(region.dispatch),
        num_host_reads=count_host_reads(region),
        rows=rows,
        row_bytes={name: bytes_of_row(tensor) for name, tensor in rows.items()},
        products=find_products(region, config),
    )


def _payload(launch: fx.Node) -> torch.Tensor | None:
    (payload, *_) = launch.all_input_nodes
    return tensor_of(payload)


class _Form(NamedTuple):
    """The nodes emitted for a region."""

    dispatches: Sequence[fx.Node]
    combines: Sequence[fx.Node]
    instead: Mapping[fx.Node, fx.Node]
    overflow: fx.Node | None = None


def _form(one: PlannedExperts) -> _Form:
    """Emit a region in equal parts, on gathered tokens, in two hops, or in chunks."""
    region, proof, effects = one.found.region, one.proof, one.effects
    assert effects is not None and isinstance(proof, RowProof)
    if one.even is not None:
        even = emit_even(one.even)
        instead = {region.result: even.result}
        return _Form(even.dispatches, even.combines, instead, even.overflow)
    if one.gathered is not None:
        gathered = emit_gathered(one.gathered, effects, _rank_in(region.group))
        instead = {**gathered.instead, one.gathered.found.sums.total: gathered.result}
        return _Form(gathered.gathers, gathered.reduces, instead)
    if one.two_hops is not None:
        two_hops = emit_two_hops(one.two_hops, proof, _cut(one), effects)
        return _Form(two_hops.hops, two_hops.combines, two_hops.instead)
    num, by_tokens = one.plan.num_chunks, one.plan.by_tokens
    rank = _rank_in(region.group) if one.plan.by_load else None
    for sort in proof.reordered:
        make_stable(sort)
    chunks = emit_chunks(region, proof, num, effects, by_tokens=by_tokens, rank_by_load=rank)
    return _Form(chunks.dispatches, chunks.combines, chunks.instead)


def _cut(one: PlannedExperts) -> HopSplit:
    """Return the parts in which rows travel in two hops: chunks of experts, slices of tokens."""
    local, num = one.found.region.num_local_experts, one.plan.num_chunks
    if one.plan.by_tokens:
        return HopSplit((0, local), slices=num)
    edges = (0, *(chunk.stop for chunk in chunk_bounds(local, num)))
    return HopSplit(edges, slices=one.plan.hop_slices)


def _rank_in(group: str) -> int:
    return dist.get_rank(dist.distributed_c10d._resolve_process_group(group))


def region_report(one: PlannedExperts, asked: str) -> RegionReport:
    """Return the report on a MoE region; `asked` is the option `dispatch`."""
    region, plan = one.found.region, one.plan
    left, chunks = dict(one.left), one.left.get("chunks")
    remarks = [chunks.why] if chunks and isinstance(one.proof, RowProof) else []
    remarks += (
        [NumericalChange.BY_TOKENS.value] if plan.by_tokens and not plan.is_in_two_hops else []
    )
    remarks += [BY_LOAD] if plan.by_load else edges_remarks(left)
    remarks += decision_remarks(one.decision)
    remarks += [f"decided without predicted times: {one.not_priced}"] if one.not_priced else []
    remarks += dispatch_remarks(one, asked)
    remarks += room_remarks(one)
    remarks += node_remarks(one)
    remarks += [_wire(one, name) for name in ("dispatch", "combine") if plan.wire(name) != "same"]
    wires = [v for v in (left.get("dispatch_wire"), left.get("combine_wire")) if v and v.is_asked]
    remarks += [f"{v.option.removesuffix('_wire')} not quantised: {v.why}" for v in wires]
    remarks += _products(one)
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
        remedy=REMEDIES[one.proof.reason] if isinstance(one.proof, Left) else "",
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


def _verdict(one: PlannedExperts) -> str:
    if one.plan.room:
        return NO_READS
    if one.plan.gathers:
        return ALL_GATHERED
    if one.plan.is_in_two_hops:
        return IN_TWO_HOPS
    if one.plan.is_chunked:
        return CHUNKED
    return one.left["chunks"].why if isinstance(one.proof, Left) else LEFT_WHOLE


def _rounds(parameter: str) -> str:
    return (
        f"the gradient of {parameter}, which rows of several experts read, is added up in a "
        "different order than in the model, so it differs by at most (m + 1) eps times the sum of "
        "the magnitudes of its m terms"
    )


def _reorders(where: str) -> str:
    return (
        f"the sort at {where} leaves the order of one expert's rows open, and is stable in "
        "chunks. So gradients of weights, sums of m terms, are added up in a different order "
        "than in the model, and differ by at most m eps times the sum of their magnitudes; a "
        "product of n terms that is rounded depending on a row's place differs by at most n eps"
    )


def _products(one: PlannedExperts) -> list[str]:
    """Return the remark on products in eight bits, or on why there are none where asked for."""
    left = one.left.get("expert_compute")
    if left is not None:
        return [f"products not quantised: {left.why}"] if left.is_asked else []
    said = f"grouped products in {one.plan.expert_compute} ({', '.join(one.plan.fp8_products)})"
    return [f"{said}: {one.product_times} predicted" if one.product_times else said]


def _wire(one: PlannedExperts, name: str) -> str:
    now, before = one.row_bytes[name], one.found.row_bytes[name]
    return f"{name} in {one.plan.wire(name)}: {now} of {before} bytes per row ({now / before:.3f})"


def dispatch_remarks(one: PlannedExperts, asked: str) -> list[str]:
    """Return the remarks on the dispatch of one region under the option's value `asked`."""
    if asked == "all_to_all":
        return []
    said = []
    if (left := one.left.get("dispatch")) is not None:
        said.append(f"not all-gathered: {left.why}")
    if one.costs is not None:
        said += _costs(one.costs)
    if one.plan.gathers and one.rounding is not None:
        said += _equality(one.rounding)
    return said


def room_remarks(one: PlannedExperts) -> list[str]:
    """Return the remark on the room for rows of one region, or on why the host reads for it."""
    left = one.left.get("host_reads")
    if left is not None and left.reason is not Reason.NOT_ASKED:
        return [f"the host still reads its counts: {left.why}"]
    if not one.plan.room:
        return []
    rows = known_rows(one.found.region.rows)
    said = (
        f"the host reads nothing: from each rank to each other rank, {one.plan.room} of a rank's "
        f"{rows} rows fit"
    )
    if one.even is not None and one.plan.is_chunked:
        said += f"; in slices of {one.even.slice_room}, one for each chunk"
    return [said]


def node_remarks(one: PlannedExperts) -> list[str]:
    """Return the remarks on the two hops of one region, or on why it has none."""
    prices = _prices(one.hop_prices) if one.hop_prices is not None else []
    if not one.plan.is_in_two_hops:
        left = one.left.get("nodes")
        if left is None or left.reason is Reason.NOT_ASKED:
            return prices
        return [f"not in two hops: {left.why}", *prices]
    nodes, ranks = one.plan.num_nodes, one.plan.num_ranks
    where = f"{nodes} nodes of {ranks // nodes} ranks: "
    prices = _parts(one) + prices
    if (rounding := one.node_rounding) is not None:
        return [
            f"{where}in dispatch and combine, forward and backward, a token crosses to a node once",
            *_sums_on_nodes(rounding),
            *_messages(one),
            *prices,
        ]
    messages = _messages(one)
    return [
        f"{where}in the dispatch, and in the gradient of the combine, a token crosses to a node "
        "once; rows that are summed go in one hop, as in the "
        f"model{('' if messages else ', and no bit changes')}",
        *messages,
        *prices,
    ]


def _messages(one: PlannedExperts) -> list[str]:
    """Return how eight-bit rows in two hops compare with those of the flat exchange."""
    form, plan = one.two_hops, one.plan
    if form is None or plan.dispatch_wire == plan.combine_wire == "same":
        return []
    said = "in eight bits a row is packed once, and handed on inside the node as it came"
    weighted, products = form.found.weighted, []
    if plan.dispatch_wire != "same" and "dispatch" in weighted:
        products.append("tokens, not their weighted rows")
    if plan.combine_wire == "fp8" and "combine" in weighted:
        products.append("gradients of sums, not of weighted rows")
    if products:
        return [
            f"{said}. Packed are {', and '.join(products)}, so bits differ from the exchange "
            "in one hop, within the same bound"
        ]
    return [f"{said}. Rows equal those of the exchange in one hop in eight bits, bit for bit"]


def _parts(one: PlannedExperts) -> list[str]:
    """Return the parts that two hops run in."""
    num, slices = one.plan.num_chunks, one.plan.hop_slices
    if one.plan.by_tokens:
        num, slices = 1, num
    said = []
    if slices > 1:
        said = [
            f"hop 1 runs in {slices} slices of tokens, and hop 2 of a slice once the slice "
            "has arrived; experts wait for all slices"
        ]
    return said + [f"hop 2, experts and combine run in {num} chunks of experts"] * (num > 1)


def _prices(prices: HopPrices) -> list[str]:
    words = {"off": "flat", "exact": "in two hops", "rounded": "with sums on the nodes"}
    rows = ", ".join(f"{words[n]} {prices.shape.rows_between(n):.2f}" for n in words)
    said = [f"rows of a token from node to node, forward and backward: {rows}"]
    if prices.us:
        times = ", ".join(f"{words[n]} {us / 1e3:.2f} ms" for n, us in prices.us.items())
        said.append(f"predicted without chunking, one hop after the other: {times}")
    return said


def _sums_on_nodes(rounding: NodeRounding) -> list[str]:
    wide = "float64" if rounding.dtype is torch.float64 else "float32"
    said = (
        f"sums of {rounding.num_addends} rows per token are made on the nodes, in {wide}, and "
        f"then on the token's own rank, so they differ by at most {rounding.bound:.3g} times the "
        "sum of their magnitudes, three roundings to "
        f"{str(rounding.dtype).removeprefix('torch.')} and {rounding.num_addends + 2} in {wide}"
    )
    packed = (
        f"sums of {' and '.join(rounding.in_eight_bits)} have terms that travel in eight bits, "
        f"as do the sums of nodes, so they differ by at most {rounding.bound_in_eight_bits:.3g} "
        f"times the sum of their magnitudes and {rounding.bound_of_blocks:.3g} times the sum of "
        f"the largest magnitudes of their {BLOCK} columns"
    )
    return [said, *([packed] if rounding.in_eight_bits else []), *_gradients(rounding)]


def dispatch_figures(one: PlannedExperts) -> dict[str, float]:
    """Return bytes either way, as numbers; empty where they are not known."""
    costs = one.costs
    if costs is None:
        return {}
    return {
        "rows_per_token": costs.rows_per_token,
        "all_to_all_bytes": costs.all_to_all_bytes,
        "all_gather_bytes": costs.all_gather_bytes,
    }


def _costs(costs: DispatchCosts) -> list[str]:
    words = {True: "all-gather", False: "all-to-all"}
    return [
        f"bytes per token and direction: all-gather {costs.all_gather_bytes:.0f}, "
        f"all-to-all {costs.all_to_all_bytes:.0f}",
        f"for k = {costs.rows_per_token:g} rows per token on n = {costs.num_ranks} ranks, the "
        f"rule k > n favours {words[costs.by_volume]}, and the rule k > {MEASURED_SHARE} n "
        f"favours {words[costs.by_measurement]}",
    ]


def _equality(rounding: Rounding) -> list[str]:
    if rounding.bound_eps is None:
        sums = (
            "sums per token are added in another order than in the model, without a known "
            "bound, because it is not proven how many rows a token has"
        )
    elif rounding.bound_eps:
        sums = (
            f"sums of {rounding.num_addends} rows per token are added in another order than in "
            f"the model, so they differ by at most {rounding.bound_eps} eps times the sum of "
            "their magnitudes"
        )
    else:
        most = "one product" if rounding.is_weighted else f"at most {EXACT_ADDENDS} addends"
        kept = "no bit changes" if rounding.is_bitwise else "no bit of a sum changes"
        sums = f"{kept}: sums per token have {most}"
    return [sums, *_gradients(rounding)]


def _gradients(rounding: Rounding | NodeRounding) -> list[str]:
    if rounding.gradient_bound_eps == 0:
        return []
    said = "gradients of the weights of rows are added up in another order than in the model"
    if rounding.gradient_bound_eps is None:
        return [said]
    return [
        f"{said}, so they differ by at most {rounding.gradient_bound_eps} eps times the sum of "
        "the magnitudes of their products"
    ]
