"""The nodes that run for each part of a batch, their order, and the results of all parts.

Contract
    A segment ends with a launch of a region's rows, and begins and ends in the modes that the graph
    ends in: segments of other parts may run between.
    Parameters have gradients as accumulation over the parts gives them: each part makes the values
    computed from them, or repeated for each index of the batch, and adds up its own terms first.
    So each part repeats a parameter, a class token or learned queries, in its own sizes, instead of
    cutting the whole. Repetitions other than one run of elements behind another are refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.batch.batch_split import BatchSplit, SplitRegion
from moe_compile.batch.batch_tracking import inside
from moe_compile.batch.taken_places import counts_places
from moe_compile.dims.arguments import moved, one_index, operator_name
from moe_compile.dims.factors import Dims, Factor, Lost, flat, holds, size_of
from moe_compile.dims.tracker import Tracker
from moe_compile.graph.dependence import storages
from moe_compile.graph.effects import is_pure
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.modes import (
    changes_autocast,
    changes_grad_mode,
    changes_mode,
    chooses_attention,
)
from moe_compile.graph.query import called_name, has_gradient, operator_at, tensor_of
from moe_compile.graph.torch_calls import maker_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.token_index import TokenIndex

EXPANDS: Final = frozenset({"expand", "broadcast_to"})
REPEATS: Final = frozenset({"repeat", "tile"})
OTHERS: Final = frozenset({"expand_as", "repeat_interleave", "index_select", "embedding", "gather"})
"""Other operators that repeat elements, which are not made anew in other sizes."""


def is_spread(node: fx.Node, tracker: Tracker, batch: Factor) -> bool:
    """Whether `node`, with the batch and no input that depends on it, repeats a parameter."""
    name = called_name(node)
    if not has_gradient(node) or name not in EXPANDS | REPEATS | OTHERS:
        return False
    if name in OTHERS or not _is_outermost(node, tracker, batch):
        raise Lost(
            f"{name} repeats a parameter once for each sequence of the batch, which megamoe "
            "follows only if expand or repeat adds the batch as the outermost dimension"
        )
    return True


def repeats_in(node: fx.Node, sizes: list[int]) -> list[int]:
    """Return the repetitions of each dimension by which `repeat` gives `sizes`."""
    return [size // given for size, given in zip(sizes, _given_sizes(node), strict=True)]


def _is_outermost(node: fx.Node, tracker: Tracker, batch: Factor) -> bool:
    """Whether each index of the batch has the same elements."""
    dims: Dims = tracker.dims(node)
    along = next(i for i, dim in enumerate(dims) if holds(dim, batch))
    given = _given_sizes(node)[along]
    if given == 1:
        return True
    first, *inner = flat(dims[along])
    return called_name(node) in REPEATS and first is batch and size_of(inner) % given == 0


def _given_sizes(node: fx.Node) -> list[Any]:
    """Return the sizes of the tensor repeated, with 1 for each dimension that is added."""
    whole, given = tensor_of(node), tensor_of(moved(node))
    assert whole is not None and given is not None
    return [1] * (whole.dim() - given.dim()) + list(given.shape)


@dataclass(slots=True)
class Dependents:
    """The nodes of a graph that depend on the batch, by how they do."""

    inputs: dict[fx.Node, None] = field(default_factory=dict)
    """Nodes that have the batch and depend on no other node that has it, in graph order."""
    per_sequence: set[fx.Node] = field(default_factory=set)
    """Nodes whose tensors have the batch in a dimension: each part computes its own."""
    mixed: set[fx.Node] = field(default_factory=set)
    """Nodes that depend on the batch in another way."""
    sizes_only: set[fx.Node] = field(default_factory=set)
    """Nodes that read sizes of these, and nothing else of them."""
    counters: set[fx.Node] = field(default_factory=set)
    """Nodes that add counts to tensors from outside."""
    returned: set[fx.Node] = field(default_factory=set)
    """Counters that the graph returns: made once, from the counts of all parts."""
    reductions: set[fx.Node] = field(default_factory=set)
    """Counts, sums and means over the batch, of which results of the graph are made."""
    outputs_once: set[fx.Node] = field(default_factory=set)
    """Nodes from reductions to results of the graph: run once, on those of all parts."""
    needed: set[fx.Node] = field(default_factory=set)
    """Nodes that the results and the counters depend on."""

    def __contains__(self, node: fx.Node) -> bool:
        """Whether the node has the batch, or depends on it."""
        return node in self.inputs or node in self.per_sequence or node in self.mixed

    @property
    def nodes(self) -> set[fx.Node]:
        """Return the nodes that depend on the batch."""
        return self.per_sequence | self.mixed

    def end(self, facts: GraphFacts, sums: set[fx.Node]) -> None:
        """Set the fields about the graph's outputs, of parts and of `sums` over the batch."""
        (output,), dependence = facts.graph.find_nodes(op="output"), facts.dependence
        given = {*output.all_input_nodes}
        ends = [n for n in dependence.needs(output) if n in given or n not in self.counters]
        leaving = [n for n in ends if n in self.mixed]
        above = dependence.above(leaving, stops=sums) & self.nodes
        self.reductions, self.outputs_once = above & sums, above - sums
        results = [n for n in output.all_input_nodes if n in self.per_sequence]
        self.needed = dependence.above([*results, *self.counters, *self.reductions])


