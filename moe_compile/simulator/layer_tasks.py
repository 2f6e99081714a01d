"""The tasks of one MoE layer, forward and backward, under one method.

Contract
    A collective and the kernel beside it are one pair: two tasks, or with fused tiles one task
    that ends when the longer has, and what tiles cannot hide.
    Backward: the chain of input gradients; weight gradients hang off it and fill gaps.
    Where rows travel in two hops, attention's collectives are on the stream of the node's link.

Pseudo-code
    forward   norm, (gather) qkv (exchange), attention, (exchange) output (scatter), norm, router,
              per chunk: dispatch, experts, combine; shared experts beside; sum
              in two hops `HopTasks` has what stands for dispatch or combine
    backward  the mirror image; rebuilt rows and activations depend on no gradient
    blocks of one graph follow one another, part by part

The tasks of an exchange of rows, in one collective or in two hops.
Hops as the compiler makes them: hop 1 between nodes and hop 2 inside the node are collectives
of their own, each on the stream of its link; row operators stand before, between and behind.
Bytes are those of `cost/hop_shape.py`, which the planner's prices have too.
In chunks of experts hop 1 is whole, hop 2 in chunks; in slices of tokens both are cut, and what
is behind them waits for all slices.

Pseudo-code
    copies   begin: hop 1 (slices: and hop 2 of each, then rows in their order)
             chunk: hop 2, rows in their order
    sums     chunk: rows in the order of ranks, hop 2 back
             end:   sums on the node, hop 1, sums at home (slices: all of it, slice by slice)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from moe_compile.cost.hop_shape import INDEX_KERNELS, PLACE_KERNELS, HopShape
from moe_compile.cost.tasks import LINK, NODE_LINK, TaskList
from moe_compile.simulator.layer_costs import LayerCosts
from moe_compile.simulator.method import Overlap

TILES_HIDE: Final = 0.865
"""Share of a collective that fused tiles hide: COMET (arXiv 2502.19811), 8 H800."""
TILES_CONTENTION: Final = 0.5
"""Of the link's contention and overlap slowdown, with fused tiles: copy engines move half.
Assumed."""
BACKWARD_NORM: Final = 1.5
"""Bytes of the backward of norms and router over those of the forward: three passes for two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerTasks:
    """Adds one layer's tasks to a list."""

    costs: LayerCosts
    tasks: TaskList
    label: str = ""
    """Put before every name: the number of a part of the batch."""

    def add_forward(self, behind: list[int] | None = None) -> int:
        """Add the forward of the layer, of what the tasks `behind` made; return its last task."""
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
        if dispatch := self._hops("dispatch", costs.method.dispatch_bytes):
            start = dispatch.begin_copies(dispatch.find_rows([router]))
        combine = self._hops("combine", costs.method.combine_bytes, is_of_sums=True)
        ends = [self._chunk(number, start, dispatch, combine) for number in range(self._num_chunks)]
        if combine:
            ends = [combine.end_sums(ends)]
        if costs.model.num_shared:
            ends.append(self._add("shared experts", costs.shared_us(), [router]))
        return self._add("sum", costs.residual_us(), ends)

    def add_backward(self, behind: list[int] | None = None, *, is_last: bool = True) -> int:
        """Add the backward of the layer, of the gradient that `behind` made; return its last task.

        Only behind the last layer of a graph does anything wait for weight gradients.
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
        begun = combine.begin_copies([start]) if combine else start
        for number in range(self._num_chunks):
            needs = [begun] if rebuilt == start else [begun, rebuilt]
            activation, end = self._backward_chunk(number, needs, leaves, combine, dispatch)
            activations.append(activation)
            ends.append(end)
        if dispatch:
            ends = [dispatch.end_sums(ends), dispatch.add_scores(activations)]
        if self._merges_gradients:
            self._add_gradients(1.0, "", activations, leaves)
        elif self._is_cut:
            leaves.append(self._add("join dW", costs.joined_gradient_us(), list(leaves)))
        qkv = self._backward_attention([*needed, *ends], leaves)
        us = BACKWARD_NORM * costs.norm_us()
        return self._add("norm'", us, [qkv, *leaves] if is_last else [qkv])

    def _chunk(
        self, number: int, start: int, dispatch: HopTasks | None, combine: HopTasks | None
    ) -> int:
        costs, part, mark = self.costs, 1.0 / self._num_chunks, self._mark(number)
        sort = costs.permute_us(part)
        first = sort + costs.first_experts_us(part) + costs.place_us()
        if dispatch:
            arrived = self._add(f"experts 1{mark}", first, [dispatch.copy_chunk(number, start)])
        else:
            link = costs.dispatch_us(part)
            arrived = self._pair(f"experts 1{mark}", first, link, True, [start])
        activation = self._add(f"activation{mark}", costs.activation_us(part), [arrived])
        second = costs.second_experts_us(part) + sort + costs.wide_sums_us(part)
        if combine:
            return combine.sum_chunk(number, [self._add(f"experts 2{mark}", second, [activation])])
        return self._pair(f"experts 2{mark}", second, costs.combine_us(part), False, [activation])

    def _backward_chunk(
        self,
        number: int,
        needs: list[int],
        leaves: list[int],
        combine: HopTasks | None,
        dispatch: HopTasks | None,
    ) -> tuple[int, int]:
        """Add one chunk's backward; return its activation's task and its last.

        `needs` are what its rows' gradients need, and what was rebuilt.
        """
        costs, part, mark = self.costs, 1.0 / self._num_chunks, self._mark(number)
        sort = costs.permute_us(part)
        second = sort + costs.second_experts_us(part)
        if combine:
            arrived = self._add(f"experts 2'{mark}", second, [combine.copy_chunk(number, needs[0])])
        else:
            link = costs.combine_us(part)
            arrived = self._pair(f"experts 2'{mark}", second, link, True, needs[:1])
        us = costs.activation_us(part, passes=5)
        activation = self._add(f"activation'{mark}", us, [arrived, *needs[1:]])
        if not self._merges_gradients:
            self._add_gradients(part, mark, [activation], leaves)
        first = costs.first_experts_us(part) + sort + costs.wide_sums_us(part)
        if dispatch:
            done = self._add(f"experts 1'{mark}", first, [activation])
            return activation, dispatch.sum_chunk(number, [done])
        link = costs.dispatch_us(part)
        return activation, self._pair(f"experts 1'{mark}", first, link, False, [activation])

    def _add_gradients(self, part: float, mark: str, needs: list[int], leaves: list[int]) -> None:
        costs = self.costs
        second = costs.second_experts_gradient_us(part)
        leaves.append(self._add(f"experts 2 dW{mark}", second, needs))
        first = costs.first_experts_gradient_us(part)
        leaves.append(self._add(f"experts 1 dW{mark}", first, needs))

    def _rebuild(self, start: int) -> int:
        """Make dispatched rows and activations again; needs no gradient (MegaScale-MoE 4.1)."""
        costs = self.costs
        us = costs.permute_us() + costs.activation_us() + costs.norm_us()
        if dispatch := self._hops("dispatch again", costs.method.dispatch_bytes):
            dispatch = replace(dispatch, num_chunks=1)
            arrived = dispatch.copy_chunk(0, dispatch.begin_copies([start]))
            return self._add("rebuild'", us, [arrived])
        return self._pair("rebuild'", us, costs.dispatch_us(), True, [start])

    def _backward_attention(self, needed: list[int], leaves: list[int]) -> int:
        """Add what comes before the router, but for the first norm; return its last task."""
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
    ) -> int:
        """Add a kernel and the collective before or after it; return the last task."""
        overlap = self.costs.method.overlap
        if overlap is Overlap.IDEAL or not link:
            return self._add(name, compute, needs)
        if overlap is Overlap.TILES:
            return self._add(name, self._tiles_us(compute, link), needs)
        if comes_first:
            arrived = self._add(f"{name}: in", link, needs, stream)
            return self._add(name, compute, [arrived])
        done = self._add(name, compute, needs)
        return self._add(f"{name}: out", link, [done], stream)

    def _tiles_us(self, compute: float, link: float) -> float:
        """Return the time of both in one kernel: what tiles do not hide, and no less than the link.

        The link's own time is longer by what it loses while the kernel computes.
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
        return HopTasks(
            costs=costs,
            hops=costs.hops,
            add=self._add,
            name=name,
            element_bytes=element_bytes,
            num_chunks=self._num_chunks,
            num_slices=method.num_chunks if method.chunks_tokens else 1,
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


AddTask = Callable[[str, float, list[int], str], int]
"""Adds a task: its name, its time, what it needs, its stream, "" for compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HopTasks:
    """One exchange of rows in two hops."""

    costs: LayerCosts
    hops: HopShape
    add: AddTask
    name: str
    element_bytes: float
    num_chunks: int = 1
    """Of hop 2, by experts."""
    num_slices: int = 1
    """Of both hops, by tokens."""

    def find_rows(self, needs: list[int]) -> list[int]:
        """Add finding the rows of both hops, and what travels beside them."""
        number = INDEX_KERNELS + (PLACE_KERNELS if self.costs.sums_in_hops else 0.0)
        indices = self._add("indices", self.costs.kernels.memory_us(0.0, number), needs)
        masks = self.costs.kernels.hop_us(self.hops.mask_bytes(self._num_rows), within=False)
        sent = self._add("masks", masks, [indices], LINK)
        return [sent, self.add_scores([sent])]

    def begin_copies(self, needs: list[int]) -> int:
        """Add what comes before chunks of hop 2; return the last task."""
        before, between, after = self.hops.copied_bytes(self._rows)
        arrived = []
        for number in range(self.num_slices):
            mark, part = self._mark(number, self.num_slices), 1.0 / self.num_slices
            rows = self._move(f"rows 1{mark}", before * part, needs)
            there = self._hop_1(mark, part, [rows])
            if self.num_slices > 1:
                rows = self._move(f"rows 2{mark}", between * part, [there])
                there = self._hop_2(mark, part, [rows])
            arrived.append(there)
        if self.num_slices > 1:
            return self._move("rows 3", after, arrived)
        return arrived[0]

    def copy_chunk(self, number: int, begun: int) -> int:
        """Add hop 2 of a chunk, the rows in the order of its experts behind it."""
        if self.num_slices > 1:
            return begun
        _, between, after = self.hops.copied_bytes(self._rows)
        mark, part = self._mark(number, self.num_chunks), 1.0 / self.num_chunks
        rows = self._move(f"rows 2{mark}", between * part, [begun])
        return self._move(f"rows 3{mark}", after * part, [self._hop_2(mark, part, [rows])])

    def sum_chunk(self, number: int, needs: list[int]) -> int:
        """Add hop 2 back of a chunk."""
        if self.num_slices > 1:
            return needs[0]
        before, _, _ = self.hops.summed_bytes(self._rows)
        mark, part = self._mark(number, self.num_chunks), 1.0 / self.num_chunks
        rows = self._move(f"rows 3{mark}", before * part, needs)
        return self._hop_2(mark, part, [rows])

    def end_sums(self, needs: Sequence[int]) -> int:
        """Add what comes behind chunks of hop 2 back; return the last task."""
        before, between, after = self.hops.summed_bytes(self._rows)
        home = []
        for number in range(self.num_slices):
            mark, part, there = self._mark(number, self.num_slices), 1.0 / self.num_slices, [*needs]
            if self.num_slices > 1:
                rows = self._move(f"rows 3{mark}", before * part, there)
                there = [self._hop_2(mark, part, [rows])]
            sums = self._move(f"sums on nodes{mark}", between * part, there)
            home.append(self._hop_1(mark, part, [sums]))
        return self._move("sums at home", after, home)

    def add_scores(self, needs: list[int]) -> int:
        """Add what scores, or their gradients, take: one number a row, flat."""
        nbytes = self.hops.score_bytes(self._num_rows)
        return self._add("scores", self.costs.kernels.hop_us(nbytes, within=False), needs, LINK)

    @property
    def _num_rows(self) -> float:
        return self.costs.local_tokens * self.costs.model.top_k

    @property
    def _rows(self) -> float:
        """Return the bytes of a rank's rows, one for each expert of a token."""
        return self.costs.routed_bytes(self.element_bytes)

    def _hop_1(self, mark: str, part: float, needs: list[int]) -> int:
        sent = self.hops.across_bytes(self._rows) * part
        return self._add(f"hop 1{mark}", self.costs.kernels.hop_us(sent, within=False), needs, LINK)

    def _hop_2(self, mark: str, part: float, needs: list[int]) -> int:
        sent = self.hops.inside_bytes(self._rows) * part
        us = self.costs.kernels.hop_us(sent, within=True)
        return self._add(f"hop 2{mark}", us, needs, NODE_LINK)

    def _move(self, name: str, nbytes: float, needs: list[int]) -> int:
        return self._add(name, self.costs.kernels.memory_us(nbytes), needs)

    def _add(self, name: str, us: float, needs: list[int], stream: str = "") -> int:
        return self.add(f"{self.name}: {name}", us, needs, stream)

    def _mark(self, number: int, count: int) -> str:
        return f" {number}" if count > 1 else ""
