"""What torch runs eagerly without host reads in graphs, it runs eagerly with them as well.

Contract
    megamoe has Dynamo keep host reads in graphs (`capture_scalar_outputs`). Where a program's
    shapes then need the value that was read, as `one_hot(x, classes)` does with a tensor for
    `classes`, AOTAutograd cannot trace it. Without that setting it stops at the read, and Dynamo
    goes on without the graph: the exception that makes it do so is raised here too.
    Only for graphs in which nothing is rewritten: others are an error, since ranks that run them
    eagerly would meet the collectives of ranks that do not.

    So do programs of which torch reads a wrong value. `torch.tensor(4.0) * (tokens / 2)` with a
    symbol for the tokens has, while torch 2.13 traces, the value that stands in for any symbol, not
    a number: `int()` of what is made of it is that at run time too, by every backend. Without the
    setting Dynamo ends the graph at the read. A graph is left to Python if it holds such a tensor
    that is an integer, as a capacity is, or that nothing reads: it was made for a read.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator
from typing import Final

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from moe_compile.graph.query import source_place, tensor_of, value_of

LOG: Final = logging.getLogger(__name__)
READ: Final = torch.ops.aten._local_scalar_dense.default
SYMBOLS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)


@contextlib.contextmanager
def eager_where_a_value_is_needed(*, is_rewritten: bool) -> Iterator[None]:
    """Have Dynamo run a graph eagerly whose shapes need a value that only the run knows."""
    try:
        yield
    except GuardOnDataDependentSymNode as error:
        if is_rewritten:
            raise
        raise DataDependentOutputException(READ) from error


def eager_where_a_read_is_wrong(graph: fx.Graph) -> None:
    """Have Dynamo run a graph eagerly that may hold a number of a symbol's stand-in."""
    of_symbols: set[fx.Node] = set()
    for node in graph.nodes:
        tensor = tensor_of(node)
        if getattr(tensor, "constant", None) is None:
            continue
        if any(i in of_symbols or _is_symbol(i) for i in node.all_input_nodes):
            of_symbols.add(node)
    for node in sorted(of_symbols):
        tensor = tensor_of(node)
        if tensor is not None and (not tensor.is_floating_point() or not node.users):
            _warn_once(
                f"megamoe: {source_place(node)} runs eagerly: torch computes the tensor there from "
                "what stands in for a size while it traces, and a number read of it may be wrong "
                "in any compiled program. To do: compute it of numbers, with math.ceil and max, "
                "instead of tensors"
            )
            raise DataDependentOutputException(READ)


@functools.cache
def _warn_once(text: str) -> None:
    LOG.warning("%s", text)


def _is_symbol(node: fx.Node) -> bool:
    return isinstance(value_of(node), SYMBOLS)
