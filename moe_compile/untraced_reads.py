"""Code that Dynamo cannot trace with host reads in graphs runs eagerly, and what it calls does not.

Contract
    megamoe has Dynamo keep host reads in graphs (`capture_scalar_outputs`). In torch 2.13 some
    uses of a number that was read are then an error of the trace, before any backend is asked, and
    no graph break: a list that is indexed by it. Without that setting Dynamo ends the graph at the
    read. Where this error leaves a trace, torch is told to run that function eagerly
    (`suppress_errors`), until the next compilation begins; functions that it calls are compiled.
    Errors of backends and of programs are raised as ever. So is this one where the function was
    compiled before, with other shapes: this rank would run it eagerly beside ranks that run it
    rewritten. And under `fullgraph=True`, which allows no eager code.
    `torch._dynamo.reset()` forgets callbacks: `fall_back` is called again for every graph.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import Any, Final

import torch
import torch._dynamo
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

LOG: Final = logging.getLogger(__name__)
PLACE: Final = re.compile(r"Caused by: (.*?)\s+# (?:\S*/)?([^/\s]+:\d+ in \S+)")
"""How torch says which line of the program needed a value."""
_suppressed: list[bool] = []
"""One entry while torch suppresses errors for us."""


def fall_back() -> None:
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
    is_first = str(compilation.compile_id).endswith("/0")
    if not isinstance(error, GuardOnDataDependentSymNode) or not is_first:
        return
    if config.suppress_errors or not config.capture_scalar_outputs:
        return
    config.suppress_errors = True
    _suppressed.append(True)
    said = PLACE.search(str(error))
    LOG.warning(
        "megamoe: %s: Dynamo does not trace `%s`, for which it needs a number that the host reads. "
        "The function around it runs eagerly, and no region is found across it. To do: make it of "
        "Python integers, or of tensors alone (x[order] in place of a list), or mark the function "
        "that has the line with torch.compiler.disable",
        *((said[2], said[1]) if said else ("a function", str(error).partition("\n")[0])),
    )
