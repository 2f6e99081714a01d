"""The memory of one GPU of each pipeline stage: the model's state, and activations of its graphs.

Contract
    The peak inside a graph is that of the order that the schedule chose, so what the schedule adds
    is in it. Graphs are traced as on the first rank. A rank that holds more allows its schedule
    more: that difference is added in full.
    The peak of a graph counts beside what all graphs save, whenever it is reached: the sum is an
    upper bound.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from moe_compile.errors import InvalidConfig
from torchtitan_integration.dry_run.activations import Activations, BusiestRank, busiest_rank
from torchtitan_integration.dry_run.layers import (
    Traced,
    Wanted,
    options_of_graphs,
    trace_layers,
)
from torchtitan_integration.dry_run.memory import (
    OPTIMIZER_STATES,
    ModelState,
    laid_out,
    measure_state,
)
from torchtitan_integration.dry_run.world import FakeRank, fake_rank, graphs_of
from torchtitan_integration.job_file import JobFile, first_ranks_of_stages

PEAK: Final = "peak inside one block"
MAY_ADD: Final = "the schedule may add"
"""A row that is left out where it is 0 on all ranks."""


Graphs = Sequence[tuple[Activations, int]]
"""Activations of each kind of graph on a rank, and the number of its graphs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The memory of one GPU by use, of the rank with most rows where a skew is stated."""

    name: str
    """Name of the rank."""
    place: str
    """Name of the rank with its place in the pipeline."""
    state: ModelState
    activations: int
    """Saved from forward to backward, for all microbatches in flight, with even routing."""
    peak_in_block: int
    """Largest live bytes inside one block's graph beyond what it saves, with even routing."""
    rebuilt: int
    """Part of this peak at most: activations that the backward computes again."""
    added: int
    """Part of this peak: added by the schedule."""
    may_add: int
    """Bytes that the schedule may add beyond this peak: on this rank it is allowed more than where
    the graphs were traced."""
    busiest: BusiestRank
    more_rows: int
    """Bytes that its rows take beyond those of even routing on the busiest rank."""

    def rows(self) -> dict[str, int]:
        """Return bytes by use, with even routing."""
        return {
            "parameters": self.state.parameters,
            "gradients": self.state.parameters,
            "optimizer (AdamW)": OPTIMIZER_STATES * self.state.parameters,
            "blocks gathered by FSDP": self.state.gathered,
            "saved activations": self.activations,
            PEAK: self.peak_in_block,
            MAY_ADD: self.may_add,
            "logits and their gradient": self.state.logits,
            "NCCL, all-to-all": self.state.exchange_buffers,
        }

    def parts_of_peak(self) -> dict[str, int]:
        """Return parts of the peak inside one block, which are in `rows` already."""
        return {"of it, computed again": self.rebuilt, "of it, by the schedule": self.added}

    @property
    def even(self) -> int:
        """Bytes of all uses together, with even routing."""
        return sum(self.rows().values())

    @property
    def total(self) -> int:
        """Bytes of all uses together, under the skew that the job states."""
        return self.even + (self.more_rows if self.busiest.is_stated else 0)

    def as_json(self) -> dict[str, Any]:
        """Return the figures by plain names, in bytes."""
        return {
            "rank": self.name,
            "place": self.place,
            "microbatches_in_flight": self.state.microbatches,
            "parameters": self.state.parameters,
            "gradients": self.state.parameters,
            "optimizer_state": OPTIMIZER_STATES * self.state.parameters,
            "gathered_blocks": self.state.gathered,
            "saved_activations": self.activations,
            "peak_in_block": self.peak_in_block,
            "computed_again_in_backward": self.rebuilt,
            "added_by_schedule": self.added,
            "schedule_may_add": self.may_add,
            "logits": self.state.logits,
            "nccl_buffers": self.state.exchange_buffers,
            "more_rows_on_busiest_rank": self.more_rows,
            "sum_with_even_routing": self.even,
            "sum": self.total,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The model on one rank of each pipeline stage of a job."""

    names: tuple[str, ...]
    states: tuple[ModelState, ...]
    graphs: dict[str, tuple[str, ...]]
    """Kind of a graph -> names of the blocks of the first one."""
    busiest: BusiestRank
    schedule_share: float
    """Share of what a rank holds by which the schedule may raise the peak."""

    @property
    def step_peak_bytes(self) -> int:
        """The option of this name with which graphs are traced: that of the first rank."""
        return self.states[0].held + self.states[0].exchange_buffers

    def memory(self, traced: Sequence[Traced]) -> list[StageMemory]:
        """Return the memory of each rank, with the activations of its graphs."""
        return [self._of_stage(number, traced) for number in range(len(self.states))]

    def _of_stage(self, number: int, traced: Sequence[Traced]) -> StageMemory:
        name, state, num = self.names[number], self.states[number], len(self.names)
        own = [layer for layer in traced if layer.kind in state.graphs]
        even, busiest = (
            [(getattr(layer, routing), state.graphs[layer.kind]) for layer in own]
            for routing in ("even", "busiest")
        )
        fullest = max(own, key=lambda layer: layer.even.peak, default=None)
        held = state.held + state.exchange_buffers
        return StageMemory(
            name=name,
            place=f"{name}, pipeline stage {number + 1} of {num}" if num > 1 else name,
            state=state,
            activations=_saved(even, state.microbatches),
            peak_in_block=fullest.even.peak if fullest else 0,
            rebuilt=max((layer.even.rebuilt for layer in own), default=0),
            added=fullest.added_by_schedule() if fullest else 0,
            may_add=int(self.schedule_share * max(0, held - self.step_peak_bytes)),
            busiest=self.busiest,
            more_rows=_held(busiest, state.microbatches) - _held(even, state.microbatches),
        )


def measure_stages(file: JobFile, world: int, begin: Callable[[FakeRank], None]) -> Stages:
    """Return the model on the first rank of each pipeline stage.

    `begin` is called with the first of these ranks. Raises InvalidConfig for a refused layout.
    """
    states: dict[str, ModelState] = {}
    graphs: dict[str, tuple[str, ...]] = {}
    for number in first_ranks_of_stages(file, world):
        with fake_rank(file, world, number) as rank, refusals(file):
            if number == 0:
                begin(rank)
                busiest, share = busiest_rank(rank), _schedule_share(rank)
            parts = laid_out(rank)
            graphs |= graphs_of(parts, rank.job)
            states[f"rank {number}"] = measure_state(rank, parts)
    return Stages(
        names=tuple(states),
        states=tuple(states.values()),
        graphs=graphs,
        busiest=busiest,
        schedule_share=share,
    )


def trace_stages(
    file: JobFile, world: int, stages: Stages, say: Callable[[str], None], wanted: Wanted
) -> list[Traced]:
    """Trace one graph of each kind of the stages of a job; `say` gets the name of the next one."""
    with fake_rank(file, world, 0) as rank:
        return trace_layers(rank, stages.graphs, stages.step_peak_bytes, say, wanted)


@contextlib.contextmanager
def refusals(file: JobFile) -> Iterator[None]:
    """Name the job's file in errors by which torch and torchtitan refuse it."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:  # raised for a refused layout
        raise InvalidConfig(f"{file.path}: this layout cannot be made: {error}") from error


def _schedule_share(rank: FakeRank) -> float:
    """Return the share of what a rank holds that its schedule may add; 0 where that is no matter.

    A job that names `step_peak_bytes` allows every rank as much.
    """
    options = options_of_graphs(rank.job)
    allows_more = options.schedule and not options.step_peak_bytes
    return options.max_memory_increase if allows_more else 0.0


def _saved(graphs: Graphs, microbatches: float) -> int:
    return int(sum(one.kept * number for one, number in graphs) * microbatches)


def _held(graphs: Graphs, microbatches: float) -> int:
    """Return what is saved, and the largest peak inside a graph."""
    return _saved(graphs, microbatches) + max((one.peak for one, _ in graphs), default=0)


def first_most_last(stages: Sequence[StageMemory]) -> list[StageMemory]:
    """Return the first and the last of `stages`, and of those between the one that holds most."""
    first, *between = stages
    last = [between.pop()] if between else []
    most = max(between, key=lambda stage: stage.total, default=None)
    return [first, *([most] if most else []), *last]
