"""Functions that Dynamo cannot trace with host reads run eagerly; those they call are compiled.

Fault
    megamoe has Dynamo keep host reads in graphs (`capture_scalar_outputs`). Some uses of a number
    that was read need its value for a guard: a list that is indexed by it. They end the trace,
    before any backend is asked, where Dynamo without that setting ends the graph at the read.
Seen in
    torch 2.13, up to 2.14: `GuardOnDataDependentSymNode`, an error. Torch 2.15 makes a `UserError`
    of it and ends the graph at the list, or inside a `try` runs the function eagerly.
Noticed by
    `test_a_list_indexed_by_a_number_that_is_read_is_an_error` in test_still_there.py.
Contract
    Where the error leaves a trace, torch is told to run that function eagerly (`suppress_errors`),
    until the next compilation begins. Functions that it calls are compiled, with either torch, and
    a warning names the line.
    Errors of backends and of programs are raised as ever. So is this one, by any torch, where there
    are ranks and the function was compiled before, with other shapes: this rank would run it
    eagerly beside ranks that run it rewritten. And under `fullgraph=True`, which allows no eager
    code.
    `torch._dynamo.reset()` forgets callbacks: `install_eager_fallback` is called for every graph.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, Final

import torch
import torch._dynamo
import torch.distributed as dist
from torch._dynamo.exc import UserError
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

LOG: Final = logging.getLogger(__name__)
PLACE: Final = re.compile(r"Caused by: (.*?)\s+# (?:\S*/)?([^/\s]+:\d+ in \S+)")
"""Text by which torch names the line of the program that needed a value."""
_suppressed: list[bool] = []
"""One entry while torch suppresses errors for us."""


def install_eager_fallback() -> None:
    """Have functions run eagerly that cannot be traced, from the next compilation on."""
    handler = torch._dynamo.callback_handler
    if _at_start not in handler.start_callbacks:
        torch._dynamo.on_compile_start(_at_start)
    if _at_end not in handler.end_callbacks:
        torch._dynamo.on_compile_end(_at_end)


def _at_start(_: Any) -> None:
    if _suppressed:
        _suppressed.clear()
        torch._dynamo.config.suppress_errors = False


def _at_end(compilation: Any) -> None:
    error, config = sys.exception(), torch._dynamo.config
    needed = _number_needed(error)
    if error is None or needed is None or not config.capture_scalar_outputs:
        return
    is_first = str(compilation.compile_id).endswith("/0")
    if not is_first and _has_other_ranks():
        _have_torch_raise(error)
        return
    if config.suppress_errors:
        return
    if error is needed:
        config.suppress_errors = True
        _suppressed.append(True)
    said = PLACE.search(str(needed))
    LOG.warning(
        "megamoe: %s: Dynamo does not trace `%s`, for which it needs a number that the host "
        "reads from a tensor. The function that has this line runs in eager mode, and no region "
        "is found across it. To do: compute the line from Python integers, or from tensors alone "
        "(x[order] in place of a list), or mark the function with torch.compiler.disable",
        *((said[2], said[1]) if said else ("a function", str(needed).partition("\n")[0])),
    )


def _number_needed(error: BaseException | None) -> GuardOnDataDependentSymNode | None:
    """Return the error that names the number a trace needed, if that error ended it."""
    inner = error
    while isinstance(error, UserError) and inner is not None:
        if isinstance(inner, GuardOnDataDependentSymNode):
            break
        inner = inner.__cause__ or inner.__context__
    return inner if isinstance(inner, GuardOnDataDependentSymNode) else None


def _has_other_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _have_torch_raise(error: BaseException) -> None:
    """Have Dynamo raise `error`, which some releases take for one to run the function eagerly by.

    `error_on_graph_break` decides that, and the error carries its value. Raising from here does
    it as well, but Dynamo then counts a compilation that never ends: for a torch without the value.
    """
    traced: Any = getattr(error, "_torch_dynamo_tracer_output", None)
    if hasattr(traced, "error_on_graph_break"):
        traced.error_on_graph_break = True
    elif isinstance(error, UserError):
        raise error
