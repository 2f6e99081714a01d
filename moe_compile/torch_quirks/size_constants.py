"""Programs of which torch reads a wrong value while it traces: traced again with fixed sizes.

Fault
    `torch.tensor(4.0) * (tokens / 2)` with a symbol for the tokens has, while torch traces, the
    stand-in value of a symbol, not a number: `int()` of a result of it is that value at run time
    too, by every backend. With host reads in graphs (`capture_scalar_outputs`) nothing ends the
    graph at the read.
Seen in
    torch 2.13.
Noticed by
    `test_a_number_of_a_symbol_is_its_stand_in` in test_still_there.py.
Contract
    A graph is taken for one of these if it holds such a tensor that is an integer, as a capacity
    is, or that nothing reads: it was made for a read.
    Such a graph is traced again with the current sizes in place of symbols, by Dynamo's own restart
    and with `automatic_dynamic_shapes` off until this compilation ends. Ranks whose sizes did not
    change go on with their compiled code: both are rewritten by one plan, or ranks notice.
    Where sizes are symbols because the user said so (`mark_dynamic`, `dynamic=True`), as on all
    ranks and from the first compilation on, Dynamo runs the graph eagerly, as it does by itself at
    a read that it does not keep.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Final

import torch
import torch._dynamo
import torch.fx as fx
from torch._dynamo.exc import TensorifyScalarRestartAnalysis
from torch._subclasses.fake_tensor import DataDependentOutputException

from moe_compile.graph.query import source_place, tensor_of, value_of

LOG: Final = logging.getLogger(__name__)
READ: Final = torch.ops.aten._local_scalar_dense.default
SYMBOLS: Final = (torch.SymInt, torch.SymFloat, torch.SymBool)
_fixed: list[bool] = []
"""One entry while torch takes sizes as numbers for us."""


def refuse_wrong_constants(graph: fx.Graph) -> None:
    """Have Dynamo trace anew, or run eagerly, a graph that may hold a wrong number of a size."""
    node = _first_wrong(graph)
    if node is None:
        return
    config = torch._dynamo.config
    if config.automatic_dynamic_shapes:
        _fix_sizes()
        _warn_once(
            f"megamoe: {source_place(node)} is compiled again for each number of tokens: when "
            "torch traces this line, it builds a tensor from a stand-in for a size, so that a "
            f"number read from this tensor may be wrong with any torch.compile backend. {REMEDY}"
        )
        raise TensorifyScalarRestartAnalysis(restart_reason="a number of a symbol's stand-in")
    _warn_once(
        f"megamoe: {source_place(node)} runs eagerly: it reads a number from a tensor that is "
        "built from a size marked dynamic. While torch traces, it uses a stand-in for this "
        f"size, so that the number may be wrong with any torch.compile backend. {REMEDY}"
    )
    raise DataDependentOutputException(READ)


REMEDY: Final = (
    "To do: compute the number from Python numbers, by math.ceil and max, instead of tensors"
)


def _fix_sizes() -> None:
    if _at_end not in torch._dynamo.callback_handler.end_callbacks:
        torch._dynamo.on_compile_end(_at_end)
    torch._dynamo.config.automatic_dynamic_shapes = False
    _fixed.append(True)


def _at_end(_: Any) -> None:
    if _fixed:
        _fixed.clear()
        torch._dynamo.config.automatic_dynamic_shapes = True


def _first_wrong(graph: fx.Graph) -> fx.Node | None:
    """Return the first tensor of constants and symbols that a read may be for."""
    of_symbols: set[fx.Node] = set()
    for node in graph.nodes:
        tensor = tensor_of(node)
        if tensor is None or getattr(tensor, "constant", None) is None:
            continue
        if not any(i in of_symbols or _is_symbol(i) for i in node.all_input_nodes):
            continue
        of_symbols.add(node)
        if not tensor.is_floating_point() or not node.users:
            return node
    return None


@functools.cache
def _warn_once(text: str) -> None:
    LOG.warning("%s", text)


def _is_symbol(node: fx.Node) -> bool:
    return isinstance(value_of(node), SYMBOLS)
