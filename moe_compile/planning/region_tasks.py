"""Time of one way to run a region: its work as tasks on a compute stream and a link.

Contract
    Tasks run by `planning/cluster/tasks.py`, on the streams of `planning/events.py`: the ones the
    scheduler's own estimate keeps time with, in the order it looks for: what the next exchange
    needs comes first, what none needs fills gaps. Backward is the mirror image of forward; weight
    gradients hang off it and fill gaps.

Pseudo-code
    work of the region: one task per chunk, of its share; else one task
    the first exchange of a chunked region needs its rows sorted by chunk
    who needs the whole region needs its chunks joined: concatenated, and sorted back
    a launch is an operator on the compute stream
    an exchange in eight bits: packed before, unpacked after
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from moe_compile.planning.candidates import Candidate
from moe_compile.planning.cluster.tasks import LINK, Priority, Task, TaskList, run_tasks
from moe_compile.planning.rates import Rates
from moe_compile.planning.region_work import RegionWork, Work
from moe_compile.planning.rewrite_costs import MASK_KERNELS, ORDER_KERNELS

WHOLE: Final = -1
"""Key of a task that no chunk divides."""
GRADIENT_SUM: Final = 3.0
"""Passes over a weight's gradient to add one chunk's to the others': two reads and a write."""

ROW_PASSES: Final = 2.0
"""Over rows that are moved: read, written."""


def price_us(work: RegionWork, candidate: Candidate, rates: Rates) -> float:
    """Return the time of forward and backward of `work` run as `candidate` says."""
    work = work.by_dispatch(candidate.dispatch)
    phases = (_Phase(work, candidate, rates, is_backward=b) for b in (False, True))
    return sum(_fastest_us(p.tasks(), rates.contention) for p in phases)


def _fastest_us(tasks: Sequence[Task], contention: float) -> float:
    """Return the time in the better of two orders: a scheduler has more, and takes the fastest."""
    runs = (run_tasks(tasks, contention, priority) for priority in Priority)
    return min(run.total_us for run in runs)


