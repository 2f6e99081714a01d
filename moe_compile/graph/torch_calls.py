"""Calls of torch's own functions and methods in a Dynamo graph, with all their arguments by name.

Contract
    A function of others is not taken for torch's, whatever its name. A call that is given an
    argument that the reader does not know is not understood: it may change what the call means.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx


def torch_name(node: fx.Node) -> str:
    """Return the name of the tensor method, or of torch's or `operator`'s function, else ""."""
    if node.op == "call_method":
        return str(node.target)
    if node.op != "call_function":
        return ""
    name = str(getattr(node.target, "__name__", ""))
    own = (getattr(module, name, None) for module in (torch, operator))
    return name if any(function is node.target for function in own) else ""


def arguments_of(node: Any, name: str, *parameters: str) -> dict[str, Any] | None:
    """Return the arguments of a call of torch's `name`, without those left out.

    `parameters` are in the order in which they are taken. None where the node calls something
    else, or gives any other argument.
    """
    if not isinstance(node, fx.Node) or torch_name(node) != name:
        return None
    if len(node.args) > len(parameters) or not node.kwargs.keys() <= {*parameters}:
        return None
    return {**dict(zip(parameters, node.args, strict=False)), **node.kwargs}
