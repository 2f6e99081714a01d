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
    work = work.by_dispatch(candidate.dispatch)
    total = 0.0
    for is_backward in (False, True):
        compute = link = 0.0
        for one in work.work:
            if is_backward and not one.backward:
                continue
            rows = work.imbalance if one.is_chunked else 1.0
            if one.exchange:
                sent = one.link_bytes * rows * candidate.wire_share(work, one.exchange)
                link += rates.link_us(sent, is_gather=one.is_gather)
                compute += rates.op_overhead_us
            else:
                compute += _compute_us(one, rates, rows, is_backward=is_backward)
        total += max(compute, link)
    return total


def _compute_us(one: Work, rates: Rates, rows: float, *, is_backward: bool) -> float:
    """Return the time of one operator in one phase, undivided; backward with weight gradients."""
    operations, nbytes, num_kernels = one.amounts(is_backward=is_backward)
    us = rates.compute_us(operations * rows, nbytes * rows + one.weight_bytes, num_kernels)
    if is_backward and one.weight_bytes:
        moved = one.nbytes * rows + one.weight_bytes
        us += rates.compute_us(one.operations * rows, moved, 1)
    return us
