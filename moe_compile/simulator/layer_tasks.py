"""The tasks of one MoE layer, forward and backward, under one method.

Contract
    A collective and the kernel beside it are one pair: two tasks. With fused tiles they are one
    task that ends when the longer has, plus the part that tiles cannot hide.
    Backward: the chain of input gradients; weight gradients hang off it and fill gaps.
    Where rows travel in two hops, attention's collectives are on the stream of the node's link.

Pseudo-code
    forward   norm, (gather) qkv (exchange), attention, (exchange) output (scatter), norm, router,
              per chunk: dispatch, experts, combine; shared experts beside; sum
              in two hops `cost/hop_tasks.py` has the tasks of dispatch or combine
    backward  the mirror image; rebuilt rows and activations depend on no gradient
    blocks of one graph follow one another, part by part

`time_layer` returns the time of one layer, forward and backward, and the spans of its tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from moe_compile.cost.hop_tasks import HopTasks
from moe_compile.cost.tasks import (
    LINK,
    NODE_LINK,
    TaskList,
    TaskTimeline,
    run_in_order,
    run_tasks,
)
from moe_compile.simulator.layer_costs import LayerCosts
from moe_compile.simulator.method import Overlap

TILES_HIDE: Final = 0.865
"""Share of a collective that fused tiles hide: COMET (arXiv 2502.19811), 8 H800."""
TILES_CONTENTION: Final = 0.5
"""Share of the link's contention and overlap slowdown with fused tiles: copy engines move half.
Assumed."""
BACKWARD_NORM: Final = 1.5
"""Bytes of the backward of norms and router over those of the forward: three passes for two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTasks:
    """Adds one layer's tasks to a list."""

    costs: LayerCosts
    tasks: TaskList
    label: str = ""
    """Prefix of every name: the number of a part of the batch."""
    weights: tuple[int, ...] = ()
    """The task that copies the experts' weights, transposed, once for all parts of the batch."""

    def add_forward(self, behind: list[int] | None = None) -> int:
        """Add the forward of the layer, on the results of tasks `behind`; return its last task."""
        costs = self.costs
        norm = self._add("norm", costs.norm_us(), behind)
        heads = costs.has_heads
        near = self._near
        qkv = self._pair("qkv", costs.qkv_us(), costs.before_attention_us(), heads, [norm], near)
        attention = self._add("attention", costs.attention_us(), [qkv])
        after = costs.after_attention_us()
        output = self._pair("output", costs.output_us(), after, not heads, [attention], near)
        router = self._add("norm, router", costs.norm_us() + costs.router_us(), [output])
        start = router
        if self._is_cut and not costs.hops:
            start = self._add("order", costs.order_us(), [router])
        starts = [start] * self._num_chunks
        if dispatch := self._hops("dispatch", costs.method.dispatch_bytes):
            starts = dispatch.copies(dispatch.told([router], finds_places=costs.sums_in_hops))
        combine = self._hops("combine", costs.method.combine_bytes, is_of_sums=True)
        goes = dispatch is None, combine is None
        ends = [self._chunk(number, start, *goes) for number, start in enumerate(starts)]
        if combine:
            ends = [combine.sums([[end] for end in ends])]
        if costs.model.num_shared:
            ends.append(self._add("shared experts", costs.shared_us(), [router]))
        return self._add("sum", costs.residual_us(), ends)

    def add_backward(self, behind: list[int] | None = None, *, is_last: bool = True) -> int:
        """Add the backward of the layer, from the gradient made by `behind`; return its last task.

        Weight gradients are waited for behind the last layer of a graph alone.
        """
        costs = self.costs
        start = self._add("sum'", costs.residual_us(2), behind)
        needed = [start]
        leaves: list[int] = []
        if costs.model.num_shared:
            us = costs.shared_us() + costs.shared_gradient_us()
            needed.append(self._add("shared experts'", us, [start]))
        rebuilt = self._rebuild(start) if costs.method.rebuilds else start
        activations, ends = [], []
        combine = self._hops("combine'", costs.method.combine_bytes)
        dispatch = self._hops("dispatch'", costs.method.dispatch_bytes, is_of_sums=True)
        starts = combine.copies([start]) if combine else [start] * self._num_chunks
        goes = combine is None, dispatch is None
        for number, begun in enumerate(starts):
            needs = [begun] if rebuilt == start else [begun, rebuilt]
            activation, end = self._backward_chunk(number, needs, leaves, *goes)
            activations.append(activation)
            ends.append(end)
        if dispatch:
            ends = [dispatch.sums([[end] for end in ends]), dispatch.scores(activations)]
        if self._merges_gradients:
            self._add_gradients(1.0, "", activations, leaves)
        elif self._is_cut:
            leaves.append(self._add("join dW", costs.joined_gradient_us(), list(leaves)))
        qkv = self._backward_attention([*needed, *ends], leaves)
        us = BACKWARD_NORM * costs.norm_us()
        return self._add("norm'", us, [qkv, *leaves] if is_last else [qkv])

    def _chunk(self, number: int, start: int, dispatches: bool, combines: bool) -> int:
        """Add one chunk's forward; exchanges that are not its own go in two hops."""
        costs, part, mark = self.costs, 1.0 / self._num_chunks, self._mark(number)
        sort = costs.permute_us(part)
        first = costs.arrived_us(part) + costs.first_experts_us(part) + costs.place_us()
        link = costs.dispatch_us(part) if dispatches else 0.0
        arrived = self._pair(f"experts 1{mark}", first, link, True, [start], also=self.weights)
        activation = self._add(f"activation{mark}", costs.activation_us(part), [arrived])
        second = costs.quantised_hidden_us(part) + costs.second_experts_us(part)
        second += sort + costs.wide_sums_us(part)
        link = costs.combine_us(part) if combines else 0.0
        return self._pair(f"experts 2{mark}", second, link, False, [activation])

    def _backward_chunk(
        self,
        number: int,
        needs: list[int],
        leaves: list[int],
        combines: bool,
        dispatches: bool,
    ) -> tuple[int, int]:
        """Add one chunk's backward; return its activation's task and its last.

        `needs` are the tasks that its rows' gradients need, rebuilt ones included. Exchanges that
        are not its own go in two hops.
        """
        costs, part, mark = self.costs, 1.0 / self._num_chunks, self._mark(number)
        sort = costs.permute_us(part)
        second = costs.arrived_gradient_us(part) + costs.second_experts_us(part)
        link = costs.combine_us(part) if combines else 0.0
        arrived = self._pair(f"experts 2'{mark}", second, link, True, needs[:1], also=self.weights)
        us = costs.activation_us(part, passes=5)
        activation = self._add(f"activation'{mark}", us, [arrived, *needs[1:]])
        if not self._merges_gradients:
            self._add_gradients(part, mark, [activation], leaves)
        first = costs.quantised_gradient_us(part) + costs.first_experts_us(part)
        first += sort + costs.wide_sums_us(part)
        link = costs.dispatch_us(part) if dispatches else 0.0
        return activation, self._pair(f"experts 1'{mark}", first, link, False, [activation])

    def _add_gradients(self, part: float, mark: str, needs: list[int], leaves: list[int]) -> None:
        costs = self.costs
        second = costs.second_experts_gradient_us(part)
        leaves.append(self._add(f"experts 2 dW{mark}", second, needs))
        first = costs.unpacked_us(part) + costs.first_experts_gradient_us(part)
        leaves.append(self._add(f"experts 1 dW{mark}", first, needs))

    def _rebuild(self, start: int) -> int:
        """Make dispatched rows and activations again; needs no gradient (MegaScale-MoE 4.1)."""
        costs = self.costs
        us = costs.permute_us() + costs.activation_us() + costs.norm_us()
        if dispatch := self._hops("dispatch again", costs.method.dispatch_bytes):
            return self._add("rebuild'", us, replace(dispatch, num_chunks=1).copies([start]))
        return self._pair("rebuild'", us, costs.dispatch_us(), True, [start])

    def _backward_attention(self, needed: list[int], leaves: list[int]) -> int:
        """Add the backward of all before the router, but the first norm; return its last task."""
        costs, heads = self.costs, self.costs.has_heads
        us = BACKWARD_NORM * (costs.norm_us() + costs.router_us())
        router = self._add("norm, router'", us, needed)
        after = costs.after_attention_us()
        output = self._pair("output'", costs.output_us(), after, heads, [router], self._near)
        attention = self._add("attention'", costs.attention_us(is_backward=True), [output])
        before = costs.before_attention_us()
        qkv = self._pair("qkv'", costs.qkv_us(), before, not heads, [attention], self._near)
        there = output if heads else router
        leaves.append(self._add("output dW", costs.output_gradient_us(), [there]))
        gathered = [attention if heads else qkv]
        if heads and not self._hides:  # Megatron gathers the norm's output again for the gradient
            gathered.append(self._add("gather again", before, [router], self._near))
        leaves.append(self._add("qkv dW", costs.qkv_gradient_us(), gathered))
        return qkv

    def _pair(
        self,
        name: str,
        compute: float,
        link: float,
        comes_first: bool,
        needs: list[int],
        stream: str = LINK,
        also: Sequence[int] = (),
    ) -> int:
        """Add a kernel and the collective before or after it; return the last task.

        The kernel needs tasks `also` that the collective does not.
        """
        overlap = self.costs.method.overlap
        if overlap is Overlap.IDEAL or not link:
            return self._add(name, compute, [*needs, *also])
        if overlap is Overlap.TILES:
            return self._add(name, self._tiles_us(compute, link), [*needs, *also])
        if comes_first:
            arrived = self._add(f"{name}: in", link, needs, stream)
            return self._add(name, compute, [arrived, *also])
        done = self._add(name, compute, [*needs, *also])
        return self._add(f"{name}: out", link, [done], stream)

    def _tiles_us(self, compute: float, link: float) -> float:
        """Return the time of both in one kernel: the part tiles do not hide, at least the link's.

        The link's own time grows by its slowdown while the kernel computes.
        """
        beside = self.costs.link
        slowed = compute * (1.0 + TILES_CONTENTION * beside.contention)
        slower = TILES_CONTENTION * beside.overlap_slowdown
        lost = min(slowed * slower / (1.0 + slower), slower * link)
        return max(slowed + (1.0 - TILES_HIDE) * link, link + lost)

    def _add(self, name: str, us: float, needs: list[int] | None = None, stream: str = "") -> int:
        named = {"stream": stream} if stream else {}
        return self.tasks.add(self.label + name, us, needs or (), **named)

    def _mark(self, number: int) -> str:
        return f" {number}" if self._num_chunks > 1 else ""

    def _hops(
        self, name: str, element_bytes: float, *, is_of_sums: bool = False
    ) -> HopTasks | None:
        """Return the tasks of an exchange in two hops; None for one that goes in one."""
        costs, method = self.costs, self.costs.method
        if costs.hops is None or (is_of_sums and not costs.sums_in_hops):
            return None
        rows = costs.routed_bytes(element_bytes)
        shape = costs.hops
        return HopTasks(
            made=self.tasks,
            times=costs.kernels,
            hops=shape,
            label=f"{self.label}{name}: ",
            rows=rows,
            num_rows=costs.local_tokens * costs.model.top_k,
            moved=shape.summed_bytes(rows) if is_of_sums else shape.copied_bytes(rows),
            num_chunks=self._num_chunks,
            num_slices=method.num_chunks if method.chunks_tokens else 1,
            cuts_moves=True,
        )

    @property
    def _near(self) -> str:
        """Return the stream of collectives inside the node."""
        return NODE_LINK if self.costs.hops else LINK

    @property
    def _num_chunks(self) -> int:
        """Return the chunks of experts, or of rows; experts in hops wait for all slices."""
        method = self.costs.method
        if method.overlap is not Overlap.CHUNKS or (self.costs.hops and method.chunks_tokens):
            return 1
        return method.num_chunks

    @property
    def _is_cut(self) -> bool:
        """Whether operators of its own find the rows of chunks."""
        return self._num_chunks > 1 and self.costs.method.replays_chunks

    @property
    def _merges_gradients(self) -> bool:
        """Whether weight gradients wait for all chunks: by tokens each would sum a weight anew."""
        return self._num_chunks > 1 and self.costs.method.chunks_tokens

    @property
    def _hides(self) -> bool:
        return self.costs.method.overlap in (Overlap.TILES, Overlap.IDEAL)


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTime:
    """Timelines of the layers of one graph for one micro-batch; times are those of one layer."""

    phases: tuple[TaskTimeline, ...]
    """Forward and backward timelines; or one of both at once, of two micro-batches."""
    num_layers: int = 1

    @property
    def total_us(self) -> float:
        """Return the time of forward plus backward."""
        return sum(phase.total_us for phase in self.phases) / self.num_layers

    @property
    def exposed_us(self) -> float:
        """Return the time in which nothing was computed."""
        return sum(phase.exposed_us for phase in self.phases) / self.num_layers

    @property
    def link_us(self) -> float:
        """Return how long collectives that are tasks of their own ran, slower beside compute."""
        busy = (phase.busy_us(link) for phase in self.phases for link in (LINK, NODE_LINK))
        return sum(busy) / self.num_layers


