"""Whether chunks of experts with a capacity run the operators of the whole: tried without values.

Contract
    Nothing is refused only where every node of every chunk runs, forward and backward, the
    operators that it runs in the whole region, moves of data apart. Nothing is written: the replay
    runs on the tracer's values.

`FakeRun` runs a replay on values instead of writing it, to collect the operators of each node.
It has the methods of an `Emitter` and uses the values that the tracer stored of nodes; nothing is
computed and the graph stays as it is. An exchange hands on its input, and gradients, in the
memory order that a real one makes.
Operators of the backward are noted with the node whose backward they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from moe_compile.capacity.capacity_regions import CapacityRegion
from moe_compile.dims.record import SAME_VALUES, UNTRACEABLE, Operator, Recorder
from moe_compile.graph.modes import Mode, modes, running_under
from moe_compile.graph.observation import call as call_node
from moe_compile.graph.observation import fake_mode_of, running_on
from moe_compile.graph.query import is_launch, is_wait, operator_at, value_of
from moe_compile.proof.kernel_bits import bits
from moe_compile.proof.operator_call import Call, Knowledge, functional
from moe_compile.regions.count_facts import CountFacts
from passes.replay.capacity_chunks import CapacityChunk, pieces_of
from passes.replay.factor_pieces import Pieces

NOT_TRIED: Final = (
    "megamoe tries the experts on tensors without values, and one of their operators cannot "
    "run on these"
)


MOVES: Final = SAME_VALUES | frozenset(
    {
        "_unsafe_view", "cat", "stack", "repeat", "slice_backward", "select_backward",
        "split_backward", "new_zeros", "zeros", "zeros_like", "empty_like", "new_empty_strided",
        "empty", "ones_like", "fill", "zero", "constant_pad_nd",
    }
)  # fmt: skip
"""Operators that move elements, or make constants, beside those that return views."""


@dataclass(frozen=True, slots=True)
class Trial:
    """The findings of a trial; "" means none."""

    refused: str = ""
    """Why a chunk does not run the operators of the whole."""
    last_bits: str = ""
    """Why last bits may depend on the experts of a chunk."""


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
            said = "runs different operators for some of the experts than for all experts"
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
        raise TypeError(
            "megamoe needs the fake tensors that torch's tracer attaches to a graph, and "
            "this graph has none"
        )
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
            _check_sizes(node, chunk.env.get(node), pieces, experts)
        run.go_back(chunk.env[region.result])
        found.append(run.operators)
    return found


def _check_sizes(node: fx.Node, made: Any, pieces: Pieces, experts: range) -> None:
    """Raise ValueError where a chunk's value has another size than its part of the whole."""
    if isinstance(made, torch.Tensor) and list(made.shape) != pieces.sizes_of(node, len(experts)):
        raise ValueError(
            f"{operator_at(node)} returns unexpected sizes when it runs for some of the experts "
            "only"
        )


class FakeRun:
    """Runs emitted calls; collects the operators of each node."""

    def __init__(
        self, fake: FakeTensorMode, modes: Mapping[fx.Node, Mode], anchor: fx.Node
    ) -> None:
        """Run on tensors of `fake`: nodes under their own modes, other calls under the anchor's."""
        self._fake, self._modes, self._anchor = fake, modes, anchor
        self.operators: dict[fx.Node, list[Call]] = {}
        """Node -> its operators: of its forward, then of its backward."""
        self._recorder = Recorder(self._note)
        self._known = Knowledge(CountFacts(1, 1, 1))
        self._given: dict[fx.Node, Any] = {}

    def _note(self, one: Operator) -> None:
        if one.outputs:
            func = functional(one.func) or one.func
            made = Call(one.node, func, one.args, one.kwargs, one.out, self._known)
            self.operators.setdefault(one.node, []).append(made)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function."""
        args, kwargs = self._values((args, kwargs), {})
        return self._run(None, lambda: target(*args, **kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of the first argument."""
        (first, *rest), kwargs = self._values((args, kwargs), {})
        return self._run(None, lambda: getattr(first, name)(*rest, **kwargs))

    def copy(self, node: fx.Node, env: Mapping[fx.Node, Any]) -> Any:
        """Run `node`, reading `env[input]` where env has the input."""
        args, kwargs = self._values((node.args, node.kwargs), env)
        return self._node(node, args, kwargs)

    def instead(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a function in the place of `node`."""
        args, kwargs = self._values((args, kwargs), {})
        if is_launch(node):
            return self._node(node, args, kwargs)
        return self._run(node, lambda: target(*args, **kwargs))

    def go_back(self, result: torch.Tensor) -> None:
        """Run the backward of all operators that made `result`."""
        leaves = [t for t in self._given.values() if _is_leaf(t)]
        if not leaves or not result.requires_grad:
            return
        with running_on(self._fake), self._recorder:
            gradient = torch.ones(result.shape, dtype=result.dtype, device=result.device)
            torch.autograd.grad([result], leaves, [gradient], allow_unused=True)

    def _node(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_wait(node):
            return args[0]
        if is_launch(node):
            return self._run(None, lambda: args[0].view(-1).clone().view(args[0].shape))
        return self._run(node, lambda: call_node(node, args, kwargs))

    def _run(self, node: fx.Node | None, run: Callable[[], Any]) -> Any:
        mode = self._modes[node or self._anchor]
        with running_on(self._fake), running_under(mode), self._recorder:
            return self._recorder.run(node, run)

    def _values(self, arguments: Any, env: Mapping[fx.Node, Any]) -> Any:
        def now(leaf: Any) -> Any:
            if not isinstance(leaf, fx.Node):
                return leaf
            return env[leaf] if leaf in env else self._value(leaf)

        return pytree.tree_map(now, fx.node.map_aggregate(arguments, now))

    def _value(self, node: fx.Node) -> Any:
        if node not in self._given:
            value = value_of(node)
            if isinstance(value, torch.Tensor):
                with running_on(self._fake):
                    value = value.detach().requires_grad_(value.requires_grad)
            self._given[node] = value
        return self._given[node]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
