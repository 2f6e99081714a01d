"""Parts of a model by name: which operators of a joint graph are its norms, activations and so on.

Contract
    Parts are found by operators and data flow alone, not by names of modules: a joint graph need
    not have any, and models name the same part differently. The same graph has the same parts, on
    every rank; no size decides.
    Nothing is said here about what may be computed again.

layernorm       each norm, by mean or by mean and variance: from the statistic to the scaled result
moe_act         what stands element by element between two products of the experts
core_attn       attention: the fused operator, or both products with the softmax between them
mla_up_proj     from latents to attention: the products whose input is a norm, a slice or a view of
                another product, and what they become on the way to attention (rotary embedding)
mlp             two products and the activation between them, outside the experts
shared_experts  such an MLP that reads what the experts of its graph read, and whose result these
                do not read
moe             a layer of experts, router and shared experts included (`moe_layers.py`)
megascale_moe   norms, activations and gathers of rows, after MegaScale-MoE (arXiv 2505.11432),
                which keeps the products of gate and up and the inputs of attention
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.cost.amounts import (
    CONCATENATION,
    FILLS,
    GATHERS,
    OWN_GATHERS,
    REDUCTIONS,
    is_elementwise,
    is_part,
    is_product,
)
from moe_compile.graph.inner_graphs import is_flex_attention
from moe_compile.graph.query import is_launch, is_wait, overload_name, tensor_of, value_of
from moe_compile.recompute.moe_layers import MoELayer, ancestors, moe_layers
from moe_compile.recompute.storages import of_the_backward
from moe_compile.regions.row_chain import shape_of

NORMS: Final = frozenset({"_fused_rms_norm", "native_layer_norm", "native_group_norm", "rms_norm"})
ROOTS: Final = frozenset({"rsqrt", "sqrt"})
STATISTICS: Final = frozenset({"mean", "sum", "var", "var_mean"})
SQUARES: Final = frozenset({"abs", "mul", "pow", "square", "sub"})
CASTS: Final = frozenset({"_to_copy", "clone", "convert_element_type"})
SCALES: Final = frozenset({"add", "div", "mul", "reciprocal", "sub"})
LINEAR: Final = CASTS | {"add", "div", "mul", "neg", "sub"}
"""Elementwise operators that are no activation, if only one of their inputs is a product's."""
SOFTMAX: Final = REDUCTIONS | {"_safe_softmax", "logsumexp"}
MOVES: Final = (
    GATHERS
    | OWN_GATHERS
    | {CONCATENATION, "clone", "constant_pad_nd", "flip", "quantize_rows", "split_with_sizes"}
)
"""Operators past which an activation is still that of the products before it."""
GROUPED: Final = "grouped_mm"
"""Part of the names of products with a weight for each group of rows: those of experts."""


def parts_of(graph: fx.Graph, names: Sequence[str]) -> dict[str, set[fx.Node]]:
    """Return the nodes of the forward part of a joint graph that belong to each of `names`.

    A part that the graph does not have is an empty set.
    """
    forward = Forward.of(graph)
    found: dict[str, Callable[[], set[fx.Node]]] = {
        "layernorm": lambda: forward.norms,
        "moe_act": lambda: _nodes(a.path for a in forward.activations if forward.is_expert(a)),
        "core_attn": lambda: _nodes(forward.attention.values()),
        "mla_up_proj": lambda: _nodes(map(forward.from_latents, forward.attention)),
        "mlp": lambda: _nodes(a.all for a in forward.mlps if not forward.is_shared(a)),
        "shared_experts": forward.shared_experts,
        "moe": lambda: _nodes(layer.nodes for layer in forward.layers) | forward.shared_experts(),
        "megascale_moe": lambda: (
            forward.norms
            | _nodes(a.path for a in forward.activations)
            | {n for layer in forward.layers for n in layer.nodes if _gathers_rows(n)}
        ),
    }
    return {name: set(found[name]()) for name in names}


def _nodes(groups: Iterable[Iterable[fx.Node]]) -> set[fx.Node]:
    return {node for group in groups for node in group}


@dataclass(frozen=True, kw_only=True, slots=True)
class Activation:
    """What stands between products: `down` reads what `path` makes of the products `ups`."""

    ups: frozenset[fx.Node]
    path: frozenset[fx.Node]
    down: fx.Node

    @property
    def all(self) -> frozenset[fx.Node]:
        """Return the products and what stands between them."""
        return self.ups | self.path | {self.down}


