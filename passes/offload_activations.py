"""Copy activations that the backward pass reads late to host memory, and back before it does.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value, and the backward pass as often as it is run: the copy on the host stays.
    Changes both graphs of one joint graph, just after they were parted: the forward returns the
    copy on the host in place of the tensor, the backward is given it and copies it back.
    Only with `equal_tokens`, and only tensors whose sizes are numbers: then all ranks decide alike.

    forward:   x = ...;  h = offload(x);  wait(h, while x lives)               returns h, not x
    backward:  given h;  y = reload(h);   wait(y, while h lives);  ...         reads y, not x

A tensor leaves the device if its memory is free once the forward graph has run: no input, no result
of the program, and nothing else that is kept shares its storage. Where a view of it is kept, the
backward takes that view again. The pass looks for the storage on the graph, through views and
waits. Where it is mistaken nothing is wrong but the saving: no storage is freed by force
(`ops/host_copies.py`), memory goes where the last reader goes.

Which tensors
    worth = bytes times the time between the last read of the forward graph and the first of the
            backward graph, within these graphs
    by worth, the largest first: take a tensor if it is within the budget, and all copies taken run
    beside compute: to the host between the tensor's making and the end of the forward graph, back
    between the begin of the backward graph and the tensor's first read, one after another
    Collectives are taken to be hidden: a graph has at least the time of its compute.

The copies stand where they are right in any order: a launch behind the last reader, the wait at the
end; back, both before the first reader. `schedule_exchanges` moves them.
torch has a pass of its own for this (`activation_offloading.py`). Its waits free storages by force,
which generated code may have given to another tensor, and the copy on the host with the first
backward pass; it takes no account of the link, and offloads inputs that the caller holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.cost.cost_model import estimate_costs
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.aliases import AliasClasses
from moe_compile.graph.edit import (
    Emitter,
    ValuedEmitter,
    change_value,
    erase_unused,
    read_instead,
)
from moe_compile.graph.precedence import is_view
from moe_compile.graph.query import operator_at, tensor_of
from moe_compile.hardware import HardwareProfile
from moe_compile.hardware.profile import NO_HOST
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.ops.host_copies import why_no_copies
from moe_compile.plan.state import CompileState, Partitioned
from passes.contract import Fact, GraphPass

OPTION: Final = "offload_budget"
LEAST_BYTES: Final = 2**20
"""Bytes of the smallest tensor that is copied: a smaller copy takes longer to start than to run."""


@dataclass(frozen=True, slots=True)
class Pair:
    """An activation that the forward graph keeps, and the input of the backward that brings it."""

    node: fx.Node
    """What is kept: the tensor, or a view of it."""
    given: fx.Node
    tensor: fx.Node
    """The tensor itself."""
    views: tuple[fx.Node, ...]
    """Views from the tensor to what is kept, in their order: the backward takes them again."""

    @property
    def value(self) -> torch.Tensor:
        """Return the tensor's fake value."""
        value: torch.Tensor = self.tensor.meta["val"]
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A tensor that the forward graph keeps for the backward graph."""

    pair: Pair
    nbytes: int
    made_us: float
    """When it is made, from the begin of the forward graph, by its compute alone."""
    idle_us: float
    """From its last read in the forward graph to its first in the backward graph."""
    needed_us: float
    """When it is first read, from the begin of the backward graph."""
    copy_us: float
    """Time of a copy, one way."""

    @property
    def worth(self) -> float:
        """Return bytes times the time for which nothing reads them."""
        return self.nbytes * self.idle_us


@dataclass(frozen=True)
class OffloadActivations(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "offload_activations"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Choose the tensors, then change the forward graph `graph` and the backward graph."""
        both = state.partitioned
        if both is None or not state.config.offload_budget:
            return PassReport(pass_name=self.name)
        pairs = _of_one_device(list(_pairs(graph, both)))
        if why := _what_forbids(pairs, both, state):
            return PassReport(pass_name=self.name, skipped=(why,))
        sizes = NominalSizes(dict(state.nominal_sizes))
        sizes.learn(graph)
        ends = _ends_us(graph, sizes, state.hardware)
        verdicts = list(_refused(graph, both, pairs))
        refused = {verdict.candidate for verdict in verdicts}
        free = [pair for pair in pairs if pair.node.name not in refused]
        kept = list(_measured(ends, both, free, sizes, state.hardware))
        kept_bytes = sum(sizes.nbytes(pair.value) for pair in pairs)
        budget = state.config.offload_budget
        limit = budget if budget > 1 else budget * kept_bytes
        chosen = _chosen(kept, limit, max(ends.values()), verdicts)
        for one in chosen:
            _reload(one.pair)  # first: it takes views again that are erased with their last reader
            _offload(graph, one.pair)
        both.backward.lint()
        return PassReport(
            pass_name=self.name,
            applied=tuple(one.pair.node.name for one in chosen),
            skipped=tuple(verdicts),
            measures={
                "kept_bytes": float(kept_bytes),
                "offloaded_bytes": float(sum(one.nbytes for one in chosen)),
                "copy_us": sum(one.copy_us for one in chosen),
                **{f"{one.pair.node.name}_bytes": float(one.nbytes) for one in chosen},
            },
        )


