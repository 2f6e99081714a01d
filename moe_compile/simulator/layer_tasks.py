"""The tasks of one MoE layer, forward and backward, under one method.

Contract
    A collective and the kernel beside it are one pair: two tasks, or with fused tiles one task
    that ends when the longer has, and what tiles cannot hide.
    Backward: the chain of input gradients; weight gradients hang off it and fill gaps.

Pseudo-code
    forward   norm, (gather) qkv (exchange), attention, (exchange) output (scatter), norm, router,
              per chunk: dispatch, experts, combine; shared experts beside; sum
    backward  the mirror image; rebuilt rows and activations depend on no gradient
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moe_compile.cost.tasks import LINK, TaskList
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
    """Put before every name: `a.` and `b.` for halves."""

    def add_forward(self) -> None:
        """Add the forward of the layer."""
        costs = self.costs
        norm = self._add("norm", costs.norm_us())
        heads = costs.has_heads
        qkv = self._pair("qkv", costs.qkv_us(), costs.before_attention_us(), heads, [norm])
        attention = self._add("attention", costs.attention_us(), [qkv])
        after = costs.after_attention_us()
        output = self._pair("output", costs.output_us(), after, not heads, [attention])
        router = self._add("norm, router", costs.norm_us() + costs.router_us(), [output])
        start = router
        if self._is_cut:
            start = self._add("order", costs.order_us(), [router])
        ends = [self._chunk(number, start) for number in range(self._num_chunks)]
        if costs.model.num_shared:
            ends.append(self._add("shared experts", costs.shared_us(), [router]))
        self._add("sum", costs.residual_us(), ends)

    def add_backward(self) -> None:
        """Add the backward of the layer."""
        costs = self.costs
        start = self._add("sum'", costs.residual_us(2))
        needed = [start]
        leaves: list[int] = []
        if costs.model.num_shared:
            us = costs.shared_us() + costs.shared_gradient_us()
            needed.append(self._add("shared experts'", us, [start]))
        rebuilt = self._rebuild(start) if costs.method.rebuilds else start
        activations, ends = [], []
        for number in range(self._num_chunks):
            activation, end = self._backward_chunk(number, start, rebuilt, leaves)
            activations.append(activation)
            ends.append(end)
        if self._merges_gradients:
            self._add_gradients(1.0, "", activations, leaves)
        elif self._is_cut:
            leaves.append(self._add("join dW", costs.joined_gradient_us(), list(leaves)))
        self._backward_attention([*needed, *ends], leaves)

    def _chunk(self, number: int, router: int) -> int:
        costs, part, mark = self.costs, 1.0 / self._num_chunks, self._mark(number)
        sort = costs.permute_us(part)
        first = sort + costs.first_experts_us(part) + costs.place_us()
        arrived = self._pair(f"experts 1{mark}", first, costs.dispatch_us(part), True, [router])
        activation = self._add(f"activation{mark}", costs.activation_us(part), [arrived])
        second = costs.second_experts_us(part) + sort + costs.wide_sums_us(part)
        return self._pair(f"experts 2{mark}", second, costs.combine_us(part), False, [activation])

    def _backward_chunk(
        self, number: int, start: int, rebuilt: int, leaves: list[int]
    ) -> tuple[int, int]:
        """Add one chunk's backward; return its activation's task and its last."""
        costs, part, mark = self.costs, 1.0 / self._num_chunks, self._mark(number)
        sort = costs.permute_us(part)
        second = sort + costs.second_experts_us(part)
        arrived = self._pair(f"experts 2'{mark}", second, costs.combine_us(part), True, [start])
        needs = [arrived] if rebuilt == start else [arrived, rebuilt]
        us = costs.activation_us(part, passes=5)
        activation = self._add(f"activation'{mark}", us, needs)
        if not self._merges_gradients:
            self._add_gradients(part, mark, [activation], leaves)
        first = costs.first_experts_us(part) + sort + costs.wide_sums_us(part)
        dispatch = costs.dispatch_us(part)
        return activation, self._pair(f"experts 1'{mark}", first, dispatch, False, [activation])

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
        return self._pair("rebuild'", us, costs.dispatch_us(), True, [start])

    def _backward_attention(self, needed: list[int], leaves: list[int]) -> None:
        costs, heads = self.costs, self.costs.has_heads
        us = BACKWARD_NORM * (costs.norm_us() + costs.router_us())
        router = self._add("norm, router'", us, needed)
        after = costs.after_attention_us()
        output = self._pair("output'", costs.output_us(), after, heads, [router])
        attention = self._add("attention'", costs.attention_us(is_backward=True), [output])
        before = costs.before_attention_us()
        qkv = self._pair("qkv'", costs.qkv_us(), before, not heads, [attention])
        there = output if heads else router
        leaves.append(self._add("output dW", costs.output_gradient_us(), [there]))
        gathered = [attention if heads else qkv]
        if heads and not self._hides:  # Megatron gathers the norm's output again for the gradient
            gathered.append(self._add("gather again", before, [router], LINK))
        leaves.append(self._add("qkv dW", costs.qkv_gradient_us(), gathered))
        self._add("norm'", BACKWARD_NORM * costs.norm_us(), [qkv, *leaves])

    def _pair(
        self, name: str, compute: float, link: float, comes_first: bool, needs: list[int]
    ) -> int:
        """Add a kernel and the collective before or after it; return the last task."""
        overlap = self.costs.method.overlap
        if overlap is Overlap.IDEAL or not link:
            return self._add(name, compute, needs)
        if overlap is Overlap.TILES:
            return self._add(name, self._tiles_us(compute, link), needs)
        if comes_first:
            arrived = self._add(f"{name}: in", link, needs, LINK)
            return self._add(name, compute, [arrived])
        done = self._add(name, compute, needs)
        return self._add(f"{name}: out", link, [done], LINK)

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

    @property
    def _num_chunks(self) -> int:
        method = self.costs.method
        return method.num_chunks if method.overlap is Overlap.CHUNKS else 1

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
