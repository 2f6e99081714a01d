"""Process groups whose collectives end when links of stated latency and bandwidth would end them.

Contract
    The bytes really move, over gloo. When an exchange (an all-to-all, an all-gather, a
    reduce-scatter) ends is said by benchmarks/link/link_model.py: one link, or one inside nodes and
    one between them.
    Sending and receiving do not slow each other (duplex); what a rank keeps costs nothing. Of a
    gathered tensor, and of one that is reduced and scattered, (n - 1) / n crosses each way, as in
    a ring: a gather sends on what it received, a reduction sends partial sums. Over nodes it
    divides as moe_compile/hardware/links.py has it.
    A launch returns at once; only waiting moves the clock.

Processors are not slowed by a transfer, nor by the sums of a reduction, as with RDMA and a network
that adds. Nor does it matter how many peers a rank speaks to: with a latency for each, a pairwise
all-to-all and a ring would pay it n - 1 times alike, and the congestion that sets them apart on
real networks has no place in bytes over bandwidth. This is a model: call its times modelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.link.clocks import Clock
from benchmarks.link.link_model import NO_LINK, ExchangeEnds, LinkRate, Span, Topology, Traffic
from benchmarks.link.post_board import Post, PostBoard
from moe_compile.hardware.links import spread_of
from moe_compile.testing.process_groups import PythonGroup, new_groups_of

BACKEND: Final = "emulated"
"""Name the process groups are registered under."""


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """One thing the main thread did at the link: `kind` is "launch", "wait" or "resume".

    Of kind "end" the time is when the model ends the exchange.
    """

    kind: str
    ordinal: int
    time_s: float
    wire_bytes: float = 0.0
    inside_bytes: float = 0.0
    span: Span = Span.ALL


class Wire:
    """What the groups of a rank share: clock, rate, and the order of their exchanges."""

    def __init__(self, board: PostBoard, clock: Clock, topology: Topology) -> None:
        """Compare posts on `board`, wait on `clock`; `rate` may be changed between steps."""
        self.clock, self.board, self.topology = clock, board, topology
        self.rate: LinkRate = NO_LINK
        self.traffic = Traffic()
        self.events: list[LinkEvent] | None = None
        """Filled while not None."""
        self._posted = 0
        self._ends = ExchangeEnds(board, topology, board.rank)

    def post(self, span: Span, wire_bytes: float, inside_bytes: float) -> int:
        """Tell the other ranks of an exchange; return its ordinal."""
        self._posted += 1
        now = self.clock.now()
        self.board.write(self._posted, Post(now, wire_bytes, inside_bytes, span))
        if self.events is not None:
            sizes = wire_bytes, inside_bytes, span
            self.events.append(LinkEvent("launch", self._posted, now, *sizes))
        return self._posted

    def note(self, kind: str, ordinal: int) -> None:
        """Keep an event, where they are kept."""
        if self.events is not None:
            self.events.append(LinkEvent(kind, ordinal, self.clock.now()))

    def end_of(self, ordinal: int) -> float:
        """Return when an exchange ends."""
        end = self._ends.of(ordinal, self.rate, self.traffic)
        if self.events is not None:
            self.events.append(LinkEvent("end", ordinal, end))
        return end


@dataclass(slots=True)
class _Pending:
    """An exchange in flight: gloo's work and the tensors it moves, kept alive."""

    ordinal: int
    inner: Any
    tensors: tuple[torch.Tensor, torch.Tensor]


