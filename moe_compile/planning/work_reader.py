"""Read a Dynamo graph as work: what each operator computes, moves and sends.

Contract
    Sizes are numbers in the graph, and balanced routing for those that only a run knows.
    Between elementwise operators nothing is read or written; views and host arithmetic are free.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.graph.memory import storages_of
from moe_compile.graph.query import (
    called_name,
    is_all_gather,
    is_launch,
    is_reduce_scatter,
    is_wait,
    overload_name,
    tensor_of,
    value_of,
)
from moe_compile.planning.backward_work import (
    CONSTANTS,
    ELEMENTWISE,
    GATHERS,
    BackwardWork,
    Moved,
    has_gradient,
)
from moe_compile.planning.cost_model import (
    BACKWARD_OVER_FORWARD,
    attended_share,
    leaving_bytes,
)
from moe_compile.planning.region_work import MEMORY_BACKWARD, Work
from moe_compile.planning.sizes import NominalSizes

PRODUCTS: Final = frozenset(
    {"mm", "matmul", "linear", "bmm", "addmm", "baddbmm", "_grouped_mm", "grouped_mm"}
)
"""Matrix products as Dynamo calls them."""
GEMM_FACTORS: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """The nodes of a region that run once per chunk, and how."""

    nodes: Collection[fx.Node]
    exchanges: Mapping[fx.Node, str]
    """Launch -> `dispatch` or `combine`."""
    expert_of: Mapping[fx.Node, int] = field(default_factory=dict)
    whole_weights: Collection[fx.Node] = ()
    """Products of which every chunk reads all weights."""


def read_work(graph: fx.Graph, window: Collection[fx.Node], replayed: Replayed) -> tuple[Work, ...]:
    """Return the work of the nodes in `window`, in graph order; who does nothing is left out."""
    sizes = NominalSizes({})
    sizes.learn(graph)
    reader = _Reader(sizes, replayed)
    reader.find_free(graph)
    for node in graph.nodes:
        reader.read(node, is_near=node in window)
    return tuple(reader.work)


def has_static_rows(node: fx.Node) -> bool:
    """Whether every size of the node's tensor is a number."""
    tensor = tensor_of(node)
    return tensor is not None and all(type(size) is int for size in tensor.shape)


