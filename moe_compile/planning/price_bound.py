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
            rows = work.imbalance if one.is_chunked else 1.0
            if one.exchange:
                smaller = work.wire_shares.get(wires.get(one.exchange, "same"), 1.0)
                link += rates.link_us(one.link_bytes * rows * smaller, is_gather=one.is_gather)
                compute += rates.op_overhead_us
            elif is_backward:
                compute += _backward_us(one, rates, rows)
            else:
                moved = one.nbytes * rows + one.weight_bytes
                compute += rates.compute_us(one.operations * rows, moved, one.num_kernels)
        total += max(compute, link)
    return total


def _backward_us(one: Work, rates: Rates, rows: float) -> float:
    """Return the time of one operator's gradients, of rows and of its weights, undivided."""
    nbytes = one.nbytes * one.backward if one.backward_nbytes is None else one.backward_nbytes
    num_kernels = one.num_kernels if one.backward_kernels is None else one.backward_kernels
    operations = one.operations * one.backward * rows
    us = rates.compute_us(operations, nbytes * rows + one.weight_bytes, num_kernels)
    if one.weight_bytes:
        moved = one.nbytes * rows + one.weight_bytes
        us += rates.compute_us(one.operations * rows, moved, 1)
    return us
