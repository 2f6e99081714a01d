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

from typing import NamedTuple

from moe_compile.cost.hop_shape import INDEX_KERNELS, PLACE_KERNELS, HopShape
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.hardware.collectives import leaving_share


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
        return _told(hops, num_rows, nodes, rates) + steps
    if not copies and not is_forward:  # gradients of scores come home
        scores = hops.score_bytes(rows / hops.row_bytes)
        return (*steps, _launch(rates), Step("scores", rates.link_us(scores), is_sent=True))
    return steps


def _told(hops: HopShape, num_rows: float, nodes: str, rates: Rates) -> tuple[Step, ...]:
    """Return what goes beside the rows, and finding them."""
    num_kernels = INDEX_KERNELS + (PLACE_KERNELS if nodes == "rounded" else 0.0)
    masks, scores = hops.mask_bytes(num_rows), hops.score_bytes(num_rows)
    return (
        Step("indices", rates.compute_us(0.0, 0.0, num_kernels), is_sent=False),
        Step("masks", rates.hop_us(masks, within=False), is_sent=True),
        _launch(rates),
        Step("scores", rates.link_us(scores), is_sent=True),
    )


def _copied(hops: HopShape, rows: float, rates: Rates) -> tuple[Step, ...]:
    before, between, after = (_moving(nbytes, rates) for nbytes in hops.copied_bytes(rows))
    across, inside = _across(hops, rows, rates), _inside(hops, rows, rates)
    return (before, _launch(rates), across, between, _launch(rates), inside, after)


def _summed(hops: HopShape, rows: float, rates: Rates) -> tuple[Step, ...]:
    before, between, after = (_moving(nbytes, rates) for nbytes in hops.summed_bytes(rows))
    across, inside = _across(hops, rows, rates), _inside(hops, rows, rates)
    return (before, _launch(rates), inside, between, _launch(rates), across, after)


def _across(hops: HopShape, rows: float, rates: Rates) -> Step:
    us = rates.hop_us(hops.across_bytes(rows), within=False)
    return Step("hop between nodes", us, is_sent=True)


def _inside(hops: HopShape, rows: float, rates: Rates) -> Step:
    us = rates.hop_us(hops.inside_bytes(rows), within=True)
    return Step("hop inside the node", us, is_sent=True)


def _launch(rates: Rates) -> Step:
    return Step("launch", rates.op_overhead_us, is_sent=False)


def _moving(nbytes: float, rates: Rates) -> Step:
    return Step("rows", rates.compute_us(0.0, nbytes, 1.0), is_sent=False)
