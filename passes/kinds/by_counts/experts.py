"""Decide how the MoE regions of a graph run: gathered or exchanged, in how many chunks, how sent.

Contract
    The graph is as the model wrote it, and is not edited.
    Decisions follow from graph, options, profile and sizes of groups: the same on every rank.

Pseudo-code
    for each: can the host do without its integers, where that is asked for? then its chunks alone
    for each other proven region: could its tokens be gathered? the planner decides between the ways
    for each that is not gathered: shall its rows travel in two hops? else its number of chunks
    all that are to be rewritten together: the nodes that stay around them, or a refusal
    for each: the wires of its two exchanges

`check_chunks` refuses regions whose chunks would compute other values, or miss exchanges, once the
experts of each chunk are known. It looks at regions in several chunks whose rows are exchanged
flat; others are left as decided.

Where the host waits for grouped products on this GPU, a warning says so once, and "auto" makes no
chunks. That follows from the program and the kind of GPU. Ranks with other GPUs may decide apart;
they then run the program as it is written, as for any difference between plans.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.traced_nodes import Layers, TracedNodes
from moe_compile.graph.query import known_rows, tensor_of
from moe_compile.hardware.chip_limits import waits_in_products
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.chunk_numbers import (
    AUTO_CHUNKS,
    BY_PRICE,
    ONE_CHUNK,
    plan_num_chunks,
)
from moe_compile.plan.decide import Gathering, TwoHops, asks_planner, decide_experts
from moe_compile.plan.dispatch_rules import (
    dispatch_costs,
    rounding_of,
)
from moe_compile.plan.hop_prices import price_hops
from moe_compile.plan.plan import ExpertsPlan
from moe_compile.plan.planned import PlannedExperts
from moe_compile.plan.state import CompileState
from moe_compile.regions.grouped_products import is_grouped
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.rewrite_effects import find_effects
from moe_compile.regions.rewrites import Aftermath, Replacement
from moe_compile.regions.token_regions import EvenForm, GatheredForm, TokenRows, TwoHopForm
from moe_compile.regions.token_rows import find_token_rows
from passes.kinds.by_counts.chunk_edges import decide_edges
from passes.kinds.by_counts.draft import Draft
from passes.kinds.by_counts.gathering import (
    against,
    find_mixing,
    gathered_form,
    gathered_work,
    gathering,
    may_be_priced,
)
from passes.kinds.by_counts.products import predicted_products
from passes.kinds.by_counts.room import (
    even_form,
    in_equal_parts,
    predicted_rooms,
    room_of_work,
    still_read,
)
from passes.kinds.by_counts.two_hops import (
    Forms,
    chosen_form,
    hop_forms,
    plan_hop_parts,
    replacement_by_two_hops,
    shape_of_hops,
    two_hops_of,
)
from passes.kinds.by_counts.wires import never_packed, plan_wires
from passes.replay.gradient_paths import chunk_without_gradient
from passes.replay.masked_replay import experts_of_chunks

BY_EXPERTS: Final = (
    "each chunk of experts would have to gather and sum all tokens again; set chunk_by = "
    "'tokens' to split them"
)


def plan_experts(
    state: CompileState, layers: Layers
) -> tuple[tuple[PlannedExperts, ...], tuple[fx.Node, ...]]:
    """Return the plan of every MoE region in `state.found`, and the nodes unused after it.

    `layers` are the graph's; they are traced if something in them has to be priced.
    """
    by_tokens = state.config.chunk_by == "tokens"
    drafts = [Draft(found=f, proof=f.proof, by_tokens=by_tokens) for f in state.found.experts]
    for draft in drafts:
        draft.never_packed = never_packed(draft.found, state.config)
        draft.waits = products_wait(draft.region) and state.config.chunks == "auto"
    regions = [draft.region for draft in drafts]
    for draft in drafts:
        form = even_form(draft.found, state.config)
        draft.even, draft.not_even = (None, form) if isinstance(form, Left) else (form, None)
        if draft.even is not None:
            _decide_chunks_with_room(draft, draft.even, state, layers.around(draft.region))
            check_chunks(draft)
            draft.room_times = predicted_rooms(draft, state, layers.around(draft.region))
    others = [draft for draft in drafts if draft.even is None]
    for draft in others:
        _decide_dispatch(draft, regions, state, layers.around(draft.region))
    for draft in others:
        if draft.two_hops is not None:
            _decide_hop_parts(draft, state.config)
        elif draft.gathered is None and isinstance(draft.proof, RowProof):
            _decide_chunks(draft, state, layers.around(draft.region))
        decide_edges(draft, state, layers.around(draft.region))
        check_chunks(draft)
        draft.product_times = predicted_products(draft, state, layers.around(draft.region))
    after = _examine_together(drafts, state.left_whole)
    return tuple(_planned(draft, state.config) for draft in drafts), after.dead


def _decide_dispatch(
    draft: Draft,
    regions: Sequence[MoERegion],
    state: CompileState,
    layer: TracedNodes,
) -> None:
    """Decide whether the tokens of a region are gathered."""
    config, found = state.config, find_token_rows(draft.region)
    forms = hop_forms(draft.found, config, found)
    two_hops = two_hops_of(forms)
    if isinstance(found, TokenRows):
        draft.costs = dispatch_costs(draft.region, found)
    form: GatheredForm | Left = Left(Reason.NOT_ASKED)
    if may_be_priced(config, draft.costs):
        form = gathered_form(draft.found, regions, config, found)
    if isinstance(form, GatheredForm):
        how = _gathering(draft, form, regions, config, layer)
        draft.decision = _decided(draft, state, layer, how, two_hops)
        refused = against(form, draft.decision, draft.costs, config)
        form = refused or form
    elif config.dispatch == "all_to_all":
        form = Left(Reason.NOT_ASKED)
    if isinstance(form, Left):
        draft.not_gathered = form
        _decide_hops(draft, forms, two_hops, state, layer)
        return
    crossing = Left(Reason.GATHERED, "each token goes to every rank")
    draft.not_in_two_hops = crossing if config.nodes != "off" else Left(Reason.NOT_ASKED)
    slices, draft.not_chunked = plan_token_slices(config, form.found, draft.decision)
    if draft.waits:
        slices, draft.not_chunked = 1, Left(Reason.PRODUCTS_WAIT)
    draft.num_chunks, draft.gathered = slices, replace(form, num_slices=slices)


def plan_token_slices(
    config: MegaMoEConfig, found: TokenRows, decision: Decision | None = None
) -> tuple[int, Left | None]:
    """Return the slices of tokens an all-gathered region runs in, and a reason unless as asked.

    "auto" takes the planner's decision, where there is one.
    """
    if config.chunks == "auto" and config.chunk_by == "tokens" and decision is not None:
        num_slices = decision.chosen.candidate.num_chunks
        return num_slices, BY_PRICE if num_slices == 1 else None
    asked = AUTO_CHUNKS if config.chunks == "auto" else int(config.chunks)
    if asked == 1:
        return 1, ONE_CHUNK
    if config.chunk_by != "tokens":
        return 1, Left(Reason.GATHERED, BY_EXPERTS)
    num_tokens = known_rows(found.tokens)
    if not num_tokens or num_tokens % asked or found.rows_per_token is None:
        detail = f"a rank's tokens are not known to split evenly into {asked} slices"
        return 1, Left(Reason.GATHERED, detail)
    return asked, None


def _decided(
    draft: Draft,
    state: CompileState,
    layer: TracedNodes,
    gathering: Gathering | None = None,
    two_hops: TwoHops | None = None,
) -> Decision | None:
    """Return the planner's decision, None where it is not asked or has no price."""
    kept, hardware = frozenset(draft.never_packed), state.hardware
    return decide_experts(
        draft.found, state.config, hardware, layer, gathering, two_hops, never_packed=kept
    )


