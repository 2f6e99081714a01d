"""Estimated time of each node: on the compute stream, and of an exchange on its link.

Contract
    Pure arithmetic on nominal sizes and the rates of a hardware profile; nothing is measured.
    Amounts become time in `planning/rates.py`, as the planner's do. Compute is
    max(operations / matmul rate, bytes / memory rate) plus a fixed cost per operator; a collective
    is latency plus bytes / link rate, over a node's link and the network at once; a wait is free.
    Between elementwise nodes nothing is read or written: a compiler fuses them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.graph.precedence import is_view
from moe_compile.graph.query import (
    argument_of,
    is_all_gather,
    is_all_to_all,
    is_launch,
    is_reduce_scatter,
    is_wait,
    output_splits,
    overload_name,
    tensor_of,
    value_of,
)
from moe_compile.hardware import HardwareProfile
from moe_compile.hardware.collectives import leaving_share
from moe_compile.planning.rates import Bound, Rates
from moe_compile.planning.sizes import NominalSizes

MATMULS: Final = frozenset({"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_mm"})
BACKWARD_OVER_FORWARD: Final = 2.5
"""Operations of attention's backward over its forward: five matrix products instead of two."""
CAUSAL_SHARE: Final = 0.5
"""Of all pairs, those of a query with itself and what is before it; the diagonal is neglected."""
FUNCTIONAL_IS_CAUSAL: Final = 5
"""Place of `is_causal` among the arguments of `F.scaled_dot_product_attention`."""
FUSED: Final = frozenset(
    {
        "aten::_to_copy",
        "aten::constant_pad_nd",
        "aten::select_scatter",
        "aten::slice_scatter",
        "prims::convert_element_type",
    }
)
"""Elementwise to a compiler, though not tagged so."""
ALLOCATIONS: Final = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
"""Operators that take memory and touch none of it."""
FILLS: Final = frozenset({"full_like", "new_ones", "new_zeros", "ones_like", "zeros_like"})
"""Operators that read no element of what they are given."""
GATHERS: Final = frozenset({"embedding", "gather", "index", "index_select"})
"""Operators that read at most as much of their first tensor as they write."""
PASSES_OF: Final = {"all_reduce": 2}
"""Times the payload crosses the link, where not once: reduce-scatter, then all-gather."""


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds one node takes on the compute stream and on a link."""

    compute_us: float = 0.0
    link_us: float = 0.0
    bound: Bound = Bound.NOTHING
    """What the larger part of the time follows from."""


def estimate_costs(
    graph: fx.Graph, sizes: NominalSizes, hardware: HardwareProfile
) -> dict[fx.Node, Cost]:
    """Return the estimated cost of every node."""
    estimator = _Estimator(sizes, hardware)
    return {node: estimator.cost(node) for node in graph.nodes}


def us_by_bound(costs: Iterable[Cost]) -> dict[Bound, float]:
    """Return the time on the compute stream that follows from each bound; launches are calls."""
    us = dict.fromkeys((Bound.COMPUTE, Bound.MEMORY, Bound.LAUNCH), 0.0)
    for cost in costs:
        bound = Bound.LAUNCH if cost.bound is Bound.LINK else cost.bound
        if bound in us:
            us[bound] += cost.compute_us
    return us


def estimate_cost(node: fx.Node, sizes: NominalSizes, hardware: HardwareProfile) -> Cost:
    """Return the estimated cost of one node."""
    return _Estimator(sizes, hardware).cost(node)


def is_free(node: fx.Node) -> bool:
    """Whether the node does no work on the device: not a call, a view, a wait, host arithmetic."""
    if node.op != "call_function" or node.target is operator.getitem:
        return True
    if is_wait(node) or is_view(node):
        return True
    value = value_of(node)
    return not isinstance(value, torch.Tensor | tuple | list)


def is_elementwise(node: fx.Node) -> bool:
    """Whether a compiler would fuse the node with its neighbours: one output per element."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags or target._schema.name in FUSED


