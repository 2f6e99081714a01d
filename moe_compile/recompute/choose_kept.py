"""The choice of `recompute = "price"`: what the forward keeps for the backward, by predicted time.

Contract
    A function of the joint graph, the options and the hardware profile; nothing is measured.
    torch's partitioner makes every candidate, from policies that say of each step whether it is
    kept; none of its settings and no policy is left changed. Collectives are the same in all
    candidates, so nothing that ranks share follows from the choice.
    A candidate is priced by the schedules of its forward and its backward.

Pseudo-code
    default = torch's partition without a budget; done if it fits
    for prices in (our times, our times where the backward waits)
        some choices that fit into the budget, by prices that add up (`fill_budget.py`)
        have torch part the graph so; again for less where it keeps more than that
    take the fastest that fits; where none does, the one that keeps least
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch._functorch.config as functorch_config
import torch.distributed as dist
import torch.fx as fx
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import DeviceMesh

from moe_compile.cost.cost_model import estimate_costs
from moe_compile.cost.sizes import NominalSizes, nominal_hints
from moe_compile.plan.state import CompileState
from moe_compile.recompute.fill_budget import filling
from moe_compile.recompute.kept import computed_again, kept_storages, results_of
from moe_compile.recompute.never_again import keep_what_is_never_computed_again
from moe_compile.recompute.policies import BUDGET, SOLVER, chosen_policies, forget_choice
from moe_compile.recompute.prices import beside_waits, in_ns
from moe_compile.recompute.storages import Kept, Storages
from moe_compile.schedule.choose_schedule import choose_schedule
from moe_compile.schedule.liveness import Liveness
from moe_compile.schedule.schedule_problem import ScheduleProblem
from moe_compile.schedule.simulate import simulate

ESTIMATOR: Final = "activation_memory_budget_runtime_estimator"
DRAWS: Final = "visualize_memory_budget_pareto"
"""Setting by which torch draws its own curve, by many more solutions."""
WEIGHTLESS: Final = "unsafe_treat_script_objects_as_zero_size"
"""Setting by which objects among a graph's inputs are taken to hold no tensors."""
FINALISTS: Final = 2
"""Choices by each kind of prices that are partitioned, and priced by their schedules."""
ROUNDS: Final = 2
"""Times that this is done, the second for less, where torch kept more than was chosen."""

Modules = tuple[fx.GraphModule, fx.GraphModule]
Partitioner = Callable[[], Modules]
Phases: TypeAlias = "tuple[Scheduled, Scheduled]"

TORCHS_DEFAULT: Final = "torch's default"
TORCHS_PRICES: Final = "operations, as torch counts them"
"""torch's solver with its own estimator: what the choice is compared with."""
OUR_PRICES: Final = "predicted time"
FREE_WAITS: Final = "predicted time, less time in which the backward waits"


@dataclass(frozen=True, kw_only=True)
class Partition:
    """A forward and a backward graph, and what they keep and take."""

    modules: Modules
    prices: str
    """Prices by which it was decided what is kept."""
    kept: Mapping[fx.Node, int]
    """Forward nodes whose tensors are kept for the backward alone, with their bytes."""
    again: frozenset[str]
    """Names of nodes that both graphs run."""
    schedule: Callable[[Partition], Phases]

    @functools.cached_property
    def phases(self) -> Phases:
        """Return forward and backward in their schedules, which take long to find."""
        return self.schedule(self)

    @property
    def kept_bytes(self) -> int:
        """Return the bytes kept for the backward alone."""
        return sum(self.kept.values())

    @property
    def us(self) -> float:
        """Return the predicted time of forward and backward, microseconds."""
        return sum(phase.step_us for phase in self.phases)


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The partition to use, and the one that torch makes without a budget."""

    partition: Partition
    default: Partition
    budget_bytes: int

    @property
    def figures(self) -> dict[str, float]:
        """Return bytes, and predicted microseconds, by the names that reports have."""
        names = {node.name for node in self.partition.kept}
        dropped = sum(b for node, b in self.default.kept.items() if node.name not in names)
        again = self.partition.again - self.default.again
        again_us = self.partition.phases[1].compute_us(again) if again else 0.0
        added_us = max(0.0, self.partition.us - self.default.us) if again else 0.0
        return {
            "kept_bytes_before": self.default.kept_bytes,
            "kept_bytes": self.partition.kept_bytes,
            "kept_bytes_allowed": self.budget_bytes,
            "again_bytes": dropped,
            "again_us": again_us,
            "again_hidden_us": max(0.0, again_us - added_us),
        }


def choose_kept(
    joint: fx.GraphModule, state: CompileState, partition: Partitioner, num_results: int
) -> Chosen:
    """Return the fastest partition of `joint` that `activation_budget` allows.

    `partition` runs torch's partitioner on `joint`, under the settings that there are then. The
    first `num_results` values that the forward returns are the program's.
    """
    sizes = NominalSizes(dict(state.nominal_sizes))
    sizes.learn(joint.graph)
    with nominal_hints(joint.graph, sizes):
        search = Search(joint, state, sizes, partition, num_results)
        default = search.default()
        budget = budget_bytes(state.config.activation_budget, default.kept_bytes)
        if default.kept_bytes <= budget:
            return Chosen(partition=default, default=default, budget_bytes=budget)
        keep_what_is_never_computed_again(joint.graph)
        return search.choose(default, budget)


def holds_tensors_alone(graph: fx.Graph) -> bool:
    """Whether all objects in the graph but tensors are groups and meshes: these keep none."""
    values = (node.meta.get("val") for node in graph.nodes)
    objects = [value for value in values if isinstance(value, FakeScriptObject)]
    return all(isinstance(one.real_obj, dist.ProcessGroup | DeviceMesh) for one in objects)


def budget_bytes(asked: float, default_bytes: int) -> int:
    """Return the bytes that `activation_budget` allows: a share of the default's, or bytes."""
    return int(asked) if asked > 1 else int(asked * default_bytes)


