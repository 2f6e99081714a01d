"""Ulysses attention trains as one-dimensional FSDP does, to the last printed digit."""

import functools

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tests.integration.one_stream import ONE_STREAM
from tests.integration.titan_jobs import OURS, STEPS, STOCK, train
from torchtitan_integration.layout import KEYS

GLOBAL_BATCH = 4
SMALL_STEPS = {"optimizer.lr": 5e-4, KEYS["checkpointing"]: "none", **ONE_STREAM}
"""A larger rate, and the roundings of two world sizes of FSDP alone part within five steps."""
SEED = {"checkpoint.enable": True, "checkpoint.create_seed_checkpoint": True}


def job(dp, cp, ep, model="deepseek_v3", flavor="tiny"):
    return {
        KEYS["model"]: model,
        "model.flavor": flavor,
        KEYS["dp_shard"]: dp,
        KEYS["cp"]: cp,
        KEYS["ep"]: ep,
        "training.local_batch_size": GLOBAL_BATCH // dp,
        **SMALL_STEPS,
    }


@pytest.fixture(scope="module")
def from_seed(four_ranks, tmp_path_factory):
    """Train from one seed checkpoint per flavor."""
    new = tmp_path_factory.mktemp

    @functools.cache
    def seed(model, flavor):
        folder = new("seed")
        train(four_ranks, 1, folder, job(1, 1, 1, model, flavor), STOCK, SEED)
        return folder / "checkpoint/step-0"

    def run(settings, *changes):
        start = {
            "checkpoint.enable": True,
            "checkpoint.load_only": True,
            "checkpoint.initial_load_path": seed(settings[KEYS["model"]], settings["model.flavor"]),
        }
        ranks = settings[KEYS["dp_shard"]] * settings[KEYS["cp"]]
        return train(four_ranks, ranks, new("job"), settings, start, *changes)

    return run


def test_x(from_seed):
    import time

    for model in ("qwen3", "deepseek_v3"):
        t = time.time()
        for settings, ch in (
            (job(2, 1, 1, model), STOCK),
            (job(4, 1, 1, model), STOCK),
            (job(1, 2, 1, model), OURS),
            (job(1, 2, 2, model), OURS),
            (job(1, 4, 2, model), OURS),
            (job(2, 2, 4, model), OURS),
        ):
            r = from_seed(settings, ch)
            print(model, r[0].steps, r[0].verdicts, r[0].chunks, time.time() - t)
