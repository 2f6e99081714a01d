"""Gradients of the mean over a step's tokens: values stay; labels that do not count are refused."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims

from moe_compile.errors import InvalidConfig
from torchtitan_integration.losses import EveryLabel, with_mean_gradients

LENGTH = 16


def job(sequences, local):
    training = {"global_batch_size": sequences, "local_batch_size": local, "seq_len": LENGTH}
    return SimpleNamespace(training=SimpleNamespace(**training))


def dims(**degrees):
    every = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1}
    every |= degrees
    ranks = every["dp_replicate"] * every["dp_shard"] * every["tp"] * every["pp"]
    return ParallelDims(**every, world_size=ranks)


@pytest.mark.parametrize(
    ("degrees", "batch", "factor"),
    [
        ({"dp_shard": 2, "pp": 2}, job(-1, 4), 1 / (2 * 4 * LENGTH)),
        ({"dp_shard": 2, "pp": 2}, job(32, 4), 1 / (32 * LENGTH)),  # accumulates
        ({"dp_replicate": 2, "dp_shard": 2, "pp": 2}, job(-1, 4), 1 / (4 * 4 * LENGTH)),
        ({"dp_replicate": 4}, job(-1, 4), 4),
        ({"dp_replicate": 2, "dp_shard": 2, "ep": 2}, job(-1, 4), 1),
        ({"dp_shard": 2, "tp": 2}, job(-1, 4), 1),
    ],
)
def test_values_stay_and_gradients_are_of_the_mean(degrees, batch, factor):
    loss = with_mean_gradients(torch.Tensor.dot, dims(**degrees), batch)
    x, weights = torch.arange(3.0, requires_grad=True), torch.tensor([1.0, 2.0, 4.0])
    value = loss(x, weights)
    value.backward()
    assert value.item() == 10
    assert torch.equal(x.grad, weights * factor)
    with torch.no_grad():  # as in validation
        assert loss(x, weights).item() == 10


def test_labels_that_the_loss_ignores_end_a_pipelines_job_by_name():
    batches = [({"input": torch.zeros(1, 2)}, torch.tensor([[1, label]])) for label in (0, -100)]
    read = iter(EveryLabel(batches))
    assert next(read) is not None
    assert IGNORE_INDEX == -100
    with pytest.raises(InvalidConfig, match="pipeline_parallel_degree = 1"):
        next(read)


def test_what_a_checkpoint_holds_is_the_loaders_own():
    loader = SimpleNamespace(state_dict=lambda: {"place": 3})
    assert EveryLabel(loader).state_dict() == {"place": 3}
