"""Time of one candidate: the work of its region as tasks on a compute stream and links.

Contract
    Tasks run by `cost/tasks.py`, on the streams of `cost/events.py`, with which the scheduler
    makes its own estimate, in the order it looks for: tasks that the next exchange needs come
    first, those that none needs fill gaps. Forward and backward are priced one after the other,
    each from its own traced graph.
    Two hops spare the gather of the flat rows. It is taken off, tokens read and rows written,
    where rows are copied; for their sum at home nothing is taken off, but in eight bits.
    In eight bits a row is packed in front of the first hop, handed on as received, and unpacked
    behind the second; sums of a node are packed anew on their way home.
    Experts are chosen evenly.
    Passes over rows that other kernels do on the way are taken off (`plan/row_folds.py`), and in
    two hops the unpacking of rows that feed products as they came.

Pseudo-code
    work of the region: one task per chunk, of its share; other work: one task
    the first exchange of a chunked region needs its rows sorted by chunk
    a reader of the whole of chunked work needs its chunks joined: concatenated, rows sorted back
    too; but for sums per token as one operator, which read chunks as received
    a compiler sorts rows in the kernel that makes them, and joins them in those that read them
    a launch is an operator on the compute stream
    an exchange in eight bits: packed before, unpacked after; gathers of rows are done on the way,
    and chunks that are read as a whole are unpacked once they are joined
    an exchange with room: its buffer filled before, its rows taken out after; between exchanges
    all but products read and write padding too
    an exchange in two hops: the tasks of `cost/hop_tasks.py`, in its parts, each hop on its link
    chunks are equal unless their loads are stated: rows, sent rows and weights of each
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from moe_compile.cost.hop_shape import MOVED, HopShape
from moe_compile.cost.hop_tasks import HopTasks
from moe_compile.cost.kernel_counts import ORDER_KERNELS, ROOM_KERNELS
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.cost.tasks import (
    LINK,
    NODE_LINK,
    Priority,
    Task,
    TaskList,
    TaskTimeline,
    run_tasks,
)
from moe_compile.hardware.links import leaving_share
from moe_compile.hardware.products import Product
from moe_compile.plan.candidates import Candidate, copied_exchange, goes_in_hops
from moe_compile.plan.row_folds import NO_FOLDS, RowFolds, folds_of, unpacked_bytes

WHOLE: Final = -1
"""Key of a task that is not divided into chunks."""
GRADIENT_SUM: Final = 3.0
"""Passes over a weight's gradient to add one chunk's to the others': two reads and a write."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Shares of one chunk in an even rank's whole region."""

    rows: float
    """Share of the rows that this rank computes."""
    sent: float
    """Share of the rows that the exchange lasts for: the rows of the rank that has most."""
    weights: float
    """Share of the weights."""


def price_us(work: RegionWork, candidate: Candidate, rates: Rates) -> float:
    """Return the time of forward and backward of `work` run as `candidate` says."""
    return sum(fastest(tasks, rates).total_us for tasks in tasks_of(work, candidate, rates))


def tasks_of(
    work: RegionWork, candidate: Candidate, rates: Rates, loads: Sequence[Load] = ()
) -> list[Sequence[Task]]:
    """Return the tasks of the forward, then the backward; `loads` are of each chunk.

    Loads change the time of tasks, not their number.
    """
    work = work.by_dispatch(candidate.dispatch)
    return [_Phase(work, one, candidate, rates, tuple(loads)).tasks() for one in work.phases]


def fastest(tasks: Sequence[Task], rates: Rates) -> TaskTimeline:
    """Return the better of two orders: a scheduler tries more, and takes the fastest."""
    slower = rates.contention, rates.overlap_slowdown
    of_node = rates.intra_node_overlap_slowdown
    runs = (run_tasks(tasks, *slower, priority, node_slowdown=of_node) for priority in Priority)
    return min(runs, key=lambda run: run.total_us)


@dataclass(slots=True)
class _Phase:
    """Builds the tasks of one phase."""

    region: RegionWork
    work: tuple[Work, ...]
    candidate: Candidate
    rates: Rates
    loads: tuple[Load, ...] = ()
    made: TaskList = field(default_factory=TaskList)
    of_work: dict[int, dict[int, int]] = field(default_factory=dict)
    """Work -> chunk, or WHOLE -> the task that others need."""
    joined: dict[int, int] = field(default_factory=dict)
    sorts: int | None = None
    """The first exchange in chunks: before it rows are sorted."""
    sorted: int | None = None
    """The task that sorts rows by chunk."""
    folds: RowFolds = NO_FOLDS

    def tasks(self) -> Sequence[Task]:
        self.folds = folds_of(self.region, self.work, self.candidate)
        self.sorts = self._first_sorted()
        for index, work in enumerate(self.work):
            self.of_work[index] = (
                self._add_hops(index)
                if self._goes_in_hops(work)
                else {chunk: self._add(index, chunk) for chunk in self._chunks_of(work)}
            )
        for index, work in enumerate(self.work):
            if work.makes_gradient and WHOLE not in self.of_work[index]:
                self._join(index)
        if not self._is_forward:
            self._add_unpacked()
        return self.made.tasks

    def _add_unpacked(self) -> None:
        """Add what unpacks rows that the forward kept as they came, for gradients of weights."""
        num = self.candidate.num_chunks
        nbytes = unpacked_bytes(self.region, self.candidate) * self.region.imbalance
        for _ in range(num if nbytes else 0):
            self.made.add("unpack", self.rates.memory_us(nbytes / num), [])

    def _chunks_of(self, work: Work) -> Sequence[int]:
        num = self.candidate.num_chunks
        if num == 1 or not work.is_chunked:
            return (WHOLE,)
        if self._is_owned(work) and work.expert is not None:
            return (work.expert * num // self.region.num_parts,)
        return range(num)

    def _is_owned(self, work: Work) -> bool:
        return work.expert is not None and self.candidate.chunk_by == "experts"

    def _slices(self, work: Work) -> bool:
        """Whether a chunk reads only its own part of the weights."""
        return work.slices_weights and self.candidate.chunk_by != "tokens"

    def _needs(self, work: Work, chunk: int) -> list[int]:
        needs: list[int] = []
        for other in work.needs:
            tasks = self.of_work[other]
            if chunk in tasks:
                needs.append(tasks[chunk])
            elif WHOLE in tasks:
                needs.append(tasks[WHOLE])
            elif chunk == WHOLE:
                needs.append(self._join(other))
        return needs

    @property
    def _sorts_rows(self) -> bool:
        """Whether chunks are of exchanged rows; gathered tokens and heads come in slices."""
        one = self.candidate
        is_flat = one.dispatch == "all_to_all" and self.region.room is None
        return one.num_chunks > 1 and not self.region.in_slices and is_flat

    def _moving_us(self, nbytes: float, num_times: int) -> float:
        return self.rates.memory_us(MOVED * nbytes * num_times, num_times)

    def _join(self, other: int) -> int:
        """Return the task that joins the chunks' results of one work."""
        if other not in self.joined:
            work, parts = self.work[other], list(self.of_work[other].values())
            is_one = len(parts) == 1 or (work.makes_gradient and not self._slices(work))
            is_one |= self._is_read_in_pieces(other)
            is_sorted = self._sorts_rows and work.exchange in ("dispatch", "combine", "beside")
            passes, num_kernels = self._to_sort_back(other) if is_sorted else (MOVED, 1)
            nbytes = 0.0 if is_one else passes * work.written
            us = self.rates.memory_us(nbytes, 0 if is_one else num_kernels)
            if self._unpacks_joined(other):
                us = self._join_messages_us(work)
            self.joined[other] = self.made.add("join", us, parts)
        return self.joined[other]

    def _unpacks_joined(self, other: int) -> bool:
        """Whether messages of all chunks of an exchange are joined, then unpacked in order."""
        work = self.work[other]
        readers = (w for w in self.work if other in w.needs)
        is_cut = self._sorts_rows and work.is_chunked and self._share_of(work) < 1.0
        is_whole = not any(reader.is_chunked for reader in readers)
        return is_cut and is_whole and not self._is_read_in_pieces(other)

    def _is_read_in_pieces(self, other: int) -> bool:
        """Whether all readers of the whole of a work read its chunks in place."""
        whole = [w for w in self.work if other in w.needs and not w.is_chunked]
        return bool(whole) and all(reader.reads_pieces for reader in whole)

    def _join_messages_us(self, work: Work) -> float:
        """Return the time to join and unpack: messages read, written and read, rows written."""
        share = self._share_of(work)
        return self.rates.memory_us((1.0 + share * (1.0 + MOVED)) * work.written, 2)

    def _share_of(self, work: Work) -> float:
        """Return the bytes of a work's rows as sent over those in the model's number format."""
        is_forward, kind = self._is_forward, work.exchange
        return self.candidate.wire_share(self.region, kind, is_forward=is_forward)

    def _to_sort_back(self, other: int) -> tuple[float, int]:
        """Return the passes over the joined rows of a work before they are read, and kernels.

        A reader that fuses with its inputs sorts them while it reads; if it computes with them they
        are written for the backward.
        """
        of_all = [w for w in self.work if other in w.needs and not w.is_chunked]
        passes = MOVED * self.region.writes_joined
        if not all(reader.fuses_what_it_reads for reader in of_all):
            return passes + MOVED, int(self.region.writes_joined) + 1
        computes = any(reader.is_fusible and not reader.moves_rows for reader in of_all)
        return passes + (self._is_forward and computes), int(self.region.writes_joined)

    def _first_sorted(self) -> int | None:
        if not self._sorts_rows:
            return None
        chunked = (i for i, w in enumerate(self.work) if w.is_chunked and w.exchange)
        return next(chunked, None)

    def _sort(self, needs: list[int]) -> int:
        """Return the task that sorts the rows by chunk before the first exchange."""
        if self.sorted is None:
            us = self.rates.memory_us(0.0, ORDER_KERNELS) if self._is_forward else 0.0
            assert self.sorts is not None
            is_packed = self._share_of(self.work[self.sorts]) < 1.0
            if not is_packed and not self._rows_are_fusible():
                us += self._moving_us(self.region.row_bytes, 1)
            self.sorted = self.made.add("sort", us, needs)
        return self.sorted

    def _rows_are_fusible(self) -> bool:
        """Whether a compiler makes the rows of the first exchange where they are sorted."""
        assert self.sorts is not None
        made_of = (self.work[i] for i in self.work[self.sorts].needs)
        rows = max(made_of, key=lambda work: work.written, default=None)
        return rows is not None and rows.is_fusible

    def _add(self, index: int, chunk: int) -> int:
        work = self.work[index]
        needs = self._needs(work, chunk)
        load = self._load(work, chunk)
        if work.exchange:
            if index == self.sorts:
                needs = [self._sort(needs)]
            return self._add_exchange(index, needs, load.sent)
        weights, rows = work.weight_bytes, load.rows
        if chunk != WHOLE:
            if self._slices(work):
                weights *= load.weights
            elif work.makes_gradient:
                weights *= 1.0 + GRADIENT_SUM
        left = self.folds.left_of(index, work)
        nbytes = left.nbytes * rows * self._padding(work)
        amounts = work.operations * rows, nbytes + weights, left.num_kernels
        us = self.rates.compute_us(*amounts, self._product(work, chunk, load))
        return self.made.add(work.name, us, needs)

    def _padding(self, work: Work) -> float:
        """Return the slots over the rows where work reads padding too; products read rows alone."""
        if self.region.room is None or work.product is not None or not work.is_chunked:
            return 1.0
        return self.region.room.of_chunks(self.candidate.num_chunks)

    def _product(self, work: Work, chunk: int, load: Load) -> Product | None:
        """Return the product of a task: of some of its groups, of some of the rows of each."""
        if work.product is None:
            return None
        by_tokens = self.candidate.chunk_by == "tokens"
        is_of_groups = chunk != WHOLE and not by_tokens and work.product.groups > 1.0
        groups = load.weights if is_of_groups else 1.0
        tokens = load.rows / groups if groups else 0.0
        return work.product.part(groups, tokens, is_gradient=work.makes_gradient)

    def _load(self, work: Work, chunk: int) -> Load:
        """Return the share of `work` that a task of it has."""
        is_shared = chunk != WHOLE and not self._is_owned(work)
        if self.loads and work.is_chunked and not self._is_owned(work):
            return self.loads[0 if chunk == WHOLE else chunk]
        share = 1.0 / self.candidate.num_chunks if is_shared else 1.0
        rows = share * (self.region.imbalance if work.is_chunked else 1.0)
        return Load(rows=rows, sent=rows, weights=share)

    @property
    def _is_forward(self) -> bool:
        return self.work is self.region.forward

    def _goes_in_hops(self, work: Work) -> bool:
        nodes = self.candidate.nodes
        return nodes != "off" and goes_in_hops(work, nodes, is_forward=self._is_forward)

    def _add_hops(self, index: int) -> dict[int, int]:
        """Return the last task of each chunk of an exchange in two hops.

        An exchange that sums rows has one last task; one that copies them sends all tokens at once.
        """
        work = self.work[index]
        chunks, is_forward = self._chunks_of(work), self._is_forward
        is_copy = work.exchange == copied_exchange(is_forward)
        needs = [self._needs(work, chunk) for chunk in ([WHOLE] if is_copy else chunks)]
        way = work, self.candidate, self.rates, needs, is_forward
        last = add_hops(self.made, self.region, *way, is_fed=index in self.folds.fed)
        return dict(zip(chunks if is_copy else [WHOLE], last, strict=True))

    def _add_exchange(self, index: int, needs: list[int], share: float) -> int:
        work = self.work[index]
        if self.region.room is not None and work.exchange in ("dispatch", "combine"):
            return self._add_with_room(work, needs, share)
        smaller, rows = self._share_of(work), work.link_bytes * share
        is_packed = smaller < 1.0
        if is_packed:
            pack_us = self.rates.memory_us(self._rows_packed(index, rows) + rows * smaller)
            needs = [self.made.add("pack", pack_us, needs)]
        launch = self.made.add("launch", self.rates.op_overhead_us, needs)
        us = self.rates.link_us(rows * smaller, is_gather=work.is_gather)
        done = self.made.add(work.name, us, [launch], LINK)
        if not is_packed or index in self.folds.fed or self._unpacks_joined(index):
            return done
        written = 0.0 if index in self.folds.permuted else rows
        unpack_us = self.rates.memory_us(written + rows * smaller)
        return self.made.add("unpack", unpack_us, [done])

    def _add_with_room(self, work: Work, needs: list[int], share: float) -> int:
        """Add an exchange of buffers: rows are moved into theirs, and out of the one that came."""
        rows = work.link_bytes * share
        slots = rows * self.region.slots_per_row(work.exchange, self.candidate.num_chunks)
        is_indexed = self._is_forward and work.exchange == "dispatch"
        index_us = self.rates.memory_us(0.0, ROOM_KERNELS if is_indexed else 0.0)
        move_us = self.rates.memory_us((rows + slots) / leaving_share(self.region.num_ranks))
        filled = self.made.add("fill", index_us + move_us, needs)
        launch = self.made.add("launch", self.rates.op_overhead_us, [filled])
        done = self.made.add(work.name, self.rates.link_us(slots), [launch], LINK)
        return self.made.add("take out", move_us, [done])

    def _rows_packed(self, index: int, rows: float) -> float:
        """Return the bytes read to pack `rows`; all are counted where a kernel sorts the rows."""
        if index in self.folds.gathered:
            return 0.0  # those of the gather
        return self.work[index].link_bytes if index == self.sorts else rows


