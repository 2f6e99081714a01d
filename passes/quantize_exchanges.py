"""Send the rows of chosen exchanges as messages of eight bits: quantise, exchange, dequantise.

Contract
    Requires  PLANNED, REWRITTEN.
    Keeps     every collective but the payload of those rewritten; router, counts and scores.
              Rows in two hops are packed where the hops are emitted, not here.
    Loses     at most the row error in `moe_compile.ops.wire_format`; only where the plan says so.

    all_to_all(rows) -> wait    becomes    pack(rows) -> all_to_all -> wait -> unpack

The split lists count rows and so stay. AOTAutograd derives the backward: the same, reversed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from moe_compile.graph.edit import Emitter, replace_uses, substitute
from moe_compile.graph.query import group_name, input_splits, output_splits, waits_on
from moe_compile.ops.packed_rows import DEQUANTIZE_EXCHANGED
from moe_compile.ops.quantized_rows import GATHER_QUANTIZE_PACK
from moe_compile.plan.state import CompileState
from passes.contract import Fact
from passes.rewrite import Proposed, Rewrite


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantised:
    """One exchange of a region that is to travel in eight bits."""

    exchange: str
    """Its name: `dispatch of region 0`."""
    launches: tuple[str, ...]
    """Names of its launches."""
    quantizes_gradient: bool

    @property
    def region(self) -> str:
        """Return the name of its region."""
        return self.exchange.partition(" of ")[2]

    def __str__(self) -> str:
        """Return its name in reports."""
        return self.exchange


@dataclass(frozen=True)
class QuantizeExchanges(Rewrite[Quantised]):
    """See the module docstring."""

    name: ClassVar[str] = "quantize_exchanges"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLANNED, Fact.REWRITTEN})
    after: ClassVar[frozenset[str]] = frozenset({"fuse_token_sums"})
    numerics: ClassVar[str] = "lossy"
    is_decided: ClassVar[bool] = True
    by_region: ClassVar[bool] = True

    def propose(self, graph: fx.Graph, state: CompileState) -> Proposed[Quantised]:
        """Return the dispatches and combines that are planned in eight bits, chunked or not."""
        del graph  # the state names its launches
        found = [
            Quantised(
                exchange=f"{exchange} of {one.found.region.name}",
                launches=tuple(launch.name for launch in launches),
                quantizes_gradient=wire == "fp8",
            )
            for one in state.experts
            if not one.plan.is_in_two_hops
            for exchange, launches in state.launches[one.found.region.name].items()
            if (wire := one.plan.wire(exchange)) != "same"
        ]
        return Proposed(proposals=tuple(found))

    def region_of(self, proposal: Quantised) -> str:
        """Return the name of its region."""
        return proposal.region

    def apply(self, graph: fx.Graph, proposals: tuple[Quantised, ...], state: CompileState) -> None:
        """Send their rows as messages of eight bits."""
        del state
        nodes = {node.name: node for node in graph.nodes}
        for one in proposals:
            for launch in one.launches:
                _rewrite(nodes[launch], quantize_gradient=one.quantizes_gradient)


def _rewrite(launch: fx.Node, *, quantize_gradient: bool) -> None:
    rows = launch.args[0]
    assert isinstance(rows, fx.Node)
    waits = waits_on(launch)
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
