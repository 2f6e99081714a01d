"""Copy the integers that the host needs for one exchange to it at once.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value: integers are only read from another tensor on the host.

    a.to("cpu").tolist(), b.to("cpu").tolist()  ->  cat([a, b]).to("cpu").tolist()
    [v[0].item(), v[1].item()]                  ->  v.to("cpu").tolist()

Inductor waits for the device at every copy to the host, and at every element that is read from a
tensor on the device. A program reads the rows it sends and those it receives one after the other,
and the tracer turns `tolist()` into one read per element.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import torch
import torch.fx as fx

from moe_compile.graph.edit import (
    ValuedEmitter,
    erase_unused,
    move_before,
    read_instead,
)
from moe_compile.graph.effects import is_host_arithmetic
from moe_compile.graph.precedence import HOST_READ, is_host_read
from moe_compile.graph.query import (
    input_splits,
    is_all_to_all,
    is_integer,
    known_rows,
    output_splits,
    overload_name,
    tensor_of,
)
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

ATEN: Final = torch.ops.aten
SELECT: Final = ATEN.select.int
UNSQUEEZE: Final = ATEN.unsqueeze.default
CAT: Final = ATEN.cat.default
MOVE: Final = torch.ops.prims.device_put.default
CONVERT: Final = torch.ops.prims.convert_element_type.default
COPIES: Final = (MOVE, ATEN._to_copy.default)


class Read(NamedTuple):
    """One integer that the host reads: an element of a vector on the device, or a whole tensor."""

    node: fx.Node
    source: fx.Node
    element: int
    waited: fx.Node
    """The node that the host waits for: a copy of `source`, or the read itself."""


@dataclass(frozen=True)
class MergeHostReads(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "merge_host_reads"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    after: ClassVar[frozenset[str]] = frozenset({"sort_nodes"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Read the integers of each exchange by one copy, or, if impossible, each vector by one."""
        del state
        found = (_read(node) for node in graph.nodes if overload_name(node) == HOST_READ)
        reads = _by_source([read for read in found if read is not None])
        applied = []
        for sources in _needed_together(graph, reads):
            alone = [[source] for source in sources]
            for together in ([sources], alone):
                done = [t for t in together if _read_by_one_copy([r for s in t for r in reads[s]])]
                applied += [source.name for t in done for source in t]
                if done:
                    break
        return PassReport(pass_name=self.name, applied=tuple(applied))


def _read(node: fx.Node) -> Read | None:
    """Return the host read of `node` from the device, where a copy may serve it."""
    tensor, element = node.args[0], 0
    assert isinstance(tensor, fx.Node)
    if tensor.target is SELECT and tensor.args[1] == 0 and type(tensor.args[2]) is int:
        tensor, element = tensor.args[0], tensor.args[2]
    source, waited = tensor, node
    if tensor.target in COPIES and is_host_read(tensor):
        source, waited = tensor.args[0], tensor
        if _dtype(source) is not _dtype(tensor) or not _is_read_only_by_integers(tensor):
            return None
    value = tensor_of(source)
    if value is None or value.device.type == "cpu" or not is_integer(source) or value.dim() > 1:
        return None
    length = _length(source)
    return Read(node, source, element % length, waited) if length else None


def _is_read_only_by_integers(copy: fx.Node) -> bool:
    """Whether nothing needs the copy once the host reads its elements from another."""
    readers = [user for reader in copy.users for user in (_parts(reader) or [reader])]
    return all(overload_name(reader) == HOST_READ for reader in readers)


def _parts(node: fx.Node) -> list[fx.Node]:
    return list(node.users) if node.target is SELECT else []


def _length(source: fx.Node) -> int:
    """Return the length of a vector, 0 where not known; 1 for a tensor of no dimension."""
    value = tensor_of(source)
    return known_rows(source) if value is not None and value.dim() else 1