def add_hops(
    made: TaskList,
    region: RegionWork,
    work: Work,
    candidate: Candidate,
    rates: Rates,
    needs: Sequence[Sequence[int]],
    is_forward: bool,
    *,
    is_fed: bool,
) -> list[int]:
    """Add an exchange in two hops; return the last task of each chunk, or of all where rows are
    summed. `needs` are of each chunk where rows are summed, else of all. Products alone read rows
    that are `is_fed`, as they came.
    """
    assert region.hops is not None
    is_copy = work.exchange == copied_exchange(is_forward)
    share = candidate.wire_share(region, work.exchange, is_forward=is_forward)
    of_rank = region.imbalance if work.is_chunked else 1.0
    rows = work.link_bytes * of_rank / leaving_share(region.num_ranks)
    is_weighted = is_forward and "combine" in region.weighted
    moved = (
        _copied_bytes(region.hops, rows, share, candidate.hop_slices, is_fed=is_fed)
        if is_copy
        else _summed_bytes(region.hops, rows, share, is_weighted=is_weighted)
    )
    hops = HopTasks(
        made=made,
        times=rates,
        hops=region.hops,
        rows=rows,
        num_rows=rows / region.hops.row_bytes,
        moved=moved,
        wire_share=share,
        num_chunks=candidate.num_chunks,
        num_slices=candidate.hop_slices,
        launch_us=rates.op_overhead_us,
        node_link=NODE_LINK if rates.intra_node_gb_per_s else LINK,
    )
    if is_copy:
        (of_all,) = needs
        places = candidate.nodes == "rounded"
        return hops.copies(hops.told(of_all, finds_places=places) if is_forward else of_all)
    last = hops.sums(needs)
    return [last] if is_forward else [hops.scores([last])]


