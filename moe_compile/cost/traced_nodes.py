"""Nodes of a Dynamo graph, a layer of it, traced by themselves and read as work.

Contract
    The graph stays as it is while its work is read.
    The work of a layer does not depend on the layers beside it in the graph.

Work of layers traced before is kept in this process, and on disk beside Inductor's cache. An
entry equals the result of tracing: its name is a hash of the layer's program, torch's version and
every source file of megamoe, and a layer that calls a user's own code is not kept on disk. So no
decision depends on the cache.

To read a layer as work, trace it and note the amounts of each node of the traced graphs.
Sizes are the graph's numbers, and balanced routing for those that only a run knows.
Amounts are those of `cost/amounts.py`, with which the scheduler prices nodes.

Layers of a Dynamo graph are stretches that are traced, priced and decided on by themselves.
Every region has its exchanges, its body, and its sums that are one operator, within one layer.
A layer ends with a MoE region, or with an attention region that another one follows; nodes
behind the last layer are in none.
Equal layers of a model are equal programs: their text, and so their work, is the same.

Pseudo-code
    behind each region that ends a layer, before the next region begins:
        cut where the fewest values are needed on both sides, the earliest of such places;
        between blocks of a transformer that is behind the residual sum: one tensor
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch.fx as fx

from moe_compile.attention.attention_regions import AttentionRegion
from moe_compile.cost.amounts import (
    Amounts,
    amounts_of,
    fuses_what_it_reads,
    is_free,
    is_fusible,
    is_product,
    reads_pieces,
)
from moe_compile.cost.layer_program import (
    NO_PRODUCTS,
    ORIGIN,
    LayerProgram,
    is_weight,
    program_of,
)
from moe_compile.cost.region_work import Work
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import SIZE, is_all_to_all, is_launch, value_of
from moe_compile.graph.row_moves import pads_rows, row_gather
from moe_compile.hardware.products import Product
from moe_compile.ops.scaled_products import QUANTIZE_ROWS, QUANTIZE_WEIGHT
from moe_compile.ops.weight_gradients import QUANTIZE_COLUMNS
from moe_compile.regions.fused_sums import FusedSums
from moe_compile.regions.grouped_products import EightBits, takes_messages
from moe_compile.regions.regions import MoERegion, Region
from moe_compile.source_hash import hash_of_sources
from moe_compile.torch_quirks.cache_files import keep, kept_path

LOG: Final = logging.getLogger(__name__)

Phase: TypeAlias = tuple[tuple[Work, fx.Node | None], ...]
"""Work of the forward or the backward, each with the Dynamo node it comes from, if it has one."""


class TracedNodes:
    """Nodes of one graph as a program; it is traced when its work is first asked for."""

    def __init__(
        self,
        graph: fx.Graph,
        nodes: Collection[fx.Node] | None = None,
        num_rows: int = 1,
        *,
        is_recomputed: bool = False,
        sums: Iterable[FusedSums] = (),
        products: Mapping[fx.Node, EightBits] = NO_PRODUCTS,
    ) -> None:
        """Note the nodes to trace: `nodes`, or all, less those given a size which only a run knows.

        `num_rows` is the value of an integer that the host reads and nothing in the graph explains;
        `is_recomputed` says that the backward recomputes the nodes, less what exchanges received;
        each of `sums` that lies among the nodes is traced as one operator, and each of `products`
        as one in eight bits.
        """
        self._graph, self._num_rows, self._is_recomputed = graph, num_rows, is_recomputed
        self._sums, self._products = tuple(sums), products
        self.not_traced = ""
        """Why torch cannot trace the nodes by themselves, once it was tried; "" if it can."""
        self.nodes = frozenset(graph.nodes) if nodes is None else nodes

    @functools.cached_property
    def program(self) -> LayerProgram:
        """Return the program."""
        program = program_of(self._graph, self.nodes, self._sums, self._products)
        program.rows, program.is_recomputed = self._num_rows, self._is_recomputed
        return program

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Return the forward and, where there is a gradient, the backward.

        () where torch cannot trace the program by itself, on any rank alike.
        """
        try:
            traced = work_of(self.program)
        except Exception as error:  # noqa: BLE001  (the program is compiled whole all the same)
            first_line = str(error).partition("\n")[0]
            self.not_traced = f"{type(error).__name__}: {first_line}"
            LOG.info("not priced: a graph could not be traced by itself: %s", error)
            return ()
        origins = [*self.program.origins, None]  # the last for nodes without an origin
        return tuple(tuple((work, origins[place]) for work, place in one) for one in traced)


