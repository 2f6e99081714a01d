"""The options of the recipe that runs in parts over nodes, all at once, on four ranks."""

import tomllib

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tests.integration.titan_jobs import NOT_COMPILED, OURS, STEPS, train
from torchtitan_integration.job_file import find_job

OF_RECIPE = ("batch_parts", "blocks_per_graph", "hop_slices", "nodes", "numerics")


@pytest.mark.slow
def test_losses_of_the_parts_recipes_options_are_those_of_no_compiler(pool_for, tmp_path):
    """Two nodes of two ranks, whose ranks share sequences; all blocks with experts in one graph."""
    recipe = tomllib.loads(find_job("deepseek_v3_671b_parts_1024gpu").read_text())
    asked = {f"megamoe.{name}": recipe["megamoe"][name] for name in OF_RECIPE}
    job = {
        "model.flavor": "tiny_pipeline",
        "training.local_batch_size": 4,
        "activation_checkpoint.mode": recipe["activation_checkpoint"]["mode"],
        "parallelism.tensor_parallel_degree": 2,
        "parallelism.expert_parallel_degree": 4,
        "parallelism.expert_tensor_parallel_degree": 1,
    }
    nodes = {"megamoe.node_ranks": 2, "megamoe.chunks": "auto", "megamoe.equal_tokens": True}
    pool = pool_for(4)
    ours = train(pool, 4, tmp_path / "ours", OURS, job, asked, nodes)
    theirs = train(pool, 4, tmp_path / "theirs", NOT_COMPILED, job)
    for rank, other in zip(ours, theirs, strict=True):
        assert sorted(rank.steps) == list(range(1, STEPS + 1))
        for step, measured in rank.steps.items():
            assert list(map(float, measured)) == pytest.approx(
                list(map(float, other.steps[step])), rel=2e-4
            )
        assert rank.rows[0] == other.rows[0]  # later rows follow from weights that differ by bits
        assert len(rank.verdicts) == 2 * 3  # three blocks with experts, of two parts each
        hops = [r for r in rank.remarks if "sums of 2 rows per token are made on the nodes" in r]
        assert len(hops) == 2 * 3, rank.remarks
