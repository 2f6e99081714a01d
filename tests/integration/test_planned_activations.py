"""Activations that a dry run plans are those that a run keeps from forward to backward."""

import contextlib
import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.testing.rank_pool import RankPool
from tests.integration.conftest import work_around
from tests.integration.test_dry_run import run_here
from tests.integration.titan_jobs import CONFIG, OURS, flags_of, train

JOB = {
    "training.steps": 1,
    "training.local_batch_size": 4,
    "training.seq_len": 128,
    "parallelism.data_parallel_shard_degree": 2,
    "parallelism.expert_parallel_degree": 2,
    "megamoe.report": "",
}


@contextlib.contextmanager
def kept(rank, trainer):
    """Write the bytes that the graphs of blocks keep from forward to backward, as the loss begins.

    Parameters and buffers are not counted: those gathered by FSDP are freed by then.
    """
    (part,) = trainer.model_parts
    outputs, loss_fn = [], trainer.loss_fn
    hooks = [
        block.register_forward_hook(lambda module, given, output: outputs.append(output))
        for block in part.layers.values()
    ]

    def loss(*given):
        held = [t for t in (*part.parameters(), *part.buffers())]
        path = Path(trainer.job_config.job.dump_folder) / f"kept{rank}.json"
        path.write_text(json.dumps(bytes_kept([o.grad_fn for o in outputs], held)))
        outputs.clear()
        return loss_fn(*given)

    trainer.loss_fn = loss
    yield
    trainer.loss_fn = loss_fn
    for hook in hooks:
        hook.remove()


def bytes_kept(grad_fns, held):
    """Return the bytes of all storages that graphs behind `grad_fns` have saved, less `held`."""
    known = {tensor_storage(t)._cdata for t in held}
    seen, todo, found = set(), list(grad_fns), {}
    while todo:
        if (node := todo.pop()) is None or node in seen:
            continue
        seen.add(node)
        todo += [behind for behind, _ in node.next_functions]
        if "CompiledFunction" in node.name():
            for tensor in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())):
                storage = tensor_storage(tensor)
                found[storage._cdata] = storage.nbytes()
    return sum(nbytes for one, nbytes in found.items() if one not in known)


def tensor_storage(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_planned_activations_are_those_that_a_run_keeps(two_ranks, tmp_path, mode):
    """Both ranks together have as many rows as with even routing."""
    checkpointed = {
        "activation_checkpoint.mode": mode,
        "activation_checkpoint.selective_ac_option": "op",
    }
    settings = {**JOB, **OURS, **checkpointed}
    train(two_ranks, 2, tmp_path, settings, base={"job.dump_folder": ""}, recorder=kept)
    counted = sum(json.loads((tmp_path / f"kept{rank}.json").read_text()) for rank in range(2)) / 2
    report = tmp_path / "plan.json"
    arguments = ["train", str(CONFIG), "--dry-run", *flags_of(settings)]
    with RankPool(1, at_start=work_around) as pool:
        ((status, out, errors),) = pool.run(run_here, [*arguments, f"--megamoe.report={report}"])
    assert status == 0, out + errors
    (rank,) = json.loads(report.read_text())["memory"]["ranks"]
    assert rank["saved_activations"] == pytest.approx(counted, rel=0.05)
