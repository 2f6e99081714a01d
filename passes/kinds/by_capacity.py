"""Experts with a capacity: they run chunk by chunk, each on the slots of its experts.

Contract
    Decisions follow from graph, options, profile and sizes of groups: the same on every rank.
    The chunks partition the local experts; what they send back is joined in the dimension of
    experts. Weights with that dimension are cut by one split each; of a loop over experts a chunk
    runs its own alone. Nothing is read by the host.
    At the region's result all dispatches are launched, then per chunk: wait, experts, combine.
    Every node of every chunk runs, forward and backward, the operators that it runs of the whole,
    moves of data apart, or there are no chunks. That is tried on the tracer's values, and nothing
    is written.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.capacity.detect_capacity import find_capacity_regions
from moe_compile.capacity.fake_run import FakeRun
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.layers import Layers
from moe_compile.cost.read_regions import work_of_capacity
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.dims.arguments import joined, moved
from moe_compile.dims.expert_rules import one_index
from moe_compile.dims.products import linear_of
from moe_compile.dims.rules import operator_name
from moe_compile.dims.tracker import CUTS, cut_dim, move_name
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import Emitter
from moe_compile.graph.modes import modes
from moe_compile.graph.observation import fake_mode_of
from moe_compile.graph.query import operator_at, source_place, tensor_of, value_of
from moe_compile.hardware import HardwareProfile
from moe_compile.journal.kinds import Kind
from moe_compile.journal.left import Left
from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import REMEDIES, changes_for
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.chunk_numbers import last_bits_remark, plan_num_chunks
from moe_compile.plan.decide import choose
from moe_compile.plan.plan import RegionPlan
from moe_compile.plan.planned import Findings, Found, Planned
from moe_compile.plan.state import CompileState
from moe_compile.proof.kernel_bits import bits
from moe_compile.proof.operator_call import SAME_VALUES, Call
from moe_compile.proof.row_trace import UNTRACEABLE
from moe_compile.report.decisions import decision_figures, decision_remarks
from moe_compile.report.region_reports import CHUNKED, LEFT_WHOLE, RegionReport, edges_remarks
from passes.kinds.contract import Emitted, Finds, RegionKind
from passes.replay.factor_pieces import Emits, Pieces
from passes.replay.masked_replay import chunk_bounds

AS_MANY_ROWS: Final = Left(Reason.ALREADY_DONE, "by its capacity every expert has as many rows")
OTHER_FORMS: Final = ("dispatch", "nodes", "dispatch_wire", "combine_wire")
"""Options for other forms than chunks."""
OF_CAPACITY: Final = "experts with a capacity: equal parts are exchanged, the host reads nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityPlan(RegionPlan):
    """How experts with a capacity run."""

    num_ranks: int
    num_local_experts: int


class ByCapacity(RegionKind[Planned[CapacityRegion]]):
    """See the module docstring."""

    name: ClassVar[str] = "capacity"

    def find(self, graph: fx.Graph, config: MegaMoEConfig, before: Findings) -> Finds:
        """Return the regions among the exchanges that no other kind has; numbers go on."""
        del config
        taken = {launch for region in before.regions for launch in region.launches}
        first = len(before.experts) + sum(other.is_region for other in before.others)
        even = find_capacity_regions(graph, taken, first)
        found = tuple(Found(region=r, where=source_place(r.dispatch)) for r in even.regions)
        return Finds(found=found, others=even.refused, exchanges=even.exchanges)

    def plan(
        self, graph: fx.Graph, state: CompileState, layers: Layers
    ) -> tuple[Planned[CapacityRegion], ...]:
        """Return the plan of every region."""
        del graph
        found = state.found.by_kind[self.name]
        return tuple(_planned(one, state, layers.around(one.region)) for one in found)

    def emit(
        self, one: Planned[CapacityRegion], state: CompileState, dependence: Dependence
    ) -> Emitted:
        """Emit experts with a capacity in chunks."""
        del state, dependence
        region = one.found.region
        bounds = chunk_bounds(region.num_local_experts, one.plan.num_chunks)
        result = emit_capacity_chunks(region, bounds)
        return Emitted(instead={region.result: result}, body=region.body)

    def say(self, one: Planned[CapacityRegion], config: MegaMoEConfig) -> RegionReport:
        """Return what became of a region."""
        del config
        region, why = one.found.region, one.left.get("chunks")
        unproven = why if why is not None and why.reason.kind is Kind.UNPROVEN else None
        remarks = [why.why] if why is not None and unproven is None else []
        remarks += decision_remarks(one.decision)
        remarks += [f"not decided by price: {one.not_priced}"] if one.not_priced else []
        remarks += edges_remarks(one.left)
        others = [(n, left) for n, left in one.left.items() if n not in ("chunks", "chunk_edges")]
        remarks += [f"{name} is not done: {left.why}" for name, left in others if left.is_asked]
        return RegionReport(
            name=region.name,
            where=one.found.where,
            num_ranks=region.num_ranks,
            num_local_experts=region.num_local_experts,
            num_chunks=one.plan.num_chunks,
            num_host_reads=0,
            verdict=unproven.why if unproven else CHUNKED if one.is_rewritten else LEFT_WHOLE,
            remedy=REMEDIES[unproven.reason] if unproven else "",
            sized_by="capacity",
            decision=decision_figures(one.decision),
            remarks=(*remarks, *one.remarks, OF_CAPACITY),
            to_do=changes_for(left.reason for left in one.left.values()),
        )


def _planned(
    found: Found[CapacityRegion], state: CompileState, layer: TracedNodes
) -> Planned[CapacityRegion]:
    config, region = state.config, found.region
    decision = decide_capacity(region, config, state.hardware, layer)
    num_chunks, why = plan_num_chunks(config, region.num_local_experts, decision)
    if config.chunk_by == "tokens":
        num_chunks, why = 1, Left(Reason.BY_CAPACITY)
    tried = Trial()
    if num_chunks > 1:
        tried = try_chunks(region, chunk_bounds(region.num_local_experts, num_chunks))
        if tried.refused:
            num_chunks, why = 1, Left(Reason.UNKNOWN_OPERATOR, tried.refused)
        elif tried.last_bits and bits().refuses:
            num_chunks, why = 1, Left(Reason.MAY_ROUND, tried.last_bits)
    left = {name: Left(Reason.BY_CAPACITY) for name in OTHER_FORMS if config.asks_for(name)}
    left |= {"chunks": why} if why is not None else {}
    left |= {"chunk_edges": AS_MANY_ROWS} if config.chunk_edges != "even" else {}
    is_unproven = why is not None and why.reason in (Reason.UNKNOWN_OPERATOR, Reason.MAY_ROUND)
    return Planned(
        found=found,
        plan=CapacityPlan(
            group=region.group,
            num_ranks=region.num_ranks,
            num_local_experts=region.num_local_experts,
            num_chunks=num_chunks,
            unproven=why.reason.name if why is not None and is_unproven else "",
        ),
        left=found.verdicts(config, left),
        decision=decision,
        not_priced=layer.not_traced if decision is None else "",
        remarks=(last_bits_remark(tried.last_bits),) if tried.last_bits and num_chunks > 1 else (),
    )


def decide_capacity(
    region: CapacityRegion, config: MegaMoEConfig, hardware: HardwareProfile, layer: TracedNodes
) -> Decision | None:
    """Return what the planner decides, None where it is not asked or has no price."""
    if config.chunks != "auto" or not config.equal_tokens or region.num_local_experts == 1:
        return None
    work = work_of_capacity(region, layer)
    if work is None:
        return None
    return choose(work, ("experts",), lambda _: True, config, hardware)


def emit_capacity_chunks(region: CapacityRegion, bounds: Sequence[range]) -> fx.Node:
    """Emit the region in chunks of these local experts; return what takes its result's place."""
    emit = Emitter(region.result)
    pieces = pieces_of(region, emit, bounds)
    chunks = [CapacityChunk(emit, region, pieces, experts) for experts in bounds]
    for source in region.cut:
        for chunk, piece in zip(chunks, pieces.cut(source), strict=True):
            chunk.env[source] = piece
    for chunk in chunks:
        chunk.replay(region.dispatch)
    for chunk in chunks:
        for node in region.body[1:]:
            chunk.replay(node)
    result: fx.Node = pieces.join([chunk.env[region.result] for chunk in chunks], region.result)
    result.meta["example_value"] = value_of(region.result)
    return result


