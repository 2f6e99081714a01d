"""Run a graph once for each part of its batch, and join its outputs.

Contract
    Requires  a `BatchSplit`, which proves that parts compute the same values as the whole.
    Order     the segments of all parts in turn: while rows of one part travel, attention and
              experts of others can run. Within a turn the last part first, so that autograd adds
              up gradients from the first part on, as gradient accumulation over the parts does.
    Outputs made of counts, sums or means over the batch are computed once, from those of all parts
    added up.

`SizedEmitter` emits numbers that stand for sizes as nodes that compute the sizes.
Every number in the arguments of a call that is emitted here, and that a `SizeNumbers` has for
a product with symbols, becomes that product of the graph's inputs. Nodes that are copied keep
their arguments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_aggregate

from moe_compile.batch.batch_body import REPEATS, repeats_in
from moe_compile.batch.batch_split import BatchSplit
from moe_compile.batch.batch_terms import Terms, summed_instead, terms_of, weight_of_targets
from moe_compile.dims.arguments import moved
from moe_compile.dims.factors import Dims, SizeNumbers, size_of
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import called_name, tensor_of
from moe_compile.graph.torch_calls import maker_of, torch_name
from passes.replay.factor_pieces import Emits, Pieces


@dataclass(slots=True)
class Parts:
    """The nodes emitted for all parts."""

    envs: list[dict[fx.Node, Any]]
    """For each part: node of the whole -> its copy."""
    kept: dict[fx.Node, Any] = field(default_factory=dict)
    """Sums over the batch, and values computed from them -> the same over all parts."""
    joined: dict[fx.Node, Any] = field(default_factory=dict)
    """Output of the whole -> the joined output of all parts."""


class _Pieces(Pieces):
    """Pieces of the batch, and of rows computed from it."""

    def __init__(self, emit: Emits, split: BatchSplit, shares: Sequence[int]) -> None:
        super().__init__(emit, split.tracker, split.batch, shares)
        self._split = split

    def sizes(self, dims: Dims, share: int) -> list[int]:
        """Return the sizes of dimensions of these factors in a part of `share` indices."""
        return self._split.sizes(dims, share)


def part_sizes(size: Any, num_parts: int) -> list[Any]:
    """Return the number of `size` indices in each part: as even as can be, larger ones first."""
    return [(size + num_parts - 1 - i) // num_parts for i in range(num_parts)]


def emit_parts(split: BatchSplit, shares: Sequence[int], output: fx.Node) -> Parts:
    """Emit the graph for each share of the batch, before `output`."""
    replay = _Replay(split, shares, output)
    replay.give_inputs()
    for segment in split.segments:
        replay.run(segment)
    for node in dict.fromkeys(split.results):
        replay.join(node)
    return replay.parts


def _read(env: Mapping[fx.Node, Any], node: fx.Node) -> Any:
    """Return a part's copy of `node`."""
    return env.get(node, node)


