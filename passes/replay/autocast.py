"""Emit nodes under the autocast that they run under where they stand.

Contract
    A copy runs under the autocast of its original; neighbours under the same one share it. What is
    not copied runs under the modes of the place where it is emitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter
from moe_compile.graph.modes import entered_since, modes


class AutocastEmitter(Emitter):
    """Appends nodes before `anchor`, copies under autocast as their originals."""

    def __init__(self, anchor: fx.Node) -> None:
        """Read the modes of the nodes that stand in the graph now: copied are these."""
        super().__init__(anchor)
        self._modes = modes(anchor.graph)
        self._open: list[tuple[fx.Node, fx.Node]] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of a function or operator."""
        self._switch(())
        return super().call(target, *args, **kwargs)

    def method(self, name: str, *args: Any, **kwargs: Any) -> fx.Node:
        """Emit a call of the tensor method `name`; the tensor is the first argument."""
        self._switch(())
        return super().method(name, *args, **kwargs)

    def copy(self, node: fx.Node, env: dict[fx.Node, Any]) -> fx.Node:
        """Emit `node` again, under its autocast, reading `env[input]` where env has the input."""
        self._switch(entered_since(self._modes[node], self._modes[self.anchor]) or ())
        return super().copy(node, env)

    def _switch(self, wanted: tuple[fx.Node, ...]) -> None:
        """Leave and enter autocast until what `wanted` entered is in force, and nothing else."""
        if tuple(entered for entered, _ in self._open) == wanted:
            return
        while self._open:
            _, ours = self._open.pop()
            super().call(torch.amp.autocast_mode._exit_autocast, ours)
        for switch in wanted:
            self._open.append((switch, super().copy(switch, {})))