def body_of(
    facts: GraphFacts,
    regions: tuple[SplitRegion, ...],
    tracker: Tracker,
    batch: Factor,
    found: Dependents,
) -> BatchSplit:
    """Return the split of a graph of which `found` depends on the batch."""
    (output,), dependence = facts.graph.find_nodes(op="output"), facts.dependence
    spread = {n for n in found.inputs if n in found.needed and is_spread(n, tracker, batch)}
    made = _made_of_parameters(found, facts) | spread
    body = dependence.in_order((found.nodes & found.needed) | made)
    legality = facts.legality
    obstacle = legality.obstacle(body, output, keeps_modes=True)
    obstacle = obstacle or legality.obstacle(found.outputs_once, output)
    if obstacle is not None:
        raise obstacle.left
    read = {source for node in body for source in node.all_input_nodes}
    given = [node for node in found.inputs if node in read - spread]
    anew = {n for n in given if maker_of(n) is not None or counts_places(n)}
    dead = found.nodes | found.sizes_only
    for node in reversed(dependence.in_order(made | anew)):
        dead |= {node} if dead.issuperset(node.users) else set()
    return BatchSplit(
        batch=batch,
        tracker=tracker,
        regions=regions,
        rows=tuple(_outer_of_rows(regions, tracker, batch)),
        cut=tuple(node for node in given if node not in anew),
        anew=tuple(node for node in given if node in anew),
        spread=frozenset(spread),
        written=tuple(node for node in given if dependence.writers(node)),
        segments=tuple(_segments(facts, regions, set(body))),
        alone=tuple(_read_alone(body, found.inputs, regions)),
        results=tuple(n for n in output.all_input_nodes if n in found.per_sequence),
        summed=tuple(dependence.in_order(found.reductions)),
        kept=tuple(dependence.in_order(found.outputs_once)),
        told=tuple(dependence.in_order(found.sizes_only)),
        dead=tuple(dependence.in_order(dead)),
    )


def _made_of_parameters(found: Dependents, facts: GraphFacts) -> set[fx.Node]:
    """Return nodes without the batch that give parameters a gradient, but for their only views.

    Parts may share a view, and add up its gradient, where nothing else adds to the same elements.
    """
    made, dependence = set[fx.Node](), facts.dependence
    for node in dependence.in_order(found.needed - found.nodes - set(found.inputs)):
        if node.op not in ("call_function", "call_method") or not has_gradient(node):
            continue
        is_view = bool(storages(node) & dependence.reads(node))
        read_twice = any(_is_read_twice(n, found.needed) for n in node.all_input_nodes)
        is_of_made = any(n in made for n in node.all_input_nodes)
        if is_pure(node) and (not is_view or read_twice or is_of_made):
            made.add(node)
    return made


def _is_read_twice(source: fx.Node, needed: Collection[fx.Node]) -> bool:
    """Whether several of `needed` read the same elements.

    Pieces of a split have none in common, nor have single indices of one dimension.
    """
    readers = [user for user in source.users if user in needed]
    tensor = tensor_of(source)
    if len(readers) < 2 or tensor is None:
        return False
    taken = [one_index(n) if operator_name(n) in ("getitem", "select") else None for n in readers]
    indices = {(dim, index % tensor.shape[dim]) for dim, index in filter(None, taken)}
    return len(indices) < len(readers) or len({dim for dim, _ in indices}) > 1