def time_layer(costs: LayerCosts) -> LayerTime:
    """Return the timelines of the layer under the method of `costs`.

    Raises InvalidConfig when the method cannot divide the model.
    """
    return LayerTime(
        phases=tuple(_run(tasks, costs) for tasks in tasks_of(costs)),
        num_layers=costs.method.blocks_per_graph,
    )


def tasks_of(costs: LayerCosts) -> list[TaskList]:
    """Return the tasks of forward and backward, of all layers of a graph; or both in one list.

    Raises InvalidConfig when the method cannot divide the model.
    """
    costs.method.check(costs.model)
    forward, backward = TaskList(), TaskList()
    if costs.method.overlap is Overlap.TWO_BATCHES:
        backward = forward
    parts, blocks = _parts(costs), costs.method.blocks_per_graph
    ends: dict[str, list[int]] = {}
    for _ in range(blocks):
        for part, label in parts:
            layer = LayerTasks(costs=part, tasks=forward, label=label)
            ends[label] = [layer.add_forward(ends.get(label))]
    ends = {}
    for left in reversed(range(blocks)):
        weights = _add_weights(costs, backward)
        for part, label in parts:
            layer = LayerTasks(costs=part, tasks=backward, label=label, weights=weights)
            ends[label] = [layer.add_backward(ends.get(label), is_last=not left)]
    return [forward] if forward is backward else [forward, backward]


def _add_weights(costs: LayerCosts, tasks: TaskList) -> tuple[int, ...]:
    """Add the task that copies the experts' weights of one layer, if there is one."""
    us = costs.transposed_weights_us()
    return (tasks.add("transpose weights", us),) if us else ()


def bound_us(costs: LayerCosts) -> float:
    """Return the time of the layer were collectives free."""
    ideal = replace(costs.method, overlap=Overlap.IDEAL, batch_parts=1, blocks_per_graph=1)
    return time_layer(replace(costs, method=ideal)).total_us


def _parts(costs: LayerCosts) -> list[tuple[LayerCosts, str]]:
    num = costs.method.batch_parts
    if num == 1:
        return [(costs, "")]
    return [(costs.of_part(1.0 / num), f"{part}. ") for part in range(num)]


def _run(tasks: TaskList, costs: LayerCosts) -> TaskTimeline:
    if costs.method.overlap is Overlap.SEQUENTIAL:
        return run_in_order(tasks.tasks)
    return run_tasks(
        tasks.tasks,
        costs.link.contention,
        costs.link.overlap_slowdown,
        node_slowdown=costs.profile.nvlink.overlap_slowdown,
    )
