"""Give every exchange the one form the passes know: a launch and a wait of `_c10d_functional`,
the arguments of the launch by position.

Contract
    Provides  WAITS_VISIBLE.
    Keeps     values and gradients: `_c10d_functional` collectives carry their own autograd.

Programs have exchanges in an `autograd.Function` of their own (`passes/function_exchanges.py`)
and have `torch.distributed`'s collectives write memory, and others (see below).
A program may have a function of its own that waits, as older torch has no derivative of a wait: on
a tensor that was awaited before, it returns a view.
Older torch traces a differentiable all-to-all as `_c10d_functional_autograd.all_to_all_single`
whose wait hides in the body of an `autograd_function_apply` operator. torch 2.15 waits by
`wait_tensors` for a collective of several tensors, in programs and in derivatives; `split_waits`
makes a wait for each of it, as torch had until then.

A `BufferFill` is memory that a program makes for one operator to write, and that nothing else
writes. A fill is found only where reading the collective's result in place of the memory is the
same: nothing reads the memory before, the two have one type, sizes and strides, nothing writes
either after, nothing else reads the result, and gradients flow alike.
A write by index is found only where nothing else writes the memory or reads it before.

`dist.all_to_all_single(out, x)` is traced as a functional exchange, its wait, and `out.copy_(...)`.
`out.index_add_(0, i, rows)` equals `out = out.index_add(0, i, rows)`, where `out` is new.

Exchanged integers get the length that the program asserts of them.
Only the values that the tracer stored change, from a symbol that can be one number only to
that number; no node does. Exchanges whose split sizes are known at run time are left out: that this
rank sends none, say, is its own affair.

`torch.bincount` makes a tensor of unknown length, which `view(ranks, experts)` then asserts.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.edit import (
    Emitter,
    erase_dead,
    erase_unused,
    read_instead,
    replace_uses,
    substitute,
)
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.inner_graphs import bodies, is_autograd_function
from moe_compile.graph.modes import changes_mode
from moe_compile.graph.query import (
    C10D,
    called_name,
    has_dynamic_splits,
    is_all_to_all,
    is_integer,
    is_launch,
    is_wait,
    number_of,
    overload_name,
    tensor_of,
    value_of,
    waits_on,
)
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass
from passes.function_exchanges import (
    HAND_ON,
    MAKE_MEMORY,
    Unknown,
    alike,
    exchanges_of,
    replace_function,
)

VISIBLE: Final = "the graph already has its launch and its wait as nodes"
TOGETHER: Final = "_c10d_functional::wait_tensors"


@dataclass(frozen=True)
class NormalizeExchanges(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "normalize_exchanges"
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_VISIBLE})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Rewrite each launch together with the operator that hides it, its wait or its result."""
        facts, waits = state.facts_of(graph), split_waits(graph)
        facts.forget()
        writes = write_elsewhere(facts)
        found: list[tuple[fx.Node, fx.Node]] = []
        skipped: list[Verdict] = []
        launches = [node for node in graph.nodes if is_launch(node)]
        placed = {launch: _arguments_in_place(launch) for launch in launches}
        for launch in launches:
            if not overload_name(launch).startswith("_c10d_functional_autograd::"):
                done = Verdict(candidate=launch.name, reason=Reason.ALREADY_DONE, detail=VISIBLE)
                skipped.append(done)
            elif (hiding := _hides_wait(launch)) is None:
                skipped.append(Verdict(candidate=launch.name, reason=Reason.UNKNOWN_FORM))
            else:
                found.append((launch, hiding))
        functions = {node: exchanges_of(node) for node in filter(is_autograd_function, graph.nodes)}
        replaced = {node: one for node, one in functions.items() if isinstance(one, list)}
        skipped += _left(functions)
        fills = find_fills(facts)
        for launch, (args, kwargs) in placed.items():
            launch.args, launch.kwargs = args, kwargs
        for launch, hiding in found:
            _rewrite(launch, hiding)
        hidden = {hiding for _, hiding in found}
        again = _which_wait_again(f for f in functions if f not in hidden)
        applied = (
            *(launch.name for launch, _ in found),
            *(node.name for node in (*replaced, *again)),
            *(fill.memory.name for fill in fills),
            *waits,
            *(write.name for write in writes),
        )
        _hand_on(again)
        for function, exchanges in replaced.items():
            replace_function(function, exchanges)
        read_sources(fills)
        note_known_lengths(graph)
        if applied:
            _drop_unread_bodies(graph)
        return PassReport(pass_name=self.name, applied=applied, skipped=tuple(skipped))


