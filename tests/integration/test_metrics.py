"""Metrics of a training run reach TensorBoard, complete."""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.integration.titan_jobs import LOGGED, OURS, STEPS, STOCK, train

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
WAITS = {"megamoe/measured_waits_ms_per_step", "megamoe/predicted_waits_ms_per_step"}
TOKENS, DIM = 2 * 64, 64
"""Of a rank's batch, and of a token, in the small jobs of these tests."""
LAYERS_WITH_EXPERTS = 1
"""The first of two is dense."""


def logged(folder, below="tb/*"):
    (events,) = folder.glob(f"{below}/events.*")
    log = EventAccumulator(str(events)).Reload()
    return {tag: [e.value for e in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def assert_about_half_leave(values, *, tokens, dim):
    """Of two ranks, half the rows are the other's, more or less."""
    top_k, layers, ways = 2, 2, 4
    most = ways * tokens * top_k * layers * dim * torch.float32.itemsize / 1e9
    assert all(0.2 * most < value < 0.8 * most for value in values["megamoe/exchange_GB_per_step"])


def test_every_logged_step_has_every_metric(plain_job):
    """The share of time is what was measured; how large it may be is for docs/torchtitan.md."""
    values = logged(plain_job.folder)
    assert set(values) >= KEYS
    assert {len(values[key]) for key in KEYS} == {STEPS}
    for key in KEYS:
        assert all(value >= (1.0 if "max_over_mean" in key else 0.0) for value in values[key])
    assert_about_half_leave(values, tokens=TOKENS, dim=DIM)
    assert all(0.0 < share < 100.0 for share in values["megamoe/metrics_time_pct"])


def test_every_logged_step_but_the_first_has_its_waits(plain_job):
    """The first one compiles."""
    values = logged(plain_job.folder)
    each = {key for key in values if key.startswith("megamoe/waits/")}
    assert {len(values[key]) for key in {*WAITS, *each}} == {STEPS - 1}
    graphs = {tuple(key.split("/")[2:4]) for key in each}
    assert sorted(phase for _, phase in graphs) == ["backward", "forward"]
    for step, total in enumerate(values["megamoe/measured_waits_ms_per_step"]):
        of_each = sum(values[key][step] for key in each)
        assert total == pytest.approx(LAYERS_WITH_EXPERTS * of_each, rel=1e-4) and total > 0.0


@pytest.mark.slow
def test_a_job_that_measures_no_waits_logs_none(two_ranks, tmp_path):
    train(
        two_ranks, 2, tmp_path, LOGGED, OURS, {"training.steps": 2, "megamoe.measure_waits": False}
    )
    values = logged(tmp_path)
    assert set(values) >= KEYS and not [key for key in values if "waits" in key]


@pytest.mark.slow
def test_rows_are_counted_once_under_activation_checkpointing(two_ranks, tmp_path, plain_job):
    """torchtitan halves the counts of checkpointed blocks; compiled ones do not count twice."""
    train(two_ranks, 2, tmp_path, LOGGED, OURS, {"activation_checkpoint.mode": "full"})
    sent = "megamoe/exchange_GB_per_step"
    assert logged(tmp_path)[sent] == logged(plain_job.folder)[sent]


@pytest.mark.slow
def test_a_resumed_job_counts_its_own_steps(two_ranks, tmp_path):
    """Steps before the checkpoint were taken for steps of the first logged window."""
    saves = {**LOGGED, "checkpoint.enable": True, "checkpoint.interval": 2, "metrics.log_freq": 2}
    saves["checkpoint.last_save_model_only"] = False
    train(two_ranks, 2, tmp_path, saves, OURS, {"training.steps": 2})
    train(two_ranks, 2, tmp_path, saves, OURS, {"metrics.save_tb_folder": "tb/resumed"})
    values = logged(tmp_path / "tb/resumed", "*")
    (gigabytes,) = values["megamoe/exchange_GB_per_step"]
    (seconds,) = values["time_metrics/end_to_end(s)"]
    (rate,) = values["megamoe/exchange_GB_per_s_of_step"]
    assert rate == pytest.approx(gigabytes / seconds, rel=0.4)  # by two clocks; it was twice this


@pytest.mark.slow
def test_a_job_without_megamoe_logs_as_torchtitan_does(two_ranks, tmp_path):
    train(two_ranks, 2, tmp_path, LOGGED, STOCK, {"training.steps": 2})
    assert not [key for key in logged(tmp_path) if key.startswith("megamoe/")]
