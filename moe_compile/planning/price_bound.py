"""A time no way of running a region can be faster than: much quicker to tell than its price.

Contract
    Never above `region_tasks.price_us` of the same way. Chunks, joins, packing and contention only
    add to what is summed here.
"""

from __future__ import annotations

from moe_compile.planning.candidates import Candidate
from moe_compile.planning.rates import Rates
from moe_compile.planning.region_work import RegionWork, Work


def least_us(work: RegionWork, candidate: Candidate, rates: Rates) -> float:
    """Return the time of forward and backward if each hid all of compute or all of exchanges."""
    if candidate.dispatch == "all_gather":
        assert work.gathered is not None
        work = work.gathered
    wires = {"dispatch": candidate.dispatch_wire, "combine": candidate.combine_wire}
    total = 0.0
    for is_backward in (False, True):
        compute = link = 0.0
        for one in work.work:
            if is_backward and not one.backward:
                continue
            if one.exchange:
                smaller = work.wire_shares.get(wires.get(one.exchange, "same"), 1.0)
                link += rates.link_us(one.link_bytes * smaller, is_gather=one.is_gather)
            else:
                compute += _compute_us(one, rates, is_backward=is_backward)
        total += max(compute, link)
    return total


def _compute_us(one: Work, rates: Rates, *, is_backward: bool) -> float:
    """Return the time of one operator and, backward, of its weights' gradient, undivided."""
    factor, gradient_us = 1.0, 0.0
    if is_backward:
        factor = one.backward
        if one.weight_bytes:
            gradient_us = rates.compute_us(one.operations, one.nbytes + one.weight_bytes, 1)
    moved = one.nbytes * factor + one.weight_bytes
    return rates.compute_us(one.operations * factor, moved, one.num_kernels) + gradient_us
