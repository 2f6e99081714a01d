"""Save values computed from an input that the program overwrites, if the backward needs them.

Contract
    Requires  FUNCTIONAL.
    Keeps     values: the choice between saving and recomputing is written, as `recompute`.

Torch's partitioner may keep an input in place of a value computed from it, and recompute that in
the backward: from the input's new contents (seen on torch 2.13, by `rows + buffer.to(dtype)` before
`buffer.mul_(0.5)`). Nodes inside a checkpointed function keep their policy: there eager reads the
input anew as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx
from torch.utils.checkpoint import CheckpointPolicy

from moe_compile.journal.entries import PassReport
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass


@dataclass(frozen=True)
class SaveOverwritten(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "save_overwritten"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    is_needed: ClassVar[bool] = True
    after: ClassVar[frozenset[str]] = frozenset({"save_exchanges"})  # it overrules a policy

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Write the policy on the first operators, past views, that read such an input."""
        del state
        return PassReport(pass_name=self.name, applied=mark_overwritten(graph))


def mark_overwritten(graph: fx.Graph) -> tuple[str, ...]:
    """Have the first readers of inputs that are overwritten saved; return their names."""
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {copy.args[0] for copy in copies}
    inputs = [node for node in graph.find_nodes(op="placeholder") if node in written]
    readers = [r for node in inputs for r in _readers(node) if "recompute" not in r.meta]
    for reader in readers:
        reader.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return tuple(reader.name for reader in readers)


def _readers(node: fx.Node) -> list[fx.Node]:
    """Return the forward's readers of the tensor or of a view of it."""
    found: list[fx.Node] = []
    todo = [node]
    while todo:
        for user in todo.pop().users:
            if isinstance(user.target, torch._ops.OpOverload) and user.target.is_view:
                todo.append(user)
            elif user.op == "call_function" and not _writes_or_is_backward(user):
                found.append(user)
    return list(dict.fromkeys(found))


def _writes_or_is_backward(node: fx.Node) -> bool:
    is_write = node.target is torch.ops.aten.copy_.default
    return is_write or node.meta.get("partitioner_tag") == "is_backward"
