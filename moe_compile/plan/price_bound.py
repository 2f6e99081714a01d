"""A time that no candidate can be faster than: much quicker to tell than its price.

Contract
    Never above `region_tasks.price_us` of the same candidate. Chunks, joins, packing and
    what compute and exchanges slow each other only add to what is summed here.
"""

from __future__ import annotations

from dataclasses import replace

from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.cost.tasks import COMPUTE, LINK, STREAMS, TaskList
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.hop_times import HopTasks, goes_in_hops
from moe_compile.plan.row_folds import folds_of


def least_us(work: RegionWork, candidate: Candidate, rates: Rates) -> float:
    """Return the time of forward and backward if each hid all of compute or all of exchanges."""
    work = work.by_dispatch(candidate.dispatch)
    total = 0.0
    for phase in work.phases:
        busy = dict.fromkeys(STREAMS, 0.0)
        spared = folds_of(work, phase, candidate).spared
        for index, one in enumerate(phase):
            left = replace(one, nbytes=one.nbytes - spared[index]) if index in spared else one
            for stream, us in _busy(work, left, candidate, rates, phase is work.forward).items():
                busy[stream] += us
        total += max(busy.values())
    return total


def _busy(
    work: RegionWork, one: Work, candidate: Candidate, rates: Rates, is_forward: bool
) -> dict[str, float]:
    """Return how long one work at least takes each stream."""
    rows = work.imbalance if one.is_chunked else 1.0
    in_hops = candidate.nodes != "off"
    if in_hops and goes_in_hops(one, candidate.nodes, is_forward=is_forward):
        in_one_part, made = replace(candidate, num_chunks=1, hop_slices=1), TaskList()
        HopTasks(made, work, one, in_one_part, rates, is_forward).add([[]])
        return {s: sum(t.us for t in made.tasks if t.stream == s) for s in STREAMS}
    if one.exchange:
        share = candidate.wire_share(work, one.exchange, is_forward=is_forward)
        sent = one.link_bytes * rows * share
        link_us = rates.link_us(sent, is_gather=one.is_gather)
        return {COMPUTE: rates.op_overhead_us, LINK: link_us}
    moved = one.nbytes * rows + one.weight_bytes
    return {COMPUTE: rates.compute_us(one.operations * rows, moved, one.num_kernels)}
