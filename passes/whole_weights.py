"""Quantise a weight for products in eight bits in one kernel, not in one for each chunk's experts.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value bit for bit: no block of a weight has numbers of two experts.

    quantize_weight(w[:n]), quantize_weight(w[n:])
        becomes  q, s = quantize_weight(w); q[:n], s[:n], q[n:], s[n:]

So the kernel of the first chunk does the work of all, while the first rows are on their way. Parts
of a weight that are not all of its experts are left.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch.fx as fx

from moe_compile.graph.edit import ValuedEmitter, erase_unused, replace_uses
from moe_compile.graph.query import argument_of, is_of_backward, tensor_of
from moe_compile.graph.row_moves import ATEN, SLICE
from moe_compile.journal.entries import PassReport
from moe_compile.ops.scaled_products import QUANTIZE_WEIGHT
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

SPLITS: Final = (ATEN.split_with_sizes.default, ATEN.split.Tensor)
SWAPS: Final = (ATEN.transpose.int, ATEN.permute.default)


@dataclass(frozen=True, slots=True)
class _Part:
    """Experts `start` to `end` of a weight, seen through views, and what quantises them."""

    quantised: fx.Node
    weight: fx.Node
    views: tuple[fx.Node, ...]
    start: int
    end: int


@dataclass(frozen=True)
class WholeWeights(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "whole_weights"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset({"save_overwritten"})  # a policy is left alone

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Join the parts of every weight, forward and backward apart."""
        del state
        groups: dict[Any, list[_Part]] = {}
        for node in graph.find_nodes(op="call_function", target=QUANTIZE_WEIGHT):
            if (part := _part(node)) is not None:
                groups.setdefault(_key(part), []).append(part)
        applied = []
        for parts in filter(_are_whole, groups.values()):
            applied += [part.quantised.name for part in parts]
            _join(parts)
        return PassReport(pass_name=self.name, applied=tuple(applied))


def _part(quantised: fx.Node) -> _Part | None:
    views, node = [], quantised.args[0]
    while isinstance(node, fx.Node) and node.target in SWAPS and _keeps_experts(node):
        views.append(node)
        node = node.args[0]
    if not isinstance(node, fx.Node) or (cut := _cut(node)) is None:
        return None
    return _Part(quantised, cut[0], tuple(reversed(views)), *cut[1:])


def _keeps_experts(view: fx.Node) -> bool:
    value = tensor_of(view)
    dims: list[Any] = list(view.args[1:])
    assert value is not None
    if view.target is ATEN.transpose.int:
        return 0 not in (dim % value.dim() for dim in dims)
    return bool(dims[0][0] % value.dim() == 0)


def _cut(node: fx.Node) -> tuple[fx.Node, int, int] | None:
    """Return the weight of which a node is some experts, the first of them and the end."""
    if node.target is SLICE:
        made, start = tensor_of(node), argument_of(node, 2, "start", default=0)
        others = argument_of(node, 1, "dim", default=0), argument_of(node, 4, "step", default=1)
        if made is None or others != (0, 1) or type(start) is not int or start < 0:
            return None
        return node.args[0], start, start + int(made.shape[0])
    if node.target is not operator.getitem or node.args[0].target not in SPLITS:
        return None
    split, number = node.args
    if argument_of(split, 2, "dim", default=0) != 0:
        return None
    sizes = [int(part.shape[0]) for part in split.meta["val"]]
    return split.args[0], sum(sizes[:number]), sum(sizes[: number + 1])


def _key(part: _Part) -> Any:
    views = tuple((view.target, str(view.args[1:])) for view in part.views)
    return part.weight, part.quantised.args[1], views, is_of_backward(part.quantised)


def _are_whole(parts: Sequence[_Part]) -> bool:
    """Whether parts are all experts of their weight, each once, and more than one."""
    weight = tensor_of(parts[0].weight)
    assert weight is not None
    ends = [0]
    for part in sorted(parts, key=lambda one: one.start):
        if part.start != ends[-1]:
            return False
        ends.append(part.end)
    return len(parts) > 1 and ends[-1] == weight.shape[0]


def _join(parts: Sequence[_Part]) -> None:
    first = parts[0].quantised
    emit, weight = ValuedEmitter(first), parts[0].weight
    made = [weight := emit.call(view.target, weight, *view.args[1:]) for view in parts[0].views]
    made.append(emit.call(QUANTIZE_WEIGHT, weight, first.args[1]))
    both = [emit.call(operator.getitem, made[-1], place) for place in (0, 1)]
    readers = {reader: part for part in parts for reader in part.quantised.users}
    shares = {
        reader: emit.call(SLICE, both[reader.args[1]], 0, part.start, part.end)
        for reader, part in readers.items()
    }
    for node in (*made, *both, *shares.values()):
        node.meta["partitioner_tag"] = first.meta.get("partitioner_tag")
    replace_uses(shares)
    erase_unused([*(part.quantised for part in parts), *readers])
