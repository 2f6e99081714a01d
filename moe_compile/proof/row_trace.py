"""A region's body as the aten operators it runs, each with the graph's node that runs it.

Contract
    The body runs once on fake tensors, under the grad mode and the autocast that the graph runs it
    under; the tensors require gradients where the tracer's do: functions look at both. Writes in
    place are noted like any other operator. Results have the types that the tracer found.
    Host reads are not repeated: sizes stay the symbols the tracer gave them.
    The steps of a `Trace` have fake tensors, told apart by identity.

Graphs inside higher-order operators are run too: those of activation checkpoints, and those of
functions whose backward is written by hand.
Such a graph runs under its own modes, inside of those that its call runs under. Host reads and
collectives in it are refused. A backward written by hand runs once, on gradients of the form of
the results.

A tensor of a class of its own, such as a weight that quantizes itself in every product, decides
what operators on it compute, and what their gradients are. Nothing that reads one is trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.fx as fx
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from moe_compile.dims.record import UNTRACEABLE, Operator, Recorder
from moe_compile.graph.dependence import written_arguments
from moe_compile.graph.inner_graphs import CHECKPOINT, bodies, is_higher_order
from moe_compile.graph.memory import tensors_in
from moe_compile.graph.modes import Mode, changes_mode, modes, running_under
from moe_compile.graph.observation import alike, call, running_on
from moe_compile.graph.query import is_launch, operator_at, tensor_of, value_of, waits_on
from moe_compile.graph.torch_calls import is_open_sort, stable_call
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.constants import constant_nodes
from moe_compile.regions.regions import MoERegion


@dataclass(frozen=True, slots=True)
class Produced:
    """`node` produced `tensor`: an input of the body, or the result of one of its nodes.

    For a combine, the rows it sends.
    """

    node: fx.Node
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host read `tensor` at `node`, as the size `value_of(node)`."""

    node: fx.Node
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class NotFollowed:
    """`node` filled `tensor` from its `inputs`."""

    node: fx.Node
    tensor: torch.Tensor
    inputs: tuple[torch.Tensor, ...]
    read: tuple[tuple[fx.Node, Any], ...] = ()
    """Node -> the value `node` reads of it."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A dispatch happened, and brought `tensor`: sizes that it needs are known."""

    node: fx.Node
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class GradientOf:
    """`tensor` is the gradient that a function written by hand is given of its result `result`."""

    node: fx.Node
    tensor: torch.Tensor
    result: torch.Tensor


@dataclass(frozen=True, slots=True)
class GradientMade:
    """`tensor` is the gradient that a function written by hand gives its argument `argument`."""

    node: fx.Node
    tensor: torch.Tensor
    argument: torch.Tensor