def _decide_hops(
    draft: Draft, forms: Forms, two_hops: TwoHops | None, state: CompileState, layer: TracedNodes
) -> None:
    """Decide whether the rows of a region that is not gathered travel in two hops."""
    is_open = draft.decision is None or draft.decision.gathers or state.config.nodes != "auto"
    if two_hops is not None and is_open:
        draft.decision = _decided(draft, state, layer, two_hops=two_hops)
    form = chosen_form(state.config, forms, draft.decision)
    draft.two_hops = form if isinstance(form, TwoHopForm) else None
    draft.not_in_two_hops = form if isinstance(form, Left) else None
    if (shape := shape_of_hops(forms)) is not None:
        draft.hop_prices = price_hops(draft.region, draft.proof, shape, state.hardware, layer)


def _decide_hop_parts(draft: Draft, config: MegaMoEConfig) -> None:
    """Decide the parts that the rows of a region in two hops travel in."""
    parts = plan_hop_parts(draft.found, config, draft.decision)
    draft.num_chunks, draft.num_slices, draft.not_chunked = parts
    if draft.waits:
        draft.num_chunks, draft.not_chunked = 1, Left(Reason.PRODUCTS_WAIT)


def _gathering(
    draft: Draft,
    form: GatheredForm,
    regions: Sequence[MoERegion],
    config: MegaMoEConfig,
    layer: TracedNodes,
) -> Gathering | None:
    """Return the work to be priced, None where the planner is not asked or bytes are not known."""
    if draft.costs is None or not isinstance(draft.proof, RowProof):
        return None
    if not asks_planner(config, can_gather=True):
        return None
    asked = None if isinstance(draft.found.products, Left) else config
    work = gathered_work(form, draft.proof, regions, layer.nodes, asked)
    return Gathering(work=work, rounding=rounding_of(form.found))