def _arguments_in_place(launch: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a launch's arguments by position, as passes expect, where they are given by name.

    Arguments taken by name alone, as the output of `all_gather_into_tensor_out`, stay so.
    """
    target: Any = launch.target
    overload = target.default if isinstance(target, torch._ops.OpOverloadPacket) else target
    takes = [a.name for a in overload._schema.arguments if not a.kwarg_only]
    left = takes[len(launch.args) :]
    if not set(left) <= launch.kwargs.keys():
        return launch.args, launch.kwargs
    by_name = {name: value for name, value in launch.kwargs.items() if name not in left}
    return (*launch.args, *(launch.kwargs[name] for name in left)), by_name


def _hides_wait(launch: fx.Node) -> fx.Node | None:
    """Return the operator that does no more than wait for `launch`, when nothing else reads it."""
    readers = [user for user in launch.users if is_autograd_function(user)]
    alone = len(readers) == 1 and len(launch.users) == 1
    return readers[0] if alone and _only_waits(launch, readers[0]) else None


def _left(functions: Mapping[fx.Node, object]) -> list[Verdict]:
    """Return why functions that exchange stay as they are."""
    unknown = [(node.name, one) for node, one in functions.items() if isinstance(one, Unknown)]
    return [Verdict(candidate=name, reason=one.reason, detail=one.because) for name, one in unknown]


def _which_wait_again(functions: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return operator -> wait, for operators that only wait again for an awaited tensor."""
    waits = {f: [i for i in f.args if isinstance(i, fx.Node) and is_wait(i)] for f in functions}
    return {f: one[0] for f, one in waits.items() if len(one) == 1 and _only_waits(one[0], f)}


def _only_waits(launch: fx.Node, hiding: fx.Node) -> bool:
    """Whether the operator returns `launch` awaited, and hands back its gradient unchanged.

    It may also be given sizes, as in older torch, and no other tensor.
    """
    given = [i for i in hiding.args if not (isinstance(i, fx.Node) and i.op == "get_attr")]
    tensors = [i for i in given if isinstance(i, fx.Node) and tensor_of(i) is not None]
    graphs = [body.graph for body in bodies(hiding)]
    if tensors != [launch] or len(graphs) != 2 or hiding.kwargs.get("non_differentiable_idx"):
        return False
    forward, backward = graphs
    (results, *_), gradients = forward.output_node().args[0], backward.output_node().args[0]
    place = given.index(launch)
    wanted = [None] * len(given)
    return (
        any(is_wait(node) for node in forward.nodes)
        and _handed_on(forward, results) == [forward.find_nodes(op="placeholder")[place]]
        and _handed_on(backward, gradients)
        == [*wanted[:place], backward.find_nodes(op="placeholder")[0], *wanted[place + 1 :]]
    )


def _handed_on(body: fx.Graph, results: Any) -> list[Any]:
    """Return the inputs that a body returns, [] if it does more than wait for them."""
    inner = [node for node in body.nodes if node.op not in ("placeholder", "output")]
    passing = [node for node in inner if is_wait(node) or called_name(node) in HAND_ON]
    if not all(node in passing or changes_mode(node) for node in inner):
        return []
    found = []
    for result in results if isinstance(results, list | tuple) else ():
        node = result
        while node in passing:
            node = node.args[0]
        found.append(node)
    return found


def _drop_unread_bodies(graph: fx.Graph) -> None:
    """Drop the operator bodies that nothing runs any more; bodies within one that is run stay.

    `delete_all_unused_submodules` would drop those, too: it looks into modules that are called.
    """
    erase_unused(graph.find_nodes(op="get_attr"))
    if (owner := graph.owning_module) is None:
        return
    named = [n for op in ("get_attr", "call_module") for n in graph.find_nodes(op=op, sort=False)]
    used = {str(node.target).partition(".")[0] for node in named}
    for name in [name for name, _ in owner.named_children() if name not in used]:
        owner.delete_submodule(name)


def _hand_on(again: Mapping[fx.Node, fx.Node]) -> None:
    """Let readers of each operator read a view of its wait: autograd makes one of such results."""
    for function, wait in again.items():
        view = Emitter(function).method("view_as", wait, wait)
        view.meta["example_value"] = value_of(wait)
        for reader in list(function.users):
            view.meta["example_value"] = value_of(reader)
            substitute(reader, view)
        erase_dead([function])


def _rewrite(launch: fx.Node, hiding: fx.Node) -> None:
    """Launch where `launch` stands and wait where `hiding` does: each under its own grad mode."""
    op = overload_name(launch).partition("::")[2]
    plain = Emitter(launch).call(getattr(C10D, op), *launch.args, **launch.kwargs)
    wait = Emitter(hiding).call(C10D.wait_tensor, plain)
    value = launch.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        plain.meta["example_value"] = wait.meta["example_value"] = value
    for reader in list(hiding.users):
        if isinstance(reader.meta.get("example_value"), torch.Tensor):
            plain.meta["example_value"] = wait.meta["example_value"] = reader.meta["example_value"]
        substitute(reader, wait)
    erase_dead([launch, hiding])  # the operator's body is an exchange and its wait, no more


ELSEWHERE: Final = {
    "index_add_": "index_add",
    "index_copy_": "index_copy",
    "scatter_add_": "scatter_add",
}
"""Method that writes memory by an index -> the method that writes a copy of it."""


@dataclass(frozen=True, slots=True)
class BufferFill:
    """`copy` fills `memory` with `source`, a collective's result or a part of it."""

    memory: fx.Node
    copy: fx.Node
    source: fx.Node


def find_fills(facts: GraphFacts) -> list[BufferFill]:
    """Return the fills whose memory may be replaced by its source in later readers."""
    copies = (n for n in facts.graph.nodes if n.op == "call_method" and n.target == "copy_")
    fills = [fill for copy in copies if (fill := _fill(copy)) is not None]
    return [fill for fill in fills if _is_only_read(fill, facts)]


def _fill(copy: fx.Node) -> BufferFill | None:
    memory, source = copy.args[:2]
    if not isinstance(memory, fx.Node) or not isinstance(source, fx.Node):
        return None
    if not _is_new(memory) or not _is_brought(source) or not alike(memory, source):
        return None
    return BufferFill(memory, copy, source)


def _is_new(memory: object) -> bool:
    """Whether the node makes memory of its own, to which no gradient flows."""
    if not isinstance(memory, fx.Node) or called_name(memory) not in MAKE_MEMORY:
        return False
    return not memory.kwargs.get("requires_grad")


def _is_brought(node: fx.Node) -> bool:
    """Whether the node is a collective's result, whole or in parts, with one reader only."""
    while called_name(node) == "getitem" and len(node.users) == 1:
        (node,) = node.all_input_nodes
        if is_wait(node):
            return all(called_name(user) == "getitem" for user in node.users)
    return is_wait(node) and len(node.users) == 1


def _is_only_read(fill: BufferFill, facts: GraphFacts) -> bool:
    place = facts.dependence.position
    if any(place[user] < place[fill.copy] for user in fill.memory.users):
        return False
    tensor = tensor_of(fill.source)
    flows = tensor is not None and tensor.requires_grad
    if flows and facts.modes[fill.copy][0] is not facts.modes[fill.source][0]:
        return False
    memory = storages(fill.memory) | storages(fill.source)
    return not any(
        not written or written & memory
        for writer, written in facts.dependence.writes.items()
        if writer is not fill.copy and place[writer] > place[fill.source]
    )


def read_sources(fills: list[BufferFill]) -> None:
    """Have readers of filled memory read the source of the fill."""
    for fill in fills:
        replace_uses({fill.copy: fill.source})
        for reader in [user for user in fill.memory.users if user is not fill.copy]:
            read_instead(reader, fill.memory, fill.source)
        erase_dead([fill.memory, fill.copy])


def write_elsewhere(facts: GraphFacts) -> list[fx.Node]:
    """Have writes by index into new memory write a copy, which the memory's readers then read."""
    writes = [n for n in facts.graph.nodes if n.op == "call_method" and n.target in ELSEWHERE]
    writes = [write for write in writes if _is_new(write.args[0])]
    found = [write for write in writes if _is_alone(write, facts.dependence)]
    for write in found:
        memory, value = write.args[0], tensor_of(write)
        assert isinstance(memory, fx.Node) and value is not None
        total = Emitter(write).method(ELSEWHERE[str(write.target)], *write.args, **write.kwargs)
        total.meta["example_value"] = torch.empty_like(value).requires_grad_(value.requires_grad)
        for reader in [user for user in memory.users if user not in (write, total)]:
            read_instead(reader, memory, total)
        replace_uses({write: total})
        erase_dead([write])
    if found:
        facts.forget()
    return found


def _is_alone(write: fx.Node, dependence: Dependence) -> bool:
    """Whether nothing but `write` writes its memory, and nothing reads it before."""
    memory, place = write.all_input_nodes[0], dependence.position
    is_first = all(place[user] >= place[write] for user in memory.users)
    reads_it = memory in (*write.args[1:], *write.kwargs.values())
    return is_first and not reads_it and dependence.writers(memory) == [write]


def note_known_lengths(graph: fx.Graph) -> None:
    """Store known lengths of the tensors that exchanges of integers send and receive."""
    for launch in graph.nodes:
        if not is_launch(launch) or not is_integer(launch):
            continue
        if is_all_to_all(launch) and has_dynamic_splits(launch):
            continue
        for node in (*_sent(launch), launch, *waits_on(launch)):
            _note(node)


def _sent(launch: fx.Node) -> Iterator[fx.Node]:
    """Yield the tensor sent, and its earlier forms before each change of shape or type."""
    node = launch.args[0]
    while isinstance(node, fx.Node) and is_integer(node):
        yield node
        node = node.args[0] if node.op == "call_method" and node.args else None


def _note(node: fx.Node) -> None:
    tensor = tensor_of(node)
    if tensor is None or all(type(size) is int for size in tensor.shape):
        return
    sizes = [number_of(size) for size in tensor.shape]
    if all(sizes) and tensor.is_contiguous():
        node.meta["example_value"] = tensor.view([size or 0 for size in sizes])


def split_waits(graph: fx.Graph) -> tuple[str, ...]:
    """Split each wait for several tensors whose readers take one of them; return their names."""
    together = [node for node in graph.nodes if overload_name(node) == TOGETHER]
    found = [node for node in together if all(map(_takes_one, node.users))]
    for node in found:
        _split(node)
    return tuple(node.name for node in found)


def _takes_one(reader: fx.Node) -> bool:
    return reader.target is operator.getitem and type(reader.args[1]) is int


def _split(together: fx.Node) -> None:
    """Wait for each tensor where `together` stands, in the order it names them."""
    emit, tensors = Emitter(together), list(together.args[0])
    is_overload = isinstance(together.target, torch._ops.OpOverload)
    target = C10D.wait_tensor.default if is_overload else C10D.wait_tensor
    waits = [emit.call(target, tensor) for tensor in tensors]
    values = value_of(together) or [value_of(tensor) for tensor in tensors]
    for wait, value in zip(waits, values, strict=True):
        wait.meta["val" if is_overload else "example_value"] = value
    for reader in list(together.users):
        substitute(reader, waits[reader.args[1]])
    erase_dead([together])
