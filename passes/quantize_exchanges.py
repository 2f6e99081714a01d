"""Send the rows of chosen exchanges as messages of eight bits: quantise, exchange, dequantise.

Contract
    Requires  REGIONS_FOUND.
    Keeps     every collective but the payload of those rewritten; router, counts and scores.
    Loses     what `moe_compile.ops.wire_format` says a row loses; only where `dispatch_wire` or
              `combine_wire` asks for it, or leaves it to the planner, which decided so.

    all_to_all(rows) -> wait    becomes    pack(rows) -> all_to_all -> wait -> unpack

The split lists count rows and so stay. AOTAutograd derives the backward: the same, reversed.
A region need not be proven, nor chunked: nothing but the exchange is touched.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.analysis.regions import Refusal, Refused
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.edit import Emitter, replace_uses, substitute
from moe_compile.graph.modes import Mode, modes
from moe_compile.graph.query import (
    group_name,
    input_splits,
    is_integer,
    is_wait,
    output_splits,
    tensor_of,
)
from moe_compile.ops.quantized_exchange import DEQUANTIZE_EXCHANGED
from moe_compile.ops.quantized_rows import GATHER_QUANTIZE_PACK
from moe_compile.ops.wire_format import row_bytes
from moe_compile.planning.state import CompileState, Exchange, RegionPlan
from passes.contract import Fact, GraphPass, PassReport, Verdict

QUANTIZED: Final = ("fp8", "fp8_forward")


class Left(enum.Enum):
    """Why the rows of an exchange travel as they are."""

    SAME = "its wire option is `same`, or `auto` and not worthwhile"
    NOT_A_MATRIX = "its rows are no matrix of floating-point numbers with a known width"
    NARROW = "a row would not get shorter"
    GATHERED = (
        "tokens are gathered, and sums of them travel back: no message of eight bits for these"
    )
    UNKNOWN_FORM = "its launch is read by something else than one wait"
    MODES = "gradients or autocast are switched between its launch and its wait"
    INTEGERS = "integers are made of its rows: positions or bits, which eight bits do not hold"
    COMMUNICATES = "the experts communicate between dispatch and combine: it may carry no rows"


NOT_OWED: Final = (Left.SAME, Left.NARROW)
"""Not asked for, or of no use: `strict` accepts both."""


@dataclass(frozen=True)
class QuantizeExchanges(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "quantize_exchanges"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.REGIONS_FOUND})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Rewrite the dispatches and combines that the options name, chunked or not."""
        in_force = modes(graph)
        chosen: list[tuple[Exchange, str, int]] = []
        applied: list[str] = []
        skipped: list[Verdict] = []
        for plan in state.plans:
            for exchange in (plan.dispatch, plan.combine):
                candidate = f"{exchange.name} of {plan.region.name}"
                wire = wire_of(exchange, plan, state.config)
                decided = _decide(exchange, wire, plan, in_force)
                if isinstance(decided, Left):
                    exchange.refusal = "" if decided in NOT_OWED else decided.value
                    skipped.append(Verdict(candidate=candidate, reason=decided))
                else:
                    applied.append(candidate)
                    chosen.append((exchange, wire, decided))
        for exchange, wire, width in chosen:
            exchange.wire = wire
            exchange.row_bytes = row_bytes(width)
            for launch in exchange.launches:
                _rewrite(launch, quantize_gradient=exchange.wire == "fp8")
        return PassReport(pass_name=self.name, applied=tuple(applied), skipped=tuple(skipped))


def wire_of(exchange: Exchange, plan: RegionPlan, config: MegaMoEConfig) -> str:
    """Return the wire of an exchange: what its option says, or for "auto" what was decided."""
    is_dispatch = exchange.name == "dispatch"
    option = config.dispatch_wire if is_dispatch else config.combine_wire
    if option != "auto":
        return option
    if plan.decision is None:
        return "same"
    chosen = plan.decision.chosen.candidate
    return chosen.dispatch_wire if is_dispatch else chosen.combine_wire


def _decide(
    exchange: Exchange, wire: str, plan: RegionPlan, in_force: dict[fx.Node, Mode]
) -> int | Left:
    """Return the width of the rows to quantise, or why they travel as they are."""
    if wire not in QUANTIZED:
        return Left.SAME
    if plan.switch.is_switched:
        return Left.GATHERED
    rows = exchange.rows
    if rows is None or rows.dim() != 2 or not rows.dtype.is_floating_point:
        return Left.NOT_A_MATRIX
    width: Any = rows.shape[1]
    if isinstance(width, torch.SymInt):
        return Left.NOT_A_MATRIX
    if row_bytes(width) >= exchange.row_bytes_before:
        return Left.NARROW
    return _needs_its_rows(exchange, plan, in_force) or int(width)


def _needs_its_rows(
    exchange: Exchange, plan: RegionPlan, in_force: dict[fx.Node, Mode]
) -> Left | None:
    """Return what of the program around an exchange would not be right of rounded rows."""
    if isinstance(plan.proof, Refused) and plan.proof.reason is Refusal.COMMUNICATES:
        return Left.COMMUNICATES
    if any(len(launch.users) != 1 or not _waits(launch) for launch in exchange.launches):
        return Left.UNKNOWN_FORM
    if any(in_force[n] != in_force[wait] for n in exchange.launches for wait in _waits(n)):
        return Left.MODES
    return Left.INTEGERS if _makes_integers(plan) else None


def _makes_integers(plan: RegionPlan) -> bool:
    """Whether integers are made of the rows of activations between dispatch and combine."""
    seen, todo = set(plan.combine.launches), list(plan.dispatch.launches)
    while todo:
        node = todo.pop()
        if is_integer(node):
            return True
        new = [user for user in node.users if user not in seen and tensor_of(user) is not None]
        seen.update(new)
        todo.extend(new)
    return False


def _waits(launch: fx.Node) -> list[fx.Node]:
    """Return the chain of waits on `launch`: most have one, some frontends wait twice."""
    chain: list[fx.Node] = []
    node: fx.Node | None = launch
    while node is not None:
        node = next((user for user in node.users if is_wait(user)), None)
        if node is not None:
            chain.append(node)
    return chain


def _rewrite(launch: fx.Node, *, quantize_gradient: bool) -> None:
    rows = launch.args[0]
    assert isinstance(rows, fx.Node)
    waits = _waits(launch)
    message = Emitter(launch).call(GATHER_QUANTIZE_PACK, rows)
    launch.args = (message, *launch.args[1:])
    for wait in reversed(waits[1:]):
        substitute(wait, waits[0])
    received = Emitter(waits[0].next).call(
        DEQUANTIZE_EXCHANGED,
        waits[0],
        rows,
        output_splits(launch),
        input_splits(launch),
        group_name(launch),
        quantize_gradient,
    )
    replace_uses({waits[0]: received})
    for node in (launch, waits[0]):
        node.meta.pop("example_value", None)
