"""A wait for several tensors becomes a wait for each: the one form the passes know.

torch 2.15 waits by `wait_tensors` for a collective of several tensors, in programs and in
derivatives. Until then it waited for each of them.
"""

from __future__ import annotations

import operator
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import Emitter, erase_dead, substitute
from moe_compile.graph.query import C10D, overload_name, value_of

TOGETHER: Final = "_c10d_functional::wait_tensors"


def split_waits(graph: fx.Graph) -> tuple[str, ...]:
    """Split each wait for several tensors whose readers take one of them; return their names."""
    together = [node for node in graph.nodes if overload_name(node) == TOGETHER]
    found = [node for node in together if all(map(_takes_one, node.users))]
    for node in found:
        _split(node)
    return tuple(node.name for node in found)


def _takes_one(reader: fx.Node) -> bool:
    return reader.target is operator.getitem and type(reader.args[1]) is int


def _split(together: fx.Node) -> None:
    """Wait for each tensor where `together` stands, in the order it names them."""
    emit, tensors = Emitter(together), list(together.args[0])
    is_overload = isinstance(together.target, torch._ops.OpOverload)
    target = C10D.wait_tensor.default if is_overload else C10D.wait_tensor
    waits = [emit.call(target, tensor) for tensor in tensors]
    values = value_of(together) or [value_of(tensor) for tensor in tensors]
    for wait, value in zip(waits, values, strict=True):
        wait.meta["val" if is_overload else "example_value"] = value
    for reader in list(together.users):
        substitute(reader, waits[reader.args[1]])
    erase_dead([together])
