"""A time that no candidate can be faster than: much quicker to tell than its price.

Contract
    Never above `region_tasks.price_us` of the same candidate. Chunks, joins, packing and
    what compute and exchanges slow each other only add to what is summed here.
"""

from __future__ import annotations

from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.hop_times import goes_in_hops, hop_steps


def least_us(work: RegionWork, candidate: Candidate, rates: Rates) -> float:
    """Return the time of forward and backward if each hid all of compute or all of exchanges."""
    work = work.by_dispatch(candidate.dispatch)
    total = 0.0
    for phase in work.phases:
        compute = link = 0.0
        for one in phase:
            rows = work.imbalance if one.is_chunked else 1.0
            if candidate.nodes != "off" and goes_in_hops(
                one, candidate.nodes, is_forward=phase is work.forward
            ):
                for step in hop_steps(
                    work, one, candidate.nodes, rows, rates, is_forward=phase is work.forward
                ):
                    link += step.us if step.is_sent else 0.0
                    compute += 0.0 if step.is_sent else step.us
            elif one.exchange:
                sent = one.link_bytes * rows * candidate.wire_share(work, one.exchange)
                link += rates.link_us(sent, is_gather=one.is_gather)
                compute += rates.op_overhead_us
            else:
                moved = one.nbytes * rows + one.weight_bytes
                compute += rates.compute_us(one.operations * rows, moved, one.num_kernels)
        total += max(compute, link)
    return total
