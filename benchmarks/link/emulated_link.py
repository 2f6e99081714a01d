"""A process group whose collectives end when a link of stated latency and bandwidth would end them.

Contract
    The bytes really move, over gloo. An exchange (an all-to-all, an all-gather, a reduce-scatter)
    starts when every rank has posted it and the one before it has ended; it takes
    latency + (most bytes any rank sends or receives) / bandwidth.
    Sending and receiving do not slow each other (duplex); what a rank keeps costs nothing. Of a
    gathered tensor, and of one that is reduced and scattered, (n - 1) / n crosses each way, as in
    a ring: a gather sends on what it received, a reduction sends partial sums.
    Every rank computes the same end of every exchange.
    A launch returns at once; only waiting moves the clock.

Processors are not slowed by a transfer, nor by the sums of a reduction, as with RDMA and a network
that adds. Nor does it matter how many peers a rank speaks to: with a latency for each, a pairwise
all-to-all and a ring would pay it n - 1 times alike, and the congestion that sets them apart on
real networks has no place in bytes over bandwidth. This is a model: call its times modelled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.link.clocks import Clock
from benchmarks.link.post_board import Post, PostBoard
from moe_compile.testing.python_group import PythonGroup, new_group_of

BACKEND: Final = "emulated"
"""Name the process group is registered under."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRate:
    """How fast the link is."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def duration_s(self, wire_bytes: float) -> float:
        """Return how long one exchange occupies the link."""
        return self.latency_s + wire_bytes / self.bytes_per_s


NO_LINK: Final = LinkRate()
"""The control: exchanges take no time, so that nothing is left to hide."""


@dataclass(slots=True)
class Traffic:
    """What crossed the link since it was reset, and what the model made of it."""

    num_exchanges: int = 0
    wire_bytes: float = 0.0
    waited_s: float = 0.0
    """Time waits added to the clock: exposed communication, and waiting for slower ranks."""
    host_s: float = 0.0
    """CPU time this process group itself took on the main thread."""

    def alone_s(self, rate: LinkRate) -> float:
        """Return how long these exchanges take one after the other with no compute at all."""
        return self.num_exchanges * rate.latency_s + self.wire_bytes / rate.bytes_per_s


@dataclass(frozen=True, slots=True)
class LinkEvent:
    """One thing the main thread did at the link; `kind` is "launch", "wait" or "resume"."""

    kind: str
    ordinal: int
    time_s: float
    wire_bytes: float = 0.0


@dataclass(slots=True)
class _Pending:
    """An exchange in flight: gloo's work and the tensors it moves, kept alive."""

    ordinal: int
    inner: Any
    tensors: tuple[torch.Tensor, torch.Tensor]


class EmulatedLink(PythonGroup):
    """See the module docstring; `rate` may be changed between steps."""

    backend_name = BACKEND

    def __init__(self, inner: Any, board: PostBoard, clock: Clock) -> None:
        """Move bytes by `inner`, compare posts on `board`, wait on `clock`."""
        super().__init__(inner.rank(), inner.size())
        self.clock = clock
        self._inner, self._board = inner, board
        self.rate = NO_LINK
        self.traffic = Traffic()
        self.events: list[LinkEvent] | None = None
        """Filled while not None."""
        self._posted = 0
        self._ends = ExchangeEnds(board)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_splits: list[int],
        input_splits: list[int],
        options: Any,
    ) -> dist.Work:
        """Launch one exchange."""
        crossing = max(
            _wire_bytes(output, output_splits, self.rank(), self.size()),
            _wire_bytes(input, input_splits, self.rank(), self.size()),
        )
        return self._launch(
            crossing,
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
            _wire_bytes(output, [], self.rank(), self.size()),
            (output, input),
            lambda: self._inner._allgather_base(output, input),
        )

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], options: Any
    ) -> dist.Work:
        """Launch one reduce-scatter, the name under which functional collectives ask for it."""
        (output,), (input,) = outputs, inputs
        return self._launch(
            _wire_bytes(input, [], self.rank(), self.size()),
            (output, input),
            lambda: self._inner._reduce_scatter_base(output, input, options),
        )

    def _launch(
        self, crossing: float, tensors: tuple[torch.Tensor, torch.Tensor], start: Callable[[], Any]
    ) -> dist.Work:
        """Post an exchange of which `crossing` bytes cross the link, and start moving it."""
        began = time.thread_time()
        self._posted += 1
        now = self.clock.now()
        self._board.write(self._posted, Post(now, crossing))
        if self.events is not None:
            self.events.append(LinkEvent("launch", self._posted, now, crossing))
        work = _LinkWork(self, _Pending(self._posted, start(), tensors))
        self.traffic.host_s += time.thread_time() - began
        return work

    def barrier(self, options: Any = None) -> dist.Work:
        """Wait for all ranks, outside the model."""
        return self._inner.barrier() if options is None else self._inner.barrier(options)

    def finish(self, pending: _Pending) -> None:
        """Return when the bytes are here and the clock says that the exchange has ended."""
        began = time.thread_time()
        if self.events is not None:
            self.events.append(LinkEvent("wait", pending.ordinal, self.clock.now()))
        pending.inner.wait()
        end = self._ends.of(pending.ordinal, self.rate, self.traffic)
        self.traffic.host_s += time.thread_time() - began
        now = self.clock.now()
        self.traffic.waited_s += max(0.0, end - now)
        self.clock.wait_until(end)
        if self.events is not None:
            self.events.append(LinkEvent("resume", pending.ordinal, self.clock.now()))


class _LinkWork(dist.Work):
    """What a launch returns."""

    def __init__(self, link: EmulatedLink, pending: _Pending) -> None:
        super().__init__()
        self._link = link
        self._pending: _Pending | None = pending

    def wait(self, timeout: Any = None) -> bool:
        del timeout  # the inner group has its own
        if self._pending is not None:
            self._link.finish(self._pending)
            self._pending = None
        return True


@dataclass(slots=True)
class ExchangeEnds:
    """When each exchange ends, worked out in the order of the exchanges."""

    board: PostBoard
    known: dict[int, float] = field(default_factory=dict)
    last: int = 0
    last_end: float = -math.inf

    def of(self, ordinal: int, rate: LinkRate, traffic: Traffic) -> float:
        """Return the end of one exchange, once; counts in `traffic` those not ended before."""
        while self.last < ordinal:
            self.last += 1
            posts = self.board.read(self.last)
            crossing = max(post.wire_bytes for post in posts)
            start = max(self.last_end, *(post.time_s for post in posts))
            self.last_end = self.known[self.last] = start + rate.duration_s(crossing)
            traffic.num_exchanges += 1
            traffic.wire_bytes += crossing
        return self.known.pop(ordinal)


def _wire_bytes(tensor: torch.Tensor, splits: list[int], rank: int, num_ranks: int) -> int:
    """Return the bytes of `tensor` that other ranks send or receive."""
    if not splits:
        return tensor.nbytes * (num_ranks - 1) // num_ranks
    rows = sum(splits)
    return tensor.nbytes * (rows - splits[rank]) // rows if rows else 0


def make_emulated_group(board: PostBoard, clock: Clock) -> EmulatedLink:
    """Return a group of all ranks over the emulated link; the default group must exist."""

    def create(store: Any, rank: int, size: int, timeout: Any) -> EmulatedLink:
        return EmulatedLink(dist.ProcessGroupGloo(store, rank, size, timeout), board, clock)

    return new_group_of(EmulatedLink, create, ["cpu"])
