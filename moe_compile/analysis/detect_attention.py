"""Find attention between exchanges of heads for sequence, by data flow and named factors.

Contract
    Every scaled dot product attention of the graph ends in a region or gets a refusal; the graph
    is not edited. The answer is a function of the graph's structure, the same on every rank.
    In a region one factor of one dimension is proven to be the index of heads all the way.

Pseudo-code
    for each attention operator:
        walk up from q, k, v through movements of data: one even exchange above q; above k and v
            one each, the same one, or a local computation from a gathered latent
        walk down from its result through movements of data to an even exchange, and its wait
        track factors down both ways; check that heads left, sequence came, sequence goes back
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.analysis.attention_regions import (
    AttentionRefusal,
    AttentionRefused,
    AttentionRegion,
)
from moe_compile.analysis.attention_surroundings import (
    backend_choices,
    movements_above,
    nearest_launches,
)
from moe_compile.analysis.head_factors import Factor, Lost, flat, holds, size_of, unify
from moe_compile.analysis.head_tracking import Tracker, is_even_exchange, is_movement, sizes_of
from moe_compile.analysis.surroundings import changes_state
from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.query import (
    group_name,
    is_all_gather,
    is_launch,
    is_wait,
    output_splits,
    overload_name,
)

ATTENTION: Final = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)


class _Refuse(Exception):
    def __init__(self, reason: AttentionRefusal, detail: str = "") -> None:
        super().__init__(reason.value)
        self.reason, self.detail = reason, detail


def find_attention(graph: fx.Graph) -> tuple[list[AttentionRegion], list[AttentionRefused]]:
    """Return the attention regions of a Dynamo graph in graph order, and the other attentions."""
    cores = [n for n in graph.nodes if n.op == "call_function" and n.target in ATTENTION]
    regions: list[AttentionRegion] = []
    refused: list[AttentionRefused] = []
    dependence = Dependence(graph) if cores else None
    for core in cores:
        assert dependence is not None
        try:
            regions.append(_region(core, dependence))
        except _Refuse as e:
            refused.append(
                AttentionRefused(name=core.name, core=core, reason=e.reason, detail=e.detail)
            )
        except Lost as e:
            lost = AttentionRefusal.HEADS_LOST
            refused.append(AttentionRefused(name=core.name, core=core, reason=lost, detail=str(e)))
    return regions, refused


def _region(core: fx.Node, dependence: Dependence) -> AttentionRegion:
    operands = [argument(core, i, name) for i, name in enumerate(("query", "key", "value"))]
    above = [movements_above(operand) for operand in operands]
    entering = [[n for n in moved if is_launch(n)] for moved in above]
    outward = _outward(core)
    _check_shape(core, operands, entering, outward)
    if any(len(sizes_of(operand)) != 4 for operand in operands):
        raise Lost("operands without four dimensions")
    exchanges = _in_order({n for found in entering for n in found}, dependence)
    local = [o for o, found in zip(operands, entering, strict=True) if not found]
    moved = {n for nodes, found in zip(above, entering, strict=True) if found for n in nodes}
    tracker = Tracker()
    _track(tracker, _in_order(moved, dependence), local)
    head = _find_heads(tracker, core, operands, entering, outward)
    _check_arithmetic(core)
    below = dependence.below(exchanges)
    region = AttentionRegion(
        name=core.name,
        core=core,
        exchanges=tuple(exchanges),
        local_operands=tuple(dict.fromkeys(local)),
        inward=tuple(n for n in _in_order(moved, dependence) if n in below - set(exchanges)),
        outward=tuple(outward),
        state_calls=backend_choices(core),
        tracker=tracker,
        head=head,
        num_heads=size_of(tracker.dims(operands[0])[-3]),
        num_kv_heads=head.size if head else 1,
        group=group_name(exchanges[0]),
        num_ranks=len(output_splits(exchanges[0])),
    )
    _check_surroundings(region, dependence)
    return region


def _in_order(nodes: set[fx.Node], dependence: Dependence) -> list[fx.Node]:
    return sorted(nodes, key=dependence.position.__getitem__)


def argument(core: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return an argument of the attention operator."""
    return core.args[position] if len(core.args) > position else core.kwargs.get(name, default)


def _outward(core: fx.Node) -> list[fx.Node]:
    """Return the movements from `core` to the last wait of the exchange back; [] without one."""
    found: list[fx.Node] = []
    node = core
    while len(node.users) == 1:
        following = next(iter(node.users))
        back = any(is_launch(n) for n in found)
        if not is_movement(following) or (back and not is_wait(following)):
            break
        found.append(following)
        node = following
    return found if len(found) > 1 and is_wait(found[-1]) else []


