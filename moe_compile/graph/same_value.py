"""Do two nodes compute the same value: an index, say, that a program writes out twice.

Contract
    True only where both call one pure function on equal arguments, and nothing in the graph writes
    what these, or theirs in turn, lie in.
"""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from moe_compile.graph.dependence import Dependence, storages
from moe_compile.graph.effects import draws_random, is_pure


def is_same_value(a: fx.Node, b: fx.Node, dependence: Dependence) -> bool:
    """Whether `a` and `b` compute the same, wherever they stand."""
    if a is b:
        return True
    if (a.op, a.target) != (b.op, b.target) or not a.op.startswith("call"):
        return False
    if not all(
        is_pure(n) and not draws_random(n) and not _is_written(n, dependence) for n in (a, b)
    ):
        return False
    return _alike((a.args, a.kwargs), (b.args, b.kwargs), dependence)


def _alike(a: Any, b: Any, dependence: Dependence) -> bool:
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        return not _is_written(a, dependence) and is_same_value(a, b, dependence)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[k], b[k], dependence) for k in a)
    if isinstance(a, slice) and isinstance(b, slice):
        one, other = ((s.start, s.stop, s.step) for s in (a, b))
        return _alike(one, other, dependence)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_alike(x, y, dependence) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and bool(a == b)


def _is_written(node: fx.Node, dependence: Dependence) -> bool:
    memory = storages(node)
    return any(not written or written & memory for written in dependence.writes.values())
