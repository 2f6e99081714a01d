"""Metrics of a training run reach TensorBoard, complete, and cost next to nothing."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.titan_jobs import OURS, STEPS, STOCK, train

KEYS = {
    "megamoe/rows_per_expert_max_over_mean",
    "megamoe/rows_per_expert_max_over_mean_worst_layer",
    "megamoe/rows_per_rank_max_over_mean",
    "megamoe/rows_per_rank_max_over_mean_worst_layer",
    "megamoe/exchange_GB_per_step",
    "megamoe/exchange_GB_per_s_of_step",
    "megamoe/predicted_hidden_ms_per_block",
    "megamoe/predicted_exposed_ms_per_block",
    "megamoe/recompiles",
    "megamoe/metrics_time_pct",
}
LARGER = {"model.flavor": "debug_cpu", "training.local_batch_size": 4, "training.seq_len": 128}
LOGGED = {"metrics.enable_tensorboard": True, "metrics.save_tb_folder": "tb"}
BUDGET_PCT = 0.5
"""Of the step, for all our metrics."""


def logged(folder):
    (events,) = folder.glob("tb/**/events.*")
    log = EventAccumulator(str(events)).Reload()
    return {tag: [e.value for e in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def test_every_logged_step_has_every_metric(two_ranks, tmp_path):
    train(two_ranks, 2, tmp_path, LARGER, LOGGED, OURS)
    values = logged(tmp_path)
    assert set(values) >= KEYS
    assert {len(values[key]) for key in KEYS} == {STEPS}
    for key in KEYS:
        assert all(value >= (1.0 if "max_over_mean" in key else 0.0) for value in values[key])
    tokens, top_k, layers, row_bytes = 4 * 128, 2, 2, 128 * 4
    most = 4 * tokens * top_k * layers * row_bytes / 1e9  # every row to the other rank, four ways
    assert all(0.2 * most < value < 0.8 * most for value in values["megamoe/exchange_GB_per_step"])
    seconds = values["time_metrics/end_to_end(s)"]
    shares = values["megamoe/metrics_time_pct"]
    spent = sum(s * p for s, p in zip(seconds, shares, strict=True)) / sum(seconds)
    assert spent < BUDGET_PCT


def test_rows_are_counted_once_under_activation_checkpointing(two_ranks, tmp_path):
    """torchtitan halves the counts of checkpointed blocks; compiled ones do not count twice."""
    sent = {}
    for mode in ("none", "full"):
        folder = tmp_path / mode
        train(two_ranks, 2, folder, LOGGED, OURS, {"activation_checkpoint.mode": mode})
        sent[mode] = logged(folder)["megamoe/exchange_GB_per_step"]
    assert sent["full"] == sent["none"]


def test_a_job_without_megamoe_logs_as_torchtitan_does(two_ranks, tmp_path):
    train(two_ranks, 2, tmp_path, LOGGED, STOCK, {"training.steps": 2})
    assert not [key for key in logged(tmp_path) if key.startswith("megamoe/")]