@dataclass(slots=True)
class _Phase:
    """Builds the tasks of one phase."""

    region: RegionWork
    candidate: Candidate
    rates: Rates
    is_backward: bool
    made: TaskList = field(default_factory=TaskList)
    of_work: dict[int, dict[int, int]] = field(default_factory=dict)
    """Work -> chunk, or WHOLE -> the task others need."""
    joined: dict[int, int] = field(default_factory=dict)
    sorted: int | None = None
    """The task that sorts rows by chunk."""
    gradients: dict[int, list[int]] = field(default_factory=dict)
    """Work -> tasks that make parts of its weight's gradient."""
    around: tuple[tuple[int, ...], ...] = ()
    """What each work's task must come after."""

    def tasks(self) -> Sequence[Task]:
        self.around = self.region.users if self.is_backward else self.region.needs
        count = len(self.region.work)
        for index in reversed(range(count)) if self.is_backward else range(count):
            work = self.region.work[index]
            if self.is_backward and not work.backward:
                continue
            self.of_work[index] = {
                chunk: self._add(work, index, chunk) for chunk in self._chunks_of(work)
            }
        for index, parts in self.gradients.items():
            us = self._moving_us(self.region.work[index].weight_bytes, 1)
            self.made.add("join dW", us, parts)
        return self.made.tasks

    def _chunks_of(self, work: Work) -> Sequence[int]:
        num = self.candidate.num_chunks
        if num == 1 or not work.is_chunked:
            return (WHOLE,)
        if self._is_owned(work) and work.expert is not None:
            return (work.expert * num // self.region.num_parts,)
        return range(num)

    def _is_owned(self, work: Work) -> bool:
        return work.expert is not None and self.candidate.chunk_by == "experts"

    def _needs(self, index: int, chunk: int) -> list[int]:
        needs: list[int] = []
        for other in self.around[index]:
            tasks = self.of_work.get(other, {})
            if chunk in tasks:
                needs.append(tasks[chunk])
            elif WHOLE in tasks:
                needs.append(tasks[WHOLE])
            elif chunk == WHOLE and tasks:
                needs.append(self._join(other))
        return needs

    @property
    def _sorts_rows(self) -> bool:
        """Whether chunks are of exchanged rows; gathered tokens and heads come in slices."""
        way = self.candidate
        return way.num_chunks > 1 and way.chunk_by != "heads" and way.dispatch == "all_to_all"

    def _moving_us(self, nbytes: float, num_times: int) -> float:
        return self.rates.compute_us(0.0, ROW_PASSES * nbytes * num_times, num_times)

    def _sort(self, needs: list[int]) -> int:
        """Return the task that sorts the rows by chunk before the first exchange."""
        if self.sorted is None:
            num_kernels = ORDER_KERNELS + MASK_KERNELS * self.candidate.num_chunks
            finding_us = 0.0 if self.is_backward else self.rates.compute_us(0.0, 0.0, num_kernels)
            us = finding_us + self._moving_us(self.region.row_bytes, 1)
            self.sorted = self.made.add("sort", us, needs)
        return self.sorted

    def _join(self, other: int) -> int:
        if other not in self.joined:
            us = self._moving_us(self.region.row_bytes, 2 if self._sorts_rows else 1)
            self.joined[other] = self.made.add("join", us, list(self.of_work[other].values()))
        return self.joined[other]

    def _add(self, work: Work, index: int, chunk: int) -> int:
        needs = self._needs(index, chunk)
        share = 1.0
        if chunk != WHOLE and not self._is_owned(work):
            share /= self.candidate.num_chunks
        rows = share * (self.region.imbalance if work.is_chunked else 1.0)
        if work.exchange:
            if work.exchange == self._first_exchange and chunk != WHOLE and self._sorts_rows:
                whole = (self.of_work.get(i, {}) for i in self.around[index])
                needs.append(self._sort([tasks[WHOLE] for tasks in whole if WHOLE in tasks]))
            return self._add_exchange(work, needs, rows)
        by_tokens = self.candidate.chunk_by == "tokens" and chunk != WHOLE
        weights = work.weight_bytes * (
            1.0 if by_tokens or self._is_owned(work) or not work.slices_weights else share
        )
        us = self._compute_us(work, rows, weights)
        if self.is_backward and work.weight_bytes:
            made = self._add_weight_gradient(work, needs, rows, weights, by_tokens=by_tokens)
            if share < 1.0 and work.slices_weights and not by_tokens:
                self.gradients.setdefault(index, []).append(made)
        return self.made.add(work.name, us, needs)

    @property
    def _first_exchange(self) -> str:
        return "combine" if self.is_backward else "dispatch"

    def _compute_us(self, work: Work, share: float, weights: float) -> float:
        operations, nbytes, num_kernels = work.amounts(is_backward=self.is_backward)
        return self.rates.compute_us(operations * share, nbytes * share + weights, num_kernels)

    def _add_weight_gradient(
        self, work: Work, needs: list[int], share: float, weights: float, *, by_tokens: bool
    ) -> int:
        if by_tokens:
            weights *= 1.0 + GRADIENT_SUM
        us = self.rates.compute_us(work.operations * share, work.nbytes * share + weights, 1)
        return self.made.add(f"{work.name} dW", us, needs)

    def _add_exchange(self, work: Work, needs: list[int], share: float) -> int:
        smaller = self.candidate.wire_share(self.region, work.exchange)
        sent = work.link_bytes * share * smaller
        pack_us = 0.0
        if smaller < 1.0:  # rows are read and a smaller message written, and the reverse
            pack_us = self.rates.compute_us(0.0, work.link_bytes * share * (1.0 + smaller), 1)
            needs = [self.made.add("pack", pack_us, needs)]
        launch = self.made.add("launch", self.rates.op_overhead_us, needs)
        us = self.rates.link_us(sent, is_gather=work.is_gather)
        done = self.made.add(work.name, us, [launch], LINK)
        return self.made.add("unpack", pack_us, [done]) if pack_us else done