class _Replay:
    """Emits parts, segment by segment."""

    def __init__(self, split: BatchSplit, shares: Sequence[int], output: fx.Node) -> None:
        self._split, self._shares = split, shares
        self._emit = SizedEmitter(output, split.tracker.numbers)
        self._emit.divide(split.size, shares)
        self._pieces = _Pieces(self._emit, split, shares)
        self.parts = Parts([{} for _ in shares])
        sums = [one.found.sums for one in split.regions]
        self._totals = {one.total for one in sums}
        self._sized = {
            node: one
            for one in split.regions
            if one.found.sums.is_order
            for node in (one.found.sums.memory, one.found.sums.by_token)
            if node is not None and not torch_name(node).endswith("_like")
        }
        routed = [one.share for one in split.regions if one.share is not None]
        self._shared = {node: own for own in routed for node in own.shifted}
        self._shared |= {n: own for own in routed for n in own.slices if split.takes(n, own)}

    def give_inputs(self) -> None:
        """Cut inputs that have the batch; give each part names for inputs it reads repeatedly."""
        for source in self._split.cut:
            for env, piece in zip(self.parts.envs, self._pieces.cut(source), strict=True):
                is_written = source in self._split.written
                env[source] = self._emit.method("clone", piece) if is_written else piece
        for source in self._split.anew:
            for env, share in zip(self.parts.envs, self._shares, strict=True):
                self._make(source, env, share)
        for source in self._split.alone:
            for env in reversed(self.parts.envs):
                env[source] = self._emit.method("view_as", source, source)

    def _make(self, source: fx.Node, env: dict[fx.Node, Any], share: int) -> None:
        """Emit zeros, ones or row numbers for a part."""
        tensor = tensor_of(source)
        if maker_of(source) is not None or tensor is None:
            self._pieces.replay(source, env, share)
            return
        (size,) = self._pieces.sizes_of(source, share)
        options = {"dtype": tensor.dtype, "device": tensor.device}
        env[source] = self._emit.instead(source, torch.arange, size, **options)

    def run(self, segment: Sequence[fx.Node]) -> None:
        """Emit a segment for each part, then values computed from sums once all are there."""
        envs, kept = self.parts.envs, self.parts.kept
        for env, share in reversed(list(zip(envs, self._shares, strict=True))):
            for node in segment:
                self._emit_node(node, env, share)
        if kept or not self._split.summed or not {*self._split.summed} <= envs[0].keys():
            return
        for node in self._split.summed:
            kept[node] = self._sum(node)
        for node in self._split.kept:
            kept[node] = self._emit.copy(node, kept)

    def _sum(self, node: fx.Node) -> fx.Node:
        """Emit the whole's sum or mean over the batch from those of the parts."""
        emit, values, terms = self._emit, [env[node] for env in self.parts.envs], terms_of(node)
        if terms is Terms.BY_SHARE:
            shared = zip(values, self._shares, strict=True)
            shares = [(value, emit.ratio(n, self._split.size)) for value, n in shared]
            values = [emit.call(torch.mul, value, share) for value, share in shares]
        total = self._added(node, values)
        if terms is not Terms.BY_TARGETS:
            return total
        envs = self.parts.envs
        weights = [weight_of_targets(node, emit, partial(_read, env)) for env in envs]
        return emit.call(torch.div, total, self._added(node, weights))

    def _added(self, node: fx.Node, values: Sequence[Any]) -> Any:
        add, total = torch.add if tensor_of(node) is not None else operator.add, values[0]
        for value in values[1:]:
            total = self._emit.call(add, total, value)
        return total

    def join(self, node: fx.Node) -> None:
        """Emit an output of the whole."""
        self.parts.joined[node] = self._pieces.join([env[node] for env in self.parts.envs], node)

    def _emit_node(self, node: fx.Node, env: dict[fx.Node, Any], share: int) -> None:
        if node in self._sized:
            env[node] = self._resized(node, env, share)
        elif node in self._shared:
            env[node] = self._of_share(node, env, share)
        elif node in self._split.summed and terms_of(node) is Terms.BY_TARGETS:
            given = summed_instead(node, partial(_read, env))
            env[node] = self._emit.instead(node, node.target, *given)
        elif node in self._split.spread:
            env[node] = self._spread(node, env, share)
        elif node in self._totals or not self._split.is_divided(node):
            env[node] = self._emit.copy(node, env)
        else:
            self._pieces.replay(node, env, share)

    def _spread(self, node: fx.Node, env: dict[fx.Node, Any], share: int) -> fx.Node:
        """Emit the repetition of a parameter for each index of a part."""
        source, sizes = _read(env, moved(node)), self._pieces.sizes_of(node, share)
        if called_name(node) in REPEATS:
            return self._emit.method("repeat", source, repeats_in(node, sizes))
        return self._emit.method("expand", source, sizes)

    def _of_share(self, node: fx.Node, env: dict[fx.Node, Any], share: int) -> fx.Node:
        """Emit a rank's share of the tokens, or row numbers that count from the first of all."""
        own = self._shared[node]
        (num_tokens,) = self._split.sizes([[own.factor]], share)
        first = own.number * num_tokens
        if (order := own.shifted.get(node)) is not None:
            order = env.get(order, order)
            return self._emit.instead(node, operator.add, order, own.rows_per_token * first)
        source, rows = node.all_input_nodes[0], slice(first, first + num_tokens)
        return self._emit.instead(node, operator.getitem, env.get(source, source), rows)

    def _resized(self, node: fx.Node, env: dict[fx.Node, Any], share: int) -> fx.Node:
        """Emit the zeros into which rows are put in order, or the view of them by token."""
        found, tracker = self._sized[node].found, self._split.tracker
        whole = size_of(tracker.dims(found.tokens)[0])
        num_tokens = whole // self._split.size * share
        first, *others = tracker.sizes_of(node)
        sizes = [first // whole * num_tokens, *others]
        if node is found.sums.by_token:
            return self._emit.method("reshape", env[moved(node)], sizes)
        return self._pieces.made(node, torch.zeros, sizes)


class SizedEmitter(Emitter):
    """Appends nodes before `anchor`, with the sizes that `numbers` stand for."""

    def __init__(self, anchor: fx.Node, numbers: SizeNumbers) -> None:
        """Emit before `anchor`, which stays."""
        super().__init__(anchor)
        self._numbers = numbers
        self._nodes: dict[int, fx.Node] = dict(numbers.inputs)

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator."""
        return super().call(target, *self._sized(args), **self._sized(kwargs))

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of the tensor method `name`; the tensor is the first argument."""
        return super().method(name, *self._sized(args), **self._sized(kwargs))

    def instead(self, node: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator in the place of `node`."""
        return super().instead(node, target, *self._sized(args), **self._sized(kwargs))

    def divide(self, whole: int, shares: Sequence[int]) -> None:
        """Emit the sizes of parts of `whole`, for which `shares` stand: larger ones first."""
        for i, share in enumerate(shares):
            if self._numbers.factors(share)[1] and share not in self._nodes:
                more = self.call(operator.add, whole, len(shares) - 1 - i)
                self._nodes[share] = self.call(operator.floordiv, more, len(shares))

    def ratio(self, part: int, whole: int) -> Any:
        """Return the share that a part has of `whole`, or emit it."""
        if any(self._numbers.factors(number)[1] for number in (part, whole)):
            return self.call(operator.truediv, part, whole)
        return part / whole

    def _sized(self, arguments: Any) -> Any:
        return map_aggregate(arguments, self._size)

    def _size(self, argument: Any) -> Any:
        """Return the node that computes the size `argument` stands for, or `argument` itself."""
        if type(argument) is not int or argument in self._nodes:
            return self._nodes.get(argument, argument)
        number, symbols = self._numbers.factors(argument)
        if not symbols:
            return argument
        *outer, last = (self._nodes[one] for one in symbols)
        for one in outer:
            last = super().call(operator.mul, one, last)
        self._nodes[argument] = super().call(operator.mul, number, last) if number != 1 else last
        return self._nodes[argument]