def _check_shape(
    core: fx.Node,
    operands: list[fx.Node],
    entering: list[list[fx.Node]],
    outward: list[fx.Node],
) -> None:
    """Refuse unless exchanges stand around the attention as around a region."""
    if not entering[0]:
        raise _no_exchange(core, operands)
    launches = [n for found in entering for n in found] + [n for n in outward if is_launch(n)]
    if any(len(found) > 1 for found in entering):
        raise _Refuse(AttentionRefusal.SEVERAL_EXCHANGES)
    for operand, found in zip(operands, entering, strict=True):
        if not found and any(not is_all_gather(n) for n in nearest_launches(operand, up=True)):
            raise _Refuse(AttentionRefusal.COMPUTED_BETWEEN, operand.name)
    if not outward:
        raise _Refuse(AttentionRefusal.NO_EXCHANGE_BACK)
    if not all(is_even_exchange(n) for n in launches):
        raise _Refuse(AttentionRefusal.UNEVEN)
    if len({group_name(n) for n in launches}) > 1:
        raise _Refuse(AttentionRefusal.GROUPS_DIFFER)


def _no_exchange(core: fx.Node, operands: list[fx.Node]) -> _Refuse:
    above = [n for operand in operands for n in nearest_launches(operand, up=True)]
    below = nearest_launches(core, up=False)
    reduces = any("reduce" in overload_name(n) for n in below)
    if reduces and any(is_all_gather(n) for n in above):
        return _Refuse(AttentionRefusal.TENSOR_PARALLEL)
    if any(is_even_exchange(n) for n in above) and any(is_even_exchange(n) for n in below):
        return _Refuse(AttentionRefusal.COMPUTED_BETWEEN, operands[0].name)
    return _Refuse(AttentionRefusal.NO_EXCHANGE)


def _check_arithmetic(core: fx.Node) -> None:
    mask, dropout = argument(core, 3, "attn_mask"), argument(core, 4, "dropout_p", 0.0)
    if isinstance(mask, fx.Node):
        sizes = sizes_of(mask)
        if len(sizes) > 2 and sizes[-3] != 1:
            raise _Refuse(AttentionRefusal.VARIES_BY_HEAD, mask.name)
    if dropout != 0.0:
        raise _Refuse(AttentionRefusal.RANDOM)


def _track(tracker: Tracker, moved: list[fx.Node], local: list[fx.Node]) -> None:
    for node in moved:
        for source in node.all_input_nodes:
            if source not in tracker:
                tracker.start(source)
        tracker.step(node)
    for operand in local:
        if operand not in tracker:
            tracker.start(operand)


def _find_heads(
    tracker: Tracker,
    core: fx.Node,
    operands: list[fx.Node],
    entering: list[list[fx.Node]],
    outward: list[fx.Node],
) -> Factor | None:
    """Return the factor that is the index of KV heads; refuses what does not move heads."""
    query, key, value = operands
    unify(tracker.dims(key)[-3], tracker.dims(value)[-3])
    unify(tracker.dims(key)[-3], tracker.dims(query)[-3], prefix=True)
    heads = tracker.dims(query)[-3]
    if not _sends_heads(tracker, entering[0][0], heads):
        raise _Refuse(AttentionRefusal.NOT_HEADS)
    for operand, found in zip(operands, entering, strict=True):
        if found and tracker.dims(operand)[-2][:1] != flat([tracker.source[found[0]]])[:1]:
            raise _Refuse(AttentionRefusal.NOT_SEQUENCE, operand.name)
    tracker.result_of_attention(core, query, value)
    for node in outward:
        tracker.step(node)
    back = next(n for n in outward if is_launch(n))
    if flat(tracker.sent[back]) != flat([tracker.source[entering[0][0]]]):
        raise _Refuse(AttentionRefusal.NOT_BACK)
    kv_heads = tracker.dims(key)[-3]
    head = kv_heads[0] if kv_heads else None
    sent = [n.all_input_nodes[0] for found in entering for n in found]
    if head and not all(any(holds(d, head) for d in tracker.dims(n)) for n in sent):
        raise Lost("the heads are not in what is sent")
    return head


def _sends_heads(tracker: Tracker, exchange: fx.Node, heads: list[Factor]) -> bool:
    """Whether what `exchange` sends by is the outer part of the index that `heads` end."""
    sent = flat(tracker.sent[exchange])
    return any(
        dim[i : i + len(sent) + len(heads)] == sent + heads
        for dims in tracker.started()
        for dim in dims
        for i in range(len(dim))
    )


def _check_surroundings(region: AttentionRegion, dependence: Dependence) -> None:
    """Refuse what replaying the region at its attention would change."""
    body = {*region.exchanges, *region.inward, region.core, *region.outward}
    for node in body - {region.result}:
        if any(user not in body for user in node.users):
            raise _Refuse(AttentionRefusal.ESCAPES, node.name)
    read = {s for n in body for i in (n, *n.all_input_nodes) for s in storages(i)}
    position = dependence.position
    first, last = position[region.exchanges[0]], position[region.result]
    for node, place in position.items():
        if first < place < last:
            if dependence.writes.get(node, frozenset()) & read:
                raise _Refuse(AttentionRefusal.MUTATED_MEANWHILE, node.name)
            if changes_state(node):
                raise _Refuse(AttentionRefusal.STATE_CHANGES, node.name)
