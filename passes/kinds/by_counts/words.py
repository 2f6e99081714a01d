"""The report on a MoE region in words: chunks, gathered tokens or exchanged rows, and why.

Contract
    Every figure comes from static facts of the region; bytes are per token and direction.
"""

from __future__ import annotations

from typing import Final

import torch

from moe_compile.graph.query import known_rows, source_place
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
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
from moe_compile.plan.planned import PlannedExperts
from moe_compile.regions.regions import RowProof
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

NOT_OF_WEIGHTS: Final = "gradients of weights as the model computes them"
BY_LOAD: Final = "each step's counts say which experts a chunk has: about as many rows in each"


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
    remarks += [f"not decided by price: {one.not_priced}"] if one.not_priced else []
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


def _products(one: PlannedExperts) -> list[str]:
    """Return the remark on products in eight bits, or on why there are none where asked for."""
    left = one.left.get("expert_compute")
    if left is not None:
        return [f"products not quantised: {left.why}"] if left.is_asked else []
    said = f"grouped products in {one.plan.expert_compute}, {NOT_OF_WEIGHTS}"
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
        return [f"the host reads its counts: {left.why}"]
    if not one.plan.room:
        return []
    rows = known_rows(one.found.region.rows)
    said = (
        f"the host reads nothing: {one.plan.room} rows have room from each rank to each, of "
        f"{rows} rows that a rank has in all"
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
        f"once; what is summed goes as written{'' if messages else ', and no bit changes'}",
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
        return [f"{said}: packed are {', and '.join(products)}, by the same bound but other bits"]
    return [f"{said}: what the flat exchange in eight bits brings, bit for bit"]


def _parts(one: PlannedExperts) -> list[str]:
    """Return the parts that two hops run in."""
    num, slices = one.plan.num_chunks, one.plan.hop_slices
    if one.plan.by_tokens:
        num, slices = 1, num
    said = []
    if slices > 1:
        said = [f"hop 1 in {slices} slices of tokens, hop 2 of each once it is there; experts wait"]
    return said + [f"hop 2, experts and the way home in {num} chunks of experts"] * (num > 1)


def _prices(prices: HopPrices) -> list[str]:
    words = {"off": "flat", "exact": "in two hops", "rounded": "with sums on the nodes"}
    rows = ", ".join(f"{words[n]} {prices.shape.rows_between(n):.2f}" for n in words)
    said = [f"rows of a token from node to node, forward and backward: {rows}"]
    if prices.us:
        times = ", ".join(f"{words[n]} {us / 1e3:.2f} ms" for n, us in prices.us.items())
        said.append(f"predicted in one chunk, one hop after the other: {times}")
    return said


def _sums_on_nodes(rounding: NodeRounding) -> list[str]:
    wide = "float64" if rounding.dtype is torch.float64 else "float32"
    said = (
        f"sums of {rounding.num_addends} per token are made on the nodes, in {wide}, and at home: "
        f"off by at most {rounding.bound:.3g} times the sum of their magnitudes, three roundings "
        f"to {str(rounding.dtype).removeprefix('torch.')} and {rounding.num_addends + 2} in {wide}"
    )
    packed = (
        f"sums of {' and '.join(rounding.in_eight_bits)} have terms that travel in eight bits, as "
        f"do the sums of nodes: off by at most {rounding.bound_in_eight_bits:.3g} times the sum of "
        f"their magnitudes and {rounding.bound_of_blocks:.3g} times the sum of the largest "
        f"magnitudes of their {BLOCK} columns"
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
        f"k = {costs.rows_per_token:g}, n = {costs.num_ranks}: "
        f"k > n says {words[costs.by_volume]}, "
        f"k > {MEASURED_SHARE} n says {words[costs.by_measurement]}",
    ]


def _equality(rounding: Rounding) -> list[str]:
    if rounding.bound_eps is None:
        sums = "sums per token round in another order: how many rows a token has is not proven"
    elif rounding.bound_eps:
        sums = (
            f"sums of {rounding.num_addends} per token round otherwise: off by at most "
            f"{rounding.bound_eps} eps times the sum of their magnitudes"
        )
    else:
        most = "one product" if rounding.is_weighted else f"at most {EXACT_ADDENDS} addends"
        kept = "no bit changes" if rounding.is_bitwise else "no bit of a sum changes"
        sums = f"{kept}: sums per token have {most}"
    return [sums, *_gradients(rounding)]


def _gradients(rounding: Rounding | NodeRounding) -> list[str]:
    if rounding.gradient_bound_eps == 0:
        return []
    said = "gradients of the weights of rows are added up in another order"
    if rounding.gradient_bound_eps is None:
        return [said]
    return [
        f"{said}: off by at most {rounding.gradient_bound_eps} eps times the sum of the "
        "magnitudes of their products"
    ]
