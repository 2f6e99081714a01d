"""What torch's own bisector asks of the passes: to leave one out, and to say its name.

Contract
    `torch._inductor.compiler_bisector` counts what every subsystem of Inductor applies, in the
    process it runs in, and leaves out all from some number on. Each pass of ours counts as one,
    under the subsystem of Inductor's passes on the same graphs. Its name is what the search ends
    with. Checks, and passes that mend what is not ours, are not counted.
    Where nothing is searched, or torch has no bisector, no pass is left out.
    Ranks that run the same programs count alike. Where they do not, what is left out of the forward
    pass is part of what they compare, and they run the program as it was written; in the backward
    pass an order of launches that differs ends the job.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, Final

from passes.contract import GraphPass

BACKEND: Final = "inductor"
"""Backend of torch's search under which our passes count."""


def is_bisecting() -> bool:
    """Whether torch searches: what is compiled meanwhile belongs in no cache."""
    return bool(getattr(_bisector(), "bisection_enabled", False))


def is_left_out(p: GraphPass, subsystem: str, graph_name: str) -> bool:
    """Whether torch's bisector has the pass left out of a graph."""
    if not is_bisecting() or p.is_check or p.is_needed:
        return False
    said = f"megamoe's pass {p.name}, on the {graph_name} graph"
    return bool(_bisector().disable_subsystem(BACKEND, subsystem, lambda: said))


@functools.cache
def _bisector() -> Any:
    """Return torch's bisector, None where this torch has none."""
    try:
        return importlib.import_module("torch._inductor.compiler_bisector").CompilerBisector
    except (ImportError, AttributeError):
        return None
