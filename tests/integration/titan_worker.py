"""One rank of a torchtitan job; importing this module puts the CPU work-arounds in place."""

import contextlib
import hashlib
import logging
import os

from torchtitan_integration.cpu_launcher import cpu_trainer, prepare_torch

prepare_torch()

import torch
import torch.distributed as dist
from torch._functorch import config as functorch_config
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torchtitan.config import ConfigManager
from torchtitan.distributed import activation_checkpoint
from torchtitan.tools.logging import init_logger, logger
from torchtitan.train import Trainer

from moe_compile.report.process_report import REPORT
from moe_compile.testing.rank_pool import collect_seldom, forget_compiled
from tests.integration.titan_jobs import CONFIG, STEP, VALIDATED, JobResult
from torchtitan_integration.meshes import sequence_mesh
from torchtitan_integration.routing import RoutingCounter, blocks_with_experts


def train(rank, ranks, port, flags, recorder=None):
    """Train, as one of `ranks`, the debug job with `flags`; None on a rank that has no part.

    `recorder(rank, trainer)` is entered around the training.
    """
    if not _join(rank, ranks, port):
        return None
    result, before, counter = JobResult(), len(REPORT.compilations), RoutingCounter()
    graphs_before = len(REPORT.as_dict()["graphs"])
    # torchtitan sets a job's budget for the whole process
    with _listening(result), functorch_config.patch(activation_memory_budget=1.0):
        trainer = cpu_trainer()(ConfigManager().parse_args([*flags, f"--job.config_file={CONFIG}"]))
        try:
            if trainer.job_config.checkpoint.create_seed_checkpoint:
                trainer.checkpointer.save(curr_step=0, last_step=True)
            else:
                _look_at(trainer, result)
                _count_rows(trainer, counter, result)
                _watch_bias(trainer, result)
                _watch_loading(trainer, result)
                with recorder(rank, trainer) if recorder else contextlib.nullcontext():
                    trainer.train()
        finally:
            counter.close()
            trainer.close()
            del trainer
            _leave()
    regions = [region for c in REPORT.compilations[before:] for region in c.regions]
    result.chunks = [region.num_chunks for region in regions]
    result.verdicts = [region.verdict for region in regions]
    result.remarks = [remark for region in regions for remark in region.remarks]
    attention = [found for c in REPORT.compilations[before:] for found in c.attention]
    result.attention = [(found.is_region, found.verdict) for found in attention]
    result.graphs = REPORT.as_dict()["graphs"][graphs_before:]
    return result


def random_states(rank, port, flags):
    """Return the random state that torchtitan's trainer leaves, and the one the launcher's does."""
    if not _join(rank, 1, port):
        return None
    states = []
    for make in (Trainer, cpu_trainer()):
        torch.manual_seed(0)
        trainer = make(ConfigManager().parse_args([*flags, f"--job.config_file={CONFIG}"]))
        states.append(torch.get_rng_state().tolist())
        trainer.close()
        del trainer
        _leave()
    return states


def _join(rank, ranks, port):
    """Prepare to be one of `ranks` ranks of a new job; False on a rank that has no part."""
    if dist.is_initialized():
        dist.destroy_process_group()
    collect_seldom()  # what stays of the jobs before
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(ranks), RANK=str(rank),
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks), TORCHELASTIC_USE_AGENT_STORE="True",
    )  # fmt: skip
    # torchtitan numbers layers through all jobs of a process: after a job of three layers on some
    # ranks only, every second layer would be another one on each rank, and so would collectives
    activation_checkpoint._layer_sac_count = 0
    return rank < ranks


def _leave():
    """End the job's groups, and let go of what would keep them or bring them back."""
    dist.destroy_process_group()
    _clear_sharding_prop_cache()  # meshes that compare equal would come back with ended groups
    forget_compiled()