def pieces_of(region: CapacityRegion, emit: Emits, bounds: Sequence[range]) -> Pieces:
    """Return what cuts tensors of the region in chunks of these local experts."""
    shares = [len(experts) for experts in bounds]
    return Pieces(emit, region.tracker, region.experts, shares)


class CapacityChunk:
    """Emits the nodes of a region for some of its experts."""

    def __init__(self, emit: Emits, region: CapacityRegion, pieces: Pieces, experts: range) -> None:
        """Emit for local `experts`, whose parts of what is cut `env` is to be given first."""
        self._emit, self._region, self._pieces, self._experts = emit, region, pieces, experts
        self.env: dict[fx.Node, Any] = {}

    def replay(self, node: fx.Node) -> None:
        """Emit `node`, unless it works for an expert of another chunk."""
        expert_of = self._region.expert_of
        if node in expert_of:
            if expert_of[node] not in self._experts:
                return
            if not all(i in expert_of for i in node.all_input_nodes if i in self._region.body):
                self._take(node)
                return
        elif any(i in expert_of for i in node.all_input_nodes):
            self._join(node)
            return
        elif move_name(node) in CUTS and self._is_by_expert(node):
            source, along = self._now(moved(node)), cut_dim(node)
            size = int(value_of(node)[0].shape[along])
            sizes = [size] * len(self._experts)
            self.env[node] = self._emit.call(torch.split, source, sizes, along)
            return
        if self._adds_bias_apart(node):
            self._add_bias_apart(node)
        else:
            self._pieces.replay(node, self.env, len(self._experts))

    def _adds_bias_apart(self, node: fx.Node) -> bool:
        """Whether torch adds the bias after the product: `F.linear` does for rows with gaps.

        The only expert of a chunk has rows without gaps, for which it would add it inside.
        """
        linear = linear_of(node)
        if linear is None or linear.bias is None or len(self._experts) > 1:
            return False
        rows = tensor_of(linear.x)
        return rows is not None and not rows.is_contiguous()

    def _add_bias_apart(self, node: fx.Node) -> None:
        linear = linear_of(node)
        assert linear is not None
        product = self._emit.instead(
            node, node.target, self._now(linear.x), self._now(linear.weight)
        )
        self.env[node] = self._emit.instead(node, torch.add, product, self._now(linear.bias))

    def _is_by_expert(self, cut: fx.Node) -> bool:
        return all(user in self._region.expert_of for user in cut.users)

    def _now(self, node: fx.Node) -> Any:
        return self.env.get(node, node)

    def _take(self, node: fx.Node) -> None:
        """Emit what takes one expert's part of all: it has another index among the chunk's."""
        index, source = self._region.expert_of[node] - self._experts.start, node.args[0]
        assert isinstance(source, fx.Node)
        if move_name(source) in CUTS or operator_name(source) == "unbind":
            self.env[node] = self._emit.call(operator.getitem, self._now(source), index)
            return
        found = one_index(node)
        assert found is not None
        self.env[node] = self._emit.method("select", self._now(source), found[0], index)

    def _join(self, node: fx.Node) -> None:
        """Emit what joins the parts of all experts, of the chunk's alone."""
        parts = [self.env[part] for part in joined(node) if part in self.env]
        kwargs = {name: given for name, given in node.kwargs.items() if name != "tensors"}
        self.env[node] = self._emit.instead(node, node.target, parts, *node.args[1:], **kwargs)


