"""Ranks of an emulated link as threads of one process, so that code is compiled once for all.

Contract
    Each rank has a charged clock and the groups of the emulated link, as a process of its own would
    have. Messages are real, over gloo, and so are values.
    Torch knows one rank in this process, that of `as_rank`, whose groups exchange nothing. A graph
    that was compiled there runs on every rank's own groups: `LinkedGraph` launches its collectives
    there. Code into which passes write the rank must be compiled for each rank.
    After an error on one rank the others may wait for it, so that nothing runs here any more.
"""

from __future__ import annotations

import datetime
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.link.charged_graph import ChargedGraph, Price, as_estimated
from benchmarks.link.charged_step import EmulatedDevice
from benchmarks.link.clocks import ChargedClock
from benchmarks.link.emulated_link import EmulatedLink, Wire
from benchmarks.link.link_model import LinkRate, Span, Topology, Traffic
from benchmarks.link.post_board import PostBoard, create_board
from moe_compile.hardware import HardwareProfile
from moe_compile.runtime.launch_records import RECORD_LAUNCHES
from moe_compile.runtime.node_groups import register_node_groups

C10D: Final = torch.ops._c10d_functional
TIMEOUT: Final = datetime.timedelta(seconds=300)
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkRank:
    """One rank: its clock, and its group of each kind."""

    clock: ChargedClock
    wire: Wire
    links: Mapping[Span, EmulatedLink]


class RankThreads:
    """All ranks of a topology, each with a thread."""

    def __init__(self, topology: Topology) -> None:
        """Make the ranks, and their groups."""
        self.topology, num_ranks = topology, topology.num_ranks
        self._folder = tempfile.TemporaryDirectory(prefix="megamoe-ranks-")
        self._board = Path(self._folder.name) / "posts"
        self._store = dist.HashStore()
        self._pool = ThreadPoolExecutor(num_ranks)
        self._failed: BaseException | None = None
        create_board(self._board, num_ranks)
        self.ranks: list[LinkRank] = self.run(self._made)

    def run(self, work: Callable[[int], Found]) -> list[Found]:
        """Return what `work` returns on each rank, all at once; raise the first rank's error."""
        if self._failed is not None:
            raise RuntimeError("these ranks cannot go on after an error") from self._failed
        ranks = [self._pool.submit(work, rank) for rank in range(self.topology.num_ranks)]
        wait(ranks, return_when=FIRST_EXCEPTION)
        self._failed = next(
            (one.exception() for one in ranks if one.done() and one.exception()), None
        )
        if self._failed is not None:
            raise self._failed
        return [one.result() for one in ranks]

    def timed(self, work: Callable[[int], Found], rate: LinkRate) -> tuple[list[Found], float]:
        """Return what `work` returns on each rank, and its seconds on the slowest, over a link of
        `rate`."""
        began = max(one.clock.now() for one in self.ranks)
        for one in self.ranks:
            one.clock.align(began)
            one.wire.rate, one.wire.traffic = rate, Traffic()
        found = self.run(work)
        return found, max(one.clock.now() for one in self.ranks) - began

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
        self._folder.cleanup()

    def _made(self, rank: int) -> LinkRank:
        clock = ChargedClock()
        wire = Wire(PostBoard(self._board, rank, self.topology.num_ranks), clock, self.topology)
        links = {}
        for span in _spans(self.topology):
            ranks = next(group for group in self.topology.groups(span) if rank in group)
            store = dist.PrefixStore(f"{span.name} {ranks[0]}", self._store)
            inner = dist.ProcessGroupGloo(store, ranks.index(rank), len(ranks), TIMEOUT)
            links[span] = EmulatedLink(inner, wire, span, ranks)
        return LinkRank(clock=clock, wire=wire, links=links)


def _spans(topology: Topology) -> Sequence[Span]:
    return tuple(Span) if topology.num_local > 1 else (Span.ALL,)