def _outer_of_rows(
    regions: Iterable[SplitRegion], tracker: Tracker, batch: Factor
) -> Iterator[Factor]:
    """Yield the outermost factor of each order of rows, and of each index of tokens."""
    known = TokenIndex(frozenset())
    for one in regions:
        indices = dict.fromkeys((one.found.index, one.found.sums.index))
        ordered = filter(None, (n for node in indices for n in (node, known.order_of(node))))
        dims = [tracker.dims(node)[0] for node in ordered]
        for dim in [*dims, *([[one.share.factor]] if one.share is not None else [])]:
            outer = flat(dim)[:1]
            if any(factor.size % batch.size for factor in outer):
                raise Lost(
                    f"the rows of {one.region.name} cannot be divided like the batch: the size "
                    "of their outermost dimension must be a multiple of the batch size"
                )
            yield from outer


def _segments(
    facts: GraphFacts, regions: Iterable[SplitRegion], body: Collection[fx.Node]
) -> Iterator[tuple[fx.Node, ...]]:
    """Yield the body, with switches of modes, in segments that end with launches of rows."""
    launches = {n for one in regions for n in (one.region.dispatch, one.region.combine)}
    graph, mode_of = facts.graph, facts.modes
    (output,) = graph.find_nodes(op="output")
    grad_modes = [mode_of[node][0] for node in (next(iter(graph.nodes)), output)]
    state = _State(*grad_modes)
    nodes: list[fx.Node] = []
    is_begun = is_launched = False
    is_led = state.is_settled
    for node in _thrown_and(body, graph, state):
        if node in body and not is_led:
            raise Left(Reason.STATE_CHANGES, operator_at(node))
        is_begun |= node in body
        nodes.append(node)
        is_launched |= node in launches
        if not state.is_settled:
            continue
        is_led = True
        if not is_begun:
            nodes = []  # switches thrown and thrown back
        elif is_launched:
            yield tuple(nodes)
            nodes, is_launched = [], False
    if not state.is_settled:
        raise Left(Reason.STATE_CHANGES, operator_at(output))
    yield tuple(nodes)


def _thrown_and(body: Collection[fx.Node], graph: fx.Graph, state: _State) -> Iterator[fx.Node]:
    """Yield the body, and every switch of a mode once `state` has taken it in, in graph order."""
    for node in graph.nodes:
        if changes_mode(node):
            state.throw(node)
            yield node
        elif node in body:
            yield node


class _State:
    """The modes that differ from those where a graph ends."""

    def __init__(self, begins: object, ends: object) -> None:
        self._grad_mode, self._grad_mode_now = ends, begins
        self._num_entered = self._num_chosen = 0

    @property
    def is_settled(self) -> bool:
        """Whether all modes are those where the graph ends."""
        is_chosen = self._num_chosen % 2  # `sdpa_kernel` throws its switch back by another
        return self._grad_mode_now == self._grad_mode and not (self._num_entered or is_chosen)

    def throw(self, switch: fx.Node) -> None:
        """Take in a switch; raise Left for one that is not thrown back by another."""
        if changes_grad_mode(switch):
            self._grad_mode_now = switch.args[0] if switch.args else None
        elif changes_autocast(switch):
            self._num_entered += 1 if "enter" in called_name(switch) else -1
        elif chooses_attention(switch):
            self._num_chosen += 1
        else:
            raise Left(Reason.STATE_CHANGES, operator_at(switch))


def _read_alone(
    body: Collection[fx.Node],
    cut: Iterable[fx.Node],
    regions: Iterable[SplitRegion],
) -> Iterator[fx.Node]:
    """Yield values with a gradient that all parts read whole, each part by a name of its own.

    These are values that a part reads more than once, so that its own terms are added up first, and
    values read within a region: chunks and hops run readers later, behind those of other parts.
    """
    ours = {*body, *cut}
    within = {node for one in regions for node in inside(one)}
    times: dict[fx.Node, int] = {}
    for node in body:
        for leaf in pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(leaf, fx.Node) and leaf not in ours and has_gradient(leaf):
                times[leaf] = times.get(leaf, 0) + (2 if node in within else 1)
    yield from (source for source, count in times.items() if count > 1)