def _copied_bytes(
    hops: HopShape, rows: float, share: float, num_slices: int, *, is_fed: bool
) -> tuple[float, float, float]:
    """Return the bytes read and written before, between and behind the hops of copies.

    The gather of the flat rows is taken off: it reads the tokens as well, and writes as many rows.
    If these were packed they are taken off where rows are written, behind hop 2. Rows that are fed
    to products are not written there, and the gather's are taken off with it (`row_folds.py`).
    """
    far, is_packed = hops.far_bytes(rows), share < 1.0
    between = share * far + (share * rows if is_packed else 0.0)
    passes = (0.0 if is_fed else share) if is_packed else MOVED
    passes += MOVED * share * (num_slices > 1)  # slices are joined
    return share * far, between, passes * rows


def _summed_bytes(
    hops: HopShape, rows: float, share: float, *, is_weighted: bool
) -> tuple[float, float, float]:
    """Return the bytes read and written before the hops of sums, on the node, and at home.

    The model's own sum at home, of all rows, is taken off on the node, and its result is not
    counted again. With packed rows only the sums' own bytes are left, and those of unpacking
    in front of a sum and packing behind it.
    """
    if share == 1.0:
        return hops.summed_bytes(rows)
    far, packed = hops.far_bytes(rows), 1.0 + share
    before = (packed + MOVED * is_weighted) * rows
    return before, packed * (rows + far) + far, packed * far + far