class _Estimator:
    """Prices nodes; keeps the rates of each size of group."""

    def __init__(self, sizes: NominalSizes, hardware: HardwareProfile) -> None:
        self.sizes = sizes
        self.rates_of = functools.cache(lambda num_ranks: Rates.of(hardware, num_ranks))
        self.rates = self.rates_of(0)

    def cost(self, node: fx.Node) -> Cost:
        if is_free(node) or _op(node) in ALLOCATIONS:
            return Cost()
        if is_launch(node):
            return Cost(self.rates.op_overhead_us, self._link_us(node), Bound.LINK)
        return self._compute(node)

    def _link_us(self, launch: fx.Node) -> float:
        leaving = leaving_bytes(launch, self.sizes)
        rates = self.rates_of(ranks_of(launch))
        return rates.link_us(leaving, is_gather=not is_all_to_all(launch))

    def _compute(self, node: fx.Node) -> Cost:
        module = _called_module(node)
        if module is not None:
            inner = [self.cost(n) for n in module.graph.nodes]
            longest = max(inner, key=lambda cost: cost.compute_us, default=Cost())
            return Cost(sum(cost.compute_us for cost in inner), bound=longest.bound)
        moved, materialised = self._bytes_moved(node)
        amounts = self._operations(node), moved, int(materialised)
        return Cost(self.rates.compute_us(*amounts), bound=self.rates.compute_bound(*amounts))

    def _bytes_moved(self, node: fx.Node) -> tuple[int, bool]:
        """Return bytes read and written, and whether the node writes anything at all."""
        fused = is_elementwise(node)
        inputs = [a for a in node.all_input_nodes if not (fused and is_elementwise(a))]
        written = not fused or not all(is_elementwise(user) for user in node.users)
        read = self._bytes_read(node, inputs)
        return read + (self.sizes.nbytes(value_of(node)) if written else 0), written

    def _bytes_read(self, node: fx.Node, inputs: Sequence[fx.Node]) -> int:
        if _op(node) in FILLS:
            return 0
        read = [self.sizes.nbytes(value_of(a)) for a in inputs]
        if _op(node) in GATHERS and read:
            read[0] = min(read[0], self.sizes.nbytes(value_of(node)))
        return sum(read)

    def _operations(self, node: fx.Node) -> float:
        op = _op(node)
        if op in MATMULS:
            return self._matmul_operations(node)
        if "attention" in op:
            return self._attention_operations(node, is_backward="backward" in op)
        return 0.0

    def _matmul_operations(self, node: fx.Node) -> float:
        factors = [self.sizes.shape(t) for t in _tensors(node) if t.dim() >= 2]
        if len(factors) < 2:
            return 0.0
        has_addend = overload_name(node) in ("aten::addmm", "aten::baddbmm")
        left, right = factors[-2:] if has_addend else factors[:2]
        groups = left[0] if len(left) == 3 and len(right) == 2 else 1
        return 2.0 * math.prod(left) * right[-1] / groups

    def _attention_operations(self, node: fx.Node, *, is_backward: bool) -> float:
        """Two products of queries x keys x head size, forward; half of each where it is causal."""
        shapes = [self.sizes.shape(t) for t in _tensors(node) if t.dim() == 4]
        if is_backward:
            shapes = shapes[1:]  # the first is the gradient of the output
        if len(shapes) < 2:
            return 0.0
        query, key = shapes[:2]
        forward = 4.0 * math.prod(query) * key[-2] * attended_share(node)
        return forward * BACKWARD_OVER_FORWARD if is_backward else forward


def leaving_bytes(launch: fx.Node, sizes: NominalSizes) -> float:
    """Return the bytes that leave a rank in a collective, routed evenly."""
    sent = sum(sizes.nbytes(value_of(a)) for a in launch.all_input_nodes)
    received = sizes.nbytes(value_of(launch))
    num_ranks = ranks_of(launch)
    shared = num_ranks if num_ranks > 1 else 0  # with itself alone: as if with others
    return max(sent, received) * PASSES_OF.get(_op(launch).rstrip("_"), 1) * leaving_share(shared)


def attended_share(attention: fx.Node) -> float:
    """Return the share of all pairs of query and key that attention looks at.

    Kernels leave out blocks above the diagonal; masks given as tensors are not looked into.
    """
    position = FUNCTIONAL_IS_CAUSAL
    if isinstance(attention.target, torch._ops.OpOverload):
        names = [a.name for a in attention.target._schema.arguments]
        position = names.index("is_causal") if "is_causal" in names else len(names)
    return CAUSAL_SHARE if argument_of(attention, position, "is_causal", default=False) else 1.0


def _op(node: fx.Node) -> str:
    """Return the name of the operator without its namespace and overload."""
    return overload_name(node).rpartition("::")[2]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors among the arguments, in order; one given twice is there twice."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    values = (tensor_of(a) for a in arguments if isinstance(a, fx.Node))
    return [t for t in values if t is not None]


def _called_module(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph a higher-order operator calls, if it calls one."""
    owner = node.graph.owning_module
    if not isinstance(node.target, torch._ops.HigherOrderOperator) or owner is None:
        return None
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            module = getattr(owner, str(argument.target), None)
            if isinstance(module, fx.GraphModule):
                return module
    return None


def ranks_of(launch: fx.Node) -> int:
    """Return the ranks an exchange is among; 0 where the launch does not say.

    All of the payload is then taken to leave a rank; else all but its own part, evenly routed.
    """
    return len(output_splits(launch)) if is_all_to_all(launch) else _group_size(launch)


def _group_size(launch: fx.Node) -> int:
    """Return the ranks of an all-gather or reduce-scatter, 0 of another collective."""
    position = 1 if is_all_gather(launch) else 2 if is_reduce_scatter(launch) else None
    size = None if position is None else argument_of(launch, position, "group_size")
    return size if isinstance(size, int) else 0