def _decide_chunks(draft: Draft, state: CompileState, layer: TracedNodes) -> None:
    """Decide the number of chunks of a region whose rows are exchanged."""
    if draft.waits:
        draft.num_chunks, draft.not_chunked = 1, Left(Reason.PRODUCTS_WAIT)
        return
    if draft.decision is None or draft.decision.gathers:  # gathering was refused
        draft.decision = _decided(draft, state, layer)
        draft.not_priced = layer.not_traced if draft.decision is None else ""
    draft.num_chunks, draft.not_chunked = plan_num_chunks(
        state.config, draft.region.num_local_experts, draft.decision
    )
    if draft.decision is not None and draft.decision.chosen.candidate.num_chunks > 1:
        draft.by_tokens = draft.decision.chosen.candidate.chunk_by == "tokens"


def _decide_chunks_with_room(
    draft: Draft, form: EvenForm, state: CompileState, layer: TracedNodes
) -> None:
    """Decide the number of chunks of a region whose rows travel in buffers with room."""
    config = state.config
    draft.num_chunks, draft.not_chunked = 1, ONE_CHUNK
    if config.chunks != "auto":
        draft.num_chunks = int(config.chunks)
    elif draft.waits:
        draft.not_chunked = Left(Reason.PRODUCTS_WAIT)
    else:
        room = room_of_work(form.region, form.room)
        draft.decision = decide_experts(draft.found, config, state.hardware, layer, room=room)
        draft.not_priced = layer.not_traced if draft.decision is None else ""
        draft.not_chunked = Left(Reason.NO_PRICE)
        if draft.decision is not None:
            draft.not_chunked = BY_PRICE
            draft.num_chunks = draft.decision.chosen.candidate.num_chunks
    if draft.num_chunks > 1:
        draft.not_chunked, draft.by_tokens = None, True
    draft.even = replace(form, num_chunks=draft.num_chunks)


def _examine_together(drafts: Sequence[Draft], left_whole: Collection[str]) -> Aftermath:
    """Refuse regions that cannot be rewritten beside the others; note the nodes around the rest."""
    chosen = [d for d in drafts if d.is_rewritten and d.region.name not in left_whole]
    after = find_effects([_rewrite(draft, drafts) for draft in chosen])
    for draft in chosen:
        effects = after.effects[draft.region.name]
        if isinstance(effects, Left):
            draft.refuse(effects)
            continue
        if draft.even is not None and (read := still_read(effects)) is not None:
            draft.refuse(read)
            continue
        draft.effects = effects
    return after


def _rewrite(draft: Draft, drafts: Iterable[Draft]) -> Replacement:
    assert isinstance(draft.proof, RowProof)
    if draft.even is not None:
        return in_equal_parts(draft.region, draft.proof)
    if draft.gathered is not None:
        regions = [other.region for other in drafts]
        return gathering(draft.region, draft.proof, regions, draft.gathered.found)
    if draft.two_hops is not None:
        return replacement_by_two_hops(draft.two_hops, draft.proof, _sliced(draft))
    return Replacement(
        region=draft.region,
        proof=draft.proof,
        replaced=draft.region.result,
        also_replaced=draft.region.results[:-1],
        enters_autocast=True,
        sliced=_sliced(draft),
    )


def _sliced(draft: Draft) -> tuple[fx.Node, ...]:
    """Return the grouped products whose weights are cut, a piece for each chunk."""
    is_whole = draft.by_tokens or draft.num_chunks == 1
    return () if is_whole or isinstance(draft.proof, Left) else draft.proof.sliceable


