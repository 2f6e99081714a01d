"""A compiled graph run node by node, each node taking the time the cost model says it takes.

Contract
    Values are real and so are messages; only durations are emulated: the cost of a node is that of
    `cost/cost_model.py` at the sizes its tensors really have on this rank, unless a `Price` says
    otherwise.
    Nodes run in the order the scheduler left them in.
    Raises RuntimeError for a size that does not follow from the values seen so far.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import sympy
import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from benchmarks.link.clocks import ChargedClock
from moe_compile.cost.cost_model import estimate_cost
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import is_launch, value_of
from moe_compile.hardware import HardwareProfile

US: Final = 1e-6
Price = Callable[[fx.Node, float], float]
"""Microseconds that a node takes, given the node and the cost model's time of it."""


def as_estimated(node: fx.Node, us: float) -> float:
    """Return the cost model's own time."""
    del node
    return us


class ChargedGraph(fx.Interpreter):
    """Runs a graph of AOTAutograd; `clock` is charged as the module docstring says."""

    def __init__(
        self,
        module: fx.GraphModule,
        hardware: HardwareProfile,
        clock: ChargedClock,
        price: Price = as_estimated,
    ) -> None:
        """Run `module` on an emulated device with the rates of `hardware`, as `price` has them."""
        super().__init__(module)
        self.clock, self._price = clock, price
        self.computed_us = 0.0
        """Charged in the last run."""
        self._hardware = hardware
        self._sizes = NominalSizes({})

    def run(self, *args: Any, **settings: Any) -> Any:
        """Run once; symbols may have other values each time."""
        self.computed_us = 0.0
        self._sizes = NominalSizes({})
        with torch.no_grad():
            return super().run(*args, **settings)

    def run_node(self, node: fx.Node) -> Any:
        """Run one node: a launch is charged before it posts, all else when its sizes are known."""
        if is_launch(node):
            self._charge(node, self._hardware.op_overhead_us)
        value = super().run_node(node)
        self._learn(node, value)
        if not is_launch(node):
            self._charge(node, estimate_cost(node, self._sizes, self._hardware).compute_us)
        return value

    def _charge(self, node: fx.Node, compute_us: float) -> None:
        us = self._price(node, compute_us)
        self.computed_us += us
        self.clock.charge(us * US)

    def _learn(self, node: fx.Node, value: Any) -> None:
        """Learn what symbols are worth from the real sizes of a node's value."""
        expected = pytree.tree_leaves(value_of(node))
        for guess, real in zip(expected, pytree.tree_leaves(value), strict=False):
            if isinstance(guess, torch.SymInt):
                self._equate(node, guess, real)
            elif isinstance(guess, torch.Tensor) and isinstance(real, torch.Tensor):
                for size, real_size in zip(guess.shape, real.shape, strict=True):
                    self._equate(node, size, real_size)

    def _equate(self, node: fx.Node, guess: Any, real: int) -> None:
        if not isinstance(guess, torch.SymInt):
            return
        expr = guess.node.expr
        if isinstance(expr, sympy.Symbol):
            self._sizes.known.setdefault(str(expr), int(real))
        unknown = [s for s in expr.free_symbols if str(s) not in self._sizes.known]
        if unknown or self._sizes.size(guess) != real:
            raise RuntimeError(f"{node}: {expr} is {real}, which does not follow")