@dataclass(frozen=True, kw_only=True)
class Forward:
    """The forward part of a joint graph, and what each part is found by."""

    nodes: tuple[fx.Node, ...]
    norms: set[fx.Node]
    attention: dict[fx.Node, frozenset[fx.Node]]
    """Operator of attention, or its second product -> all of its nodes."""
    activations: tuple[Activation, ...]
    layers: tuple[MoELayer, ...]

    @classmethod
    def of(cls, graph: fx.Graph) -> Forward:
        """Read a joint graph."""
        backward = set(of_the_backward([*graph.nodes]))
        nodes = tuple(n for n in graph.nodes if n.op == "call_function" and n not in backward)
        norms = {n for node in nodes for n in _norm_around(node)} - backward
        attention = {n: own - backward for n in nodes if (own := _attention_of(n))}
        inside = {n for own in attention.values() for n in own}
        products = [n for n in nodes if is_product(n) and n not in inside]
        activations = tuple(a for n in products if (a := _activation_before(n)) is not None)
        layers = moe_layers(nodes, stops=norms | inside)
        return cls(
            nodes=nodes,
            norms=norms,
            attention=attention,
            activations=activations,
            layers=layers,
        )

    @property
    def mlps(self) -> list[Activation]:
        """Return the activations between products that are no experts'."""
        return [one for one in self.activations if not self.is_expert(one)]

    def is_expert(self, one: Activation) -> bool:
        """Whether it belongs to experts: between two exchanges, or between grouped products."""
        between = any(one.down in layer.between for layer in self.layers)
        return between or GROUPED in op_of(one.down)

    def is_shared(self, mlp: Activation) -> bool:
        """Whether an MLP reads what some experts read, and these do not read its result."""
        read = {source for up in mlp.ups for a in up.all_input_nodes for source in _made_of(a)}
        experts = [layer.between for layer in self.layers]
        experts += [a.all for a in self.activations if self.is_expert(a)]
        above = (ancestors(self.nodes, group) for group in experts)
        return any(mlp.down not in before and not before.isdisjoint(read) for before in above)

    def shared_experts(self) -> set[fx.Node]:
        """Return the nodes of shared experts."""
        return _nodes(one.all for one in self.mlps if self.is_shared(one))

    def from_latents(self, attention: fx.Node) -> set[fx.Node]:
        """Return the nodes from latents to an attention operator; none if it has no latents."""
        first = min(self.attention[attention], key=self.nodes.index)
        inputs = first.all_input_nodes + attention.all_input_nodes
        path, products, _ = _walk(inputs, passes=MOVES, stops=self.attention[attention])
        ups = {product: inner for product in products if (inner := self._latent(product))}
        return path.union(ups, *ups.values()) if ups else set()

    def _latent(self, product: fx.Node) -> set[fx.Node]:
        """Return the nodes from another product to this one, {} where its input is no latent."""
        for rows in product.all_input_nodes:
            path, sources, _ = _walk([rows], passes=MOVES, among=self.norms)
            if sources and all(not is_elementwise(n) or n in self.norms for n in path):
                return path or {product}
        return set()


def op_of(node: fx.Node) -> str:
    """Return the name of an operator without its namespace, "" for anything else."""
    return overload_name(node).rpartition("::")[2]


def _gathers_rows(node: fx.Node) -> bool:
    tensor = tensor_of(node)
    return (
        op_of(node) in GATHERS | OWN_GATHERS and tensor is not None and tensor.is_floating_point()
    )


def _made_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield a tensor, and what it is a view, a cast or the gathered form of."""
    yield node
    while is_part(node) or is_wait(node) or is_launch(node) or op_of(node) in CASTS:
        node = node.all_input_nodes[0]
        yield node


def _norm_around(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of the norm whose operator, or inverse root, is `node`."""
    if op_of(node) in NORMS:
        yield node
        yield from (user for user in node.users if is_part(user))
        return
    is_root = op_of(node) in ROOTS or (op_of(node) == "pow" and node.args[1] == -0.5)
    if is_root and (above := _statistic(node)):
        yield from above
        yield from _scaled_by(node, above)


def _statistic(root: fx.Node) -> list[fx.Node]:
    """Return the nodes from a tensor to the root of its statistic; [] where it is none."""
    found, node = [root], root
    while op_of(node) not in STATISTICS:
        inputs = _whole(node) if is_elementwise(node) or is_part(node) else []
        if len(inputs) != 1:
            return []
        (node,) = inputs
        found.append(node)
    while (source := _source_of(node)) is not None:
        found.append(source)
        found += [n for n in source.all_input_nodes if op_of(n) in STATISTICS]
        node = source
    return found