def _planned(draft: Draft, config: MegaMoEConfig) -> PlannedExperts:
    gathered, (wires, not_packed) = draft.gathered, plan_wires(draft, config)
    if draft.two_hops is not None:
        dispatch, combine = wires["dispatch"], wires["combine"]
        draft.two_hops = replace(draft.two_hops, dispatch_wire=dispatch, combine_wire=combine)
    return PlannedExperts(
        found=draft.found,
        plan=_plan(draft, wires, config),
        proof=draft.proof,
        even=draft.even,
        gathered=gathered,
        two_hops=draft.two_hops,
        effects=draft.effects if draft.is_rewritten else None,
        left={**_left(draft, config), **not_packed},
        decision=draft.decision,
        not_priced=draft.not_priced,
        costs=draft.costs,
        rounding=rounding_of(gathered.found) if gathered is not None else None,
        node_rounding=draft.node_rounding,
        hop_prices=draft.hop_prices,
        product_times=draft.product_times,
        room_times=draft.room_times,
    )


def _plan(draft: Draft, wires: Mapping[str, str], config: MegaMoEConfig) -> ExpertsPlan:
    region, gathered = draft.region, draft.gathered
    found = gathered.found if gathered is not None else None
    is_quantised = not isinstance(draft.found.products, Left)
    return ExpertsPlan(
        group=region.group,
        num_ranks=region.num_ranks,
        num_local_experts=region.num_local_experts,
        num_chunks=draft.num_chunks,
        room=0 if draft.even is None else draft.even.room,
        by_tokens=draft.by_tokens and draft.num_chunks > 1,
        by_load=draft.by_load,
        dispatch="all_to_all" if gathered is None else "all_gather",
        num_tokens=known_rows(found.tokens) if found is not None else 0,
        rows_per_token=(found.mean_rows_per_token or 0) if found is not None else 0,
        nodes=draft.nodes,
        num_nodes=1 if draft.two_hops is None else draft.two_hops.nodes.num_nodes,
        hop_slices=1 if draft.two_hops is None else draft.num_slices,
        dispatch_wire=wires["dispatch"],
        combine_wire=wires["combine"],
        expert_compute=config.expert_compute if is_quantised else "same",
        fp8_products=config.fp8_products if is_quantised else (),
        unproven=draft.proof.reason.name if isinstance(draft.proof, Left) else "",
    )


def _left(draft: Draft, config: MegaMoEConfig) -> dict[str, Verdict]:
    """Return option -> why it is not carried out, for a region's chunks and dispatch."""
    why: dict[str, Left | None] = {
        "dispatch": draft.not_gathered,
        "nodes": draft.not_in_two_hops,
        "host_reads": draft.not_even,
        "chunk_edges": draft.even_edges,
        "expert_compute": draft.found.products if isinstance(draft.found.products, Left) else None,
    }
    if isinstance(draft.proof, Left):
        why["chunks"] = draft.proof
    elif draft.not_chunked is not None:
        why["chunks"] = draft.not_chunked
    return draft.found.verdicts(config, why)


def check_chunks(draft: Draft) -> None:
    """Refuse a region if a chunk would mix rows, or lose its exchanges in the backward pass."""
    is_flat = draft.gathered is None and draft.two_hops is None
    if isinstance(draft.proof, Left) or draft.num_chunks == 1 or not is_flat:
        return
    region, proof, by_tokens = draft.region, draft.proof, draft.by_tokens
    num, by_load = draft.num_chunks, draft.by_load
    bounds = experts_of_chunks(region, num, by_tokens=by_tokens, by_load=by_load)
    mixing = find_mixing(region, proof, bounds, by_tokens=by_tokens)
    if mixing is not None:
        draft.refuse(mixing)
        return
    chunk = chunk_without_gradient(region, proof, bounds)
    if chunk is not None:
        detail = f"chunk {chunk} of {num}"
        draft.refuse(Left(Reason.NO_GRADIENT, detail))


LOG: Final = logging.getLogger(__name__)


def products_wait(region: MoERegion) -> bool:
    """Whether the host waits for a product of the experts of `region`; if so, warn."""
    products = [node for node in region.row_side if is_grouped(node)]
    values = [value for node in products if (value := tensor_of(node)) is not None]
    if not any(waits_in_products(value.device) for value in values):
        return False
    _warn()
    return True


@functools.cache
def _warn() -> None:
    LOG.warning(
        "megamoe: torch has no grouped GEMM kernel (torch._grouped_mm) for this GPU: for each "
        "grouped GEMM the host waits for the device and copies offsets from it. So fewer kernels "
        "are launched ahead, and less communication is hidden, than predicted. To do: compute "
        "experts one after another on rows.split(sizes), as torchtitan's use_grouped_mm = False "
        "does"
    )
