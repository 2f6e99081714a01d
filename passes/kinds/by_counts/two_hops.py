"""Whether the rows of a MoE region can travel in two hops, and do; in how many parts.

Contract
    The graph is as the model wrote it, and is not edited.
    The ranks that share a node are those registered for the region's process group: alike on all
    of its ranks. A choice follows from them, graph, options and profile: the same on every rank.
    Parts change no bit. Chunks of experts are those of the flat exchange, and refused where these
    are; slices are of hop 1 alone, and experts wait for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple, TypeAlias

import torch
import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.hop_shape import HopShape
from moe_compile.graph.query import tensor_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.chunk_numbers import plan_num_chunks
from moe_compile.plan.decide import TwoHops
from moe_compile.plan.node_rounding import node_rounding_of
from moe_compile.plan.planned import FoundExperts
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.rewrite_effects import find_effects
from moe_compile.regions.rewrites import Replacement
from moe_compile.regions.token_regions import TokenRows, TwoHopForm
from moe_compile.runtime.node_groups import node_groups_of
from passes.kinds.by_counts.gathering import find_mixing, why_rounded
from passes.replay.gradient_paths import chunk_without_gradient
from passes.replay.masked_replay import experts_of_chunks

ONE_NODE: Final = Left(
    Reason.NO_FEWER_BYTES,
    "all its ranks are on one node, so no token crosses the network and a second hop would save "
    "nothing",
)


def two_hop_form(
    experts: FoundExperts,
    found: TokenRows | Left,
    *,
    rounds: bool,
) -> TwoHopForm | Left:
    """Return the form of a region dispatched in two hops, or why it cannot be.

    With `rounds` its sums per token are made on the nodes.
    """
    region, proof = experts.region, experts.proof
    nodes = node_groups_of(region.group)
    if nodes is None or nodes.num_nodes == 1:
        return ONE_NODE if nodes is not None else Left(Reason.NO_NODE_GROUPS)
    if isinstance(proof, Left):
        return Left(Reason.NOT_PROVEN, proof.reason.value)
    if (rounded := why_rounded(proof)) is not None:
        return rounded
    if isinstance(found, Left):
        return found
    if (reason := against_routing(found, rounds=rounds)) is not None:
        return Left(reason)
    assert found.chosen is not None
    form = TwoHopForm(
        region=region,
        found=found,
        chosen=found.chosen,
        told=_told(region),
        nodes=nodes,
        rounds=rounds,
    )
    effects = find_effects([replacement_by_two_hops(form, proof)]).effects[region.name]
    if isinstance(effects, Left):
        return Left(Reason.NOT_PROVEN, effects.reason.value)
    return form


def replacement_by_two_hops(
    form: TwoHopForm, proof: RowProof, sliced: tuple[fx.Node, ...] = ()
) -> Replacement:
    """Return the nodes that two hops replace: the region's body, and its exchange of counts.

    Where sums are made on the nodes, all from the gather of the rows to their sums. `sliced` are
    grouped products whose weights are cut into pieces.
    """
    region, found, replaces_counts = form.region, form.found, form.told[-1:]
    if form.rounds:
        return Replacement(
            region=region,
            proof=proof,
            replaced=found.sums.total,
            also_replaced=replaces_counts,
            before=found.before,
            behind=(region.result, *found.after, *found.sums.tail),
            others=(found.gather, *form.told),
            read_once=tuple((factor, found.readers(factor)) for factor in found.factors),
            sliced=sliced,
        )
    return Replacement(
        region=region,
        proof=proof,
        replaced=region.result,
        also_replaced=replaces_counts,
        others=form.told,
        sliced=sliced,
    )


def against_routing(found: TokenRows, *, rounds: bool = False) -> Reason | None:
    """Return the reason why the rows and their sum would not be the same in two hops.

    Where sums are made on the nodes: why they would not be within the known bound.
    """
    if found.chosen is None or not found.is_chosen_once:
        return Reason.CHOSEN_TWICE
    if not found.keeps_order:
        return Reason.UNSTABLE_SORT
    if rounds:
        return Reason.ROWS_MAY_DIFFER if found.rows_per_token is None else None
    return Reason.TENSOR_FLOAT if _rounds_weights(found) else None


def _told(region: MoERegion) -> tuple[fx.Node, ...]:
    """Return the nodes from the exchange of counts to the counts received, both included.

    () where that exchange brings the counts of all ranks for all experts.
    """
    counts = tensor_of(region.received_counts)
    if counts is None or counts.numel() != region.num_ranks * region.num_local_experts:
        return ()
    exchange, dependence = region.count_exchange, region.facts.dependence
    above = dependence.above([region.received_counts], stops={exchange})
    between = above & dependence.below([exchange])
    return tuple(dependence.in_order({exchange, region.received_counts} | between))


def _rounds_weights(found: TokenRows) -> bool:
    """Whether a batched product may round the weights of rows, as products of TF32 do."""
    weights = found.sums.weights
    tensor = None if weights is None else tensor_of(weights)
    if tensor is None or tensor.device.type != "cuda" or tensor.dtype is not torch.float32:
        return False
    return torch.get_float32_matmul_precision() != "highest"


Forms: TypeAlias = Mapping[str, TwoHopForm | Left]
"""Value of the option -> the region's form under it, or why it cannot be."""
TRIED: Final = {
    "off": (),
    "exact": ("exact",),
    "rounded": ("rounded",),
    "auto": ("exact", "rounded"),
}