_KNOWN: Final[dict[str, tuple[TracedWork, ...]]] = {}
"""Work by the text of its program; a process compiles few distinct layers."""


def work_of(program: LayerProgram) -> tuple[TracedWork, ...]:
    """Return the work of the forward, and of the backward where there is one."""
    name = hashlib.sha256(f"{program.text} {hash_of_sources()}".encode()).hexdigest()
    if name not in _KNOWN:
        path = kept_path(f"{name}.json") if program.is_of_torch else None
        found = None if path is None else _load(path)
        _KNOWN[name] = found or trace_work(program)
        if found is None and path is not None:
            keep(path, json.dumps([dataclasses.asdict(phase) for phase in _KNOWN[name]]))
    return _KNOWN[name]


def forget() -> None:
    """Forget the layers that this process has traced; entries on disk stay."""
    _KNOWN.clear()


def _load(path: Path) -> tuple[TracedWork, ...] | None:
    """Return an entry; None where there is none, or the file is not one of ours."""
    try:
        return tuple(map(_traced, json.loads(path.read_text()))) or None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _traced(phase: dict[str, Any]) -> TracedWork:
    return TracedWork(tuple(map(_work, phase["work"])), tuple(phase["origins"]))


def _work(fields: dict[str, Any]) -> Work:
    product = fields["product"] and Product(**fields["product"])
    return Work(**{**fields, "needs": tuple(fields["needs"]), "product": product})


NOWHERE = -1
"""Origin of a node that corresponds to no node of the program."""


@dataclass(frozen=True, slots=True)
class TracedWork:
    """Work of one phase, each with the place of the program's node it comes from."""

    work: tuple[Work, ...]
    origins: tuple[int, ...]

    def __iter__(self) -> Iterator[tuple[Work, int]]:
        """Return each work with its origin."""
        return zip(self.work, self.origins, strict=True)


def trace_work(program: LayerProgram) -> tuple[TracedWork, ...]:
    """Return the work of the forward, and of the backward where there is one."""
    sizes = NominalSizes({}, program.rows)
    products = _Products(is_weight=tuple(map(is_weight, program.inputs)))
    return tuple(_read(graph, sizes, products) for graph in program.graphs())


@dataclass(slots=True)
class _Products:
    """Facts about weights from the forward graph, for the backward graph."""

    is_weight: tuple[bool, ...]
    """Whether each input of the program is a weight."""
    is_forward_read: bool = False
    weights: set[str] = field(default_factory=set)
    """Names of weights among the forward's inputs, and of their views: the backward's as well."""
    with_weight: set[int] = field(default_factory=set)
    """Origins of products of which an operand is a weight."""


def _read(graph: fx.Graph, sizes: NominalSizes, products: _Products) -> TracedWork:
    sizes.learn(graph)
    work: list[Work] = []
    origins: list[int] = []
    made_by: dict[fx.Node, tuple[int, ...]] = {}
    origin_of: dict[fx.Node, int] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        _note_weight(node, inputs, products)
        origin_of[node] = _origin(node, inputs, origin_of)
        made = () if node.target is SIZE else inputs  # a size is known before what has it is made
        needs = tuple(sorted({i for a in made for i in made_by.get(a, ())}))
        amounts = amounts_of(node, sizes)
        if not (amounts.nbytes or amounts.num_kernels or amounts.operations):
            made_by[node] = needs
            continue
        made_by[node] = (len(work),)
        work.append(_work_of(node, needs, amounts, sizes, origin_of[node], products))
        origins.append(origin_of[node])
    products.is_forward_read = True
    return TracedWork(tuple(work), tuple(origins))


def _note_weight(node: fx.Node, inputs: Sequence[fx.Node], products: _Products) -> None:
    """Note an input of the program that is a weight, a view of one, or one in eight bits."""
    if node.op == "placeholder":
        number = _input_number(node)
        is_noted = not products.is_forward_read and (number is None or products.is_weight[number])
    else:
        is_of_weights = bool(inputs) and all(a.name in products.weights for a in inputs)
        is_noted = is_of_weights and (is_free(node) or node.target is QUANTIZE_WEIGHT)
    if is_noted:
        products.weights.add(node.name)


def _input_number(node: fx.Node) -> int | None:
    """Return the number of the program's input that a placeholder is, or is a part of; else None.

    AOTAutograd's description of it says so; an attribute, such as a weight, is no input.
    """
    described = node.meta.get("desc")
    while hasattr(described, "base"):
        described = described.base
    number: int | None = getattr(described, "idx", None)
    return number


