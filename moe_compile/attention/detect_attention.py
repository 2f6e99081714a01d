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

from collections.abc import Sequence
from typing import Final

import torch
import torch.fx as fx
import torch.nn.functional as F

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.attention.head_proof import (
    check_escapes,
    check_heads_stay,
    find_heads,
    heads_read,
    is_tensor_parallel,
    movements_above,
    nearest_launches,
    no_region,
    track,
)
from moe_compile.dims.factors import Lost, size_of
from moe_compile.dims.tracker import Tracker, is_even_exchange, is_movement, sizes_of
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.legality import Legality
from moe_compile.graph.query import (
    argument_of,
    group_name,
    has_gradient,
    is_all_gather,
    is_launch,
    is_wait,
    operator_at,
    output_splits,
    tensor_of,
)
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.kernel_bits import bits

ATTENTION: Final = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
TENSOR_PARALLEL: Final = (
    "tensor parallelism shards its heads: tokens are all-gathered before it, and its results are "
    "reduced after it"
)
COMPUTES: Final = (
    "only operators that move data may run between the exchange and attention, and another "
    "operator runs there"
)


def find_attention(facts: GraphFacts) -> tuple[list[AttentionRegion], dict[fx.Node, Left]]:
    """Return the attention regions of a Dynamo graph, and the refusals of other attention."""
    cores = [n for n in facts.graph.nodes if n.op == "call_function" and n.target in ATTENTION]
    regions: list[AttentionRegion] = []
    refused: dict[fx.Node, Left] = {}
    for core in cores:
        try:
            regions.append(_region(core, facts))
        except Left as why:
            refused[core] = Left(why.reason, why.detail)
        except Lost as why:
            refused[core] = Left(Reason.HEADS_LOST, str(why))
    return regions, refused


def _region(core: fx.Node, facts: GraphFacts) -> AttentionRegion:
    dependence = facts.dependence
    operands = [argument_of(core, i, name) for i, name in enumerate(("query", "key", "value"))]
    above = [movements_above(operand) for operand in operands]
    entering = [[n for n in moved if is_launch(n)] for moved in above]
    outward = _outward(core)
    _check_shape(core, operands, entering, outward)
    if any(len(sizes_of(operand)) != 4 for operand in operands):
        raise Lost("q, k and v must have four dimensions each, and one has not")
    exchanges = dependence.in_order({n for found in entering for n in found})
    local = [o for o, found in zip(operands, entering, strict=True) if not found]
    moved = {n for nodes, found in zip(above, entering, strict=True) if found for n in nodes}
    sources = tuple(found[0] if found else None for found in entering)
    tracker = Tracker(facts.modes)
    track(tracker, dependence.in_order(moved), local)
    head = find_heads(tracker, core, operands, sources, outward)
    _check_arithmetic(core)
    below = dependence.below(exchanges)
    inward = [n for n in dependence.in_order(moved) if n in below - set(exchanges)]
    body = (*exchanges, *inward, core, *outward)
    if head is not None:
        check_heads_stay(tracker, (*inward, *outward), head)
    num_kv_heads = head.size if head else 1
    found = bits().heads(core, operands, num_kv_heads)
    refused = bool(found.groups) and bits().refuses
    rounds = refused or _sizes_differ(operands) or _has_local_gradient(operands, sources)
    cut = heads_read(tracker, head, body, core, facts, may_round=rounds) if head else []
    region = AttentionRegion(
        name=core.name,
        core=core,
        operands=tuple(operands),
        sources=sources,
        exchanges=tuple(exchanges),
        inward=tuple(inward),
        outward=tuple(outward),
        cut=tuple(cut),
        tracker=tracker,
        head=head,
        num_heads=size_of(tracker.dims(operands[0])[-3]),
        num_kv_heads=num_kv_heads,
        rounds=rounds,
        rounds_alone=bool(found.alone) and bits().refuses,
        last_bits=found,
        group=group_name(exchanges[0]),
        num_ranks=len(output_splits(exchanges[0])),
    )
    check_escapes(region.body[:-1], region.body)
    _check_meanwhile(region, facts.legality)
    return region


def _check_meanwhile(region: AttentionRegion, legality: Legality) -> None:
    """Refuse a body whose values, gradients or effects would change just before `core`.

    Nor may other nodes write its inputs before its last node.
    """
    body, core = region.body, region.core
    obstacle = legality.obstacle([n for n in body if n is not core], core)
    last = legality.dependence.in_order(body)[-1]
    obstacle = obstacle or legality.written_meanwhile(body, last)
    if obstacle is not None:
        raise obstacle.left


def _sizes_differ(operands: Sequence[fx.Node]) -> bool:
    """Whether keys and values differ in head size: torch may take a kernel for all heads at once.

    True where a tensor is not known.
    """
    key, value = map(tensor_of, operands[1:])
    return key is None or value is None or key.shape[-1] != value.shape[-1]


def _has_local_gradient(operands: Sequence[fx.Node], sources: Sequence[fx.Node | None]) -> bool:
    """Whether a gradient flows into an operand that no exchange brings.

    Attention gives it a memory layout that depends on the number of heads, and sums over it
    round by layout. An exchange gives gradients one layout.
    """
    pairs = zip(operands, sources, strict=True)
    return any(source is None and has_gradient(operand) for operand, source in pairs)


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
        raise no_region(
            "q, k and v must be exchanged once each, and one is exchanged more than once"
        )
    for operand, found in zip(operands, entering, strict=True):
        if not found and any(not is_all_gather(n) for n in nearest_launches(operand, up=True)):
            raise no_region(f"{COMPUTES}: {operator_at(operand)}")
    if not outward:
        raise no_region(
            "its result must be sent by an even all-to-all, alone, with only data movement in "
            "between"
        )
    if not all(is_even_exchange(n) for n in launches):
        raise no_region(
            "the exchanges around it must send equally much to every rank, and one does not"
        )
    if len({group_name(n) for n in launches}) > 1:
        raise no_region(
            "all its exchanges must be over one process group, and they are over several"
        )


def _no_exchange(core: fx.Node, operands: list[fx.Node]) -> Left:
    if is_tensor_parallel(core):
        return no_region(TENSOR_PARALLEL)
    above = [n for operand in operands for n in nearest_launches(operand, up=True)]
    below = nearest_launches(core, up=False)
    if any(is_even_exchange(n) for n in above) and any(is_even_exchange(n) for n in below):
        return no_region(f"{COMPUTES}: {operator_at(operands[0])}")
    return no_region("it stands between no exchanges")


def _check_arithmetic(core: fx.Node) -> None:
    mask, dropout = argument_of(core, 3, "attn_mask"), argument_of(core, 4, "dropout_p", 0.0)
    if isinstance(mask, fx.Node):
        sizes = sizes_of(mask)
        if len(sizes) > 2 and sizes[-3] != 1:
            raise Left(Reason.VARIES_BY_HEAD, operator_at(mask))
    if dropout != 0.0:
        raise Left(Reason.RANDOM)
