"""One graph of each kind of block, traced through every pass on the meta device.

Contract
    The block is compiled as training compiles it, up to the point where code would be generated:
    same capture, same passes, same options. Sizes that only a run knows count as balanced routing.

`beside` runs functions in copies of this process while it goes on.
A copy sees all that this process had when they began, graphs and modes included, and changes
nothing here: its result alone comes back. It ends with this process, however that ends.
They run here, one after another, when results are asked for: on one CPU; on other systems than
Linux; in a daemonic process, which may have no children; and where a GPU is there, for which
autograd has threads that no copy has.
"""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
import torch.fx as fx
from torch._dynamo.exc import BackendCompilerFailed
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig

from moe_compile.check.parent import with_parent
from moe_compile.choices import Choice, Rewritten, alternatives
from moe_compile.config import MegaMoEConfig, from_sources, split_options
from moe_compile.cost.amounts import amounts_of, ranks_of
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import (
    group_name,
    is_all_to_all,
    is_launch,
    overload_name,
    tensor_of,
)
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.hardware.links import spread_of
from moe_compile.predicted_time import timelines_as_written
from moe_compile.report.compilations import Compilation
from moe_compile.report.process_report import predicted_measures, record_of
from moe_compile.runtime.node_groups import ranks_of_a_node
from torchtitan_integration.dry_run.activations import Activations, activations_of, busiest_rank
from torchtitan_integration.dry_run.world import (
    FakeRank,
    call_of_graph,
    model_of_blocks,
    smaller_kinds,
)
from torchtitan_integration.eight_bit_gathers import gathers_in_eight_bits, hold_gathered
from torchtitan_integration.parallelize import apply_model_parallelism, backend_options

DEFAULT_HARDWARE: Final = "h100"
"""Profile for estimates where the job names none: this machine may not be the job's."""


NOTHING_HIDDEN: Final[Mapping[str, Any]] = {
    "batch_parts": 1,
    "chunks": 1,
    "attention_chunks": 1,
    "dispatch_wire": "same",
    "combine_wire": "same",
    "nodes": "off",
}
"""Options of the baseline for hidden time, a block in its graph's own order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One collective of a graph."""

    operator: str
    axis: str
    """Mesh axis: `ep`, `tp`, ..."""
    sent_bytes: int
    """Bytes that one rank sends in."""
    crossing_bytes: float = 0.0
    """Bytes of these that leave the rank's node; 0 where no nodes are registered."""
    node_bytes: float = 0.0
    """Bytes of these for other ranks of its node; 0 where no nodes are registered."""