class _Printed(logging.Handler):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def emit(self, record):
        said = record.getMessage()
        self.result.validated += VALIDATED.findall(said)
        for step, loss, norm in STEP.findall(said):
            self.result.steps[int(step)] = (loss, norm)


@contextlib.contextmanager
def _listening(result):
    init_logger()
    handler = _Printed(result)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _look_at(trainer, result):
    for part in trainer.model_parts:
        for name, p in part.named_parameters():
            plain = plain_name(name)
            if not isinstance(p, DTensor):  # DDP
                result.placements[plain] = tuple(p.shape)
                continue
            mesh = p.device_mesh
            where = (mesh.mesh_dim_names, p.placements, tuple(p.to_local().shape))
            result.placements[plain] = where
            if ".experts." in name:
                for axis in mesh.mesh_dim_names:
                    result.groups[axis] = mesh.get_group(axis).group_name
        result.state_keys += list(part.state_dict())
        modules = part.named_modules()
        result.gathered += [name for name, m in modules if isinstance(m, FSDPModule)]
    trainer.optimizers.register_step_pre_hook(lambda *_, **__: _hash_once(trainer, result))
    dims = trainer.parallel_dims
    if (mesh := dims.get_optional_mesh("fsdp")) is not None:
        result.groups["fsdp"] = mesh.get_group().group_name
    if dims.cp_enabled:
        result.groups["cp"] = sequence_mesh(dims).get_group().group_name


def _count_rows(trainer, counter, result):
    counter.watch(trainer.optimizers, trainer.model_parts, group=None)
    trainer.optimizers.register_step_post_hook(
        lambda *_, **__: result.rows.append(counter.rows.tolist())
    )


def _watch_bias(trainer, result):
    """Keep the bias after each step, and what routers choose, seen from outside of them."""
    layers = blocks_with_experts(trainer.model_parts)
    counts = [torch.zeros(len(b.moe.tokens_per_expert), dtype=torch.int64) for b in layers]

    def count(total, router, output):
        if router.training and torch.is_grad_enabled():
            total += torch.bincount(output[1].reshape(-1), minlength=len(total))

    def step(*_, **__):
        bias = [b.moe.expert_bias for b in layers if b.moe.expert_bias is not None]
        result.bias.append([values.tolist() for values in bias])
        result.choices.append([total.tolist() for total in counts])
        for total in counts:
            total.zero_()

    if not trainer.job_config.compile.enable:
        for block, total in zip(layers, counts, strict=True):
            block.moe.router.register_forward_hook(
                lambda router, _, output, total=total: count(total, router, output)
            )
    trainer.optimizers.register_step_post_hook(step)


def _watch_loading(trainer, result):
    """Keep what is there once a checkpoint was loaded: model, buffers, moments."""
    load = trainer.checkpointer.load

    def loading(step):
        if found := load(step):
            states = trainer.checkpointer.states
            tensors = {
                **states["model"].state_dict(),
                **{f"optimizer.{k}": v for k, v in states["optimizer"].state_dict().items()},
            }
            result.loaded |= hashes(tensors)
        return found

    trainer.checkpointer.load = loading


def hashes(tensors):
    """Return the hash of each tensor, of a DTensor all of it; what is no tensor is left out."""
    return {
        name: _hash((x.full_tensor() if isinstance(x, DTensor) else x).detach())
        for name, x in tensors.items()
        if isinstance(x, torch.Tensor)
    }


def _hash_once(trainer, result):
    if result.parameters:
        return
    for part in trainer.model_parts:
        for name, p in part.named_parameters():
            whole = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
            result.parameters[plain_name(name)] = _hash(whole)
            if ".experts." in name or ".router." in name:
                result.experts[plain_name(name)] = [_hash(expert) for expert in whole]


def plain_name(name):
    """Return a parameter's name as it is without activation checkpointing."""
    return name.replace("_checkpoint_wrapped_module.", "")


def _hash(values):
    bits = values.contiguous().reshape(-1).view(torch.uint8)  # NumPy has no bfloat16
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()
