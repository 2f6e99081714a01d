"""Activations that a dry run plans are those that a run keeps from forward to backward.

A dry run plans a GPU's operators: fused attention and grouped products. On a CPU torchtitan runs
others, so of whole jobs those are compared that keep the inputs of blocks alone.
"""

import contextlib
import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch
import torch.distributed as dist
from torch._dynamo.exc import BackendCompilerFailed

from moe_compile.choices import Rewritten
from moe_compile.config import MegaMoEConfig
from moe_compile.testing.rank_pool import RankPool
from tests.integration.conftest import work_around
from tests.integration.test_dry_run import run_here
from tests.integration.titan_jobs import CONFIG, OURS, flags_of, train
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but
from torchtitan_integration.dry_run.activations import activations_of
from torchtitan_integration.dry_run.layers import EndOfTrace

TOKENS, WIDTH, HIDDEN, EXPERTS, TOP_K = 256, 64, 96, 8, 2
CLOSE = 0.05


class Popular(GroupedExperts):
    """Experts of the first rank are chosen more often."""

    def route(self, x):
        popular = torch.linspace(6.0, 0.0, self.num_experts, device=x.device)
        scores = torch.softmax((x @ self.router).float() + popular, -1)
        return torch.topk(scores, self.top_k, -1)


def planned_and_kept(rank, chunks):
    """Return rows received over rows sent, and the bytes that are planned to be kept and are."""
    torch._dynamo.reset()
    layer = Popular(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, WIDTH, generator=generator).bfloat16().requires_grad_()
    counts = layer.tally(layer.route(x)[1].reshape(-1))
    received = float(layer.exchange_counts(counts).sum() / counts.sum())
    options = {"codegen": "fx", "chunks": chunks, "equal_tokens": True, "strict": True}
    planned = []

    def plan(gm, inputs):
        traced = Rewritten.of("", gm, inputs, MegaMoEConfig(**options)).traced()
        planned.append(activations_of(*(one.graph for one in traced), received=received))
        raise EndOfTrace

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        with pytest.raises(BackendCompilerFailed):
            torch.compile(layer, backend=plan, fullgraph=True)(x)
        torch._dynamo.reset()
        ours = {f"megamoe.{name}": value for name, value in options.items()}
        y = torch.compile(layer, backend="megamoe", fullgraph=True, options=ours)(x)
    return received, planned[0].saved, bytes_kept([y.grad_fn], [*layer.parameters(), x])


@pytest.mark.parametrize("chunks", slow_but([2], [1, 2]))
def test_a_busy_rank_and_an_idle_one_keep_what_is_planned_for_their_rows(two_ranks, chunks):
    (busy, *busy_bytes), (idle, *idle_bytes) = two_ranks.run(planned_and_kept, chunks)
    assert busy > 1.2 and idle < 0.8
    for planned, kept in (busy_bytes, idle_bytes):
        assert planned == pytest.approx(kept, rel=CLOSE)
    assert busy_bytes[0] > 1.2 * idle_bytes[0]


JOB = {
    "training.steps": 1,
    "training.local_batch_size": 4,
    "training.seq_len": 128,
    "parallelism.data_parallel_shard_degree": 2,
    "parallelism.expert_parallel_degree": 2,
    "megamoe.report": "",
    "activation_checkpoint.mode": "full",
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
        held = [*part.parameters(), *part.buffers()]
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
    """Return the bytes of all storages that compiled graphs behind `grad_fns` keep, less `held`."""
    known = {storage_of(tensor)._cdata for tensor in held}
    seen, todo, found = set(), list(grad_fns), {}
    while todo:
        if (node := todo.pop()) is None or node in seen:
            continue
        seen.add(node)
        todo += [behind for behind, _ in node.next_functions]
        if "CompiledFunction" in node.name():
            for tensor in (*node.saved_tensors, *getattr(node, "_tensors_no_vc_check", ())):
                storage = storage_of(tensor)
                found[storage._cdata] = storage.nbytes()
    return sum(nbytes for one, nbytes in found.items() if one not in known)


def storage_of(tensor):
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()


@pytest.mark.slow
def test_planned_activations_are_those_that_a_job_keeps(two_ranks, tmp_path):
    """Blocks keep their inputs and received rows: as many as were sent, on two ranks together."""
    settings = {**JOB, **OURS}
    train(two_ranks, 2, tmp_path, settings, base={"job.dump_folder": ""}, recorder=kept)
    counted = sum(json.loads((tmp_path / f"kept{rank}.json").read_text()) for rank in range(2)) / 2
    report = tmp_path / "plan.json"
    arguments = ["train", str(CONFIG), "--dry-run", *flags_of(settings)]
    with RankPool(1, at_start=work_around) as pool:
        ((status, out, errors),) = pool.run(run_here, [*arguments, f"--megamoe.report={report}"])
    assert status == 0, out + errors
    (rank,) = json.loads(report.read_text())["memory"]["ranks"]
    assert rank["saved_activations"] == pytest.approx(counted, rel=CLOSE) and counted > 0
