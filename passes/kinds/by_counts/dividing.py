"""Whether and how the rows of a MoE region can come in two hops, a token crossing to a node once.

Contract
    The graph is as the model wrote it, and is not edited.
    Which ranks share a node is what was registered of the region's process group: alike on all of
    its ranks.
"""

from __future__ import annotations

from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.query import tensor_of
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
from moe_compile.plan.planned import FoundExperts
from moe_compile.regions.regions import MoERegion, Refused, RowProof
from moe_compile.regions.rewrites import Rewrite
from moe_compile.regions.surroundings import examine_surroundings
from moe_compile.regions.token_regions import DividedForm, TokenRows
from moe_compile.runtime.node_groups import node_groups_of
from passes.kinds.by_counts.gathering import why_rounded

ONE_NODE: Final = Left(
    Reason.NO_FEWER_BYTES,
    "all its ranks are on one node, and no token crosses the network",
)


def divided_form(
    experts: FoundExperts,
    found: TokenRows | Left,
    dependence: Dependence,
    *,
    rounds: bool,
) -> DividedForm | Left:
    """Return how a region would be dispatched in two hops, or why it cannot be.

    With `rounds` its sums per token are made on the nodes.
    """
    region, proof = experts.region, experts.proof
    nodes = node_groups_of(region.group)
    if nodes is None or nodes.num_nodes == 1:
        return ONE_NODE if nodes is not None else Left(Reason.NO_NODE_GROUPS)
    if isinstance(proof, Refused):
        return Left(Reason.NOT_PROVEN, proof.reason.value)
    if (rounded := why_rounded(proof)) is not None:
        return rounded
    if isinstance(found, Left):
        return found
    if (reason := against_routing(found, rounds=rounds)) is not None:
        return Left(reason)
    assert found.chosen is not None
    form = DividedForm(
        region=region,
        found=found,
        chosen=found.chosen,
        told=_told(region, dependence),
        nodes=nodes,
        rounds=rounds,
    )
    around = examine_surroundings([dividing(form, proof)]).around[region.name]
    if isinstance(around, Refused):
        return Left(Reason.NOT_PROVEN, around.reason.value)
    return form


def dividing(form: DividedForm, proof: RowProof, sliced: tuple[fx.Node, ...] = ()) -> Rewrite:
    """Say what two hops take the place of: the region's body, and its exchange of counts.

    Where sums are made on the nodes, all from the gather of the rows to their sums. `sliced` are
    grouped products whose weights are cut into pieces.
    """
    region, found, replaces_counts = form.region, form.found, form.told[-1:]
    if form.rounds:
        return Rewrite(
            region=region,
            proof=proof,
            replaced=found.sums.total,
            also_replaced=replaces_counts,
            before=found.before,
            behind=(region.result, *found.after, *found.sums.tail),
            others=(found.gather, *form.told),
            read_once=tuple((factor, found.readers(factor)) for factor in found.factors),
            counts_first=True,
            sliced=sliced,
        )
    return Rewrite(
        region=region,
        proof=proof,
        replaced=region.result,
        also_replaced=replaces_counts,
        others=form.told,
        counts_first=True,
        sliced=sliced,
    )


def against_routing(found: TokenRows, *, rounds: bool = False) -> Reason | None:
    """Return what of the rows and their sum would not be the same in two hops.

    Where sums are made on the nodes: nor within the bound that is known of them.
    """
    if found.chosen is None or not found.is_chosen_once:
        return Reason.CHOSEN_TWICE
    if not found.keeps_order:
        return Reason.UNSTABLE_SORT
    if rounds:
        return Reason.ROWS_MAY_DIFFER if found.rows_per_token is None else None
    return Reason.TENSOR_FLOAT if _rounds_weights(found) else None


def _told(region: MoERegion, dependence: Dependence) -> tuple[fx.Node, ...]:
    """Return what stands between the exchange of counts and the counts received, both included.

    () where that exchange brings the counts of all ranks for all experts.
    """
    counts = tensor_of(region.received_counts)
    if counts is None or counts.numel() != region.num_ranks * region.num_local_experts:
        return ()
    exchange = region.count_exchange
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
