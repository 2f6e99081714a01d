"""The values that passes hand to one another during one compilation.

Contract
    One state per call of the backend; the forward and the backward graph of that call share it.
    Findings and plans are those of the Dynamo graph at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.facts import GraphFacts
from moe_compile.hardware import HardwareProfile
from moe_compile.journal.entries import Journal
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.choose_plan import PartsDecision
from moe_compile.plan.plan import Plan, RewritePlan
from moe_compile.plan.planned import Findings, Planned, PlannedExperts
from moe_compile.runtime.rerun import RoomTimes


@dataclass(frozen=True, slots=True)
class Partitioned:
    """What AOTAutograd's partitioner made of one joint graph, beside the forward graph."""

    backward: fx.Graph
    num_results: int
    """Outputs of the forward graph that the program sees; those behind are for the backward."""
    is_run: bool = True
    """Whether the graphs are to run; not where they are traced for a price or for a dry run."""


@dataclass(kw_only=True, slots=True)
class CompileState:
    """The analyses and decisions of one compilation."""

    config: MegaMoEConfig
    hardware: HardwareProfile
    parts: PartsDecision | None = None
    """Number of parts of the batch that the program runs in, where `batch_parts` is "auto"; None
    where no batch can be divided."""
    found: Findings = field(default_factory=Findings)
    """Findings in the Dynamo graph at hand."""
    planned: dict[str, tuple[Planned[Any], ...]] = field(default_factory=dict)
    """Name of a kind of region -> the plans of its candidates in the Dynamo graph at hand."""
    left_whole: Mapping[str, Left] = field(default_factory=dict)
    """Regions of the Dynamo graph at hand that `rewrite_regions` is left out of, and why."""
    dead: tuple[fx.Node, ...] = ()
    """Nodes of the Dynamo graph at hand that nothing needs once its MoE regions are rewritten."""
    launches: dict[str, dict[str, tuple[fx.Node, ...]]] = field(default_factory=dict)
    """MoE region of the Dynamo graph at hand -> `dispatch` and `combine` -> its launches now."""
    results: dict[str, fx.Node] = field(default_factory=dict)
    """MoE region of the Dynamo graph at hand -> the rows that come back to it, in the order sent;
    without regions whose new form sums them per token."""
    overflows: list[fx.Node] = field(default_factory=list)
    """Notes of the Dynamo graph at hand about the room for rows, of each region."""
    room_times: list[RoomTimes | None] = field(default_factory=list)
    """Predicted times by room of the regions of all Dynamo graphs so far that have room; None for
    one without. They are priced where `row_room` is "auto"."""
    rewrites: tuple[RewritePlan, ...] = ()
    """Plans of the rewrites after those of regions, applied to the Dynamo graph at hand."""
    predict: Callable[[fx.GraphModule, bool], float] | None = None
    """Returns the predicted time of a Dynamo graph, microseconds, forward and backward; its second
    argument says whether the later levels run on the graph in any case."""
    journal: Journal = field(default_factory=Journal)
    graph_name: str = "dynamo"
    """Name of the graph at hand in the journal."""
    is_recomputed: bool = False
    """Whether the Dynamo graph at hand is recomputed in the backward: all of it is inside an
    activation checkpoint that keeps nothing of its own choice."""
    site: str = ""
    """Place of the compiled code in the user's source; the same on every rank."""
    is_chunked: bool = False
    """Whether some region of the compilation, attention too, runs in more than one chunk, or some
    graph on parts of its batch."""
    is_in_parts: bool = False
    """Whether some graph of the compilation runs on parts of its batch."""
    has_work: bool = False
    """Whether there is anything for the levels after the Dynamo graph to do."""
    has_outside_rewrites: bool = False
    """Whether the compilation applied a rewrite of anything but exchanges of regions."""
    num_marked: int = 0
    """Regions whose exchanges were marked as theirs, in all Dynamo graphs so far."""
    is_compared: bool = False
    """Whether ranks compare the program's launches: Dynamo saw a collective in it."""
    plan_digest: str = ""
    """Hash of the decisions of the Dynamo-level passes."""
    dropped: list[str] = field(default_factory=list)
    """Passes that failed on a graph of AOTAutograd, each as `pass graph`: no later attempt to
    compile the program runs them on that graph."""
    left_out: list[str] = field(default_factory=list)
    """Passes that torch's bisector left out of graphs, each as `pass graph`."""
    on_pass_failed: Callable[[], None] | None = None
    """Called at each such failure: a backward graph is compiled after the report of its
    compilation is written."""
    notes_overflow: bool = False
    """Whether the program returns one tensor more: its note about the room for rows."""
    gathered_groups: set[str] = field(default_factory=set)
    """Process groups of regions whose tokens are gathered, of the whole compilation."""
    measures: dict[str, float] = field(default_factory=dict)
    """Figures from the passes that ran on the AOTAutograd graph at hand."""
    kept: Mapping[str, float] = field(default_factory=dict)
    """Figures of what the forward keeps for the backward, where `recompute` is "price"."""
    is_priced: bool = False
    """Whether the graphs are traced for a price alone: nobody looks at their timelines."""
    timeline: str = ""
    """Packed timeline of the AOTAutograd graph at hand (`schedule/timeline.py`); "" where its
    launches are not scheduled."""
    is_backward: bool = False
    """Whether the AOTAutograd graph at hand is the backward one."""
    is_captured: bool = False
    """Whether Inductor captures parts of the graphs in CUDA graphs."""
    num_inputs: int = 0
    """Tensors that the Dynamo graph is given."""
    steady_inputs: frozenset[int] = frozenset()
    """Weights among them, by number, that are at one address in every step."""
    gathered_inputs: frozenset[int] = frozenset()
    """Weights among them, by number, that FSDP gathers to another address in each step."""
    steady_names: Collection[str] = ()
    """Names of `steady_inputs` in AOTAutograd's graphs; filled on the forward graph."""
    nominal_sizes: dict[str, int] = field(default_factory=dict)
    """Symbol -> nominal value; filled on the forward graph, read on the backward graph."""

    partitioned: Partitioned | None = None
    """What belongs to the forward graph at hand, while both graphs are changed together."""

    facts: GraphFacts | None = None
    """Facts of the graph that a pass last looked at."""

    def facts_of(self, graph: fx.Graph) -> GraphFacts:
        """Return the facts of the graph at hand, or of a copy that a pass looks at."""
        if self.facts is None or self.facts.graph is not graph:
            self.facts = GraphFacts(graph)
        return self.facts

    def begin_graph(self, name: str, *, is_recomputed: bool = False) -> None:
        """Forget the previous Dynamo graph; `name` is that of the next."""
        self.graph_name, self.is_recomputed = name, is_recomputed
        self.found, self.planned, self.left_whole = Findings(), {}, {}
        self.dead, self.launches, self.results, self.rewrites = (), {}, {}, ()
        self.overflows = []

    def rename_nodes(self, now: Mapping[fx.Node, fx.Node]) -> None:
        """Replace the nodes of the Dynamo graph at hand by their new ones."""
        self.launches = {
            region: {name: tuple(now.get(n, n) for n in nodes) for name, nodes in each.items()}
            for region, each in self.launches.items()
        }
        self.results = {region: now.get(node, node) for region, node in self.results.items()}

    def full_name(self, region: str) -> str:
        """Return the name of a region of the graph at hand among all of the program.

        In the body of a higher-order operator the name of the body comes first.
        """
        _, _, body = self.graph_name.partition("/")
        return f"{body}/{region}" if body else region

    def withdraw_from(self, regions: Collection[str], name: str) -> None:
        """Withdraw what the plan has for pass `name` on these regions, since it is disabled."""
        self._withdraw(name, Reason.DISABLED, regions)

    def withdraw(self, passes: Collection[str]) -> None:
        """Withdraw the decisions of passes that were left out, from the plan."""
        is_asked = "rewrite_regions" in self.config.disable_passes
        for name in passes:
            self._withdraw(name, Reason.DISABLED if is_asked else Reason.FAILED)
        self.is_chunked |= any(one.plan.num_chunks > 1 for one in self.regions)
        self.rewrites = tuple(one for one in self.rewrites if one.name not in passes)
        has_regions = any(one.plan.group for one in self.regions)
        self.has_outside_rewrites |= any(not one.is_of_regions for one in self.rewrites)
        is_parted = self.config.offload_budget > 0 or bool(self.config.recompute_modules)
        self.has_work |= has_regions or self.has_outside_rewrites or is_parted

    def _withdraw(self, name: str, why: Reason, regions: Collection[str] | None = None) -> None:
        """Withdraw a pass's decisions on `regions`, None for all."""
        self.planned = {
            kind: tuple(
                _without(one, name, why) if regions is None or one.found.name in regions else one
                for one in each
            )
            for kind, each in self.planned.items()
        }

    @property
    def num_parts(self) -> int:
        """Return the number of parts of its batch that the program is to run in."""
        asked = self.config.batch_parts
        if self.parts is not None:
            return self.parts.num_parts
        return asked if isinstance(asked, int) else 1

    @property
    def regions(self) -> tuple[Planned[Any], ...]:
        """Return all planned regions of the Dynamo graph at hand."""
        return tuple(one for each in self.planned.values() for one in each)

    @property
    def experts(self) -> tuple[PlannedExperts, ...]:
        """Return the planned experts by counts."""
        return tuple(one for one in self.regions if isinstance(one, PlannedExperts))

    @property
    def plan(self) -> Plan:
        """Return the decisions on the Dynamo graph at hand."""
        regions = {kind: tuple(one.plan for one in each) for kind, each in self.planned.items()}
        return Plan(regions=regions, rewrites=self.rewrites)


def _without(one: Planned[Any], name: str, why: Reason) -> Planned[Any]:
    """Return the plan of a region without what pass `name` would carry out."""
    if name == "rewrite_regions":
        return one.as_written(why)
    if name == "quantize_exchanges" and isinstance(one, PlannedExperts):
        return one.unquantised()
    if name == "quantize_products" and isinstance(one, PlannedExperts):
        return one.in_own_format()
    return one
