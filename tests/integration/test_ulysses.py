"""Ulysses attention trains as one-dimensional FSDP does, to the last printed digit."""

import functools
import shutil

import pytest
import torch

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import get_train_spec

import torchtitan_integration.register  # noqa: F401
from moe_compile.errors import InvalidConfig
from tests.integration.layout_table import ULYSSES
from tests.integration.titan_jobs import (
    CONFIG,
    ONE_TEXT,
    OURS,
    SAVES,
    STEPS,
    STOCK,
    flags_of,
    keys_of,
    ranks_of,
    train,
)
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.layout import Layout
from torchtitan_integration.parallelize import parallelize

GLOBAL_BATCH = 4
SMALL_STEPS = {"optimizer.lr": 5e-4, "training.seq_len": 64, **ONE_TEXT}
"""At a larger rate the roundings of two world sizes of FSDP alone part within five steps."""
SPLIT = {**OURS, "megamoe.attention_chunks": 2}
ONE_KV_HEAD = "the local KV heads must divide into equal groups, and do not (one local KV head)"


def settings_of(layout, flavor="tiny"):
    local = GLOBAL_BATCH // (layout.dp_shard * layout.dp_replicate)
    own = {"training.local_batch_size": local, "model.flavor": flavor}
    return {**keys_of(layout), **own, **SMALL_STEPS}


def fsdp(ranks, model="deepseek_v3", flavor="tiny"):
    return settings_of(Layout(model=model, dp_shard=ranks, checkpointing="none"), flavor)


@pytest.fixture(scope="module")
def trained(pool_for, tmp_path_factory):
    """Train, saving checkpoints, each way once; return each rank's result, and the folder.

    On a CPU every layout of a flavor starts from the same weights (test_initial_weights.py).
    """

    @functools.cache
    def run(items, changes):
        settings, folder = dict(items), tmp_path_factory.mktemp("job")
        ranks = ranks_of(settings)
        return train(pool_for(ranks), ranks, folder, settings, SAVES, dict(changes)), folder

    return lambda settings, changes: run(tuple(settings.items()), tuple(changes.items()))


def assert_a_rounding_apart(ours, theirs):
    """Sequences divided otherwise bring an expert's rows in another order, whose sums round
    otherwise: printed losses and norms are equal but for one unit of their last digit."""
    assert ours.keys() == theirs.keys()
    for step, printed in theirs.items():
        for mine, other in zip(ours[step], printed, strict=True):
            unit = 10.0 ** -len(other.partition(".")[2])
            assert abs(float(mine) - float(other)) < 1.5 * unit, (step, mine, other)


def check(trained, layout, flavor="tiny"):
    settings = settings_of(layout, flavor)
    ours, _ = trained(settings, SPLIT)
    theirs, _ = trained(fsdp(2, layout.model, flavor), STOCK)
    assert sorted(theirs[0].steps) == list(range(1, STEPS + 1))
    for rank in ours:
        assert_a_rounding_apart(rank.steps, theirs[0].steps)
        assert set(rank.verdicts) == ({"chunked"} if layout.ep > 1 else set())
        assert rank.attention and all(is_region for is_region, _ in rank.attention)
        assert {verdict for _, verdict in rank.attention} <= {"chunked", ONE_KV_HEAD}
        others = {group for axis, group in rank.groups.items() if axis != "cp"}
        assert rank.groups["cp"] not in others
    same = zip(ours[0].parameters.values(), theirs[0].parameters.values(), strict=True)
    assert all(a == b for a, b in same)
    assert set(ours[0].state_keys) == set(theirs[0].state_keys)


@pytest.mark.parametrize(
    "layout", exhaustive_but(ULYSSES[::3], ULYSSES), ids=map(str, range(len(ULYSSES)))
)
def test_losses_are_those_of_one_dimensional_fsdp(trained, layout):
    check(trained, layout)


@pytest.mark.slow
def test_a_wide_latent_is_not_gathered_and_losses_are_the_same(trained):
    check(trained, ULYSSES[0], "tiny_wide_latent")


def resume(pool_for, folder, before, settings, *changes):
    """Go on from step 2 of the run that wrote into `before`."""
    shutil.copytree(before / "checkpoint/step-2", folder / "checkpoint/step-2")
    ranks = ranks_of(settings)
    return train(pool_for(ranks), ranks, folder, settings, SAVES, *changes)[0]


@pytest.mark.slow
def test_a_checkpoint_of_ulysses_goes_on_under_torchtitans_fsdp(trained, pool_for, tmp_path):
    written, folder = trained(settings_of(ULYSSES[0]), SPLIT)
    rest = resume(pool_for, tmp_path, folder, fsdp(2, ULYSSES[0].model), STOCK)
    assert_a_rounding_apart(rest.steps, {step: written[0].steps[step] for step in (3, 4, 5)})


def test_a_model_whose_heads_do_not_fit_is_refused_before_it_is_laid_out():
    settings = {
        **settings_of(Layout(model="qwen3", dp_shard=1, cp=8)),
        "experimental.custom_import": "",
    }
    job = ConfigManager().parse_args([f"--job.config_file={CONFIG}", *flags_of(settings)])
    spec = get_train_spec("qwen3")
    with torch.device("meta"):
        model = spec.model_cls(spec.model_args["debug_cpu"])
    dims = ParallelDims(
        dp_replicate=1, dp_shard=1, cp=8, tp=1, pp=1, ep=1, etp=1, world_size=8
    )  # fmt: skip
    with pytest.raises(InvalidConfig, match=r"write parallelism\.context_parallel_degree = 4"):
        parallelize(model, dims, job)
