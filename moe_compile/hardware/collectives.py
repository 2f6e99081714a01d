"""Division of one collective's bytes between a node's link and the network.

Contract
    Pure arithmetic on a group's size, shared by the compiler's estimates, the planner's prices and
    the cluster simulator.
    A group no larger than a node is taken to lie within one; a larger one fills nodes.

Formulas: n ranks, g per node, shares of the bytes that leave a rank; both ways run at once
    all-to-all                   every other rank is sent the same: g - 1 of n - 1 within the node,
                                 the rest over the network, each row once per expert there
    all-gather, reduce-scatter   data that enters a node enters once, by one of its g adapters, and
                                 goes round within it: n - g of g (n - 1) over the network,
                                 n (g - 1) of g (n - 1) within
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Shares of the bytes that leave a rank, by link."""

    within: float
    """Share over the link of its node."""
    between: float
    """Share over the network."""


def spread_of(num_ranks: int, node_ranks: int, *, is_gather: bool) -> Spread:
    """Return the links that the bytes of a collective take: an all-to-all, or a gather.

    `node_ranks` share a node, 1 where a profile has one link alone. In a group of unknown size (0)
    all bytes go over the network.
    """
    if node_ranks > 1 and 0 < num_ranks <= node_ranks:
        return Spread(within=1.0, between=0.0)
    if num_ranks <= 1:
        return Spread(within=0.0, between=1.0)
    others = num_ranks - 1
    if not is_gather:
        within = (node_ranks - 1) / others
        return Spread(within=within, between=1.0 - within)
    return Spread(
        within=num_ranks * (node_ranks - 1) / (node_ranks * others),
        between=(num_ranks - node_ranks) / (node_ranks * others),
    )


def leaving_share(num_ranks: int) -> float:
    """Return the share of a payload that leaves a rank, routed evenly; all where n is 0."""
    return (num_ranks - 1) / num_ranks if num_ranks else 1.0
