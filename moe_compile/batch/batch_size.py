"""What compiled code takes for granted of a batch whose size is a symbol.

Contract
    Each part of such a batch has two indices or more, by a guard: of a size that may be one the
    tracer asks whether it is, and takes the answer for granted, so that code would be for one size
    of the batch after all. A batch that is smaller is compiled for its size alone.
    A size that the program marks as dynamic becomes no constant, and one that it bounds gets no
    guard: torch makes errors of these. Raises Refuse instead.
    All of this follows from the size that this rank has. A graph that runs in parts has the same
    plan for any of them, and one that is refused another: ranks compare them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint, statically_known_true

from moe_compile.attention.head_proof import Refuse
from moe_compile.graph.query import expression_of
from moe_compile.journal.reasons import Reason


def settle_size(size: Any, num_parts: int) -> bool:
    """Return whether `size` is what it was: False where it is a constant from now on.

    Raises Refuse where there are not enough indices for parts of it.
    """
    least = 2 * num_parts
    if not isinstance(size, torch.SymInt) or statically_known_true(size >= least):
        return True
    marks = list(_marks_of(size))
    if any(isinstance(mark, StrictMinMaxConstraint) for mark in marks):
        raise Refuse(Reason.BATCH_TOO_SMALL, f"a bound below {least} for {num_parts} parts")
    if size >= least:
        return True
    if marks:
        raise Refuse(Reason.BATCH_TOO_SMALL, f"a size marked as dynamic, below {least}")
    int(size)  # a guard: the tracer puts the number in the place of the symbol
    return False


def _marks_of(size: torch.SymInt) -> Iterator[Any]:
    """Yield what the program says of the dimensions of inputs that have this size."""
    tracked = getattr(size.node.shape_env, "tracked_fakes", None) or ()
    for one in tracked:
        if not isinstance(one.fake, torch.Tensor):
            continue
        said = getattr(one.symbolic_context, "constraint_sizes", None) or ()
        for own, mark in zip(one.fake.shape, said, strict=False):
            symbols = getattr(expression_of(own), "free_symbols", frozenset[Any]())
            is_its = bool(symbols & expression_of(size).free_symbols)
            if is_its and mark is not None and not mark.warn_only:
                yield mark