def _pairs(graph: fx.Graph, both: Partitioned) -> Iterator[Pair]:
    """Yield what the forward graph keeps for the backward graph, but inputs and views of them.

    The partitioner gives an input of the backward the name of what it brings.
    """
    inputs = {node.name: node for node in both.backward.find_nodes(op="placeholder")}
    classes = AliasClasses(graph.nodes)
    held = classes.of(*graph.find_nodes(op="placeholder"), *graph.find_nodes(op="get_attr"))
    for node in dict.fromkeys(_outputs(graph)[both.num_results :]):
        if not isinstance(node, fx.Node) or tensor_of(node) is None:
            continue
        tensor, views = node, list[fx.Node]()
        while is_view(tensor) and len(tensor.all_input_nodes) == 1:
            views.insert(0, tensor)
            tensor = tensor.all_input_nodes[0]
        is_made = held.isdisjoint(classes.of(node))
        if is_made and (given := inputs.get(node.name)) is not None and given.users:
            yield Pair(node, given, tensor, tuple(views))


def _of_one_device(pairs: Sequence[Pair]) -> list[Pair]:
    """Return those of the first device that is not the host, of the host where there is none."""
    devices = sorted({pair.value.device for pair in pairs}, key=lambda d: (d.type == "cpu", str(d)))
    return [pair for pair in pairs if pair.value.device == devices[0]]


def _outputs(graph: fx.Graph) -> Sequence[Any]:
    (output,) = graph.find_nodes(op="output")
    values: Sequence[Any] = output.args[0]
    return values


def _what_forbids(pairs: Sequence[Pair], both: Partitioned, state: CompileState) -> Verdict | None:
    """Return why nothing of the graph is copied, None where something may be.

    In graphs that are not to run, tensors on the host stand for those of the profile's device.
    """
    if not pairs:
        return _left(
            "graph",
            Reason.ALREADY_DONE,
            "the forward pass keeps no activation for the backward pass, so there is nothing to "
            "copy",
        )
    if not state.config.schedule:
        return _left(
            "graph", Reason.NOT_ASKED, "megamoe.schedule is off, so no compute would hide a copy"
        )
    if not state.config.equal_tokens:
        return _left("graph", Reason.TOKENS_MAY_DIFFER)
    if state.hardware.host_link is None:
        detail = (
            f"hardware profile {state.hardware.name} must have a table host_link, which "
            "gives the rate of copies to the host, and has none"
        )
        return _left("graph", Reason.NO_HOST_COPIES, detail)
    stands_for_device = not both.is_run and state.hardware.host != NO_HOST
    device = torch.device("cuda") if stands_for_device else pairs[0].value.device
    detail = why_no_copies(device)
    return _left("graph", Reason.NO_HOST_COPIES, detail) if detail else None


def _left(candidate: str, reason: Reason, detail: str = "") -> Verdict:
    return Verdict(candidate=candidate, reason=reason, detail=detail, option=OPTION)


def _refused(graph: fx.Graph, both: Partitioned, pairs: Sequence[Pair]) -> Iterator[Verdict]:
    """Yield a verdict on each tensor whose copy would free nothing, or is not known in size."""
    classes = AliasClasses(graph.nodes)
    outputs = [n for n in _outputs(graph) if isinstance(n, fx.Node)]
    results = set(outputs[: both.num_results])
    for pair in pairs:
        others = classes.of(*(n for n in outputs if n is not pair.node))
        is_shared = pair.node in results or not others.isdisjoint(classes.of(pair.tensor))
        if not all(type(size) is int for size in pair.value.shape):
            detail = (
                f"the size of {operator_at(pair.tensor)} must be known at compile time, and "
                "is known at run time only"
            )
            yield _left(pair.node.name, Reason.SIZE, detail)
        elif detail := _why_memory_stays(pair, is_shared=is_shared):
            said = f"{detail}: {operator_at(pair.tensor)}"
            yield _left(pair.node.name, Reason.MEMORY_STAYS, said)


def _why_memory_stays(pair: Pair, *, is_shared: bool) -> str:
    if is_shared or is_view(pair.tensor):
        return (
            "it shares memory with a result or with another kept tensor, so copying it would "
            "free nothing"
        )
    if not pair.value.is_contiguous():
        return "it is not contiguous, and its copy would take a buffer on the device"
    if pair.value.numel() * pair.value.element_size() < LEAST_BYTES:
        return "it has less than 1 MiB, so copying it would free too little"
    return ""


