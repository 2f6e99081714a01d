"""Whether the tokens of a MoE region can be gathered instead of its rows exchanged; its work then.

Contract
    The graph is as the model wrote it, and is not edited: a copy is rewritten, and read.
    Nodes that are not proven row by row must run only where an expert's rows are whole
    (`find_mixing`). A chunk of whole experts computes them from the same numbers as the region
    does. A chunk without the expert must not run them; a chunk of tokens would run them on a part
    of the rows.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.cost.read_regions import Replayed, read_work
from moe_compile.cost.region_work import RegionWork
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.graph.edit import erase_dead, move_before, replace_uses
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.query import known_rows, operator_at, tensor_of, waits_on
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.journal.reasons import Left, Reason
from moe_compile.journal.remedies import allowed_by
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.decide import asks_planner
from moe_compile.plan.dispatch_rules import DispatchCosts, quantises_rows, rounding_of
from moe_compile.plan.planned import FoundExperts
from moe_compile.regions.body_nodes import needs_of_body
from moe_compile.regions.grouped_products import compute_in_eight_bits, is_grouped
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.rewrite_effects import find_effects
from moe_compile.regions.rewrites import Replacement
from moe_compile.regions.token_regions import GatheredForm, TokenRows
from passes.kinds.by_counts.products import how_planned
from passes.replay.gathered import emit_gathered
from passes.replay.prune import prune_other_experts

EIGHT_BITS: Final = (
    "a wire option asks for rows in eight bits, which an all-gather does not support"
)
NOT_COUNTED: Final = "; it is not proven how many rows each token has"
NO_TIMES: Final = (
    "\"auto\" has no predicted times to decide by; set megamoe.dispatch = 'all_gather' to "
    "gather all the same"
)
FEW_ROWS: Final = (
    "k (experts per token) is at most 0.75 n (ranks), so an all-to-all sends less than an "
    "all-gather"
)


def gathered_form(
    experts: FoundExperts,
    regions: Iterable[MoERegion],
    config: MegaMoEConfig,
    found: TokenRows | Left,
) -> GatheredForm | Left:
    """Return the form in which the tokens of a region would be gathered, or why they cannot be."""
    if isinstance(experts.proof, Left):
        return Left(Reason.NOT_PROVEN, experts.proof.reason.value)
    if (unfit := why_mixed(experts.proof) or why_rounded(experts.proof)) is not None:
        return unfit
    if isinstance(found, Left):
        return found
    if found.mean_rows_per_token is None:
        return Left(Reason.ROWS_MAY_DIFFER)
    if not config.equal_tokens:
        return Left(Reason.TOKENS_MAY_DIFFER)
    after = find_effects([gathering(experts.region, experts.proof, regions, found)])
    effects = after.effects[experts.region.name]
    if isinstance(effects, Left):
        return Left(Reason.NOT_PROVEN, effects.reason.value)
    needs = needs_of_body(experts.region)
    if needs.reads_sent:
        return Left(Reason.SENT_SIZES)
    return GatheredForm(region=experts.region, found=found, needs=needs, num_slices=1)


def why_mixed(proof: RowProof) -> Left | None:
    """Return the reason if a node may need all rows of an expert at once, None without one."""
    for node, _ in proof.whole:
        return Left(
            Reason.NOT_PROVEN,
            f"{operator_at(node)} must compute each row of an expert by itself, and may mix rows",
        )
    return None


def why_rounded(proof: RowProof) -> Left | None:
    """Return why no form other than chunks has a known bound, None where one has."""
    for reason, nodes in (
        (Reason.SHARED_PARAMETER, proof.shared),
        (Reason.UNSTABLE_SORT, proof.reordered),
    ):
        if nodes:
            return Left(reason, ", ".join(map(operator_at, nodes)))
    return None


def may_be_priced(config: MegaMoEConfig, costs: DispatchCosts | None) -> bool:
    """Whether gathering may be chosen, or be advice, which the rule of bytes must support."""
    if config.dispatch != "all_to_all":
        return True
    is_asked = asks_planner(config, can_gather=True)
    return is_asked and costs is not None and costs.by_measurement


def gathering(
    region: MoERegion, proof: RowProof, regions: Iterable[MoERegion], found: TokenRows
) -> Replacement:
    """Return the nodes that gathered tokens replace: from the gather of the rows to their sums.

    Host reads that another region has too stay where they are: it may be rewritten as well.
    """
    elsewhere = (other for other in regions if other is not region)
    return Replacement(
        region=region,
        proof=proof,
        replaced=found.sums.total,
        before=(*found.before,),
        behind=(region.result, *found.after, *found.sums.tail),
        others=(found.gather, region.count_exchange, *waits_on(region.count_exchange)),
        read_once=tuple((factor, found.readers(factor)) for factor in found.factors),
        at_result=True,
        not_served=frozenset(node for other in elsewhere for node in other.count_side),
    )


def against(
    form: GatheredForm,
    decision: Decision | None,
    costs: DispatchCosts | None,
    config: MegaMoEConfig,
) -> Left | None:
    """Return the reason against gathering tokens that could be gathered."""
    if config.dispatch != "auto":
        return None if config.dispatch == "all_gather" else Left(Reason.NOT_ASKED)
    if quantises_rows(config):
        return Left(Reason.NOT_ASKED, EIGHT_BITS)
    rounding = rounding_of(form.found)
    if decision is not None:
        if not config.allows(rounding.numerics):
            of_sums = NOT_COUNTED if rounding.numerics == "lossy" else ""
            detail = allowed_by(rounding.numerics) + of_sums
            return Left(Reason.ROUNDS, detail)
        return None if decision.gathers else Left(Reason.BY_PRICE)
    if not rounding.is_bitwise:
        return Left(Reason.ROUNDS, NO_TIMES)
    if costs is not None and costs.by_measurement:
        return None
    return Left(Reason.NO_FEWER_BYTES, FEW_ROWS)


def gathered_work(
    form: GatheredForm,
    proof: RowProof,
    regions: Iterable[MoERegion],
    layer: Collection[fx.Node] | None = None,
    config: MegaMoEConfig | None = None,
) -> RegionWork | None:
    """Return the work of the region's `layer`, or of the graph, with tokens gathered.

    None where a size is not static.

    Its parts are the tokens of a rank where each has proven as many rows, and one in other cases.
    Its products are in eight bits as `config` asks, if there is one.
    """
    regions, found = list(regions), form.found
    tokens, rows, total = known_rows(found.tokens), known_rows(found.index), found.sums.total
    if not tokens or not rows or known_rows(total) is None:
        return None
    rewrite = gathering(form.region, proof, regions, found)
    written = form.region.dispatch.graph
    assert written.owning_module is not None
    graph = copy_of_graph(written.owning_module).graph
    env = dict(zip(written.nodes, graph.nodes, strict=True))
    theirs = frozenset(env[node] for node in env if layer is not None and node not in layer)
    twins = {**env, form.region.facts: GraphFacts(graph), proof.facts: proof.facts}
    form, rewrite = _carried((form, rewrite), twins)
    old = set(graph.nodes)
    routing = _apply(form, rewrite)
    new = {node for node in graph.nodes if node not in old}
    if config is not None:
        products = [node for node in graph.nodes if node in new and is_grouped(node)]
        for product, how in how_planned(products, GraphFacts(graph), config).items():
            compute_in_eight_bits(product, how)
    per_rank = [
        t.numel() * t.element_size()
        for n in (found.tokens, total)
        if (t := tensor_of(n)) is not None
    ]
    nodes = frozenset(graph.nodes) - theirs
    return read_work(
        TracedNodes(graph, nodes, num_rows=rows),
        Replayed(nodes=new - routing, exchanges={}),
        RegionWork(
            forward=(),
            num_ranks=form.region.num_ranks,
            num_parts=tokens if found.rows_per_token is not None else 1,
            row_bytes=float(max(per_rank)),
        ),
    )


def _carried(value: Any, twins: Mapping[Any, Any]) -> Any:
    """Return `value` for a copy of the graph, with nodes replaced by their `twins`."""
    return copy.deepcopy(value, {id(one): twin for one, twin in twins.items()})


def _apply(form: GatheredForm, rewrite: Replacement) -> frozenset[fx.Node]:
    """Rewrite the region; return the nodes that share all ranks' routing."""
    after = find_effects([rewrite])
    effects = after.effects[form.region.name]
    assert not isinstance(effects, Left)  # `gathered_form` has checked it
    gathered = emit_gathered(form, effects, rank=0)  # the same on every rank: ranks decide alike
    replace_uses(effects.sizes)
    replace_uses({**gathered.instead, form.found.sums.total: gathered.result})
    move_before(effects.moved, effects.read_at)
    erase_dead(after.dead)
    return gathered.routing


def find_mixing(
    region: MoERegion, proof: RowProof, bounds: Iterable[range], *, by_tokens: bool
) -> Left | None:
    """Return the refusal of chunks that would run such a node on other rows; None without one."""
    if by_tokens and proof.whole:
        return Left(
            Reason.ROWS_MIXED,
            f"{operator_at(proof.whole[0][0])} needs all rows of an expert, and a chunk has only "
            "some of them",
        )
    for chunk, experts in enumerate(bounds):
        pruned = prune_other_experts(region, proof, experts)
        for node, whose in proof.whole:
            if not whose <= set(experts) and node not in pruned.nodes:
                return Left(
                    Reason.ROWS_MIXED,
                    f"{operator_at(node)} needs all rows of some experts, and chunk {chunk} "
                    "lacks them",
                )
    return None
