"""Graphs that torch runs eagerly without host reads in graphs run eagerly with them as well.

Fault
    megamoe has Dynamo keep host reads in graphs (`capture_scalar_outputs`). Where a program's
    shapes then need the value that was read, as `one_hot(x, classes)` does with a tensor for
    `classes`, AOTAutograd cannot trace it: the call ends in `GuardOnDataDependentSymNode`, where
    Dynamo could go on without the graph.
Seen in
    torch 2.13, with every backend that uses AOTAutograd.
Noticed by
    `test_a_shape_that_needs_a_read_value_is_an_error` in test_still_there.py.
Contract
    Without that setting AOTAutograd stops at the read, and Dynamo runs the graph eagerly: the
    exception that makes it do so is raised here too.
    Only for graphs in which nothing is rewritten: others are an error, since ranks that run them
    eagerly would meet the collectives of ranks that do not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

READ: Final = torch.ops.aten._local_scalar_dense.default


@contextlib.contextmanager
def eager_where_a_value_is_needed(*, is_rewritten: bool) -> Iterator[None]:
    """Have Dynamo run a graph eagerly whose shapes need a value that only the run knows."""
    try:
        yield
    except GuardOnDataDependentSymNode as error:
        if is_rewritten:
            raise
        raise DataDependentOutputException(READ) from error
