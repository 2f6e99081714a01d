"""What a region takes whose tokens are gathered: a copy is rewritten, and read.

Contract
    The graph is not edited.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from typing import Any

import torch.fx as fx

from moe_compile.cost.read_regions import Replayed, read_work
from moe_compile.cost.region_work import RegionWork
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.graph.edit import erase_dead, move_before, replace_uses
from moe_compile.graph.pristine import pristine_copy
from moe_compile.graph.query import known_rows, tensor_of
from moe_compile.regions.count_facts import CountFacts
from moe_compile.regions.regions import MoERegion, Refused, RowProof
from moe_compile.regions.rewrites import Rewrite
from moe_compile.regions.surroundings import examine_surroundings
from moe_compile.regions.token_regions import GatheredForm
from passes.kinds.by_counts.gathering import gathering
from passes.replay.gathered import emit_gathered


def gathered_work(
    form: GatheredForm,
    proof: RowProof,
    regions: Iterable[MoERegion],
    layer: Collection[fx.Node] | None = None,
) -> RegionWork | None:
    """Return the work of the region's `layer`, or of all, in its new form.

    None where a size is not static.

    Its parts are the tokens of a rank where each has proven as many rows, else one.
    """
    regions, found = list(regions), form.found
    tokens, rows, total = known_rows(found.tokens), known_rows(found.index), found.sums.total
    if not tokens or not rows or known_rows(total) is None:
        return None
    rewrite = gathering(form.region, proof, regions, found)
    written = form.region.dispatch.graph
    assert written.owning_module is not None
    graph = pristine_copy(written.owning_module).graph
    env = dict(zip(written.nodes, graph.nodes, strict=True))
    theirs = frozenset(env[node] for node in env if layer is not None and node not in layer)
    form, rewrite = _carried((form, rewrite), env, proof.facts)
    old = set(graph.nodes)
    routing = _apply(form, rewrite)
    new = {node for node in graph.nodes if node not in old}
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


def _carried(value: Any, env: dict[fx.Node, fx.Node], facts: CountFacts | None) -> Any:
    """Return the same said of the nodes of a copy; `facts` name no node."""
    twins = {id(node): twin for node, twin in env.items()}
    return copy.deepcopy(value, {**twins, id(facts): facts})


def _apply(form: GatheredForm, rewrite: Rewrite) -> frozenset[fx.Node]:
    """Rewrite the region; return what tells every rank what all ranks route where."""
    after = examine_surroundings([rewrite])
    around = after.around[form.region.name]
    assert not isinstance(around, Refused)  # as `gathered_form` has asked
    gathered = emit_gathered(form, around, rank=0)  # the same on every rank: ranks decide alike
    replace_uses(around.sizes)
    replace_uses({**gathered.instead, form.found.sums.total: gathered.result})
    move_before(around.moved, around.read_at)
    erase_dead(after.dead)
    return gathered.routing
