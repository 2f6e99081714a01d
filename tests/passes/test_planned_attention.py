"""Groups of heads by price: what `attention_chunks = "auto"` decides, and what the report has."""

import json
import re
from pathlib import Path

import pytest
import torch

import moe_compile.hardware
from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import is_launch
from moe_compile.journal.reasons import Reason
from moe_compile.plan.choose_plan import Why
from moe_compile.report.process_report import ProcessReport
from tests.attention_layers import SplitAttention
from tests.block_layers import SerialBlock, block_input
from tests.capture import dynamo_graphs
from tests.slow_parameters import slow_but

PROFILE = Path(moe_compile.hardware.__file__).parent / "profiles/cpu.toml"
FREE, DEAR = (0.0, 1e6), (50.0, 0.02)
"""Latency in microseconds and gigabytes per second: with a free link there is nothing to hide."""


@pytest.fixture
def compiled(fake_ranks, tmp_path):
    """Return the graph and the JSON report of a layer of four local KV heads."""

    def run(link, **options):
        latency_us, gb_per_s = link
        text = PROFILE.read_text()
        for name, value in (("link_gb_per_s", gb_per_s), ("link_latency_us", latency_us)):
            text, found = re.subn(
                rf"(?m)^{name} = {{ value = [0-9.]+", f"{name} = {{ value = {value}", text
            )
            assert found == 1
        path = tmp_path / "changed.toml"
        path.write_text(text)
        x = torch.randn(2, 256, 64, requires_grad=True)
        (gm,) = dynamo_graphs(SplitAttention(64, 8, 8, 32, fake_ranks), x)
        options = {"attention_chunks": "auto", "equal_tokens": True, **options}
        _, compilation = rewrite(gm, MegaMoEConfig(hardware=str(path), **options))
        report = ProcessReport()
        report.add(compilation, "", "changed")
        (found,) = json.loads(json.dumps(report.as_dict()))["attention"]
        return gm, found

    return run


def test_groups_that_hide_a_dear_link_are_chosen_and_reported_as_data(compiled):
    gm, found = compiled(DEAR)
    decision = found["decision"]
    assert found["num_chunks"] >= 2 and found["verdict"] == "chunked"
    assert decision["chosen"] == f"{found['num_chunks']} chunks of heads"
    assert decision["why"] == Why.FASTEST.value
    assert decision["predicted_us"] < 0.99 * decision["as_it_is_us"]
    assert decision["runner_up_us"] == pytest.approx(
        decision["predicted_us"] * (1 + decision["margin"])
    )
    assert sum(map(is_launch, gm.graph.nodes)) == 4 * found["num_chunks"]


def test_where_the_link_is_free_one_group_stays(compiled):
    gm, found = compiled(FREE)
    assert (found["num_chunks"], found["verdict"]) == (1, Reason.BY_PRICE.value)
    decision = found["decision"]
    assert (decision["chosen"], decision["why"]) == ("one chunk", Why.NO_GAIN.value)
    assert decision["predicted_us"] == decision["as_it_is_us"] <= decision["runner_up_us"] * 1.01
    assert sum(map(is_launch, gm.graph.nodes)) == 4


@pytest.mark.parametrize("options", [{"equal_tokens": False}, {"attention_chunks": 4}])
def test_without_the_promise_or_with_a_number_the_planner_has_no_say(compiled, options):
    _, found = compiled(FREE, **options)
    assert found["num_chunks"] == options.get("attention_chunks", 2)
    assert found["decision"] == {}


def test_memory_that_is_not_there_is_not_taken(compiled):
    """A share of the step's peak where that is known, of what the graph writes where it is not."""
    _, found = compiled(DEAR, max_memory_increase=1e-6)
    assert found["num_chunks"] == 1
    assert found["decision"]["why"] == Why.MEMORY.value
    _, found = compiled(DEAR, max_memory_increase=1e-6, step_peak_bytes=10**15)
    assert found["num_chunks"] >= 2


@pytest.mark.parametrize(
    "experts", slow_but([{"chunks": 2}], [{"chunks": 2}, {"dispatch": "all_gather"}])
)
def test_experts_beside_attention_count_whatever_becomes_of_them(fake_ranks, experts):
    """Chunked or gathered first, they were left out of its price: their new nodes have no sizes."""

    def price(**options):
        (gm,) = dynamo_graphs(SerialBlock(fake_ranks, fake_ranks), block_input())
        config = MegaMoEConfig(
            attention_chunks="auto", equal_tokens=True, hardware="cpu", strict=True, **options
        )
        _, compilation = rewrite(gm, config)
        return compilation.regions[0].verdict, compilation.attention[0].decision["as_it_is_us"]

    (_, whole), (verdict, beside) = price(chunks=1), price(**experts)
    assert verdict in ("chunked", "all-gathered")
    assert beside == whole


def test_a_layer_is_priced_as_far_as_its_neighbours(fake_ranks):
    """Of the whole graph a layer's gain was a small share, and the smaller the more layers."""

    def times(num_layers):
        layers = [SplitAttention(64, 8, 8, 32, fake_ranks) for _ in range(num_layers)]
        x = torch.randn(2, 256, 64, requires_grad=True)
        (gm,) = dynamo_graphs(torch.nn.Sequential(*layers), x)
        config = MegaMoEConfig(attention_chunks="auto", equal_tokens=True, hardware="cpu")
        _, compilation = rewrite(gm, config)
        return [attention.decision["as_it_is_us"] for attention in compilation.attention]

    (alone,) = times(1)
    among = times(4)
    assert len(among) == 4
    assert all(alone <= us < 1.5 * alone for us in among)
