"""Jobs without host reads: steps whose rows had no room run again, and no bit differs."""

import contextlib
import importlib
import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.report.region_reports import NO_READS
from moe_compile.runtime.rerun import RERUN
from tests.integration.titan_jobs import STEPS, train

READS = {"megamoe.codegen": "fx", "megamoe.chunks": 1, "megamoe.strict": True}
ACCUMULATES = {"training.global_batch_size": 16, "training.local_batch_size": 2}
"""Four microbatches on two ranks."""
PIPELINE = {
    "model.flavor": "tiny_pipeline",
    "training.local_batch_size": 4,
    "parallelism.pipeline_parallel_degree": 2,
    "activation_checkpoint.mode": "full",
}
FOUR = {"parallelism.data_parallel_shard_degree": 2}


def without(room):
    return {**READS, "megamoe.host_reads": "none", "megamoe.row_room": room}


@contextlib.contextmanager
def hashed_at_end(rank, trainer):
    """Leave the hashes of weights, buffers and moments, and how many steps ran again."""
    yield
    worker = importlib.import_module("tests.integration.titan_worker")
    state = {f"optimizer.{k}": v for k, v in trainer.optimizers.state_dict().items()}
    for part in trainer.model_parts:
        state |= dict(part.named_parameters()) | dict(part.named_buffers())
    found = {"hashes": worker.hashes(state), "again": RERUN.num_again, "steps": RERUN.num_steps}
    Path(trainer.job_config.job.dump_folder, f"rank{rank}.json").write_text(json.dumps(found))


def run(pool, ranks, folder, *changes):
    """Return each rank's result, and what it left."""
    folder.mkdir(exist_ok=True)
    results = train(pool, ranks, folder, *changes, recorder=hashed_at_end)
    left = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return results, left


def check(results, left, expected, *, again):
    """Raise unless losses, rows counted, weights and moments are as expected, and so many steps ran
    again."""
    assert [rank.steps for rank in results] == [rank.steps for rank in expected[0]]
    assert [rank.rows for rank in results] == [rank.rows for rank in expected[0]]
    assert [rank.bias for rank in results] == [rank.bias for rank in expected[0]]
    assert [rank["hashes"] for rank in left] == [rank["hashes"] for rank in expected[1]]
    assert [rank["steps"] for rank in left] == [STEPS] * len(left)
    counted = {rank["again"] for rank in left}
    assert len(counted) == 1 and counted.pop() in again
    for rank in results:
        assert NO_READS in rank.verdicts


@pytest.mark.slow
def test_accumulated_steps_that_run_again_are_those_of_the_job_with_reads(pool_for, tmp_path):
    pool = pool_for(2)
    expected = run(pool, 2, tmp_path / "reads", ACCUMULATES, READS)
    fits = run(pool, 2, tmp_path / "fits", ACCUMULATES, without(2.0))
    check(*fits, expected, again=[0])
    short = run(pool, 2, tmp_path / "short", ACCUMULATES, without(1.0))
    check(*short, expected, again=[STEPS])


def check_auto(pool, ranks, folder, expected, *changes):
    """Train with a room that is too small for two steps, then with one that is chosen."""
    (folder / "auto").mkdir()
    kept = {"room": 1.1, "steps_to_next_choice": 2}
    (folder / "auto" / "row_room.json").write_text(json.dumps(kept))
    auto = run(pool, ranks, folder / "auto", *changes, without("auto"))
    check(*auto, expected, again=range(1, STEPS))
    chosen = json.loads((folder / "auto" / "row_room.json").read_text())
    assert chosen["room"] > 1.1 and chosen["steps_to_next_choice"] == 4


@pytest.mark.slow
def test_a_room_chosen_in_mid_run_has_the_bits_of_the_job_with_reads(pool_for, tmp_path):
    pool = pool_for(2)
    expected = run(pool, 2, tmp_path / "reads", ACCUMULATES, READS)
    check_auto(pool, 2, tmp_path, expected, ACCUMULATES)


@pytest.mark.slow
def test_pipelined_steps_that_run_again_are_those_of_the_job_with_reads(pool_for, tmp_path):
    pool = pool_for(4)
    expected = run(pool, 4, tmp_path / "reads", PIPELINE, FOUR, READS)
    some = run(pool, 4, tmp_path / "some", PIPELINE, FOUR, without(1.3))
    check(*some, expected, again=range(1, STEPS + 1))
    check_auto(pool, 4, tmp_path, expected, PIPELINE, FOUR)
