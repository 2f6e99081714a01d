"""Decide the number formats of the rows in a region's two exchanges.

Contract
    A region need not be proven, nor chunked: only the exchange would be touched. Uses for which
    rounded rows would be wrong are refused: integers made of rows, modes that change on the way.
    Exchanges refused under any option are known to the planner before it prices.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import is_integer, tensor_of, waits_on
from moe_compile.hardware.chip_limits import packs_rows
from moe_compile.journal.entries import Verdict, judged
from moe_compile.journal.reasons import Left, Reason
from moe_compile.ops.wire_format import row_bytes
from moe_compile.plan.planned import FoundExperts
from moe_compile.regions.regions import MoERegion
from passes.kinds.by_counts.draft import Draft

QUANTIZED: Final = ("fp8", "fp8_forward")
NOT_ASKED: Final = Left(Reason.NOT_ASKED)
NO_PASS: Final = Left(Reason.DISABLED)
"""The reason for rows that could be packed, where the pass that packs them is disabled."""


def never_packed(found: FoundExperts, config: MegaMoEConfig) -> dict[str, Left]:
    """Return which of `dispatch` and `combine` must keep their number format, and why."""
    against = {name: _against(found, name) for name in ("dispatch", "combine")}
    if "quantize_exchanges" in config.disable_passes:  # no pass would do it: no price
        against = {name: why or NO_PASS for name, why in against.items()}
    return {name: why for name, why in against.items() if why is not None}


def plan_wires(draft: Draft, config: MegaMoEConfig) -> tuple[dict[str, str], dict[str, Verdict]]:
    """Return the wires of `dispatch` and `combine`, and by option why rows travel as they are."""
    wires, left, found = dict[str, str](), dict[str, Verdict](), draft.found
    for name in ("dispatch", "combine"):
        option = config.dispatch_wire if name == "dispatch" else config.combine_wire
        wire = _wire_asked(name, option, draft)
        refused = _why_not(draft, name) if wire in QUANTIZED else NOT_ASKED
        if refused is not None:
            verdict = Verdict(
                candidate=f"{name} of {found.name}",
                reason=refused.reason,
                detail=refused.detail,
                where=found.where,
            )
            left[f"{name}_wire"] = judged(config, f"{name}_wire", verdict)
        wires[name] = wire if refused is None else "same"
    return wires, left


def _why_not(draft: Draft, name: str) -> Left | None:
    """Return the reason against eight bits, under the region's dispatch."""
    if draft.gathered is not None:
        return Left(Reason.SUMS_TRAVEL)
    why = draft.never_packed.get(name)
    if why is NO_PASS and draft.two_hops is None:
        return None  # the plan packs them until the disabled pass is withdrawn
    return why


def _wire_asked(name: str, option: str, draft: Draft) -> str:
    """Return the option's wire, or for "auto" the one decided for this dispatch."""
    if option != "auto":
        return option
    if draft.decision is None:
        return "same"
    chosen = draft.decision.chosen.candidate
    if chosen.nodes != draft.nodes:
        return "same"
    return chosen.dispatch_wire if name == "dispatch" else chosen.combine_wire


def _against(found: FoundExperts, name: str) -> Left | None:
    """Return why the rows of an exchange must not be rounded, or would not be shorter."""
    rows = found.rows[name]
    if rows is None or rows.dim() != 2 or not rows.dtype.is_floating_point:
        return Left(Reason.NOT_A_MATRIX)
    width: Any = rows.shape[1]
    if isinstance(width, torch.SymInt):
        return Left(Reason.NOT_A_MATRIX)
    if row_bytes(width) >= found.row_bytes[name]:
        return Left(
            Reason.NO_FEWER_BYTES,
            "a row in eight bits, with its scale, would take no fewer bytes",
        )
    if not packs_rows(rows.device):
        return Left(Reason.NO_E4M3)
    region = found.region
    launch = region.dispatch if name == "dispatch" else region.combine
    reason = _needs_its_rows(launch, found)
    return None if reason is None else Left(reason)


def _needs_its_rows(launch: fx.Node, found: FoundExperts) -> Reason | None:
    """Return the reason why the program around an exchange needs exact rows."""
    if isinstance(found.proof, Left) and found.proof.reason is Reason.COMMUNICATES:
        return Reason.COMMUNICATES
    waits, modes = waits_on(launch), found.region.facts.modes
    if len(launch.users) != 1 or not waits:
        return Reason.UNKNOWN_FORM
    if any(modes[launch] != modes[wait] for wait in waits):
        return Reason.STATE_CHANGES
    return Reason.INTEGERS if makes_integers(found.region) else None


def makes_integers(region: MoERegion) -> bool:
    """Whether integers are computed from the activations' rows between dispatch and combine."""
    seen, todo = {region.combine}, [region.dispatch]
    while todo:
        node = todo.pop()
        if is_integer(node):
            return True
        new = [user for user in node.users if user not in seen and tensor_of(user) is not None]
        seen.update(new)
        todo.extend(new)
    return False
