"""Give every concatenation constants of its own: shared ones keep Inductor from fusing it.

Contract
    Requires  FUNCTIONAL.
    Keeps     every value: only a tensor of one number, or a view of one, is made again.

    cat(a, zeros), cat(b, zeros)  ->  cat(a, zeros), cat(b, zeros')

Chunks append the same rows of zeros. AOTAutograd makes them once, and Inductor writes a
concatenation out where another reads one of its inputs too: all rows would move once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter, read_instead
from moe_compile.graph.precedence import is_view
from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

CAT: Final = torch.ops.aten.cat.default
FILLS: Final = frozenset(
    {torch.ops.aten.full.default, torch.ops.aten.zeros.default, torch.ops.aten.ones.default}
)


@dataclass(frozen=True)
class CopyFills(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "copy_fills"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Make every constant again that a concatenation shares with other nodes."""
        del state
        applied = []
        for cat in graph.find_nodes(op="call_function", target=CAT):
            for piece in dict.fromkeys(cat.args[0]):
                is_shared = any(len(made.users) > 1 for made in _made_of(piece))
                if is_shared and _is_fill(piece):  # its last reader keeps it
                    read_instead(cat, piece, _copied(Emitter(cat), piece))
                    applied.append(cat.name)
        return PassReport(pass_name=self.name, applied=tuple(applied))


def _made_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield `node`, and the bases it is a view of."""
    yield node
    if is_view(node):
        yield from _made_of(node.all_input_nodes[0])


def _is_fill(node: fx.Node) -> bool:
    *_, maker = _made_of(node)
    return maker.target in FILLS


def _copied(emit: Emitter, node: fx.Node) -> fx.Node:
    env: dict[fx.Node, Any] = {}
    for made in reversed(list(_made_of(node))):
        env[made] = emit.copy(made, env)
        env[made].meta["val"] = made.meta["val"]
    return env[node]
