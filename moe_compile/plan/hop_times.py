"""What one exchange of a region takes in two hops: steps on the compute stream and on the link.

Contract
    The hops run one after the other, as compiled code has them: both take the one link that the
    timeline knows, each at the rate of its own. Nothing is taken off for what two hops spare, the
    gather of the flat rows and their sum at home.
    Experts are chosen evenly.

Per row of a rank, D nodes a token of k rows: D / k rows are gathered for hop 1 and cross, but for
those of the own node; all are gathered for hop 2, go to ranks of the node, and are put in order.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from moe_compile.cost.hop_shape import HopShape
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.hardware.collectives import leaving_share

INDEX_KERNELS: Final = 40.0
"""Small operators that find the rows of both hops (`moe_compile/ops/hop_rows.py`), as written; no
generated code was counted."""
PLACE_KERNELS: Final = 20.0
"""The same of the places of sums (`moe_compile/ops/hop_sums.py`)."""
MASK_BYTES: Final = 4.0
"""Of each row of hop 1, which experts of a node it is for: one word of 32."""
SCORE_BYTES: Final = 4.0
"""Of each row's score, which goes flat."""
MOVED: Final = 2.0
"""Passes over bytes that are moved: read, written."""


class Step(NamedTuple):
    """Something that one stream does, after the step before it."""

    name: str
    us: float
    is_sent: bool
    """Whether it takes the link, else the compute stream."""


def goes_in_hops(work: Work, nodes: str, *, is_forward: bool) -> bool:
    """Whether an exchange goes in two hops where the option says `nodes`.

    Rows of tokens forward, and gradients of their sums backward, are copies: these do by either.
    """
    copies = "dispatch" if is_forward else "combine"
    sums = "combine" if is_forward else "dispatch"
    return work.exchange == copies if nodes == "exact" else work.exchange in (copies, sums)


def hop_steps(
    region: RegionWork, work: Work, nodes: str, share: float, rates: Rates, *, is_forward: bool
) -> tuple[Step, ...]:
    """Return the steps of an exchange, of `share` of its rows, in two hops."""
    hops = region.hops
    assert hops is not None
    rows = work.link_bytes * share / leaving_share(region.num_ranks)
    copies = work.exchange == ("dispatch" if is_forward else "combine")
    steps = _copied(hops, rows, rates) if copies else _summed(hops, rows, rates)
    if copies and is_forward:
        num_rows = rows / hops.row_bytes
        return _told(hops, num_rows, nodes, region, rates) + steps
    if not copies and not is_forward:  # gradients of scores come home
        scores = rows / hops.row_bytes * SCORE_BYTES * leaving_share(region.num_ranks)
        return (*steps, _launch(rates), Step("scores", rates.link_us(scores), is_sent=True))
    return steps


def _told(
    hops: HopShape, num_rows: float, nodes: str, region: RegionWork, rates: Rates
) -> tuple[Step, ...]:
    """Return what goes beside the rows, and finding them."""
    num_kernels = INDEX_KERNELS + (PLACE_KERNELS if nodes == "rounded" else 0.0)
    masks = num_rows / hops.rows_per_token * hops.hop_rows * MASK_BYTES
    scores = num_rows * SCORE_BYTES * leaving_share(region.num_ranks)
    return (
        Step("indices", rates.compute_us(0.0, 0.0, num_kernels), is_sent=False),
        Step("masks", rates.hop_us(masks, within=False), is_sent=True),
        _launch(rates),
        Step("scores", rates.link_us(scores), is_sent=True),
    )


def _copied(hops: HopShape, rows: float, rates: Rates) -> tuple[Step, ...]:
    far = rows * hops.nodes_per_token / hops.rows_per_token
    return (
        _moving(MOVED * far, rates),
        _launch(rates),
        _across(hops, rows, rates),
        _moving(MOVED * rows, rates),
        _launch(rates),
        _inside(hops, rows, rates),
        _moving(MOVED * rows, rates),
    )


def _summed(hops: HopShape, rows: float, rates: Rates) -> tuple[Step, ...]:
    far = rows * hops.nodes_per_token / hops.rows_per_token
    return (
        _moving(MOVED * rows, rates),
        _launch(rates),
        _inside(hops, rows, rates),
        _moving(rows + far, rates),
        _launch(rates),
        _across(hops, rows, rates),
        _moving(far + rows / hops.rows_per_token, rates),
    )


def _across(hops: HopShape, rows: float, rates: Rates) -> Step:
    sent = rows / hops.rows_per_token * hops.hop_rows
    return Step("hop between nodes", rates.hop_us(sent, within=False), is_sent=True)


def _inside(hops: HopShape, rows: float, rates: Rates) -> Step:
    sent = rows * (hops.num_local - 1) / hops.num_local
    return Step("hop inside the node", rates.hop_us(sent, within=True), is_sent=True)


def _launch(rates: Rates) -> Step:
    return Step("launch", rates.op_overhead_us, is_sent=False)


def _moving(nbytes: float, rates: Rates) -> Step:
    return Step("rows", rates.compute_us(0.0, nbytes, 1.0), is_sent=False)
