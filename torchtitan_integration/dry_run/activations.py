"""Bytes of the activations of one traced graph, with even routing and on the busiest rank.

Contract
    Bytes follow from the order that the schedule chose for even routing. On the busiest rank the
    all-to-alls of rows receive more rows than they send; all other sizes that follow from these
    grow with them. Sizes that no routing changes, as those of experts with a capacity, stay.
    How many rows the busiest rank has is the planner's number (`moe_compile/plan/uneven_price.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch.fx as fx

from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.aliases import AliasClasses
from moe_compile.plan.uneven_price import RoutingSkew, drawn_rows, most_rows
from moe_compile.schedule.liveness import Liveness
from torchtitan_integration.dry_run.world import FakeRank
from torchtitan_integration.job_config import options_of

DOUBLED: Final = 2.0
"""Rows of the busiest rank, over those with even routing, that are looked at where none is
stated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BusiestRank:
    """How many rows the rank with the most popular experts has."""

    skew: float
    """The option `routing_skew`; 0 where routing is assumed even."""
    times: float
    """Its rows over those with even routing; `DOUBLED` where no skew is stated."""
    why_even: str = ""
    """Why every rank has equally many rows whatever is stated; "" where this is not so."""

    @property
    def is_stated(self) -> bool:
        """Whether the job states a skew that this layout can have."""
        return self.skew > 0 and not self.why_even


def busiest_rank(rank: FakeRank) -> BusiestRank:
    """Return the rows of the busiest rank of a job under its `routing_skew`."""
    skew, experts = options_of(rank.job).routing_skew, rank.model_args.moe_args
    if rank.job.debug.moe_force_load_balance:
        why = "debug.moe_force_load_balance gives every expert equally many rows"
        return BusiestRank(skew=skew, times=1.0, why_even=why)
    if rank.dims.ep == 1:
        why = "parallelism.expert_parallel_degree is 1: every rank has the rows of its own tokens"
        return BusiestRank(skew=skew, times=1.0, why_even=why)
    if not skew:
        return BusiestRank(skew=skew, times=DOUBLED)
    routing = RoutingSkew(skew=skew, rows_per_token=experts.top_k)
    draws = drawn_rows(routing, experts.num_experts // rank.dims.ep, rank.dims.ep)
    return BusiestRank(skew=skew, times=most_rows(draws))


@dataclass(frozen=True, kw_only=True, slots=True)
class Activations:
    """Bytes of one graph of a block, or of several blocks, for one microbatch."""

    saved: int
    """Computed in the forward and kept for the backward."""
    peak: int
    """The largest sum of live bytes inside the forward or the backward, beyond `saved`: a forward
    makes these bytes, and a backward is given them."""
    rebuilt: int
    """Of activations that the backward computes again: the most that live at once."""
    graph_input: int = 0
    """The graph's input, which is kept too."""

    @property
    def kept(self) -> int:
        """Bytes kept from forward to backward; parameters are not counted."""
        return self.saved + self.graph_input


def activations_of(forward: fx.Graph, backward: fx.Graph, received: float = 1.0) -> Activations:
    """Return the bytes of a graph on a rank that receives `received` rows for each that it sends.

    The graph's input is not among them.
    """
    sizes = NominalSizes({}, received=received)
    made, used = _liveness(forward, sizes), _liveness(backward, sizes)
    saved = _saved_bytes(forward, backward, made)
    return Activations(
        saved=saved,
        peak=max(_peak(made) - saved, _peak(used)),
        rebuilt=_peak(_of_rebuilt(backward, used)),
    )


def _liveness(graph: fx.Graph, sizes: NominalSizes) -> Liveness:
    sizes.learn(graph)
    return Liveness.of([*graph.nodes], sizes)


def _peak(liveness: Liveness) -> int:
    return liveness.peak_bytes(range(len(liveness.uses)))


def _of_rebuilt(backward: fx.Graph, liveness: Liveness) -> Liveness:
    """Return the storages that nodes of the forward allocate in a backward graph."""
    allocates = tuple(
        made if node.meta.get("partitioner_tag") == "is_forward" else ()
        for node, made in zip(backward.nodes, liveness.allocates, strict=True)
    )
    return Liveness(allocates, liveness.uses)


def _saved_bytes(forward: fx.Graph, backward: fx.Graph, liveness: Liveness) -> int:
    """Return the bytes of storages of the forward that the backward takes.

    Parameters and inputs are the caller's, and not among them.
    """
    taken = {node.name for node in backward.find_nodes(op="placeholder")}
    nbytes = {storage: size for made in liveness.allocates for storage, size in made}
    nodes = [node for node in forward.nodes if node.name in taken]
    return sum(nbytes.get(one, 0) for one in AliasClasses(forward.nodes).of(*nodes))
