"""Parts of the batch and several blocks to a graph, held against free collectives and a limit."""

import dataclasses

import pytest

from moe_compile.simulator.layer_tasks import bound_us, time_layer
from moe_compile.simulator.method import AttentionSharding, Method, Overlap
from moe_compile.simulator.parts_table import find_part_shares, limit_us
from moe_compile.simulator.scenario import make_setting

CLUSTERS = ("h100", "h800")


def costs(model="qwen3-30b", contention=None, **changes):
    changes = {
        "attention": AttentionSharding.WHOLE,
        "ranks": 1,
        "overlap": Overlap.INTER_OP,
        **changes,
    }
    found = make_setting(model, "h100", changes=changes).costs
    if contention is None:
        return found
    near = dataclasses.replace(found.profile.nvlink, contention=contention, overlap_slowdown=0.0)
    return dataclasses.replace(found, profile=dataclasses.replace(found.profile, nvlink=near))


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_no_schedule_is_nearer_than_its_limit(cluster):
    for row in find_part_shares(cluster):
        last = list(row.shares.values())[-1]
        assert row.with_packing < last <= row.limit + 1e-9 < 100.0


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_limit_holds_for_every_number_of_blocks(parts):
    for blocks in (1, 2, 4):
        found = costs(batch_parts=parts, micro_batch=parts, blocks_per_graph=blocks)
        assert time_layer(found).total_us >= limit_us(found) * (1 - 1e-9)


def test_more_blocks_to_a_graph_fill_and_drain_once():
    """A chain of blocks in parts is as long as its blocks, less the ends between them."""
    shape = {"contention": 0.0, "batch_parts": 2, "micro_batch": 2}
    one, four = (costs(blocks_per_graph=n, **shape) for n in (1, 4))
    assert time_layer(four).total_us < 0.98 * time_layer(one).total_us
    assert bound_us(four) == bound_us(one)


def test_blocks_in_one_part_gain_what_weight_gradients_fill_alone():
    one, two = (costs(blocks_per_graph=n) for n in (1, 2))
    forward = [time_layer(c).phases[0].total_us for c in (one, two)]
    assert forward[1] == pytest.approx(2 * forward[0])
    assert time_layer(two).total_us <= time_layer(one).total_us


def test_the_limit_of_work_that_gains_nothing_beside_collectives_is_one_after_another():
    found = costs(contention=3.0)
    near = dataclasses.replace(found.profile.nvlink, overlap_slowdown=3.0)
    slow = dataclasses.replace(found, profile=dataclasses.replace(found.profile, nvlink=near))
    sequential = dataclasses.replace(
        slow, method=Method(attention=AttentionSharding.WHOLE, ranks=1)
    )
    assert limit_us(slow) == pytest.approx(time_layer(sequential).total_us)
