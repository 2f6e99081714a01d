"""Where exchanges of one rank with itself travel: a lane beside compute, at a chosen pace.

Contract
    Output gets the bytes of input, as an exchange among one rank does, and not before the lane has
    spent the exchange's time. One exchange at a time; it starts when the compute stream has made
    its input. Waiting holds up the compute stream, not the host.
    Tensors are kept by who waits: `Exchange` holds them.

Three kinds of lane on a GPU:

    NO_LINK    a copy on the device: the control, nothing is left to hide.
    modelled   the same copy after a kernel of one thread that spins for latency + bytes / rate.
    host       a share of the bytes by the copy engines to pinned host memory and back, both
               directions at once; the rest as in the control. Real DMA; no multiprocessor works.

The lane's streams have high priority, so that a spinning thread or a copy does not queue behind
the blocks of a matrix product: a network card would not either. There are no peers, no stragglers
and none of NCCL's multiprocessors in this: it is an emulation, and flatters what it stands for.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from benchmarks.gpu.replay import poison
from benchmarks.link.link_model import NO_LINK, LinkRate

PIECE_BYTES: Final = 8 * 2**20
"""Of a host copy: small enough that both directions overlap, large enough for full PCIe speed."""
ALIGNMENT: Final = 512
"""Bytes: where the part copied on the device begins; an odd start would slow it down."""
CALIBRATION_CYCLES: Final = 50_000_000
CALIBRATION_BYTES: Final = 256 * 2**20
HIGH_PRIORITY: Final = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How the lane carries exchanges; `host_share` of the bytes goes through host memory."""

    rate: LinkRate = NO_LINK
    host_share: float = 0.0


CONTROL: Final = Pace()


@dataclass(slots=True)
class Exchange:
    """One exchange in flight; `begun` and `done` are what the lane marks time with."""

    output: torch.Tensor
    input: torch.Tensor
    begun: Any = None
    done: Any = None


@dataclass(slots=True)
class Carried:
    """What went over the lane since it was last asked."""

    num_exchanges: int = 0
    num_bytes: int = 0
    marks: list[tuple[Any, Any]] = field(default_factory=list)


class CudaLane:
    """See the module docstring."""

    def __init__(self) -> None:
        """Calibrate; call on the device's current stream with nothing else running."""
        self.pace = CONTROL
        self.poisons = False
        """Whether outputs are made NaN at their launch, so that a missing wait shows."""
        self.carried = Carried()
        self._lane, self._back = (torch.cuda.Stream(priority=HIGH_PRIORITY) for _ in range(2))
        self._staging = torch.empty(0, dtype=torch.uint8)
        self.cycles_per_s = self._measure_cycles()
        self.copy_bytes_per_s = self._measure(CONTROL)
        self.host_bytes_per_s = self._measure(Pace(host_share=1.0))
        self.carried = Carried()

    def launch(self, output: torch.Tensor, input: torch.Tensor) -> Exchange:
        """Put one exchange on the lane."""
        exchange = Exchange(output, input, *(torch.cuda.Event(enable_timing=True) for _ in "ab"))
        if self.poisons:
            poison(output)
        self._lane.wait_stream(torch.cuda.current_stream())
        with torch.no_grad(), torch.cuda.stream(self._lane):
            exchange.begun.record()
            self._carry(output.view(-1).view(torch.uint8), input.view(-1).view(torch.uint8))
            exchange.done.record()
        self.carried.num_exchanges += 1
        self.carried.num_bytes += input.nbytes
        self.carried.marks.append((exchange.begun, exchange.done))
        return exchange

    def wait(self, exchange: Exchange) -> None:
        """Make the current stream wait for the exchange."""
        torch.cuda.current_stream().wait_event(exchange.done)

    def busy_s(self) -> float:
        """Return how long the lane carried what is in `carried`; waits for the device."""
        torch.cuda.synchronize()
        return sum(begun.elapsed_time(done) for begun, done in self.carried.marks) / 1e3

    def _carry(self, output: torch.Tensor, input: torch.Tensor) -> None:
        duration = self.pace.rate.duration_s(input.numel())
        copying = input.numel() / self.copy_bytes_per_s if duration else 0.0
        if (cycles := int((duration - copying) * self.cycles_per_s)) > 0:
            torch.cuda._sleep(cycles)
        by_host = int(self.pace.host_share * input.numel()) // ALIGNMENT * ALIGNMENT
        if by_host:
            self._through_host(output[:by_host], input[:by_host])
        output[by_host:].copy_(input[by_host:])

    def _through_host(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Copy down on the lane's stream and up on the other, a piece behind."""
        if self._staging.numel() < input.numel():
            self._staging = torch.empty(input.numel(), dtype=torch.uint8, pin_memory=True)
        for start in range(0, input.numel(), PIECE_BYTES):
            piece = slice(start, min(start + PIECE_BYTES, input.numel()))
            self._staging[piece].copy_(input[piece], non_blocking=True)
            self._back.wait_stream(self._lane)
            with torch.cuda.stream(self._back):
                output[piece].copy_(self._staging[piece], non_blocking=True)
        self._lane.wait_stream(self._back)  # nothing goes down before all is up again

    def _measure_cycles(self) -> float:
        seconds = []
        for _ in range(2):  # the first brings the clocks up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            start.record()
            torch.cuda._sleep(CALIBRATION_CYCLES)
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
        return CALIBRATION_CYCLES / seconds[-1]

    def _measure(self, pace: Pace) -> float:
        """Return bytes per second of the lane alone."""
        self.pace = pace
        source = torch.randint(256, (CALIBRATION_BYTES,), dtype=torch.uint8, device="cuda")
        target = torch.empty_like(source)
        for _ in range(3):
            self.carried = Carried()
            self.wait(self.launch(target, source))
            seconds = self.busy_s()
        self.pace = CONTROL
        return CALIBRATION_BYTES / seconds


class ProcessorLane:
    """The same for a smoke run without a GPU: copies at once, waiting sleeps."""

    cycles_per_s = 1e9
    copy_bytes_per_s = host_bytes_per_s = 1e9

    def __init__(self) -> None:
        """Start with an idle lane."""
        self.pace = CONTROL
        self.poisons = False
        self.carried = Carried()
        self._free_at = 0.0

    def launch(self, output: torch.Tensor, input: torch.Tensor) -> Exchange:
        """Put one exchange on the lane."""
        with torch.no_grad():
            if self.poisons:
                poison(output)
            begun = max(time.monotonic(), self._free_at)
            self._free_at = begun + self.pace.rate.duration_s(input.nbytes)
        exchange = Exchange(output, input, begun, self._free_at)
        self.carried.num_exchanges += 1
        self.carried.num_bytes += input.nbytes
        self.carried.marks.append((begun, self._free_at))
        return exchange

    def wait(self, exchange: Exchange) -> None:
        """Return when the exchange has ended, its bytes delivered."""
        time.sleep(max(0.0, exchange.done - time.monotonic()))
        with torch.no_grad():
            exchange.output.copy_(exchange.input)

    def busy_s(self) -> float:
        """Return how long the lane carried what is in `carried`."""
        return sum(done - begun for begun, done in self.carried.marks)
