"""Products of experts in fp8: their rate, and the bytes that quantising moves."""

import dataclasses

import pytest

from moe_compile.cost.tasks import COMPUTE
from moe_compile.simulator.layer_tasks import tasks_of, time_layer
from moe_compile.simulator.method import Crossing, Overlap, Products
from moe_compile.simulator.scenario import make_setting
from moe_compile.simulator.step import predict_step

FP8, BF16 = 1.0, 2.0


def costs(products, *, kernel_us=0.0, **changes):
    """Return those of a layer of DeepSeek-V3 on 64 ranks, by default without gaps of kernels."""
    changes = {"overlap": Overlap.INTER_OP, "crossing": Crossing.FLAT, **changes}
    found = make_setting("deepseek-v3", "h100", changes={"products": products, **changes}).costs
    compute = dataclasses.replace(found.profile.compute, kernel_us=kernel_us)
    return dataclasses.replace(found, profile=dataclasses.replace(found.profile, compute=compute))


def busy_us(found):
    return sum(one.us for tasks in tasks_of(found) for one in tasks.tasks if one.stream == COMPUTE)


@pytest.mark.parametrize(
    ("dispatch", "combine", "rebuilds", "rows"),
    [
        (BF16, BF16, False, 1 + 1),
        (BF16, FP8, False, 1 + 2),
        (FP8, BF16, False, -2 + 1 + 3),
        (FP8, FP8, False, -2 + 2 + 3),
        (FP8, FP8, True, -2 + 2),
    ],
)
def test_quantising_writes_a_byte_where_rows_are_made_and_rows_in_fp8_are_counted_once(
    dispatch, combine, rebuilds, rows
):
    """Bytes per element of routed rows: of those that came, of gradients that came, unpacked ones.

    What is made in bf16, and quantised in the kernel that makes it, is not read for that.

    Rows that came in fp8 are sorted as they are, 2 bytes for the 4 in bf16, and unpacked for the
    gradient of a weight, unless they are made again for it.
    """
    changes = {"dispatch_bytes": dispatch, "combine_bytes": combine, "rebuilds": rebuilds}
    free, found = (costs(p, **changes) for p in (Products.EXPERTS_FREE, Products.EXPERTS))
    model = found.model
    routed, hidden = found.routed_rows, model.expert_width
    weights = found.local_experts * model.expert_weights
    moved = routed * (rows * model.width + hidden + 2 * hidden) + 2 * weights
    memory = found.profile.memory
    us = moved / (memory.gb_per_s * memory.share * 1e3)
    assert busy_us(found) - busy_us(free) == pytest.approx(us)


def test_the_rate_in_fp8_is_that_of_the_products_that_are_asked_for():
    by = {products: costs(products) for products in Products}
    rate = by[Products.BF16].profile.compute.eight_bit_share
    assert rate == pytest.approx(1978.9 * 0.6 / (989.4 * 0.65))
    for name in ("first_experts_us", "second_experts_us", "shared_us", "qkv_us", "output_us"):
        whole, experts, free, every = (getattr(by[products], name)() for products in Products)
        is_of_experts = name.endswith("_experts_us")
        assert whole / experts == pytest.approx(rate if is_of_experts else 1.0)
        assert (free, whole / every) == (experts, pytest.approx(rate))
    for name in ("first_experts_gradient_us", "shared_gradient_us", "qkv_gradient_us"):
        assert len({getattr(one, name)() for one in by.values()}) == 1


def test_factors_in_fp8_have_half_the_bytes():
    """One row to an expert: a product takes as long as reading its weight."""
    kernels = [costs(p).kernels for p in (Products.BF16, Products.EXPERTS)]
    whole, half = (one.grouped_us(4, 1, 2048, 7168) for one in kernels)
    assert whole / half == pytest.approx(2.0, rel=2e-3)


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2])
def test_a_weight_is_transposed_once_in_a_backward_graph_for_all_parts_of_the_batch(parts, blocks):
    changes = {"batch_parts": parts, "micro_batch": parts, "blocks_per_graph": blocks}
    forward, backward = tasks_of(costs(Products.EXPERTS, **changes))
    assert not any(one.name == "transpose weights" for one in forward.tasks)
    made = [place for place, one in enumerate(backward.tasks) if one.name == "transpose weights"]
    first = [one for one in backward.tasks if "experts 2'" in one.name]
    assert len(made) == blocks
    readers = [one for one in first if not {*made}.isdisjoint(one.needs)]
    assert len(readers) == parts * blocks
    assert all(one.stream == COMPUTE for one in readers)  # an exchange does not wait for it


def test_weights_of_experts_are_gathered_in_the_bits_of_their_products():
    """A byte less for each that others have, and 3 bytes read and written to quantise one's own."""
    whole, free, found = (
        make_setting("deepseek-v3", "h100", changes={"products": products})
        for products in (Products.BF16, Products.EXPERTS_FREE, Products.EXPERTS)
    )
    network, memory, copies = whole.profile.network, whole.profile.memory, whole.expert_replicas
    assert copies > 1
    saved_us = whole.expert_params * (1 - 1 / copies) / (network.gather_gb_per_s * 1e3)
    made_us = 3 * whole.expert_params / copies / (memory.gb_per_s * memory.share * 1e3)
    steps = {name: predict_step(one) for name, one in zip("wfe", (whole, free, found), strict=True)}
    gathered = {name: step.gradient_us * whole.job.virtual_stages for name, step in steps.items()}
    assert gathered["f"] == gathered["e"] == pytest.approx(gathered["w"] - saved_us)
    assert steps["f"].optimizer_us == steps["w"].optimizer_us
    assert steps["e"].optimizer_us == pytest.approx(steps["w"].optimizer_us + made_us)


@pytest.mark.parametrize("overlap", list(Overlap))
def test_quantising_costs_less_than_it_gains_in_every_schedule(overlap):
    chunks = {"num_chunks": 2} if overlap is Overlap.CHUNKS else {}
    changes = {"overlap": overlap, "dispatch_bytes": FP8, "kernel_us": 2.0, **chunks}
    changes["crossing"] = Crossing.BOTH_LINKS
    whole, found, free = (
        time_layer(costs(p, **changes)).total_us
        for p in (Products.BF16, Products.EXPERTS, Products.EXPERTS_FREE)
    )
    assert free < found < whole