NOT_TRIED: Final = "its operators could not be tried without values"


MOVES: Final = SAME_VALUES | frozenset(
    {
        "_unsafe_view", "cat", "stack", "repeat", "slice_backward", "select_backward",
        "split_backward", "new_zeros", "zeros", "zeros_like", "empty_like", "new_empty_strided",
        "empty", "ones_like", "fill", "zero", "constant_pad_nd",
    }
)  # fmt: skip
"""Operators that move elements, or make constants, beside those that give views."""


@dataclass(frozen=True, slots=True)
class Trial:
    """What was found; "" is nothing."""

    refused: str = ""
    """Why a chunk does not run the operators of the whole."""
    last_bits: str = ""
    """Why last bits may depend on which experts a chunk has."""


def try_chunks(region: CapacityRegion, bounds: Sequence[range]) -> Trial:
    """Try chunks of these experts."""
    try:
        whole, parts = _whole(region), _parts(region, bounds)
    except (*UNTRACEABLE, NotImplementedError) as error:
        first_line = str(error).partition("\n")[0]
        return Trial(refused=f"{NOT_TRIED}: {type(error).__name__}: {first_line}")
    pairs = [
        (n, _arithmetic(whole.get(n, [])), _arithmetic(c)) for p in parts for n, c in p.items()
    ]
    for node, all_of_it, some in pairs:
        if [call.func for call in all_of_it] != [call.func for call in some]:
            said = "runs other operators for a part of the experts"
            return Trial(refused=f"{operator_at(node)}: {said}")
    return Trial(last_bits=next(_last_bits(pairs), ""))


def _last_bits(pairs: Sequence[tuple[fx.Node, list[Call], list[Call]]]) -> Iterator[str]:
    for node, whole, part in pairs:
        if said := bits().experts(whole, part):
            yield f"{operator_at(node)}: {said}"


def _arithmetic(calls: Sequence[Call]) -> list[Call]:
    """Return the operators that compute."""
    return [call for call in calls if not (call.func.is_view or call.name in MOVES)]


def _run(region: CapacityRegion) -> FakeRun:
    fake = fake_mode_of([value_of(node) for node in region.body])
    if fake is None:
        raise TypeError("tensors of another kind")
    return FakeRun(fake, modes(region.result.graph), region.result)


def _whole(region: CapacityRegion) -> dict[fx.Node, list[Call]]:
    run, env = _run(region), dict[fx.Node, object]()
    for node in region.body:
        env[node] = run.copy(node, env)
    result = env[region.result]
    assert isinstance(result, torch.Tensor)
    run.go_back(result)
    return run.operators


def _parts(region: CapacityRegion, bounds: Sequence[range]) -> list[dict[fx.Node, list[Call]]]:
    """Return the operators of each node in every chunk."""
    found = []
    for number, experts in enumerate(bounds):
        run = _run(region)
        pieces = pieces_of(region, run, bounds)
        chunk = CapacityChunk(run, region, pieces, experts)
        chunk.env.update({source: pieces.cut(source)[number] for source in region.cut})
        for node in region.body:
            chunk.replay(node)
        run.go_back(chunk.env[region.result])
        found.append(run.operators)
    return found
