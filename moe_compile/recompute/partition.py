"""torch's partitioner, and what options have it keep: the parts that `recompute_modules` names are
computed again, and with `recompute = "price"` the rest is chosen.

Contract
    Ranks decide alike: by price only where `equal_tokens` is promised and sizes are static. Where
    they are not, the graph is partitioned as with "save_exchanges", and the journal says why.
    Of a graph that launches nothing, a body compiled by itself say, all is kept.
"""

from __future__ import annotations

import functools
from typing import Any, Final

import torch._functorch.config as functorch_config
import torch.fx as fx
from functorch.compile import min_cut_rematerialization_partition

from moe_compile.allowed_values import NAMED
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.cost_model import estimate_costs
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import has_static_inputs, is_launch
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from moe_compile.recompute.choose_kept import Modules, Partitioner, Scheduled, choose_kept
from moe_compile.recompute.kept import computed_again, kept_storages, results_of
from moe_compile.recompute.named_again import NamedAgain, figures
from moe_compile.recompute.policies import BUDGET
from moe_compile.recompute.prices import beside_waits
from moe_compile.recompute.storages import Storages

NAME: Final = "recompute"
"""What the journal calls the choice."""
CANDIDATE: Final = "what the forward pass keeps for the backward pass"


def option_that_decides(config: MegaMoEConfig) -> str:
    """Return the option, with its value, that has megamoe decide what is kept; "" for none."""
    if config.recompute == "price":
        return "recompute = 'price'"
    if config.recompute_modules:
        return f"recompute_modules = {list(config.recompute_modules)}"
    return ""


def partitioned(
    joint: fx.GraphModule,
    joint_inputs: Any,
    state: CompileState,
    *,
    num_fwd_outputs: int,
    **settings: Any,
) -> Modules:
    """Return the forward and the backward graph; figures of a choice are noted in `state`.

    `settings` are those that AOTAutograd hands to a partitioner.
    """
    partition = functools.partial(
        min_cut_rematerialization_partition,
        joint,
        joint_inputs,
        num_fwd_outputs=num_fwd_outputs,
        **settings,
    )
    if state.config.recompute_modules:
        return _with_named_parts(joint, state, partition, num_fwd_outputs)
    if state.config.recompute == "price":
        return _by_price(joint, state, partition, num_fwd_outputs)
    return partition()


def _by_price(
    joint: fx.GraphModule, state: CompileState, partition: Partitioner, num_results: int
) -> Modules:
    left = _left(joint.graph, state.config)
    if left is not None:
        state.journal.add("joint", PassReport(pass_name=NAME, skipped=(left,)))
    if left is not None or not any(map(is_launch, joint.graph.nodes)):
        with functorch_config.patch({BUDGET: 1.0}):
            return partition()
    chosen = choose_kept(joint, state, partition, num_results)
    state.kept = chosen.figures
    return chosen.partition.modules


def _with_named_parts(
    joint: fx.GraphModule, state: CompileState, partition: Partitioner, num_results: int
) -> Modules:
    """Return graphs whose backward computes the parts of `recompute_modules` again."""
    standing = {node.name for node in joint.graph.nodes if "recompute" in node.meta}
    with functorch_config.patch({BUDGET: 1.0}):  # nothing but the named parts, or by our price
        default = partition()  # torch puts another graph into `joint`, with policies of its own
    results = results_of(joint.graph, num_results)
    named = NamedAgain.of(joint.graph, results, state.config, standing)
    is_by_price = state.config.recompute == "price"
    modules, kept = default, frozenset[str]()
    named.write(joint.graph)
    if is_by_price:
        modules = _by_price(joint, state, partition, num_results)
    elif named.nodes:
        again = computed_again(*(module.graph for module in default))
        kept = named.keep_the_rest(joint.graph, again | named.names)
        with functorch_config.patch({BUDGET: 1.0}):
            modules = partition()
    measures = _figures(joint.graph, state, named, (default, modules), num_results)
    if measures and not state.kept:
        state.kept = {key: measures[key] for key in ("kept_bytes_before", "kept_bytes")}
    for module in (joint, *modules):
        named.forget(module.graph, kept, standing)
    report = PassReport(
        pass_name=NAMED, applied=tuple(named.nodes), skipped=named.left, measures=measures
    )
    state.journal.add("joint", report)
    return modules


def _figures(
    graph: fx.Graph,
    state: CompileState,
    named: NamedAgain,
    parted: tuple[Modules, Modules],
    num_results: int,
) -> dict[str, float]:
    """Return bytes kept without and with the named parts, and the price of each part."""
    if not named.nodes or state.is_priced:
        return {}
    sizes = NominalSizes(dict(state.nominal_sizes))
    sizes.learn(graph)
    default, now = ((one.graph, other.graph) for one, other in parted)
    before = kept_storages(*default, num_results=num_results, sizes=sizes)
    kept = kept_storages(*now, num_results=num_results, sizes=sizes)
    again = named.names - computed_again(*default)
    costs = estimate_costs(graph, sizes, state.hardware)
    us = {node.name: cost.compute_us for node, cost in costs.items()}
    own = {name: us[name] for name in again if name in us}
    hidden = dict[str, float]()
    if any(map(is_launch, default[1].nodes)):
        storages = Storages.of(graph, results_of(graph, num_results), sizes)
        scheduled = Scheduled.of(default[1], state, sizes)
        ns = beside_waits(storages, us, scheduled.problem, scheduled.order)
        priced = {step.name: 1e-3 * cost for step, cost in zip(storages.steps, ns, strict=True)}
        hidden = {name: max(0.0, own[name] - priced[name]) for name in own if name in priced}
    return {
        "kept_bytes_before": float(sum(before.values())),
        "kept_bytes": float(sum(kept.values())),
        **dict(figures(named, before, kept, own, hidden)),
    }


def _left(graph: fx.Graph, config: MegaMoEConfig) -> Verdict | None:
    """Return why nothing is chosen by price; None where it is."""
    if not (config.equal_tokens and has_static_inputs(graph)):
        return Verdict(candidate=CANDIDATE, reason=Reason.NO_PRICE, option=NAME)
    if config.activation_budget == 1:
        detail = "activation_budget is 1.0, so everything is kept"
        return Verdict(candidate=CANDIDATE, reason=Reason.NOT_ASKED, detail=detail, option=NAME)
    return None
