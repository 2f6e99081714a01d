"""torchtitan's memory budget asks megamoe for recomputation by price; so may names of parts."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from torchtitan.config import ConfigManager

from moe_compile.config import from_sources, split_options
from tests.integration.titan_jobs import CONFIG, OURS, train
from torchtitan_integration.parallelize import backend_options, budget_options

MODE = "--activation_checkpoint.mode=memory_budget"
ASKED = "--megamoe.recompute=price"


PLAIN = {"activation_checkpoint.mode": "none"}
BUDGET = {"activation_checkpoint.mode": "memory_budget"}


def job_of(*flags):
    return ConfigManager().parse_args([f"--job.config_file={CONFIG}", *flags])


@pytest.mark.parametrize(
    ("flags", "budget"),
    [
        ((MODE,), 0.5),  # torchtitan's default
        ((MODE, "--activation_checkpoint.memory_budget=0.3"), 0.3),
        ((MODE, ASKED, "--megamoe.activation_budget=0.7"), 0.7),
        ((ASKED, "--megamoe.activation_budget=2000000000"), 2_000_000_000),
    ],
)
def test_the_budget_of_the_job_is_that_of_its_graphs(flags, budget):
    job = job_of(*flags)
    found = from_sources(options=split_options(backend_options(job, 0))[0], environment={})
    assert found.recompute == "price" and found.equal_tokens
    assert found.activation_budget == budget


def test_a_budget_of_zero_asks_for_the_least_and_other_modes_for_none():
    job = job_of(MODE)
    job.activation_checkpoint.memory_budget = 0.0
    assert 0 < budget_options(job)["megamoe.activation_budget"] < 1e-3
    job.activation_checkpoint.mode = "full"
    assert budget_options(job) == {}


@pytest.mark.slow
def test_a_job_that_keeps_less_has_the_losses_of_one_that_keeps_all(two_ranks, tmp_path):
    ours = {
        **OURS,
        "parallelism.data_parallel_shard_degree": 2,
        "parallelism.expert_parallel_degree": 2,
        "megamoe.equal_tokens": True,
    }
    budget = {**BUDGET, "activation_checkpoint.memory_budget": 0.5}
    names = {**PLAIN, "megamoe.recompute_modules": ("layernorm", "moe_act")}
    ways = {"none": PLAIN, "memory_budget": budget, "names": names}
    steps, kept = {}, {}
    for way, asked in ways.items():
        ranks = train(two_ranks, 2, tmp_path / way, ours, asked)
        steps[way] = [rank.steps for rank in ranks]
        kept[way] = [
            graph["kept_bytes"] < graph["kept_bytes_before"]
            for graph in ranks[0].graphs
            if graph.get("kept_bytes")
        ]
    assert steps["memory_budget"] == steps["names"] == steps["none"]
    assert kept["memory_budget"] and kept["names"] and not kept["none"]
    assert all(kept["names"])
