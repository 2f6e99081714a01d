"""Run what the host computes from the integers that it reads in a region, on sampled counts.

Contract
    What needs values from outside the region is left out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.analysis.count_run import OneRun, Unevaluable
from moe_compile.analysis.operator_call import SYMBOLIC
from moe_compile.analysis.regions import MoERegion
from moe_compile.analysis.row_trace import Operator, Trace
from moe_compile.graph.effects import is_host_arithmetic
from moe_compile.graph.query import is_assertion, value_of


def run_host(region: MoERegion, trace: Trace, run: OneRun) -> None:
    """Compute every number of the host and every size, with the integers that `run` has read.

    Raises what the host's arithmetic raises, ValueError for a negative size.
    """
    numbers: dict[fx.Node, Any] = {}

    def number(leaf: Any) -> Any:
        if leaf in numbers:
            return numbers[leaf]
        value = value_of(leaf)
        return run.size(value) if isinstance(value, SYMBOLIC) else value

    for node in region.body:
        if is_host_arithmetic(node) and not is_assertion(node):
            try:
                args = fx.node.map_arg(node.args, number)
            except Unevaluable:
                continue
            assert callable(node.target)
            numbers[node] = node.target(*args)
    for step in trace.steps:
        for tensor in pytree.tree_leaves(step.out) if isinstance(step, Operator) else ():
            _check_sizes(tensor, run)


def _check_sizes(tensor: Any, run: OneRun) -> None:
    for size in tensor.shape if isinstance(tensor, torch.Tensor) else ():
        try:
            if isinstance(size, torch.SymInt) and run.size(size) < 0:
                raise ValueError(f"a tensor of {run.size(size)} rows")
        except Unevaluable:
            continue
