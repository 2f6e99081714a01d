"""Every model starts from a seed checkpoint and learns as torchtitan's own layouts teach it."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tests.integration.titan_jobs import OURS, STOCK, train
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.layout import KEYS, MODELS

GLOBAL_BATCH = 8
ONE_D = {KEYS["ep"]: 1, "training.global_batch_size": GLOBAL_BATCH, KEYS["checkpointing"]: "none"}
WITH_EP = {**ONE_D, KEYS["ep"]: 2}


@pytest.mark.parametrize("model", exhaustive_but(["deepseek_v3", "gpt_oss"], MODELS))
def test_losses_from_one_seed_are_torchtitans_and_near_those_of_plain_fsdp(
    four_ranks, tmp_path, model
):
    """Plain FSDP on two world sizes reads other batches: its spread is what data alone does."""
    name = {KEYS["model"]: model}
    seed = {"checkpoint.enable": True, "checkpoint.create_seed_checkpoint": True}
    train(four_ranks, 1, tmp_path / "seed", name, ONE_D, STOCK, seed)
    start = {
        "checkpoint.enable": True,
        "checkpoint.initial_load_path": tmp_path / "seed/checkpoint/step-0",
    }

    def run(label, ranks, *changes):
        first = train(four_ranks, ranks, tmp_path / label, name, start, *changes)[0]
        return first, [float(loss) for loss, _ in first.steps.values()]

    ours, losses = run("ours", 4, WITH_EP, OURS)
    stock, _ = run("stock", 4, WITH_EP, STOCK)
    assert ours.parameters == stock.parameters  # those of the seed
    assert len(losses) == 5 and ours.steps == stock.steps
    assert set(ours.verdicts) == {"chunked"}

    _, on_four = run("fsdp4", 4, ONE_D, STOCK)
    _, on_two = run("fsdp2", 2, ONE_D, STOCK)
    spread = max(abs(a - b) for a, b in zip(on_four, on_two, strict=True))
    assert spread > 0
    assert max(abs(a - b) for a, b in zip(losses, on_four, strict=True)) <= 2 * spread