def _by_source(reads: Iterable[Read]) -> dict[fx.Node, list[Read]]:
    """Return the reads of each tensor; of each element where few of a vector are read."""
    by_source: dict[fx.Node, list[Read]] = {}
    for read in reads:
        by_source.setdefault(read.source, []).append(read)
    for source, its in list(by_source.items()):
        is_copied = any(read.waited is not read.node for read in its)
        if not is_copied and 2 * len({read.element for read in its}) < _length(source):
            del by_source[source]
            for read in its:
                by_source.setdefault(read.node.args[0], []).append(read._replace(element=0))
    return by_source


def _needed_together(
    graph: fx.Graph, reads: Mapping[fx.Node, Sequence[Read]]
) -> list[list[fx.Node]]:
    """Return the tensors in sets: one set has those whose integers one exchange needs."""
    source_of = {read.node: source for source, its in reads.items() for read in its}
    set_of = {source: [source] for source in reads}
    for exchange in filter(is_all_to_all, graph.nodes):
        splits = [*output_splits(exchange), *input_splits(exchange)]
        sources = _sources(splits, source_of)
        for first, other in itertools.pairwise(sources):
            if set_of[other] is not set_of[first]:
                set_of[first].extend(set_of[other])
                set_of.update(dict.fromkeys(set_of[other], set_of[first]))
    return list({id(sources): sources for sources in set_of.values()}.values())


def _sources(numbers: Iterable[object], source_of: Mapping[fx.Node, fx.Node]) -> list[fx.Node]:
    """Return the tensors from which the host reads the integers behind `numbers`."""
    seen: dict[fx.Node, None] = {}
    todo = [n for n in numbers if isinstance(n, fx.Node)]
    while todo:
        node = todo.pop()
        if node not in seen:
            seen[node] = None
            if is_host_arithmetic(node):
                todo.extend(node.all_input_nodes)
    return list(dict.fromkeys(source_of[node] for node in seen if node in source_of))


def _read_by_one_copy(reads: Sequence[Read]) -> bool:
    """Copy all sources behind the last one; return whether that saves copies and is allowed.

    It is not allowed where anything but host arithmetic needs one of the integers before that.
    """
    if len({read.waited for read in reads}) < 2:
        return False
    sources = list(dict.fromkeys(read.source for read in reads))
    last = max(sources)
    late: dict[fx.Node, None] = {}
    nodes = {read.node for read in reads}
    for node in _up_to(last):
        if node in nodes or not late.keys().isdisjoint(node.all_input_nodes):
            if node not in nodes and not is_host_arithmetic(node):
                return False
            late[node] = None
    anchor = last.next
    while anchor.op == "placeholder":
        anchor = anchor.next
    before = [node for read in reads for node in (read.waited, *read.node.all_input_nodes)]
    _emit(ValuedEmitter(anchor), sources, reads)
    move_before(late, anchor)
    erase_unused(sorted(set(before) - nodes))
    return True


def _up_to(last: fx.Node) -> Iterator[fx.Node]:
    for node in last.graph.nodes:
        yield node
        if node is last:
            return


def _emit(emit: ValuedEmitter, sources: Sequence[fx.Node], reads: Sequence[Read]) -> None:
    starts: dict[fx.Node, int] = {}
    pieces: list[fx.Node] = []
    length = 0
    is_mixed = len(set(map(_dtype, sources))) > 1
    for source in sources:
        starts[source] = length
        value = tensor_of(source)
        piece = source if value is not None and value.dim() else emit.call(UNSQUEEZE, source, 0)
        pieces.append(emit.call(CONVERT, piece, torch.int64) if is_mixed else piece)
        length += _length(source)
    whole = emit.call(CAT, pieces) if len(pieces) > 1 else pieces[0]
    host = emit.call(MOVE, whole, torch.device("cpu"))
    elements: dict[int, fx.Node] = {}
    for read in reads:
        at = starts[read.source] + read.element
        if at not in elements:
            elements[at] = emit.call(SELECT, host, 0, at)
        read_instead(read.node, read.node.all_input_nodes[0], elements[at])


def _dtype(node: object) -> torch.dtype | None:
    value = tensor_of(node) if isinstance(node, fx.Node) else None
    return None if value is None else value.dtype
