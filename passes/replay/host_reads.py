"""One blocking copy to the host for everything the host must know.

Contract
    However many integers are asked for, `finish` emits one copy to the host.
"""

from __future__ import annotations

import operator

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter


class BulkRead:
    """Collects what the host must know; one copy to the host serves all of it."""

    def __init__(self, emit: Emitter) -> None:
        """Emit through `emit`."""
        self._emit = emit
        self._sources: list[fx.Node] = []
        self._asked: dict[int, dict[fx.Node, int]] = {}

    def add(self, source: fx.Node) -> int:
        """Ask for the value of a tensor of one integer; return its place in the bulk read."""
        self._sources.append(self._emit.method("reshape", source, 1))
        return len(self._sources) - 1

    def ask(self, chunk: object, item: fx.Node, source: fx.Node) -> None:
        """Ask for what the host read `item` reads, in `chunk`, from `source`."""
        self._asked.setdefault(id(chunk), {})[item] = self.add(source)

    def asked_by(self, chunk: object) -> dict[fx.Node, int]:
        """Return the place in the bulk read of each host read that `chunk` asked for."""
        return self._asked.get(id(chunk), {})

    def finish(self) -> list[fx.Node]:
        """Emit the bulk read; return the integers in the order they were asked for."""
        emit = self._emit
        wide = [emit.method("to", source, torch.int64) for source in self._sources]
        host = emit.method("to", emit.call(torch.cat, wide), torch.device("cpu"))
        values = []
        for i in range(len(wide)):
            value = emit.method("item", emit.call(operator.getitem, host, i))
            emit.call(torch._check, emit.call(operator.ge, value, 0))
            values.append(value)
        return values