def hop_forms(
    experts: FoundExperts,
    config: MegaMoEConfig,
    found: TokenRows | Left,
) -> Forms:
    """Return the forms that the option allows."""
    return {
        nodes: two_hop_form(experts, found, rounds=nodes == "rounded")
        for nodes in TRIED[config.nodes]
    }


def shape_of_hops(forms: Forms) -> HopShape | None:
    """Return the shares of rows by where they go; None without a form or a known row size."""
    form = next((f for f in forms.values() if isinstance(f, TwoHopForm)), None)
    rows = None if form is None else tensor_of(form.region.rows)
    if form is None or rows is None or type(width := rows.shape[1]) is not int:
        return None
    if (k := form.found.rows_per_token) is None:
        return None
    return HopShape(
        num_nodes=form.nodes.num_nodes,
        num_local=form.nodes.num_local,
        num_experts=form.region.num_ranks * form.region.num_local_experts,
        rows_per_token=k,
        row_bytes=float(width * rows.element_size()),
    )


def two_hops_of(forms: Forms) -> TwoHops | None:
    """Return the choices to be priced; None without any form."""
    shape = shape_of_hops(forms)
    if shape is None:
        return None
    rounded = forms.get("rounded")
    form = next(form for form in forms.values() if isinstance(form, TwoHopForm))
    return TwoHops(
        shape=shape,
        weighted=form.found.weighted,
        can_be_exact=isinstance(forms.get("exact"), TwoHopForm),
        rounding=node_rounding_of(rounded.found) if isinstance(rounded, TwoHopForm) else None,
    )


def chosen_form(
    config: MegaMoEConfig, forms: Forms, decision: Decision | None
) -> TwoHopForm | Left:
    """Return the form that a region gets, or why it keeps its all-to-all."""
    if config.nodes == "off":
        return Left(Reason.NOT_ASKED)
    if config.nodes != "auto":
        return forms[config.nodes]
    if not any(isinstance(form, TwoHopForm) for form in forms.values()):
        return forms["exact"]
    if decision is None:
        return Left(Reason.NO_PRICE)
    return forms.get(decision.chosen.candidate.nodes, Left(Reason.BY_PRICE))


class HopParts(NamedTuple):
    """The parts of one region."""

    num_chunks: int
    """Chunks of experts, or slices of tokens where `chunk_by` says so."""
    num_slices: int
    """Slices of tokens that hop 1 goes in beside chunks of experts."""
    why: Left | None
    """Why the number of chunks is not the one asked."""


def plan_hop_parts(
    experts: FoundExperts, config: MegaMoEConfig, decision: Decision | None
) -> HopParts:
    """Return the parts; "auto" takes the planner's decision for two hops, one part without it."""
    chosen = None if decision is None else decision.chosen.candidate
    if chosen is not None and chosen.nodes == "off":
        chosen = None
    num_slices = 1 if chosen is None else chosen.hop_slices
    if config.hop_slices != "auto":
        num_slices = int(config.hop_slices)
    if config.chunks == "auto" and (chosen is None or config.chunk_by == "tokens"):
        return HopParts(1, num_slices, Left(Reason.TWO_HOPS))
    region, proof = experts.region, experts.proof
    num_chunks, why = plan_num_chunks(config, region.num_local_experts, decision)
    if num_chunks == 1 or config.chunk_by == "tokens" or isinstance(proof, Left):
        return HopParts(num_chunks, num_slices, why)
    bounds = experts_of_chunks(region, num_chunks, by_tokens=False)
    if find_mixing(region, proof, bounds, by_tokens=False) is not None:
        return HopParts(1, num_slices, Left(Reason.ROWS_MIXED))
    if chunk_without_gradient(region, proof, bounds) is not None:
        return HopParts(1, num_slices, Left(Reason.NO_GRADIENT))
    return HopParts(num_chunks, num_slices, why)
