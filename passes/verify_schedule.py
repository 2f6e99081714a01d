"""Check the order a graph is about to run in: exchanges are awaited, and untouched in flight.

Contract
    Keeps     the graph: nothing is edited, a violation raises ContractViolation.
    Each collective or copy has a wait for each tensor it produces, the first of several counts,
    unless it is returned unawaited or nothing reads its data: of a collective recomputed in vain
    AOTAutograd removes the wait and leaves the launch. Between launch and wait nothing reads or
    writes what it receives nor writes what it sends, through views too; collectives stand in the
    planned order if one was planned.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field
from typing import ClassVar

import torch.fx as fx

from moe_compile.errors import ContractViolation
from moe_compile.graph.aliases import AliasClasses
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.effects import is_size_query
from moe_compile.graph.launch_order import LAUNCH_RANK
from moe_compile.graph.precedence import awaited, is_view
from moe_compile.graph.query import ends_transfer, is_launch, starts_transfer
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import GraphPass

NAME = "verify_schedule"


@dataclass(frozen=True)
class VerifySchedule(GraphPass):
    """Checks of waits and of memory in flight; see the module docstring."""

    name: ClassVar[str] = NAME
    after: ClassVar[frozenset[str]] = frozenset({"schedule_exchanges"})
    is_check: ClassVar[bool] = True

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:  # noqa: ARG002
        """Raise ContractViolation naming the node that breaks a rule."""
        launches = [node for node in graph.nodes if is_launch(node)]
        for transfer in filter(starts_transfer, graph.nodes):
            _check_waits(transfer)
        _check_order(launches)
        flights = _Flights(AliasClasses(graph.nodes))
        for node in graph.nodes:
            flights.visit(node)
        return PassReport(pass_name=NAME, measures={"num_verified_launches": float(len(launches))})


def _violation(node: fx.Node, what: str) -> ContractViolation:
    return ContractViolation(f"{NAME}: {node.name}: {what}")


def _check_waits(launch: fx.Node) -> None:
    """Raise unless each tensor of a launch is awaited, returned, or its data read by nothing."""
    results = [u for u in launch.users if u.target is operator.getitem] or [launch]
    for result in results:
        readers = _through_views(result)
        is_awaited = any(ends_transfer(reader) or reader.op == "output" for reader in readers)
        if readers and not is_awaited:
            raise _violation(
                launch, f"its result is read by {readers}, but nothing waits for it before"
            )


def _through_views(result: fx.Node) -> list[fx.Node]:
    """Return the readers of a tensor's data, views looked through."""
    readers: list[fx.Node] = []
    for user in result.users:
        if not is_size_query(user):
            is_looked_through = is_view(user) and not ends_transfer(user)
            readers.extend(_through_views(user) if is_looked_through else [user])
    return readers


def _check_order(launches: list[fx.Node]) -> None:
    planned = [n for n in launches if LAUNCH_RANK in n.meta]
    for earlier, later in itertools.pairwise(planned):
        if earlier.meta[LAUNCH_RANK] >= later.meta[LAUNCH_RANK]:
            raise _violation(
                later, f"it is launched after {earlier.name}, but the plan has it before"
            )


@dataclass(slots=True)
class _Flights:
    """Storages that are being received into or sent from, while nodes run in order."""

    classes: AliasClasses
    receiving: dict[int, fx.Node] = field(default_factory=dict)
    sending: dict[int, dict[fx.Node, None]] = field(default_factory=dict)
    """Class of tensors -> the launches that send it."""

    def visit(self, node: fx.Node) -> None:
        """Check the storages that one node touches, then start or end its flight."""
        if ends_transfer(node):
            self._land(node)
        elif not _reads_no_data(node):
            self._check(node)
        if starts_transfer(node):
            for memory in self.classes.of(node):
                self.receiving[memory] = node
            for memory in self._sent(node):
                self.sending.setdefault(memory, {})[node] = None

    def _check(self, node: fx.Node) -> None:
        for argument in node.all_input_nodes:
            for memory in self.classes.of(argument) & self.receiving.keys():
                launch = self.receiving[memory]
                raise _violation(node, f"reads {argument.name} before the wait for {launch}")
        for argument in written_arguments(node):
            for memory in self.classes.of(argument):
                for launch in self.sending.get(memory, ()):
                    raise _violation(node, f"writes {argument.name} while {launch} sends it")

    def _land(self, wait: fx.Node) -> None:
        launch = awaited(wait)
        if launch is None:
            return
        for memory in self.classes.of(wait):
            self.receiving.pop(memory, None)
        for memory in self._sent(launch):
            self.sending.get(memory, {}).pop(launch, None)

    def _sent(self, launch: fx.Node) -> frozenset[int]:
        return self.classes.of(*launch.all_input_nodes)


def _reads_no_data(node: fx.Node) -> bool:
    return (
        node.op == "output"
        or is_view(node)
        or is_size_query(node)
        or node.target is operator.getitem
    )
