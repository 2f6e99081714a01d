"""Whether a MoE region can run without a read by the host, with how much room, in what chunks.

Contract
    The graph is as the model wrote it, and is not edited.
    Chunks are of tokens: a chunk of experts may have all rows of a rank, and its buffer would need
    room for them.
"""

from __future__ import annotations

from moe_compile.config import ROOMS, MegaMoEConfig
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import work_of_experts
from moe_compile.cost.region_work import Room
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.graph.query import known_rows, operator_at, tensor_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.planned import FoundExperts
from moe_compile.plan.row_rooms import room_times
from moe_compile.plan.state import CompileState
from moe_compile.proof.spare_rows import check_spare_rows
from moe_compile.regions.body_nodes import BodyNeeds, needs_of_body
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.rewrite_effects import find_effects
from moe_compile.regions.rewrites import Effects, Replacement
from moe_compile.regions.token_regions import EvenForm
from moe_compile.runtime.rerun import RERUN, RoomTimes
from passes.kinds.by_counts.draft import Draft
from passes.replay.even_rows import room_of


def even_form(found: FoundExperts, config: MegaMoEConfig) -> EvenForm | Left:
    """Return the form in which the host reads nothing of a region, or why it has none."""
    if config.host_reads != "none":
        return Left(Reason.NOT_ASKED)
    region, proof = found.region, found.proof
    if isinstance(proof, Left):
        return Left(Reason.NOT_PROVEN, proof.reason.value)
    if not config.equal_tokens:
        return Left(Reason.TOKENS_MAY_DIFFER)
    if not known_rows(region.rows):
        return Left(
            Reason.ROWS_MAY_DIFFER,
            "the number of rows must be known at compile time, and is known at run time only",
        )
    needs = needs_of_body(region)
    refused = _unfit(region, proof, needs) or _read_around(region, proof)
    refused = refused or check_spare_rows(region, proof, needs)
    factor = config.row_room if isinstance(config.row_room, float | int) else RERUN.room
    return refused or EvenForm(region=region, needs=needs, room=room_of(region, factor))


def room_of_work(region: MoERegion, room: int) -> Room:
    """Return a room of so many rows for each rank, for the price of a region."""
    num_rows = known_rows(region.rows)
    assert num_rows
    ranks, local = region.num_ranks, region.num_local_experts
    return Room(share=ranks * room / num_rows, rounded=ranks * local / num_rows)


def predicted_rooms(draft: Draft, state: CompileState, layer: TracedNodes) -> RoomTimes | None:
    """Return the predicted times of a region's layer by room, where "auto" chooses the room.

    None where the layer has no price.
    """
    region, proof = draft.region, draft.proof
    if state.config.row_room != "auto" or draft.even is None or isinstance(proof, Left):
        return None
    work = work_of_experts(region, proof, state.hardware, layer)
    if work is None:
        return None
    rooms = [room_of_work(region, room_of(region, factor)) for factor in ROOMS]
    rates = Rates.of(state.hardware, region.num_ranks)
    return room_times(work, rooms, draft.num_chunks, rates)


def _read_around(region: MoERegion, proof: RowProof) -> Left | None:
    """Return the refusal if the region cannot be replaced, or if its host reads stay."""
    effects = find_effects([in_equal_parts(region, proof)]).effects[region.name]
    if isinstance(effects, Left):
        return Left(Reason.NOT_PROVEN, effects.reason.value)
    return still_read(effects)


def _unfit(region: MoERegion, proof: RowProof, needs: BodyNeeds) -> Left | None:
    """Return what about the experts does not suit rows behind those of the counts."""
    if region.beside or region.back_beside:
        return Left(Reason.SPLIT_OTHERWISE, "other tensors travel beside the rows")
    if needs.reads_host:
        reader = next(n for n in needs.nodes if n.op == "call_method" and n.target == "item")
        return Left(Reason.ESCAPES, f"{operator_at(reader)}, for the experts")
    if needs.reads_sent:
        return Left(Reason.SENT_SIZES)
    counts, expected = (
        tensor_of(region.received_counts),
        region.num_ranks * region.num_local_experts,
    )
    if counts is None or counts.numel() != expected:
        return Left(
            Reason.COUNTS_NOT_COUNTED,
            "the received counts must be those of this rank's experts alone, and are not",
        )
    if proof.shared or proof.reordered or proof.whole:
        return Left(
            Reason.ROWS_MIXED,
            "received buffers have padding rows after the counted ones, and an operator may "
            "mix the two",
        )
    return None


def still_read(effects: Effects) -> Left | None:
    """Return the refusal if the graph around a region needs an integer that the host reads."""
    if effects.served:
        return Left(Reason.ESCAPES, operator_at(effects.served[0]))
    return Left(Reason.ESCAPES, "an integer that the host reads") if effects.num_kept else None


def in_equal_parts(region: MoERegion, proof: RowProof) -> Replacement:
    """Return the nodes that the form replaces: the region from its dispatch to its result."""
    return Replacement(
        region=region,
        proof=proof,
        replaced=region.result,
        at_result=True,
        enters_autocast=True,
    )