Step = Operator | Produced | HostRead | NotFollowed | Dispatched | GradientOf | GradientMade


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of one body, in order."""

    inputs: tuple[Produced, ...]
    steps: tuple[Step, ...]
    made_stable: frozenset[fx.Node] = frozenset()
    """Sorts of the body that are taken for stable ones, and are not."""


@dataclass(slots=True)
class _Runner:
    """Runs the nodes of one body, one by one."""

    region: MoERegion
    recorder: Recorder
    steps: list[Step]
    modes: Mapping[fx.Node, Mode]
    dispatched: Mapping[fx.Node, fx.Node]
    """Dispatch -> the node that gives its result."""
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
                raise _Stopped(node, Left(Reason.UNKNOWN_OPERATOR, detail)) from error
        for one in self.region.combined:
            self.steps.append(Produced(one.launch, self._value(one.sent)))
        self.recorder.node = None

    def _step(self, node: fx.Node) -> None:
        if node in self.dispatched:
            self.steps.append(Dispatched(node, self._value(self.dispatched[node])))
        elif node.op == "call_method" and node.target == "item":
            self.steps.append(HostRead(node, self._value(node.args[0])))
            self.env[node] = value_of(node)
        elif is_higher_order(node) and not runs_graphs(node):
            self._not_followed(node)
        else:
            made = self.env[node] = self._made(node)
            if (types := _types(made)) != (found := _types(value_of(node))) and found:
                detail = (
                    f"its results have the dtypes {types} in megamoe's own trace, and differ "
                    f"from the graph's, {found}"
                )
                raise _Stopped(node, Left(Reason.UNKNOWN_OPERATOR, detail))
            if isinstance(made, torch.Tensor):
                self.steps.append(Produced(node, made))

    def _made(self, node: fx.Node) -> Any:
        if not is_higher_order(node):
            return run_node(node, self._value)
        return InnerRun(self._value, self.steps, node).higher_order(node)

    def _not_followed(self, node: fx.Node) -> None:
        """Treat tensors that a higher-order operator writes as any function of those it reads."""
        written = written_arguments(node)
        if not written or value_of(node) is not None:
            raise _Stopped(node, Left(Reason.UNKNOWN_OPERATOR, str(node.target)))
        read = tuple((n, self._value(n)) for n in node.all_input_nodes)
        inputs = tuple(t for _, t in read if isinstance(t, torch.Tensor))
        for target in dict.fromkeys(written):
            self.steps.append(NotFollowed(node, self._value(target), inputs, read))

    def _value(self, node: Any) -> Any:
        if node in self.env:
            return self.env[node]
        value = value_of(node)
        if isinstance(value, torch.Tensor) or value is None:
            raise _Stopped(
                node, Left(Reason.UNKNOWN_OPERATOR, "a value is read before it was computed")
            )
        return value


def _types(value: Any) -> list[torch.dtype]:
    return [t.dtype for t in tensors_in(value)]


class _Stopped(Exception):
    """Running stopped at `node`."""

    def __init__(self, node: fx.Node, why: Left) -> None:
        super().__init__(node.name)
        self.node, self.why = node, why


def trace_body(region: MoERegion, *, may_round: bool = False) -> Trace | tuple[fx.Node, Left]:
    """Return the steps between dispatch and combine, or the node where tracing stopped.

    `may_round`: sorts that leave the order of rows open are taken for stable ones.
    """
    received = {one.launch: one.result for one in region.dispatched}
    combines = [one.launch for one in region.combined]
    after = {*combines, *(wait for launch in (*combines, *received) for wait in waits_on(launch))}
    constants = constant_nodes(region)
    body = [node for node in region.body if node not in after]
    for node in body:
        if is_launch(node) and node not in received:
            return node, Left(Reason.COMMUNICATES)
    sources = [region.counts, region.received_counts, *received.values()]
    sources += [n for n in region.others if tensor_of(n) is not None and n not in constants]
    if (refused := _reads_own_class([*sources, *body], frozenset(body))) is not None:
        return refused
    made_stable = frozenset(filter(is_open_sort, body)) if may_round else frozenset()
    steps: list[Step] = []
    recorder = Recorder(lambda one: steps.append(_stable(one) if one.node in made_stable else one))
    runner = _Runner(region, recorder, steps, region.facts.modes, received)
    try:
        _run_on_fakes(runner, sources, [*constants, *body])
    except _Stopped as stopped:
        return stopped.node, stopped.why
    return Trace(tuple(runner.inputs), tuple(runner.steps), made_stable)


def _reads_own_class(
    made: Sequence[fx.Node], body: frozenset[fx.Node]
) -> tuple[fx.Node, Left] | None:
    """Return the first node of the body that reads a tensor whose class is not torch's, if any.

    The local part of a DTensor is a plain tensor.
    """
    for node in made:
        if (name := _own_class(value_of(node))) is None:
            continue
        for user in node.users:
            if user in body and user.target != "to_local":
                what = (
                    f"{operator_at(user)} takes a {name}, and this class decides itself what an "
                    "operator computes"
                )
                return user, Left(Reason.UNKNOWN_OPERATOR, what)
    return None


def _own_class(value: Any) -> str | None:
    tensors = (t for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))
    own = (type(t) for t in tensors if type(t) not in (FakeTensor, torch.Tensor, nn.Parameter))
    return next((kind.__name__ for kind in own), None)


def _stable(one: Operator) -> Operator:
    return Operator(one.node, *stable_call(one.func, one.args, one.kwargs), one.out)


def _run_on_fakes(runner: _Runner, sources: list[fx.Node], nodes: list[fx.Node]) -> None:
    given = [value_of(node) for node in sources]
    fake = next(t for t in given if isinstance(t, FakeTensor)).fake_mode
    with running_on(fake) as stack:
        tensors = tuple(map(alike, given))  # whatever the body does to their form
        stack.enter_context(runner.recorder)
        runner.run(sources, nodes, tensors)


FUNCTION: Final = "autograd_function_apply"


class NotRun(Exception):
    """A graph could not be run; carries the refusal."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        """Keep the refusal."""
        super().__init__(detail)
        self.why = Left(reason, detail)


def runs_graphs(node: fx.Node) -> bool:
    """Whether the node runs graphs at hand, as they are."""
    target: Any = node.target
    return is_higher_order(node) and _number_of_graphs(target.name()) == len(bodies(node))


def _number_of_graphs(name: str) -> int:
    return {CHECKPOINT: 1, FUNCTION: 2}.get(name, -1)


def run_node(node: fx.Node, value: Callable[[Any], Any]) -> Any:
    """Run the call of `node`, on the `value` of each node it reads."""
    if node.op not in ("call_function", "call_method"):
        raise NotRun(Reason.UNKNOWN_OPERATOR, node.op)
    return call(node, *fx.node.map_arg((node.args, node.kwargs), value))


class InnerRun:
    """Runs the graphs of one operator, and of operators in them."""

    def __init__(
        self,
        value: Callable[[Any], Any],
        steps: list[Step],
        outer: fx.Node,
    ) -> None:
        """Read nodes around the operator by `value`; add the steps it makes to `steps`.

        `outer` is the node of the region that runs all of it.
        """
        self._value, self._steps, self._outer = value, steps, outer

    def higher_order(self, node: fx.Node) -> Any:
        """Return the result of an operator that runs graphs."""
        given = [a for a in node.args if not (isinstance(a, fx.Node) and a.op == "get_attr")]
        arguments = fx.node.map_arg(given, self._value)
        graphs = [body.graph for body in bodies(node)]
        target: Any = node.target
        if target.name() == CHECKPOINT:
            return self._run(graphs[0], arguments)
        if node.kwargs.get("dirty_idx"):
            raise NotRun(
                Reason.UNKNOWN_OPERATOR, f"{FUNCTION} must not write to its arguments, and does"
            )
        return self._function(graphs, arguments)

    def _function(self, graphs: Sequence[fx.Graph], arguments: Sequence[Any]) -> Any:
        forward, backward = graphs
        results, saved = self._run(forward, arguments)
        made = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
        given = [torch.empty_like(result) for result in made]
        for gradient, result in zip(given, made, strict=True):
            self._steps.append(GradientOf(self._outer, gradient, result))
        returned = pytree.tree_leaves(self._run(backward, [*given, *saved]))
        if len(returned) != len(arguments):
            raise NotRun(
                Reason.UNKNOWN_OPERATOR,
                f"{FUNCTION} must return one gradient for each argument, and returns another "
                "number",
            )
        pairs = zip(returned, arguments, strict=True)
        for gradient, argument in pairs:
            if isinstance(gradient, torch.Tensor) and isinstance(argument, torch.Tensor):
                self._steps.append(GradientMade(self._outer, gradient, argument))
        return results

    def _run(self, graph: fx.Graph, arguments: Sequence[Any]) -> Any:
        env: dict[fx.Node, Any] = {}
        in_force, given = modes(graph), iter(arguments)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                return fx.node.map_arg(node.args[0], env.__getitem__)
            elif node.op != "get_attr" and not changes_mode(node):
                with running_under(in_force[node]):
                    env[node] = self._inner(node, env)
                if isinstance(env[node], torch.Tensor):
                    self._steps.append(Produced(node, env[node]))
        raise NotRun(Reason.UNKNOWN_OPERATOR, "an inner graph must have a result, and has none")

    def _inner(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        if is_launch(node):
            raise NotRun(Reason.COMMUNICATES, operator_at(node))
        if node.op == "call_method" and node.target in ("item", "tolist"):
            raise NotRun(
                Reason.UNKNOWN_OPERATOR,
                f"{operator_at(node)}: the host must not read a value inside an inner graph (a "
                "checkpointed function), and does",
            )
        if not is_higher_order(node):
            return run_node(node, env.__getitem__)
        if not runs_graphs(node):
            raise NotRun(Reason.UNKNOWN_OPERATOR, str(node.target))
        return InnerRun(env.__getitem__, self._steps, self._outer).higher_order(node)