def _measured(
    ends: Mapping[fx.Node, float],
    both: Partitioned,
    pairs: Sequence[Pair],
    sizes: NominalSizes,
    hardware: HardwareProfile,
) -> Iterator[Kept]:
    """Yield the tensors with their times; see the module docstring."""
    link = hardware.host_link
    assert link is not None
    back = _ends_us(both.backward, sizes, hardware)
    classes = AliasClasses(ends)
    last_read = _last_read_us(ends, classes)
    for pair in pairs:
        read_us = max(last_read[one] for one in classes.of(pair.tensor))
        needed_us = min(back[reader.prev] for reader in _readers(pair.given))
        nbytes = sizes.nbytes(pair.value)
        yield Kept(
            pair=pair,
            nbytes=nbytes,
            made_us=ends[pair.tensor],
            idle_us=max(ends.values()) - read_us + needed_us,
            needed_us=needed_us,
            copy_us=link.copy_us(nbytes),
        )


def _ends_us(
    graph: fx.Graph, sizes: NominalSizes, hardware: HardwareProfile
) -> dict[fx.Node, float]:
    """Return when each node is over if compute alone takes time, in the graph's order."""
    costs = estimate_costs(graph, sizes, hardware)
    return dict(zip(graph.nodes, accumulate(costs[n].compute_us for n in graph.nodes), strict=True))


def _last_read_us(ends: Mapping[fx.Node, float], classes: AliasClasses) -> dict[int, float]:
    """Return class of tensors -> when the last node that makes or reads one of them is over."""
    last: dict[int, float] = {}
    for node, end in ends.items():
        if node.op != "output":
            last.update(dict.fromkeys(classes.of(node, *node.all_input_nodes), end))
    return last


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes that read a value, or a view of it."""
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _chosen(
    kept: Sequence[Kept], limit: float, end_us: float, verdicts: list[Verdict]
) -> list[Kept]:
    """Return the tensors to copy; add a verdict on each other."""
    chosen: list[Kept] = []
    for one in sorted(kept, key=lambda one: -one.worth):  # stable: of equal ones the first made
        if one.nbytes + sum(other.nbytes for other in chosen) > limit:
            detail = (
                f"offload_budget is used up by other tensors: {operator_at(one.pair.tensor)} "
                "stays on the device"
            )
            verdicts.append(_left(one.pair.node.name, Reason.NOT_ASKED, detail))
        elif not _are_hidden([*chosen, one], end_us):
            detail = (
                "the link to the host has no free time beside compute, and a copy takes "
                f"{one.copy_us:.0f} us each way"
            )
            verdicts.append(_left(one.pair.node.name, Reason.BY_PRICE, detail))
        else:
            chosen.append(one)
    return chosen


def _are_hidden(tensors: Sequence[Kept], end_us: float) -> bool:
    """Whether all copies run beside compute, each way one after another."""
    over = 0.0
    for one in sorted(tensors, key=lambda one: one.made_us):
        over = max(over, one.made_us) + one.copy_us
    back = 0.0
    for one in sorted(tensors, key=lambda one: one.needed_us):
        back += one.copy_us
        if back > one.needed_us:
            return False
    return over <= end_us


def _offload(graph: fx.Graph, pair: Pair) -> None:
    """Have the forward graph return the copy of the tensor on the host."""
    (output,) = graph.find_nodes(op="output")
    emit = Emitter(output)
    launch = emit.call(torch.ops.ao.offload.default, pair.tensor)
    wait = emit.call(torch.ops.ao.wait_tensor.default, launch, None, pair.tensor)
    on_host = _on(torch.device("cpu"), pair.value)
    for node in (launch, wait):
        change_value(node, on_host)
    read_instead(output, pair.node, wait)
    erase_unused(pair.views)


def _reload(pair: Pair) -> None:
    """Have the backward graph, given the copy on the host, copy it back before its first reader."""
    given, value = pair.given, pair.value
    readers = list(given.users)
    place = {node: i for i, node in enumerate(given.graph.nodes)}
    emit = ValuedEmitter(min(readers, key=place.__getitem__))
    change_value(given, _on(torch.device("cpu"), value))
    size, stride = list(value.shape), list(value.stride())
    launch = emit.call(torch.ops.ao.reload.default, given, value.device, size, stride)
    change_value(launch, _on(value.device, value))
    wait = emit.call(torch.ops.ao.wait_tensor.default, launch, None, given)
    change_value(wait, launch.meta["val"])
    kept = wait
    for view in pair.views:
        args, kwargs = fx.map_arg((view.args, view.kwargs), lambda _, at=kept: at)
        kept = emit.call(view.target, *args, **kwargs)
    for reader in readers:
        read_instead(reader, given, kept)


def _on(device: torch.device, value: torch.Tensor) -> torch.Tensor:
    """Return the fake value of a tensor like `value` on `device`."""
    with value.fake_mode:
        return torch.empty(value.shape, dtype=value.dtype, device=device)