def _origin(node: fx.Node, inputs: Iterable[fx.Node], origin_of: dict[fx.Node, int]) -> int:
    """Return the origin of `node`; for the sum of two gradients, the origin of the first."""
    own = node.meta.get("custom", {}).get(ORIGIN)
    if own is not None:
        return int(own)
    known = (origin_of.get(a, NOWHERE) for a in inputs)
    return next((place for place in known if place != NOWHERE), NOWHERE)


def _work_of(
    node: fx.Node,
    needs: tuple[int, ...],
    amounts: Amounts,
    sizes: NominalSizes,
    origin: int,
    products: _Products,
) -> Work:
    if is_launch(node):
        is_gather = not is_all_to_all(node)
        return Work(
            name=node.name,
            needs=needs,
            link_bytes=amounts.link_bytes,
            exchange="other",
            is_gather=is_gather,
            written=float(sizes.nbytes(value_of(node))),
        )
    weights = 0.0
    makes_gradient = False
    if is_product(node):
        weights = sum(read for a, read in amounts.read.items() if a.name in products.weights)
        if weights:
            products.with_weight.add(origin)
        elif origin in products.with_weight:
            weights, makes_gradient = amounts.written, True
    return Work(
        name=node.name,
        needs=needs,
        operations=amounts.operations,
        product=amounts.product,
        nbytes=amounts.nbytes - weights,
        weight_bytes=weights,
        written=float(sizes.nbytes(value_of(node))),
        num_kernels=amounts.num_kernels,
        makes_gradient=makes_gradient,
        is_fusible=is_fusible(node),
        fuses_what_it_reads=fuses_what_it_reads(node),
        moves_rows=row_gather(node) is not None,
        pads_rows=pads_rows(node),
        reads_pieces=reads_pieces(node),
        quantises=node.target in (QUANTIZE_ROWS, QUANTIZE_WEIGHT, QUANTIZE_COLUMNS),
        quantises_weight=node.target is QUANTIZE_WEIGHT,
        takes_messages=takes_messages(node),
    )


class Layers:
    """The layers of one graph, by the regions in them; each is traced when first read."""

    def __init__(
        self,
        graph: fx.Graph,
        regions: Iterable[Region],
        *,
        is_recomputed: bool = False,
        sums: Iterable[FusedSums] = (),
        products: Mapping[fx.Node, EightBits] = NO_PRODUCTS,
    ) -> None:
        """Cut `graph` between its `regions`; all that follows is as of `TracedNodes`."""
        nodes, found, fused = list(graph.nodes), tuple(regions), tuple(sums)
        self._place = {node: place for place, node in enumerate(nodes)}
        self._behind = {form.result: self._place[form.sums.total] for form in fused}
        cuts = [0, *self._cuts(nodes, found)]
        self._layers = {
            end: TracedNodes(
                graph,
                frozenset(nodes[start:end]),
                is_recomputed=is_recomputed,
                sums=fused,
                products=products,
            )
            for start, end in itertools.pairwise(cuts)
        }

    def around(self, region: Region) -> TracedNodes:
        """Return the layer that `region` is in."""
        last = self._place[region.result]
        return next(layer for end, layer in self._layers.items() if last < end)

    def _cuts(self, nodes: Sequence[fx.Node], regions: Sequence[Region]) -> Iterator[int]:
        """Yield how many nodes stand before each cut."""
        spans = sorted(map(self._span, regions))
        crossing = self._crossing(nodes)
        for last, _, is_attention in spans:
            if any(start <= last < end for end, start, _ in spans):
                continue
            after = [(start, kind) for _, start, kind in spans if start > last]
            end, is_next_attention = min(after, default=(len(nodes) - 1, True))
            if is_attention and not is_next_attention:
                continue
            yield 1 + min(range(last, max(end, last + 1)), key=crossing.__getitem__)

    def _span(self, region: Region) -> tuple[int, int, bool]:
        """Return where a region ends and begins, and whether it is one of attention."""
        begins = (region.count_exchange,) if isinstance(region, MoERegion) else ()
        first = min(map(self._place.__getitem__, (*begins, *region.body)))
        last = self._behind.get(region.result, self._place[region.result])
        return last, first, isinstance(region, AttentionRegion)

    def _crossing(self, nodes: Sequence[fx.Node]) -> list[int]:
        """Return how many values are needed on both sides of the place behind each node.

        An input of the graph counts from its first use: a weight is needed within one layer.
        """
        change = [0] * (len(nodes) + 1)
        for node in nodes:
            uses = [self._place[user] for user in node.users]
            if uses:
                is_given = not node.op.startswith("call")
                change[min(uses) if is_given else self._place[node]] += 1
                change[max(uses)] -= 1
        return list(itertools.accumulate(change))