class EmulatedLink(PythonGroup):
    """One group of ranks; see the module docstring."""

    backend_name = BACKEND

    def __init__(self, inner: Any, wire: Wire, span: Span, ranks: Sequence[int]) -> None:
        """Move bytes by `inner` among `ranks`, a group of kind `span`."""
        super().__init__(inner.rank(), inner.size())
        self.wire = wire
        self._inner, self._span = inner, span
        nodes = [wire.topology.node_of(rank) for rank in ranks]
        own = nodes[self.rank()]
        self._away = [i for i, node in enumerate(nodes) if node != own]
        self._beside = [i for i, n in enumerate(nodes) if n == own and i != self.rank()]

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> dist.Work:
        """Launch one exchange."""
        pairs = ((output, output_splits), (input, input_splits))
        between, inside = zip(*(self._exchanged(*pair) for pair in pairs), strict=True)
        return self._launch(
            (max(between), max(inside)),
            (output, input),
            lambda: self._inner.alltoall_base(output, input, output_splits, input_splits, options),
        )

    def allgather_into_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        """Launch one all-gather, the name under which functional collectives ask for it."""
        del options  # functional collectives leave them at their defaults
        (output,), (input,) = outputs, inputs
        return self._launch(
            self._gathered(output),
            (output, input),
            lambda: self._inner._allgather_base(output, input),
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        """Launch one reduce-scatter, the name under which functional collectives ask for it."""
        (output,), (input,) = outputs, inputs
        return self._launch(
            self._gathered(input),
            (output, input),
            lambda: self._inner._reduce_scatter_base(output, input, options),
        )

    def _exchanged(self, tensor: torch.Tensor, splits: list[int]) -> tuple[int, int]:
        """Return the bytes that cross to other nodes and inside this one, sent or received."""
        rows = splits or [1] * self.size()
        total = sum(rows) or 1
        levels = (self._away, self._beside)
        between, inside = (tensor.nbytes * sum(rows[i] for i in at) // total for at in levels)
        return between, inside

    def _gathered(self, tensor: torch.Tensor) -> tuple[float, float]:
        """Return the same of a tensor that is gathered, or reduced and scattered."""
        crossing = tensor.nbytes * (self.size() - 1) // self.size()
        num_local = 1 + len(self._beside)
        spread = spread_of(self.size(), num_local, is_gather=True)
        return crossing * spread.between, crossing * spread.within

    def _launch(
        self,
        crossing: tuple[float, float],
        tensors: tuple[torch.Tensor, torch.Tensor],
        start: Callable[[], Any],
    ) -> dist.Work:
        """Post an exchange of which so many bytes cross the links, and start moving it."""
        began = time.thread_time()
        ordinal = self.wire.post(self._span, *crossing)
        work = _LinkWork(self.wire, _Pending(ordinal, start(), tensors))
        self.wire.traffic.host_s += time.thread_time() - began
        return work

    def barrier(self, options: Any = None) -> dist.Work:
        """Wait for all ranks, outside the model."""
        return self._inner.barrier() if options is None else self._inner.barrier(options)

    def allgather(self, *args: Any) -> dist.Work:
        """Gather what ranks tell one another before anything runs, outside the model."""
        return self._inner.allgather(*args)


class _LinkWork(dist.Work):
    """What a launch returns."""

    def __init__(self, wire: Wire, pending: _Pending) -> None:
        super().__init__()
        self._wire = wire
        self._pending: _Pending | None = pending

    def wait(self, timeout: Any = None) -> bool:
        del timeout  # the inner group has its own
        if self._pending is not None:
            _finish(self._wire, self._pending)
            self._pending = None
        return True


def _finish(wire: Wire, pending: _Pending) -> None:
    """Return when the bytes are here and the clock says that the exchange has ended."""
    began = time.thread_time()
    wire.note("wait", pending.ordinal)
    pending.inner.wait()
    end = wire.end_of(pending.ordinal)
    wire.traffic.host_s += time.thread_time() - began
    wire.traffic.waited_s += max(0.0, end - wire.clock.now())
    wire.clock.wait_until(end)
    wire.note("resume", pending.ordinal)


def make_emulated_groups(
    board: PostBoard, clock: Clock, topology: Topology
) -> tuple[EmulatedLink, ...]:
    """Return this rank's group of every kind: all ranks, then where nodes have several ranks those
    of its node, and those of its place. The default group must exist."""
    wire = Wire(board, clock, topology)
    spans = tuple(Span) if topology.num_local > 1 else (Span.ALL,)
    wanted = [(span, ranks) for span in spans for ranks in topology.groups(span)]
    own = iter([one for one in wanted if board.rank in one[1]])

    def create(store: Any, rank: int, size: int, timeout: Any) -> EmulatedLink:
        return EmulatedLink(dist.ProcessGroupGloo(store, rank, size, timeout), wire, *next(own))

    return tuple(new_groups_of(EmulatedLink, create, ["cpu"], [ranks for _, ranks in wanted]))


def make_emulated_group(board: PostBoard, clock: Clock) -> EmulatedLink:
    """Return a group of all ranks over one link; the default group must exist."""
    (link,) = make_emulated_groups(board, clock, Topology(num_ranks=board.num_ranks))
    return link
