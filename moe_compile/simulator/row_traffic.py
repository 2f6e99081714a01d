"""Bytes of rows that a rank sends to experts and back, by the link they take.

Contract
    At the fit's imbalance: of the busiest rank. Rows alone; masks and scores beside them are less
    than a hundredth of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_compile.hardware.collectives import leaving_share, spread_of
from moe_compile.simulator.layer_sizes import LayerSizes
from moe_compile.simulator.method import Crossing


class Sent(NamedTuple):
    """Bytes that leave a rank."""

    between: float
    """To other nodes."""
    within: float
    """To ranks of its node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowTraffic(LayerSizes):
    """See the module docstring."""

    def row_bytes(self, element_bytes: float) -> float:
        """Return the bytes of a row, times the imbalance."""
        return self.model.width * element_bytes * self.imbalance

    def routed_bytes(self, element_bytes: float) -> float:
        """Return the bytes of a rank's tokens, once for each of their experts."""
        return self.local_tokens * self.model.top_k * self.row_bytes(element_bytes)

    def sent(self, element_bytes: float, part: float = 1.0) -> Sent:
        """Return what one all-to-all of `part` of the rows sends."""
        rows = self.routed_bytes(element_bytes) * part
        shape = self.method.hop_shape(self.model, self.profile)
        if shape is None:
            return Sent(0.0, rows * leaving_share(self.method.expert_ranks))
        if self.method.crossing is Crossing.BOTH_LINKS:
            return Sent(shape.across_bytes(rows), rows)
        spread = spread_of(self.method.expert_ranks, shape.num_local, is_gather=False)
        leaving = rows * leaving_share(self.method.expert_ranks)
        return Sent(leaving * spread.between, leaving * spread.within)

    def hopped(self, element_bytes: float) -> Sent:
        """Return what one exchange in two hops sends."""
        assert self.hops is not None
        rows = self.routed_bytes(element_bytes)
        return Sent(self.hops.across_bytes(rows), self.hops.inside_bytes(rows))

    @property
    def sent_per_layer(self) -> Sent:
        """Return what all-to-alls of one layer send, forward and backward, none of them again."""
        of_copies = self.hopped if self.hops else self.sent
        of_sums = self.hopped if self.hops and self.sums_in_hops else self.sent
        wires = self.method.dispatch_bytes, self.method.combine_bytes
        sent = [way(nbytes) for nbytes in wires for way in (of_copies, of_sums)]
        return Sent(sum(one.between for one in sent), sum(one.within for one in sent))

    @property
    def sums_in_hops(self) -> bool:
        """Whether rows that are added up travel in two hops too."""
        return self.method.crossing is Crossing.ROUNDED