class Search:
    """Runs of torch's partitioner on one joint graph."""

    def __init__(
        self,
        joint: fx.GraphModule,
        state: CompileState,
        sizes: NominalSizes,
        partition: Partitioner,
        num_results: int,
    ) -> None:
        """Prepare; nothing is partitioned yet. Parameters are those of `choose_kept`."""
        self.joint, self._state, self.sizes = joint, state, sizes
        self._partition, self.num_results = partition, num_results
        self._made: dict[frozenset[str], Partition] = {}
        self._torchs: dict[float, Partition] = {}
        self._priced: dict[tuple[frozenset[str], frozenset[str]], Phases] = {}

    def default(self) -> Partition:
        """Return torch's partition without a budget."""
        return self._new(TORCHS_DEFAULT, {BUDGET: 1.0})

    def choose(self, default: Partition, budget: int) -> Chosen:
        """Return the fastest candidate of at most `budget` bytes, or the one that keeps least."""
        found = self._candidates(default, budget)
        fitting = [one for one in found if one.kept_bytes <= budget]
        if fitting:
            best = min(fitting, key=lambda one: one.us)
        else:
            best = min((default, *found), key=lambda one: (one.kept_bytes, one.us))
        return Chosen(partition=best, default=default, budget_bytes=budget)

    def _candidates(self, default: Partition, budget: int) -> list[Partition]:
        """Return partitions for the budget, by all kinds of prices."""
        graph = self.joint.graph
        storages = Storages.of(graph, results_of(graph, self.num_results), self.sizes)
        costs = estimate_costs(graph, self.sizes, self._state.hardware)
        us = {node.name: cost.compute_us for node, cost in costs.items()}
        backward = default.phases[1]
        kinds = {
            OUR_PRICES: [in_ns(us[step.name]) for step in storages.steps],
            FREE_WAITS: beside_waits(storages, us, backward.problem, backward.order),
        }
        allowed = budget
        found: list[Partition] = []
        for _ in range(ROUNDS):
            found += [
                self._as_chosen(storages, kept, prices)
                for prices, ns in kinds.items()
                for kept in filling(storages, ns, allowed, FINALISTS)
            ]
            excess = min(one.kept_bytes for one in found) - budget
            if excess <= 0 or excess >= allowed:
                break
            allowed -= excess
        return found

    def _as_chosen(self, storages: Storages, kept: Kept, prices: str) -> Partition:
        """Return the partition that keeps what was chosen."""
        again = frozenset(storages.steps[number].name for number in kept.again)
        if again not in self._made:
            with chosen_policies(self.joint, storages, again) as settings:
                one = self._made[again] = self._new(prices, settings)
            for module in one.modules:
                forget_choice(module.graph, storages)
        return self._made[again]

    def by_torchs_solver(self, share: float) -> Partition:
        """Return what torch's solver makes for a budget of `share`, by its own estimator."""
        if share not in self._torchs:
            self._torchs[share] = self._new(TORCHS_PRICES, {BUDGET: share})
        return self._torchs[share]

    def _new(self, prices: str, settings: Mapping[str, Any]) -> Partition:
        changed = {ESTIMATOR: "flops", SOLVER: "dp", DRAWS: False, **settings}
        if hasattr(functorch_config, WEIGHTLESS) and holds_tensors_alone(self.joint.graph):
            changed[WEIGHTLESS] = True
        with functorch_config.patch(changed):
            modules = self._partition()
        forward, backward = (module.graph for module in modules)
        kept = kept_storages(forward, backward, self.num_results, self.sizes)
        again = computed_again(forward, backward)
        return Partition(
            modules=modules, prices=prices, kept=kept, again=again, schedule=self._scheduled
        )

    def _scheduled(self, one: Partition) -> Phases:
        key = frozenset(node.name for node in one.kept), one.again
        if key not in self._priced:
            forward, backward = (module.graph for module in one.modules)
            given = self._state, self.sizes
            self._priced[key] = Scheduled.of(forward, *given), Scheduled.of(backward, *given)
        return self._priced[key]


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """A graph in the order that the schedule gives it."""

    problem: ScheduleProblem
    order: tuple[int, ...]
    step_us: float

    @classmethod
    def of(cls, graph: fx.Graph, state: CompileState, sizes: NominalSizes) -> Scheduled:
        """Schedule as the pass `schedule_exchanges` would; the graph stays as it is."""
        config = state.config
        problem = ScheduleProblem.of(
            graph,
            estimate_costs(graph, sizes, state.hardware),
            keeps_program=not config.equal_tokens,
            is_in_parts=state.is_in_parts,
        )
        order = tuple(range(len(problem.nodes)))
        if config.schedule:
            chosen = choose_schedule(
                problem,
                Liveness.of(problem.nodes, sizes),
                config.max_memory_increase,
                config.step_peak_bytes,
                is_chunked=state.is_chunked,
            )
            order = chosen.chosen.order
        return cls(problem=problem, order=order, step_us=simulate(problem, order).step_us)

    def compute_us(self, names: Collection[str]) -> float:
        """Return the time of the nodes of these names on the compute stream."""
        pairs = zip(self.problem.nodes, self.problem.compute_us, strict=True)
        return sum(us for node, us in pairs if node.name in names)
