"""A region's body as the aten operators it runs, each with the graph's node that runs it.

Contract
    The body runs once on fake tensors, under the grad mode and the autocast that the graph runs it
    under, and they require gradients where the tracer's do: functions look at both. Writes in
    place are noted like any other operator. What it makes has the types that the tracer found.
    What the host reads is not read again: sizes stay the symbols the tracer gave them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.inner_graphs import is_higher_order
from moe_compile.graph.modes import Mode, modes, running_under
from moe_compile.graph.observation import alike, running_on
from moe_compile.graph.open_sorts import is_open_sort, stable_call
from moe_compile.graph.query import is_launch, tensor_of, value_of, waits_on
from moe_compile.journal.reasons import Reason
from moe_compile.proof.constant_nodes import constant_nodes
from moe_compile.proof.inner_run import InnerRun, NotRun, run_node, runs_graphs
from moe_compile.proof.trace_steps import (
    Dispatched,
    HostRead,
    NotFollowed,
    Operator,
    Produced,
    Step,
    Trace,
)
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_domain import Unproven

UNTRACEABLE = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError)
"""What running a node on fake tensors may raise where this torch cannot trace it."""


class _Recorder(TorchDispatchMode):
    """Notes every operator that makes or writes tensors."""

    def __init__(self, made_stable: frozenset[fx.Node]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.node: fx.Node | None = None
        self.made_stable = made_stable

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        leaves = pytree.tree_leaves(out)
        makes_tensors = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
        if self.node is not None and (makes_tensors or func._schema.is_mutable):
            stable = self.node in self.made_stable
            call = stable_call(func, args, kwargs) if stable else (func, args, kwargs)
            self.steps.append(Operator(self.node, *call, out))
        return out


@dataclass(slots=True)
class _Runner:
    """Runs the nodes of one body, one by one."""

    region: MoERegion
    recorder: _Recorder
    modes: Mapping[fx.Node, Mode]
    dispatched: Mapping[fx.Node, fx.Node]
    """Dispatch -> what is read of it."""
    inputs: list[Produced] = field(default_factory=list)
    env: dict[fx.Node, Any] = field(default_factory=dict)

    def run(self, sources: list[fx.Node], nodes: list[fx.Node], tensors: tuple[Any, ...]) -> None:
        for source, tensor in zip(sources, tensors, strict=True):
            self.inputs.append(Produced(source, tensor))
            self.env[source] = tensor
        for node in nodes:
            self.recorder.node = node
            try:
                with running_under(self.modes[node]):
                    self._step(node)
            except NotRun as error:
                raise _Stopped(node, error.why) from error
            except UNTRACEABLE as error:
                detail = f"{type(error).__name__}: {str(error).splitlines()[:1]}"
                raise _Stopped(node, Unproven(Reason.UNKNOWN_OPERATOR, detail)) from error
        for one in self.region.combined:
            self.recorder.steps.append(Produced(one.launch, self._value(one.sent)))
        self.recorder.node = None

    def _step(self, node: fx.Node) -> None:
        steps = self.recorder.steps
        if node in self.dispatched:
            steps.append(Dispatched(node, self._value(self.dispatched[node])))
        elif node.op == "call_method" and node.target == "item":
            steps.append(HostRead(node, self._value(node.args[0])))
            self.env[node] = value_of(node)
        elif is_higher_order(node) and not runs_graphs(node):
            self._not_followed(node)
        else:
            made = self.env[node] = self._made(node)
            if (types := _types(made)) != (found := _types(value_of(node))) and found:
                detail = f"traced with types {types}, found to be {found}"
                raise _Stopped(node, Unproven(Reason.UNKNOWN_OPERATOR, detail))
            if isinstance(made, torch.Tensor):
                steps.append(Produced(node, made))

    def _made(self, node: fx.Node) -> Any:
        if not is_higher_order(node):
            return run_node(node, self._value)
        return InnerRun(self._value, self.recorder.steps, node).higher_order(node)

    def _not_followed(self, node: fx.Node) -> None:
        """Take what a higher-order operator writes for anything computed from what it reads."""
        written = written_arguments(node)
        if not written or value_of(node) is not None:
            raise _Stopped(node, Unproven(Reason.UNKNOWN_OPERATOR, str(node.target)))
        read = tuple((n, self._value(n)) for n in node.all_input_nodes)
        inputs = tuple(t for _, t in read if isinstance(t, torch.Tensor))
        for target in dict.fromkeys(written):
            self.recorder.steps.append(NotFollowed(node, self._value(target), inputs, read))

    def _value(self, node: Any) -> Any:
        if node in self.env:
            return self.env[node]
        value = value_of(node)
        if isinstance(value, torch.Tensor) or value is None:
            raise _Stopped(node, Unproven(Reason.UNKNOWN_OPERATOR, "read before it was run"))
        return value


def _types(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


class _Stopped(Exception):
    """Running stopped at `node`."""

    def __init__(self, node: fx.Node, why: Unproven) -> None:
        super().__init__(node.name)
        self.node, self.why = node, why


def trace_body(region: MoERegion, *, may_round: bool = False) -> Trace | tuple[fx.Node, Unproven]:
    """Return what runs between dispatch and combine, or the node where tracing stopped.

    `may_round`: sorts that leave the order of rows open are taken for stable ones.
    """
    received = {one.launch: one.result for one in region.dispatched}
    combines = [one.launch for one in region.combined]
    after = {*combines, *(wait for launch in (*combines, *received) for wait in waits_on(launch))}
    constants = constant_nodes(region)
    body = [node for node in region.body if node not in after]
    for node in body:
        if is_launch(node) and node not in received:
            return node, Unproven(Reason.COMMUNICATES)
    sources = [region.counts, region.received_counts, *received.values()]
    sources += [n for n in region.others if tensor_of(n) is not None and n not in constants]
    made_stable = frozenset(filter(is_open_sort, body)) if may_round else frozenset()
    runner = _Runner(region, _Recorder(made_stable), modes(region.result.graph), received)
    try:
        _run_on_fakes(runner, sources, [*constants, *body])
    except _Stopped as stopped:
        return stopped.node, stopped.why
    return Trace(tuple(runner.inputs), tuple(runner.recorder.steps), made_stable)


def _run_on_fakes(runner: _Runner, sources: list[fx.Node], nodes: list[fx.Node]) -> None:
    given = [value_of(node) for node in sources]
    fake = next(t for t in given if isinstance(t, FakeTensor)).fake_mode
    with running_on(fake) as stack:
        tensors = tuple(map(alike, given))  # whatever the body does to their form
        stack.enter_context(runner.recorder)
        runner.run(sources, nodes, tensors)
