"""Run what the host computes from the integers that it reads in a region, on sampled counts.

Contract
    What needs values from outside the region is left out.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.graph.effects import is_host_arithmetic
from moe_compile.graph.query import is_assertion, value_of
from moe_compile.proof.count_run import OneRun, Unevaluable
from moe_compile.proof.operator_call import SYMBOLIC
from moe_compile.proof.trace_steps import Operator, Trace
from moe_compile.regions.regions import MoERegion


class HostRun:
    """The host's arithmetic in one region, and the sizes of its tensors."""

    def __init__(self, region: MoERegion, trace: Trace) -> None:
        """Find what is to be computed; equal sizes are looked at once."""
        found = (node for node in region.body if is_host_arithmetic(node))
        self._nodes = [node for node in found if not is_assertion(node)]
        made = pytree.tree_leaves([s.out for s in trace.steps if isinstance(s, Operator)])
        sizes = [size for leaf in made if isinstance(leaf, torch.Tensor) for size in leaf.shape]
        symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
        self._sizes = list({size.node._expr: size for size in symbolic}.values())

    def on(self, run: OneRun) -> None:
        """Compute every number and every size, with the integers that `run` has read.

        Raises what the host's arithmetic raises, ValueError for a negative size.
        """
        numbers: dict[fx.Node, Any] = {}

        def number(node: fx.Node) -> Any:
            value = value_of(node)
            known = numbers.get(node, value)
            return run.size(value) if known is value and isinstance(value, SYMBOLIC) else known

        for node in self._nodes:
            with suppress(Unevaluable):
                args = fx.node.map_arg(node.args, number)
                assert callable(node.target)
                numbers[node] = node.target(*args)
        for size in self._sizes:
            with suppress(Unevaluable):
                if (length := run.size(size)) < 0:
                    raise ValueError(f"a tensor of {length} rows")