def _source_of(node: fx.Node) -> fx.Node | None:
    """Return the square, difference or cast that a statistic is of; None for another tensor."""
    source = node.all_input_nodes[0]
    if op_of(source) in CASTS:
        return source
    own = {n for n in source.all_input_nodes if op_of(n) not in STATISTICS}
    return source if op_of(source) in SQUARES and len(own) == 1 and is_elementwise(source) else None


def _scaled_by(root: fx.Node, above: Collection[fx.Node]) -> Iterator[fx.Node]:
    """Yield what is multiplied by the root, and the weight, bias and casts that follow."""
    sources = {a for node in above for a in node.all_input_nodes} - {root}
    casts = {n for source in sources for n in source.users if op_of(n) in CASTS | {"sub"}}
    scaled = [root]
    for node in scaled:
        for user in node.users:
            others = set(_whole(user)) - {node}
            reads_it = op_of(user) in ("mul", "div") and others <= sources | casts | {*above}
            is_next = op_of(user) in SCALES | CASTS or is_part(user)
            if is_next and user not in scaled and (reads_it or not others):
                scaled.append(user)
                yield from (user, *(others & casts))


def _whole(node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node that have its shape, or are no factor for many elements."""
    inputs = [n for n in dict.fromkeys(node.all_input_nodes) if tensor_of(n) is not None]
    if not is_elementwise(node):
        return list(dict.fromkeys(node.all_input_nodes))
    return [n for n in inputs if shape_of(n) == shape_of(node)]


def _attention_of(node: fx.Node) -> frozenset[fx.Node]:
    """Return the nodes of the attention that ends in `node`, none where none does."""
    is_fused = is_flex_attention(node) or "attention" in op_of(node)
    if is_fused and "backward" not in op_of(node):
        return frozenset({node, *(user for user in node.users if is_part(user))})
    if not is_product(node):
        return frozenset()
    path, products, _ = _walk(node.all_input_nodes[:1], passes=SOFTMAX | CASTS)
    names = {op_of(n) for n in path}
    is_softmax = not names.isdisjoint({"_softmax", "_safe_softmax"}) or {"amax", "exp"} <= names
    return frozenset({node, *path, *products}) if is_softmax and products else frozenset()


def _activation_before(down: fx.Node) -> Activation | None:
    """Return the activation whose result a product reads, None where it reads none."""
    for rows in down.all_input_nodes:
        path, products, strange = _walk([rows], passes=MOVES)
        if products and not strange and any(_is_nonlinear(n, path | products) for n in path):
            return Activation(ups=frozenset(products), path=frozenset(path), down=down)
    return None


def _is_nonlinear(node: fx.Node, inside: Collection[fx.Node]) -> bool:
    if not is_elementwise(node):
        return False
    own = [n for n in _whole(node) if n in inside]
    return op_of(node) not in LINEAR or (op_of(node) == "mul" and len(own) == 2)


def _walk(
    starts: Iterable[fx.Node],
    *,
    passes: Collection[str],
    among: Collection[fx.Node] = (),
    stops: Collection[fx.Node] = (),
) -> tuple[set[fx.Node], set[fx.Node], set[fx.Node]]:
    """Walk up from `starts` to products; return the nodes between, the products, and other ends.

    It goes through elementwise operators, views, random draws, operators of the names in `passes`
    and nodes in `among`. A smaller input of an elementwise operator, a score or a weight, is none.
    """
    path, products, strange = set[fx.Node](), set[fx.Node](), set[fx.Node]()
    todo = list(starts)
    while todo:
        node = todo.pop()
        if node in path or node in stops:
            continue
        if is_product(node):
            products.add(node)
        elif _is_passed(node, passes) or node in among:
            path.add(node)
            # one of `passes` may change the shape, as a concatenation or padding does
            inputs = node.all_input_nodes if op_of(node) in passes else _whole(node)
            todo += [n for n in inputs if _has_numbers(n)]
        elif op_of(node) not in FILLS:
            strange.add(node)
    return path, products, strange


def _is_passed(node: fx.Node, passes: Collection[str]) -> bool:
    if node.op != "call_function":
        return False
    tags: Any = getattr(node.target, "tags", ())
    draws = torch.Tag.nondeterministic_seeded in tags and "attention" not in op_of(node)
    return is_elementwise(node) or is_part(node) or op_of(node) in passes or draws


def _has_numbers(node: fx.Node) -> bool:
    """Whether the node is a tensor of numbers or truth values, or several: no index, no size."""
    value = value_of(node)
    if isinstance(value, torch.Tensor):
        return value.is_floating_point() or value.is_complex() or value.dtype is torch.bool
    return isinstance(value, tuple | list)
