"""Every layout trains as one rank alone does: the same gradients, steps, moments and buffers."""

import dataclasses
import functools

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tests.integration.layout_table import TESTED, ULYSSES, WITHOUT_EP
from tests.integration.one_rank import GLOBAL_BATCH, alone, faults, settings_of, trained
from tests.integration.titan_jobs import NOT_COMPILED, OURS, STOCK, ranks_of
from torchtitan_integration.layout import Layout

LAYOUTS = (*TESTED, *ULYSSES, *WITHOUT_EP)
EXPERTS, TENSOR, PIPELINE, REPLICAS = (TESTED[place] for place in (0, 6, 13, 11))
MENDED = (TENSOR, PIPELINE, TESTED[8], TESTED[14], TESTED[21], WITHOUT_EP[0])
"""Layouts whose gradients torchtitan gets wrong, one for each reason."""
EXHAUSTIVE = pytest.mark.exhaustive
IN_BFLOAT16 = {"model.flavor": "tiny"}
OTHERS = {
    "accumulation of two": (Layout(dp_shard=2, ep=2), {"training.local_batch_size": 2}, 1e-4),
    "accumulation of four": (Layout(dp_shard=2, ep=2), {"training.local_batch_size": 1}, 1e-4),
    "a pipeline that accumulates": (PIPELINE, {"training.local_batch_size": 2}, 1e-4),
    "clipping": (TESTED[2], {"training.max_norm": 0.1}, 1e-4),
    "clipping in a pipeline": (PIPELINE, {"training.max_norm": 0.1}, 1e-4),
    "sums per token in one kernel": (TENSOR, {"megamoe.numerics": "bounded"}, 1e-4),
    "half the bytes": (REPLICAS, {"megamoe.gradient_wire": "bf16_fp32_sum"}, 5e-3),
}


def layouts(quick):
    """Return all layouts as parameters, their places as names: exhaustive but for two.

    One with tensor parallelism is slow: four ranks, and torchtitan's own gradients are wrong there.
    """
    marks = {TENSOR: pytest.mark.slow, quick: ()}
    return [
        pytest.param(x, id=str(place), marks=marks.get(x, EXHAUSTIVE))
        for place, x in enumerate(LAYOUTS)
    ]


@pytest.fixture(scope="module")
def against_one_rank(pool_for, tmp_path_factory):
    """Train on a layout and on one rank; return each rank's results, and all that differs."""

    @functools.cache
    def one(items, descends):
        folder = tmp_path_factory.mktemp("alone")
        return trained(pool_for(2), 1, folder, dict(items), descends=descends)[1][0]

    def run(layout, *changes, descends=False, **bounds):
        settings = {key: v for c in (settings_of(layout), *changes) for key, v in c.items()}
        expected = one(tuple(alone(layout, settings).items()), descends)
        folder, ranks = tmp_path_factory.mktemp("job"), ranks_of(settings)
        found = trained(pool_for(ranks), ranks, folder, settings, descends=descends)
        return found, faults(found[1], expected, layout, **bounds)

    return run


@pytest.mark.parametrize("layout", layouts(EXPERTS))
def test_gradients_steps_and_moments_are_those_of_one_rank(against_one_rank, layout):
    (results, _), different = against_one_rank(layout, OURS)
    assert different == []
    for rank in results:
        assert set(rank.verdicts) == ({"chunked"} if layout.ep > 1 else set())


@pytest.mark.parametrize("layout", layouts(PIPELINE))
def test_gradient_descent_takes_the_same_steps(against_one_rank, layout):
    """Without checkpointing: there a router that is not compiled counts its tokens twice."""
    layout = dataclasses.replace(layout, checkpointing="none")
    _, different = against_one_rank(layout, NOT_COMPILED, descends=True)
    assert different == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", OTHERS)
def test_so_do_jobs_that_accumulate_clip_or_round(against_one_rank, name):
    layout, changes, bound = OTHERS[name]
    _, different = against_one_rank(
        layout, OURS, changes, of_gradients=bound, of_changes=max(bound, 1e-3)
    )
    assert different == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", [TENSOR, TESTED[2]], ids=["tensor", "experts"])
def test_in_torchtitans_bfloat16_they_are_a_rounding_apart(against_one_rank, layout):
    _, different = against_one_rank(layout, OURS, IN_BFLOAT16, of_gradients=2e-2, of_changes=2e-2)
    assert different == []


@pytest.mark.slow
def test_gates_of_ranks_with_the_same_tokens_stay_equal_bit_for_bit(against_one_rank):
    (_, ranks), _ = against_one_rank(TESTED[7], NOT_COMPILED, {"training.steps": 10})
    gates = [name for name in ranks[0]["after"] if "router.gate" in name]
    assert gates
    for name in gates:
        assert all(torch.equal(rank["after"][name], ranks[0]["after"][name]) for rank in ranks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MENDED, ids=range(len(MENDED)))
def test_torchtitans_own_gradients_are_not_those_of_one_rank(against_one_rank, layout):
    """Where this fails torchtitan has been mended, and our layout may be torchtitan's again."""
    _, different = against_one_rank(layout, STOCK, {"training.steps": 1})
    assert any("gradient" in one for one in different)


def test_a_step_has_the_sequences_of_one_rank():
    for layout in LAYOUTS:
        shards = layout.dp_replicate * layout.dp_shard
        assert settings_of(layout)["training.local_batch_size"] * shards == GLOBAL_BATCH
