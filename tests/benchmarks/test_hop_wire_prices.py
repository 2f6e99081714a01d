"""Prices of blocks in two hops and eight bits against the schedules of what they become."""

import pytest
import torch

from benchmarks.planner.planned_models import SHAPES, Layer
from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.rates import Rates
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.hardware import load_profile
from moe_compile.hardware.profile import read_profile
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.region_tasks import price_us
from moe_compile.report.process_report import predicted_measures
from tests.capture import dynamo_graphs
from tests.plan.test_hops_in_eight_bits import (
    EIGHT,
    FREE,
    group_of,  # noqa: F401  (a fixture)
    region_work,
)
from tests.slow_parameters import exhaustive_but


class Counted(Layer):
    """Counts rows as two hops can prove it."""

    def _counts(self, flat):
        experts = self.shape.num_experts
        return torch.histc(flat.float(), bins=experts, min=0, max=experts).long()


CASES = (
    ("deepseek-v3", 64, 8, 45.0),
    ("deepseek-v3", 64, 8, 15.0),
    ("qwen3-235b", 32, 4, 45.0),
    ("qwen3-235b", 32, 4, 15.0),
)
"""Model, ranks, nodes, GB/s between nodes."""


def step_us(gm, **options):
    """Return the plan of a program, and the time that the schedule of its graphs predicts."""
    config = MegaMoEConfig(
        codegen="fx", step_peak_bytes=2**36, numerics="lossy", **{**FREE, **options}
    )
    copied = copy_of_graph(gm)
    compile_state, _ = rewrite(copied, config)
    inputs = [n.meta["example_value"] for n in copied.graph.find_nodes(op="placeholder")]
    measures = [predicted_measures(m.graph) for m in trace_both(copied, inputs, compile_state)]
    us = sum(m["compute_us"] + m["exposed_us"] for m in measures)
    return compile_state.experts[0], us


@pytest.fixture
def block_of(group_of, tmp_path):  # noqa: F811
    """Return a captured block, and a profile with a network of so many GB/s."""

    def made(model, ranks, nodes, network):
        shape = next(one for one in SHAPES if one.name == model)
        x = torch.empty(2048, shape.width, dtype=torch.bfloat16, device="meta", requires_grad=True)
        (gm,) = dynamo_graphs(Counted(shape, group_of(ranks, nodes)), x)
        hardware = tmp_path / "network.toml"
        text = read_profile("h100").path.read_text()
        hardware.write_text(text.replace("{ value = 45.0,", f"{{ value = {network},"))
        return gm, str(hardware)

    return made


@pytest.mark.parametrize(
    "case", exhaustive_but([(c,) for c in CASES[:2]], [(c,) for c in CASES]), ids=str
)
def test_no_choice_is_more_than_a_hundredth_slower_than_flat_rows_of_eight_bits(block_of, case):
    """By the schedules of both; each in the number of chunks that the planner has for it."""
    gm, hardware = block_of(*case)
    chosen, us = step_us(gm, hardware=hardware)
    flat, flat_us = step_us(gm, hardware=hardware, nodes="off", **EIGHT)
    assert (flat.plan.nodes, flat.plan.combine_wire) == ("off", "fp8")
    assert us <= 1.01 * flat_us, chosen.plan
    if case[3] < 45.0:
        assert chosen.plan.nodes != "off" and chosen.plan.combine_wire == "fp8"


@pytest.mark.slow
@pytest.mark.parametrize("nodes", ["off", "exact", "rounded"])
def test_a_price_is_near_the_time_of_the_schedule(block_of, nodes):
    """Flat within a hundredth; in hops what a compiler fuses behind them is not known of."""
    gm, hardware = block_of(*CASES[0])
    config = MegaMoEConfig(nodes="auto", hardware=hardware)
    work = region_work(copy_of_graph(gm), config)
    rates = Rates.of(load_profile(hardware), work.num_ranks, work.hops.num_local)
    way = Candidate(nodes=nodes, num_chunks=2, **EIGHT)
    _, us = step_us(gm, hardware=hardware, nodes=nodes, chunks=2, hop_slices=1, **EIGHT)
    assert -0.005 < price_us(work, way, rates) / us - 1 < (0.01 if nodes == "off" else 0.025)
