"""Blocks compiled together train as blocks compiled one by one do, and keep their names."""

import functools

import pytest
import torch
from torch import nn

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.errors import ContractViolation
from tests.integration.titan_jobs import OURS, STEPS, train
from torchtitan_integration.block_groups import forward_of, run_as_group

FOUR_LAYERS = {
    "model.flavor": "tiny_pipeline",
    "training.local_batch_size": 4,
    "activation_checkpoint.mode": "none",
}
"""The first of them without experts."""


@pytest.fixture(scope="module")
def one_by_one(pool_for, tmp_path_factory):
    """Jobs with a graph for every block."""

    @functools.cache
    def run(ranks, *settings):
        folder = tmp_path_factory.mktemp("one")
        return train(pool_for(ranks), ranks, folder, FOUR_LAYERS, dict(settings), OURS)

    return run


def grouped(pool_for, folder, number, settings=(), ranks=2):
    together = {"megamoe.blocks_per_graph": number}
    return train(pool_for(ranks), ranks, folder, FOUR_LAYERS, dict(settings), OURS, together)


def assert_alike(ours, theirs):
    for rank, other in zip(ours, theirs, strict=True):
        assert sorted(rank.steps) == list(range(1, STEPS + 1))
        assert rank.steps == other.steps
        assert rank.state_keys == other.state_keys
        assert list(rank.placements.items()) == list(other.placements.items())
        assert rank.parameters == other.parameters
        assert rank.rows[1:] == other.rows[1:]  # a pipeline counts what its shapes are found by
        assert sorted(rank.gathered) == sorted(other.gathered)
        assert set(rank.verdicts) == {"chunked"} and set(rank.chunks) == {2}


CHECKPOINTING = {
    "none": (),
    "selective by operator": (
        ("activation_checkpoint.mode", "selective"),
        ("activation_checkpoint.selective_ac_option", "op"),
    ),
    "full": (("activation_checkpoint.mode", "full"),),
}


@pytest.mark.slow
@pytest.mark.parametrize("settings", CHECKPOINTING.values(), ids=CHECKPOINTING)
def test_two_blocks_to_a_graph_train_as_one_does(pool_for, one_by_one, tmp_path, settings):
    ours = grouped(pool_for, tmp_path, 2, settings)
    assert_alike(ours, one_by_one(2, *settings))
    # the block without experts and the first with them; then two with them
    assert [len(graph) for graph in graphs_by_phase(ours[0])] == [2, 2]
    assert len(ours[0].chunks) == 3


def graphs_by_phase(rank):
    """Return the graphs with an exchange, forward and backward."""
    return [[g for g in rank.graphs if g["phase"] == phase] for phase in ("forward", "backward")]


@pytest.mark.slow
def test_a_group_ends_with_its_pipeline_stage(pool_for, one_by_one, tmp_path):
    """Two stages of two blocks each: a graph of three blocks is asked for, and there is none."""
    staged = {
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.data_parallel_shard_degree": 2,
    }
    settings = tuple(staged.items())
    assert_alike(grouped(pool_for, tmp_path, 3, settings, ranks=4), one_by_one(4, *settings))


def block(name, calls):
    """Return a module that notes its call, and adds one."""
    module = nn.Module()

    def forward(x, *args, **kwargs):
        calls.append((name, args, kwargs))
        return x + 1

    module.forward = forward
    return module


def test_the_first_block_runs_all_with_what_it_is_given_and_the_others_hand_on():
    calls = []
    blocks = [block(name, calls) for name in "abc"]
    run_as_group(blocks, forward_of(blocks))
    hidden = torch.zeros(2)
    for one in blocks:
        hidden = one(hidden, "angles", mask="causal")
    assert hidden.tolist() == [3, 3]
    assert calls == [(name, ("angles",), {"mask": "causal"}) for name in "abc"]
    assert not list(blocks[0].children())


@pytest.mark.parametrize("given", ["of another call", "before the group ran"])
def test_a_block_that_is_called_out_of_turn_says_so(given):
    blocks = [block(name, []) for name in "ab"]
    run_as_group(blocks, forward_of(blocks))
    made = torch.zeros(2) if given == "before the group ran" else blocks[0](torch.zeros(2)) + 0
    with pytest.raises(ContractViolation, match="write blocks_per_graph = 1"):
        blocks[1](made)
