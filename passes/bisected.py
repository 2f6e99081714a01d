"""What torch's own bisector asks of the passes: to leave one out, and to say its name.

Contract
    `torch._inductor.compiler_bisector` counts what every subsystem of Inductor applies, in the
    process it runs in, and leaves out all from some number on. Each pass of ours counts as one,
    under the subsystem of Inductor's passes on the same graphs. Its name is what the search ends
    with. Checks, and passes that mend what is not ours, are not counted.
    Where nothing is searched, or torch has no bisector, no pass is left out.
    A pass that works region by region counts once for each region in place of once: so the search
    ends with a region. `disable_passes` leaves passes out of regions in the same place.
    Ranks that run the same programs count alike. Where they do not, what is left out of the forward
    pass is part of what they compare, and they run the program as it was written; in the backward
    pass an order of launches that differs ends the job.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from typing import Any, Final

from moe_compile.config import pass_in_region
from moe_compile.journal.reasons import Left, Reason
from moe_compile.plan.state import CompileState
from passes.contract import GraphPass

BACKEND: Final = "inductor"
"""Backend of torch's search under which our passes count."""
DYNAMO_PASSES: Final = "pre_grad_passes"
"""Name that torch's bisector has for passes on Dynamo graphs, where regions are."""
BISECTED: Final = "torch's compiler bisector leaves it out of this run"


def is_bisecting() -> bool:
    """Whether torch searches: what is compiled meanwhile belongs in no cache."""
    return bool(getattr(_bisector(), "bisection_enabled", False))


def is_left_out(p: GraphPass, subsystem: str, graph_name: str) -> bool:
    """Whether torch's bisector has the pass left out of a graph."""
    if p.is_check or p.is_needed or p.by_region:
        return False
    return _leaves_out(subsystem, f"megamoe's pass {p.name}, on the {graph_name} graph")


def regions_left_out(name: str, regions: Iterable[str], state: CompileState) -> dict[str, Left]:
    """Return the regions of the Dynamo graph at hand that pass `name` is left out of, and why."""
    left = dict[str, Left]()
    for region in dict.fromkeys(regions):
        if pass_in_region(name, state.full_name(region)) in state.config.disable_passes:
            left[region] = Left(Reason.DISABLED)
        elif _leaves_out(
            DYNAMO_PASSES, f"megamoe's pass {name}, on {region} of the {state.graph_name} graph"
        ):
            state.left_out.append(f"{pass_in_region(name, region)} {state.graph_name}")
            left[region] = Left(Reason.DISABLED, BISECTED)
    return left


def _leaves_out(subsystem: str, said: str) -> bool:
    if not is_bisecting():
        return False
    return bool(_bisector().disable_subsystem(BACKEND, subsystem, lambda: said))


@functools.cache
def _bisector() -> Any:
    """Return torch's bisector, None where this torch has none."""
    try:
        return importlib.import_module("torch._inductor.compiler_bisector").CompilerBisector
    except (ImportError, AttributeError):
        return None
