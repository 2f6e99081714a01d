"""Sorts that leave the order of equal elements open, and the order that a stable sort gives them.

Contract
    A sort that is not stable may return equal elements in any order. The stable order is one of
    these, and the only one that a part of the elements keeps where it is sorted alone.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import call_otherwise
from moe_compile.graph.torch_calls import arguments_of

SORT_PARAMETERS: Final = ("input", "dim", "descending", "stable")
FUNCTIONS: Final = {"sort": torch.sort, "argsort": torch.argsort}
OPERATORS: Final = (torch.ops.aten.sort.default, torch.ops.aten.sort.stable)


def is_open_sort(node: fx.Node) -> bool:
    """Whether `node` calls torch's sort or argsort without asking for a stable one."""
    given = _arguments(node)
    return given is not None and not given[1].get("stable")


def make_stable(node: fx.Node) -> None:
    """Have `node`, an open sort, give equal elements the order in which they stand."""
    given = _arguments(node)
    assert given is not None
    name, arguments = given
    call_otherwise(node, FUNCTIONS[name], arguments.pop("input"), **arguments, stable=True)


def stable_call(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch._ops.OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Return the stable sort in the place of aten's sort `func`; any other operator as it is."""
    if func not in OPERATORS:
        return func, args, kwargs
    given = {**dict(zip(("self", "dim", "descending"), args, strict=False)), **kwargs}
    return torch.ops.aten.sort.stable, (given.pop("self"),), {**given, "stable": True}


def _arguments(node: fx.Node) -> tuple[str, dict[str, Any]] | None:
    for name in FUNCTIONS:
        if (given := arguments_of(node, name, *SORT_PARAMETERS)) is not None:
            return name, {key: value for key, value in given.items() if key != "stable" or value}
    return None
