"""Amounts into time: whichever is the slower of two, and what a time follows from."""

import pytest

from moe_compile.cost.rates import Bound, Rates
from moe_compile.hardware import HardwareProfile, Link, load_profile

NODE = Link(num_ranks=4, gb_per_s=8e-3, latency_us=1.0, gather_share=2.0)
PROFILE = HardwareProfile(
    name="two domains",
    matmul_tflops=1e-6,  # one operation per microsecond
    memory_gb_per_s=1e-3,  # one byte per microsecond
    op_overhead_us=10.0,
    link_gb_per_s=1e-3,  # one byte per microsecond between nodes, eight within
    link_latency_us=3.0,
    node=NODE,
)


def test_between_nodes_the_slower_of_network_and_node_counts():
    """Of 7 equal messages of a rank of two nodes 3 stay within and 4 do not."""
    far = Rates.of(PROFILE, 8)
    assert far.link_us(7 * 80) == pytest.approx(3.0 + 4 * 80)
    slow_node = far.scaled("intra_node_gb_per_s", 1 / 80)
    assert slow_node.link_us(7 * 80) == pytest.approx(3.0 + 3 * 80 / 0.1)


def test_a_gather_between_nodes_brings_each_block_into_a_node_once():
    """Of 7 blocks each rank fetches one by network, the other six are its neighbours'."""
    far = Rates.of(PROFILE, 8)
    assert far.link_us(7 * 80, is_gather=True) == pytest.approx(3.0 + 80)
    slow_node = far.scaled("intra_node_gb_per_s", 1 / 80)
    assert slow_node.link_us(7 * 80, is_gather=True) == pytest.approx(3.0 + 6 * 80 / 0.2)


def test_within_a_node_the_network_does_not_count():
    near = Rates.of(PROFILE, 4)
    assert near.link_us(80) == pytest.approx(1.0 + 10)
    assert near.link_us(80, is_gather=True) == pytest.approx(1.0 + 5)
    assert not near.intra_node_gb_per_s


def test_a_profile_of_one_link_sends_all_over_it():
    cpu = load_profile("cpu")
    rates = Rates.of(cpu, 64)
    assert rates.link_us(1e6) == pytest.approx(cpu.link_latency_us + 1e6 / cpu.link_gb_per_s / 1e3)
    assert rates.link_us(1e6, is_gather=True) == rates.link_us(1e6)


@pytest.mark.parametrize(
    ("amounts", "bound"),
    [
        ((50.0, 20.0, 1), Bound.COMPUTE),
        ((20.0, 50.0, 1), Bound.MEMORY),
        ((5.0, 6.0, 1), Bound.LAUNCH),
        ((0.0, 0.0, 0), Bound.NOTHING),
    ],
)
def test_the_bound_is_what_most_of_the_time_follows_from(amounts, bound):
    assert Rates.of(PROFILE, 8).compute_bound(*amounts) is bound