@dataclass(kw_only=True, slots=True)
class Traced:
    """Compiled graphs of one kind of block, or group of blocks, with their measures."""

    kind: str
    """Kind of the graph by `kind_of_graph`."""
    compilation: Compilation
    launches: dict[str, list[Launch]] = field(default_factory=dict)
    """Phase -> collectives, in order."""
    measures: dict[str, dict[str, float]] = field(default_factory=dict)
    """Phase -> predicted times and memory, as reports have them."""
    unhidden_us: dict[str, float] = field(default_factory=dict)
    """Phase -> exposed time of the block with `NOTHING_HIDDEN`."""
    choices: list[Choice] = field(default_factory=list)
    """Choices of a block with regions: as asked, then by "auto" for each value of `numerics`. None
    where these are not asked for, and for a graph that has the same blocks as a larger one."""
    even: Activations
    """Bytes of activations with even routing."""
    busiest: Activations
    """The same on the rank with the most rows."""
    records: list[dict[str, Any]] = field(default_factory=list)
    """Records of its graphs, for a report."""
    as_written: list[dict[str, str]] = field(default_factory=list)
    """Timelines of its graphs before any pass, where a page is asked for."""

    def add_phase(
        self, phase: str, graph: fx.Graph, launches: list[Launch], axes: Mapping[str, str]
    ) -> None:
        """Add one graph, with its collectives; `axes` name the process groups of its record."""
        self.launches[phase] = launches
        self.measures[phase] = predicted_measures(graph)
        if record := record_of(graph):
            named = {axes.get(group, group): order for group, order in record["launches"].items()}
            self.records.append({**record, "launches": named})

    def add_input(self, nbytes: int) -> None:
        """Count the graph's input, of `nbytes`, as kept for the backward."""
        self.even = replace(self.even, graph_input=nbytes)
        self.busiest = replace(self.busiest, graph_input=nbytes)

    def added_by_schedule(self) -> int:
        """Return the bytes by which the schedule raised the peak, as `Activations` has it."""
        before, now = (
            max((self._beyond_saved(phase, peak) for phase in self.measures), default=0.0)
            for peak in ("peak_bytes_before", "peak_bytes")
        )
        return int(now - before)

    def _beyond_saved(self, phase: str, peak: str) -> float:
        saved = self.even.saved if phase == "forward" else 0
        return max(0.0, self.measures[phase].get(peak, 0.0) - saved)

    def exposed_share(self, *phases: str, measure: str = "exposed_us") -> float:
        """Return the exposed time in `phases` over that with `NOTHING_HIDDEN`; 1 for 0 of 0.

        `measure` is "least_exposed_us" for the least of any order of the same graphs.
        """
        exposed = sum(self.measures[phase].get(measure, 0.0) for phase in phases)
        unhidden = sum(self.unhidden_us[phase] for phase in phases)
        return exposed / unhidden if unhidden else 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What is wanted of a trace, beside collectives and memory."""

    has_times: bool = True
    """Whether graphs with regions are traced with `NOTHING_HIDDEN` too."""
    compares: bool = False
    """Whether they are traced as "auto" would have them for other values of `numerics` too."""
    has_page: bool = False
    """Whether what a page has beside the tables is kept."""


def trace_layers(
    rank: FakeRank,
    graphs: Mapping[str, Collection[str]],
    held: int,
    say: Callable[[str], None],
    wanted: Wanted,
) -> list[Traced]:
    """Trace one graph of each kind; `held` is the bytes of parameters, gradients and optimizer.

    `graphs` maps each kind to the names of its blocks. `say` gets the name of the next graph.
    """
    options = options_of_graphs(rank.job, held)
    if options.hardware == "detect":
        options = replace(options, hardware=DEFAULT_HARDWARE)
    job = copy.deepcopy(rank.job)
    job.compile.enable = True
    found: list[Traced] = []
    alone = smaller_kinds(rank, graphs) if wanted.compares else {*graphs}
    for kind, names in graphs.items():

        def backend(gm: fx.GraphModule, inputs: Sequence[Any], kind: str = kind) -> Any:
            def said(what: str) -> None:
                say(f"{kind}: {what}")

            of_graph = replace(wanted, compares=kind not in alone)
            found.append(_trace(gm, inputs, options, rank, said, of_graph))
            raise EndOfTrace

        say(f"{kind}: capture")
        job.compile.backend = backend
        model = model_of_blocks(rank, names)
        apply_model_parallelism(model, rank.dims, job)
        if gathers_in_eight_bits(rank.job, rank.dims, rank.model_args.moe_args):
            for experts in (b.moe.experts for b in model.layers.values() if b.moe_enabled):
                hold_gathered(experts, TORCH_DTYPE_MAP[rank.job.training.mixed_precision_param])
        block, arguments = call_of_graph(model, rank)
        _compile(block.compiled, arguments)
        found[-1].kind = kind
        found[-1].add_input(arguments[0].numel() * arguments[0].element_size())
    return found


def options_of_graphs(job: JobConfig, held: int = 0) -> MegaMoEConfig:
    """Return the options with which training compiles the graphs of a rank that holds `held`."""
    options = split_options(backend_options(job, held))[0]
    return from_sources(options=options, environment=os.environ)


class EndOfTrace(Exception):
    """Ends the compilation of a block once it is traced."""


def _compile(forward: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    torch._dynamo.reset()
    try:
        forward(*arguments)
    except BackendCompilerFailed as failed:
        if not isinstance(failed.inner_exception, EndOfTrace):
            raise


def _trace(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    options: MegaMoEConfig,
    rank: FakeRank,
    say: Callable[[str], None],
    wanted: Wanted,
) -> Traced:
    config = replace(options, codegen="fx")  # for Inductor on a CPU kernels of ours are written out
    as_written = copy_of_graph(gm)
    asked = Rewritten.of("as asked", gm, inputs, config, keeps_texts=wanted.has_page)
    written = timelines_as_written(as_written, inputs, asked.state) if wanted.has_page else []
    plain: list[Rewritten] = []
    others: list[Rewritten] = []
    if asked.compilation.has_regions and wanted.has_times:
        say("what is chosen")
        nothing = replace(config, **NOTHING_HIDDEN)
        plain = [Rewritten.of("nothing hidden", copy_of_graph(as_written), inputs, nothing)]
        others = alternatives(as_written, inputs, config) if wanted.compares else []
    distinct = {one.what: one for one in reversed(others) if one.what != asked.what}
    say(", ".join(one.name for one in (asked, *plain, *distinct.values())))
    with beside([one.measured for one in (*plain, *distinct.values())]) as results:
        forward, backward = (module.graph for module in asked.traced())
        measured = results()
    traced = Traced(
        kind="",
        compilation=asked.compilation,
        as_written=written,
        even=activations_of(forward, backward),
        busiest=activations_of(forward, backward, busiest_rank(rank).times),
    )
    sizes, axes = NominalSizes(asked.state.nominal_sizes), rank.axis_of_groups()
    for phase, graph in (("forward", forward), ("backward", backward)):
        sizes.learn(graph)
        traced.add_phase(phase, graph, _launches(graph, sizes, axes), axes)
    if plain:
        before = [phase.get("exposed_us_before", 0.0) for phase in measured.pop(0)]
        traced.unhidden_us = dict(zip(traced.measures, before, strict=True))
    if others:
        own = asked.chosen([*traced.measures.values()])
        found = {asked.what: own}
        found |= {w: o.chosen(m) for (w, o), m in zip(distinct.items(), measured, strict=True)}
        traced.choices = [own, *(replace(found[one.what], name=one.name) for one in others)]
    return traced


def _launches(graph: fx.Graph, sizes: NominalSizes, axes: dict[str, str]) -> list[Launch]:
    return [_launch(node, sizes, axes) for node in graph.nodes if is_launch(node)]


def _launch(node: fx.Node, sizes: NominalSizes, axes: dict[str, str]) -> Launch:
    group, sent_bytes = group_name(node), sizes.nbytes(tensor_of(node.all_input_nodes[0]))
    crossing, inside = 0.0, 0.0
    if node_ranks := ranks_of_a_node(group):
        leaving = amounts_of(node, sizes).link_bytes
        spread = spread_of(ranks_of(node), node_ranks, is_gather=not is_all_to_all(node))
        crossing, inside = leaving * spread.between, leaving * spread.within
    return Launch(
        operator=overload_name(node).rpartition("::")[2],
        axis=axes.get(group, "world"),
        sent_bytes=sent_bytes,
        crossing_bytes=crossing,
        node_bytes=inside,
    )


_TASKS: Final[list[Callable[[], Any]]] = []
"""Tasks that copies of this process inherit: graphs cannot be sent to them."""


@contextlib.contextmanager
def beside(tasks: Sequence[Callable[[], Any]]) -> Iterator[Callable[[], list[Any]]]:
    """Begin `tasks`, and yield a function that waits for their results, in order.

    A task's exception is raised by that function.
    """
    is_daemonic = multiprocessing.current_process().daemon
    is_safe = sys.platform == "linux" and not torch.accelerator.is_available() and not is_daemonic
    cpus = len(os.sched_getaffinity(0)) if is_safe else 1
    if min(cpus, len(tasks)) < 2:
        yield lambda: [task() for task in tasks]
        return
    _TASKS[:] = tasks
    context = multiprocessing.get_context("fork")
    ends = with_parent(signal.SIGKILL)
    with ProcessPoolExecutor(min(cpus, len(tasks)), context, initializer=ends) as pool:
        futures = [pool.submit(_run, number) for number in range(len(tasks))]
        try:
            yield lambda: [future.result() for future in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            _TASKS.clear()


def _run(number: int) -> Any:
    return _TASKS[number]()