class _Reader:
    """Turns nodes into work one after another."""

    def __init__(self, sizes: NominalSizes, replayed: Replayed) -> None:
        self.sizes = sizes
        self.replayed = replayed
        self.work: list[Work] = []
        self.backward = BackwardWork(sizes, ())
        self._made_by: dict[fx.Node, tuple[int, ...]] = {}
        self._weights: set[fx.Node] = set()
        self._free: set[fx.Node] = set()

    def find_free(self, graph: fx.Graph) -> None:
        """Find the nodes that do nothing."""
        self._free.update(node for node in graph.nodes if self._is_free(node))
        self.backward = BackwardWork(self.sizes, self._free)

    def read(self, node: fx.Node, *, is_near: bool) -> None:
        inputs = node.all_input_nodes
        needs = tuple(sorted({i for a in inputs for i in self._made_by.get(a, ())}))
        if node.op in ("placeholder", "get_attr"):
            self._weights.add(node)
            self._read_input(node, is_near=is_near)
        elif node in self._free:
            self._made_by[node] = needs
            if inputs and all(a in self._weights for a in inputs):
                self._weights.add(node)
        elif is_near:
            self._made_by[node] = (len(self.work),)
            self.work.append(self._work(node, needs))

    def _read_input(self, node: fx.Node, *, is_near: bool) -> None:
        """An input that several operators read does nothing forward; backward it is a sum."""
        added = self.backward.sum_of(node) if is_near and has_gradient(node) else Moved()
        if added.num_kernels:
            self._made_by[node] = (len(self.work),)
            self.work.append(
                Work(
                    name=node.name,
                    num_kernels=0,
                    backward_nbytes=added.nbytes,
                    backward_kernels=added.num_kernels,
                )
            )

    def _is_free(self, node: fx.Node) -> bool:
        """Whether nothing runs on the device: views, waits, host arithmetic, integers by one."""
        if node.op not in ("call_function", "call_method") or is_wait(node):
            return True
        outputs = _tensors(value_of(node))
        if not outputs:
            return True
        name = called_name(node)
        if name.endswith("_") and not name.endswith("__"):
            return False
        return storages_of(outputs) <= storages_of([value_of(a) for a in node.all_input_nodes])

    def _work(self, node: fx.Node, needs: tuple[int, ...]) -> Work:
        chunked = node in self.replayed.nodes
        flows_back = called_name(node) not in CONSTANTS and any(
            t.dtype.is_floating_point for t in _tensors(value_of(node))
        )
        if is_launch(node):
            kind = self.replayed.exchanges.get(node, "other")
            return Work(
                name=node.name,
                needs=needs,
                link_bytes=leaving_bytes(node, self.sizes),
                exchange=kind,
                is_gather=is_all_gather(node) or is_reduce_scatter(node),
                backward=1.0 if flows_back else 0.0,
                is_chunked=chunked,
            )
        operations, is_attention = self._operations(node)
        weights = [a for a in node.all_input_nodes if a in self._weights and operations]
        moved, num_kernels = self._bytes_moved(node, weights)
        ratio = 1.0 if operations else MEMORY_BACKWARD
        ratio = BACKWARD_OVER_FORWARD if is_attention else ratio
        back = self.backward.of(node) or Moved(moved * ratio, num_kernels)
        back = back + self.backward.sum_of(node)
        return Work(
            name=node.name,
            needs=needs,
            operations=operations,
            nbytes=moved,
            weight_bytes=float(sum(self.sizes.nbytes(value_of(a)) for a in weights)),
            num_kernels=num_kernels,
            backward=ratio if flows_back else 0.0,
            backward_nbytes=back.nbytes,
            backward_kernels=back.num_kernels,
            is_chunked=chunked,
            expert=self.replayed.expert_of.get(node),
            slices_weights=node not in self.replayed.whole_weights,
        )

    def _bytes_moved(self, node: fx.Node, weights: Collection[fx.Node]) -> tuple[float, int]:
        """Return bytes of rows read and written, and kernels: 0 where it is fused away."""
        fused = called_name(node) in ELEMENTWISE
        inputs = [a for a in node.all_input_nodes if a not in weights]
        if fused:
            inputs = [a for a in inputs if called_name(a) not in ELEMENTWISE]
        written = not fused or not all(called_name(user) in ELEMENTWISE for user in node.users)
        nbytes = self._gathered(node, inputs)
        return nbytes + (self.sizes.nbytes(value_of(node)) if written else 0), int(written)

    def _gathered(self, node: fx.Node, inputs: Iterable[fx.Node]) -> float:
        """Return bytes read; a gather reads at most what it writes, a constant nothing."""
        if called_name(node) in CONSTANTS:
            return 0.0
        if called_name(node) in GATHERS:
            inputs = list(inputs)
            written = self.sizes.nbytes(value_of(node))
            source = self.sizes.nbytes(value_of(inputs[0])) if inputs else written
            rest = sum(self.sizes.nbytes(value_of(a)) for a in inputs[1:])
            return float(min(source, written) + rest)
        return float(sum(self.sizes.nbytes(value_of(a)) for a in inputs))

    def _operations(self, node: fx.Node) -> tuple[float, bool]:
        name = called_name(node) or overload_name(node).rpartition("::")[2]
        values = [tensor_of(a) for a in pytree.tree_leaves((node.args, node.kwargs)) if _is(a)]
        shapes = [self.sizes.shape(t) for t in values if t is not None and t.dim() >= 2]
        if "attention" in name and len(shapes) >= GEMM_FACTORS:
            pairs = math.prod(shapes[0]) * shapes[1][-2] * attended_share(node)
            return 4.0 * pairs, True
        if name not in PRODUCTS or len(shapes) < GEMM_FACTORS:
            return 0.0, False
        left, right = shapes[-2:] if name in ("addmm", "baddbmm") else shapes[:2]
        out = tensor_of(node)
        columns = right[-1] if out is None else self.sizes.shape(out)[-1]
        return 2.0 * math.prod(left) * columns, False


def _is(value: object) -> bool:
    return isinstance(value, fx.Node)


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