def as_rank(rank: int, topology: Topology) -> dict[str, Span]:
    """Make this process `rank` of a fake world; return the kind of each group of it, by name.

    Where nodes have several ranks they are registered.
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=topology.num_ranks, store=FakeStore())
    groups: dict[Span, dist.ProcessGroup] = {Span.ALL: dist.group.WORLD}
    for span in _spans(topology)[1:]:
        for ranks in topology.groups(span):
            made = dist.new_group(ranks)
            groups |= {span: made} if rank in ranks else {}
    if len(groups) > 1:
        host = f"emulated node {topology.node_of(rank)}"
        register_node_groups(groups[Span.ALL], groups[Span.NODE], groups[Span.CROSS], host=host)
    return {group.group_name: span for span, group in groups.items()}


class LinkedGraph(ChargedGraph):
    """A charged graph whose collectives run on the groups of one rank."""

    def __init__(
        self,
        module: fx.GraphModule,
        hardware: HardwareProfile,
        rank: LinkRank,
        spans: Mapping[str, Span],
        price: Price = as_estimated,
    ) -> None:
        """Run `module`, whose groups `spans` names, as `rank`."""
        super().__init__(module, hardware, rank.clock, price)
        self._rank, self._spans = rank, spans
        self._launched: dict[int, dist.Work] = {}
        self._called: dict[Any, Callable[..., Any]] = {
            C10D.all_to_all_single.default: self._exchange,
            C10D.all_gather_into_tensor.default: self._gather,
            C10D.reduce_scatter_tensor.default: self._reduce,
            C10D.wait_tensor.default: self._wait,
            RECORD_LAUNCHES: lambda *_: None,  # ranks of one process have nothing to compare
        }

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function; a collective on this rank's groups."""
        if target in self._called:
            return self._called[target](*args, **kwargs)
        return super().call_function(target, args, kwargs)

    def _link(self, group: str) -> EmulatedLink:
        return self._rank.links[self._spans[group]]

    def _exchange(
        self, rows: torch.Tensor, received: list[int], sent: list[int], group: str
    ) -> torch.Tensor:
        made = rows.new_empty(sum(received) if received else len(rows), *rows.shape[1:])
        options = dist.AllToAllOptions()
        work = self._link(group).alltoall_base(made, rows.contiguous(), received, sent, options)
        return self._keep(made, work)

    def _gather(self, rows: torch.Tensor, num_ranks: int, group: str) -> torch.Tensor:
        made = rows.new_empty(len(rows) * num_ranks, *rows.shape[1:])
        work = self._link(group).allgather_into_tensor_coalesced([made], [rows.contiguous()], None)
        return self._keep(made, work)

    def _reduce(self, rows: torch.Tensor, op: str, num_ranks: int, group: str) -> torch.Tensor:
        if op != "sum":
            raise NotImplementedError(f"a reduction by {op!r}")
        made = rows.new_empty(len(rows) // num_ranks, *rows.shape[1:])
        options = dist.ReduceScatterOptions()
        link = self._link(group)
        work = link.reduce_scatter_tensor_coalesced([made], [rows.contiguous()], options)
        return self._keep(made, work)

    def _keep(self, made: torch.Tensor, work: dist.Work) -> torch.Tensor:
        self._launched[id(made)] = work
        return made

    def _wait(self, launched: torch.Tensor) -> torch.Tensor:
        if (work := self._launched.pop(id(launched), None)) is not None:
            work.wait()
        return launched


class _Running(threading.local):
    """The rank whose step runs in a thread."""

    rank: LinkRank | None = None


RUNNING: Final = _Running()


@dataclass(slots=True)
class SharedDevice(EmulatedDevice):
    """An emulated device whose code runs on the rank that is `RUNNING`."""

    spans: Mapping[str, Span] = field(default_factory=dict)
    """Kind of each group, by the name it has in the code."""
    price: Price = as_estimated

    def charged(self, module: fx.GraphModule, hardware: HardwareProfile) -> ChargedGraph:
        """Return what runs a scheduled graph on the rank of this thread."""
        assert RUNNING.rank is not None
        return LinkedGraph(module, hardware, RUNNING.rank, self.spans, self.price)
