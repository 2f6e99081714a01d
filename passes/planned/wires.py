"""Decide in which number format the rows of a region's two exchanges travel.

Contract
    A region need not be proven, nor chunked: nothing but the exchange would be touched. What would
    not be right of rounded rows is refused: integers made of them, modes that change on the way.
    "auto" is priced for plain exchanges; in two hops rows travel so where an option says it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.modes import Mode
from moe_compile.graph.query import is_integer, tensor_of, waits_on
from moe_compile.journal.entries import Verdict, judged
from moe_compile.journal.reasons import Reason
from moe_compile.ops.wire_format import row_bytes
from moe_compile.plan.choose_plan import Decision
from moe_compile.plan.planned import FoundExperts
from moe_compile.regions.regions import MoERegion, Refused
from passes.planned.draft import Draft

QUANTIZED: Final = ("fp8", "fp8_forward")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wire:
    """How the rows of one exchange travel."""

    name: str
    row_bytes: int
    """Of a row that travels; 0 when unknown."""
    left: Verdict | None
    """Why they travel as they are; None where they do not."""


def plan_wires(
    draft: Draft, config: MegaMoEConfig, in_force: Mapping[fx.Node, Mode]
) -> dict[str, Wire]:
    """Return `dispatch` and `combine` of a region with their wires.

    `in_force` is the mode of each node of the graph.
    """
    wires, found = {}, draft.found
    launches = {"dispatch": found.region.dispatch, "combine": found.region.combine}
    for name, launch in launches.items():
        option = config.dispatch_wire if name == "dispatch" else config.combine_wire
        wire = _wire_asked(name, option, draft.decision)
        width = _width(found, name, wire)
        if isinstance(width, int):
            refused = _against_eight_bits(draft, config, option)
            width = refused or _needs_its_rows(launch, found, in_force) or width
        if isinstance(width, Reason):
            candidate = f"{name} of {found.region.name}"
            verdict = Verdict(candidate=candidate, reason=width, where=found.where)
            left = judged(config, f"{name}_wire", verdict)
            wires[name] = Wire(name="same", row_bytes=found.row_bytes[name], left=left)
        else:
            wires[name] = Wire(name=wire, row_bytes=row_bytes(width), left=None)
    return wires


def _against_eight_bits(draft: Draft, config: MegaMoEConfig, option: str) -> Reason | None:
    """Return what of the way in which a region is dispatched stands against eight bits."""
    if draft.gathered is not None:
        return Reason.SUMS_TRAVEL
    if draft.divided is None:
        return None
    if "quantize_exchanges" in config.disable_passes:  # two hops are packed without it
        return Reason.DISABLED
    return Reason.TWO_HOPS if option == "auto" else None


def _wire_asked(name: str, option: str, decision: Decision | None) -> str:
    """Return what the option says, or for "auto" what was decided."""
    if option != "auto":
        return option
    if decision is None:
        return "same"
    chosen = decision.chosen.candidate
    return chosen.dispatch_wire if name == "dispatch" else chosen.combine_wire


def _width(found: FoundExperts, name: str, wire: str) -> int | Reason:
    """Return the width of the rows to quantise, or why they travel as they are."""
    if wire not in QUANTIZED:
        return Reason.NOT_ASKED
    rows = found.rows[name]
    if rows is None or rows.dim() != 2 or not rows.dtype.is_floating_point:
        return Reason.NOT_A_MATRIX
    width: Any = rows.shape[1]
    if isinstance(width, torch.SymInt):
        return Reason.NOT_A_MATRIX
    return Reason.NARROW if row_bytes(width) >= found.row_bytes[name] else int(width)


def _needs_its_rows(
    launch: fx.Node, found: FoundExperts, in_force: Mapping[fx.Node, Mode]
) -> Reason | None:
    """Return what of the program around an exchange would not be right of rounded rows."""
    if isinstance(found.proof, Refused) and found.proof.reason is Reason.COMMUNICATES:
        return Reason.COMMUNICATES
    waits = waits_on(launch)
    if len(launch.users) != 1 or not waits:
        return Reason.UNKNOWN_FORM
    if any(in_force[launch] != in_force[wait] for wait in waits):
        return Reason.STATE_CHANGES
    return Reason.INTEGERS if _makes_integers(found.region) else None


def _makes_integers(region: MoERegion) -> bool:
    """Whether integers are made of the rows of activations between dispatch and combine."""
    seen, todo = {region.combine}, [region.dispatch]
    while todo:
        node = todo.pop()
        if is_integer(node):
            return True
        new = [user for user in node.users if user not in seen and tensor_of(user) is not None]
        seen.update(new)
        todo.extend(new)
    return False
