"""Calls of torch's own functions and methods in a Dynamo graph: constants and sorts among them.

Contract
    A function of others is not taken for torch's, whatever its name. A call that is given an
    argument that the reader does not know is not understood: it may change what the call means.
    A tensor of zeros or ones is recognised by the function of torch that makes it. It may be made
    anew in other sizes, if these are all that its readers need of it; later writes into it are not
    looked at.
    A sort that is not stable may return equal elements in any order. The stable order is one of
    these, and the only one that a part of the elements keeps where it is sorted alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import call_otherwise
from moe_compile.graph.query import tensor_of

MAKERS: Final[dict[str, Callable[..., Any]]] = {
    "zeros": torch.zeros,
    "new_zeros": torch.zeros,
    "ones": torch.ones,
    "new_ones": torch.ones,
}
FORM_ARGUMENTS: Final = frozenset({"size", "dtype", "layout", "device", "pin_memory"})
"""Arguments that say no more than the tensor's own form."""
SORT_PARAMETERS: Final = ("input", "dim", "descending", "stable")
SORTS: Final = {"sort": torch.sort, "argsort": torch.argsort}
SORT_OPERATORS: Final = (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)


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


def maker_of(node: fx.Node) -> Callable[..., Any] | None:
    """Return the function of `(sizes, dtype=, device=)` that makes it; None for another node."""
    tensor = tensor_of(node)
    if (
        tensor is None
        or tensor.layout is not torch.strided
        or not node.kwargs.keys() <= FORM_ARGUMENTS
    ):
        return None
    return MAKERS.get(torch_name(node))


def is_open_sort(node: fx.Node) -> bool:
    """Whether `node` calls torch's sort or argsort without asking for a stable one."""
    given = _sort_arguments(node)
    return given is not None and not given[1].get("stable")


def make_stable(node: fx.Node) -> None:
    """Have `node`, an open sort, give equal elements the order in which they stand."""
    given = _sort_arguments(node)
    assert given is not None
    name, arguments = given
    call_otherwise(node, SORTS[name], arguments.pop("input"), **arguments, stable=True)


def stable_call(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Return the stable sort in the place of aten's sort `func`; any other operator as it is."""
    if func not in SORT_OPERATORS:
        return func, args, kwargs
    given = {**dict(zip(("self", "dim", "descending"), args, strict=False)), **kwargs}
    return torch.ops.aten.sort.stable, (given.pop("self"),), {**given, "stable": True}


def _sort_arguments(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    for name in SORTS:
        if (given := arguments_of(node, name, *SORT_PARAMETERS)) is not None:
            return name, {key: value for key, value in given.items() if key != "stable" or value}
    return None
