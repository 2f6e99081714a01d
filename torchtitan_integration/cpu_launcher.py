"""torchtitan's training loop on a machine without a GPU; `torchrun -m` runs this module.

Contract
    Every CPU work-around of this project stands here and nowhere else, each with its reason.
    With a GPU use `torchrun -m torchtitan_integration.train`; nothing here is needed.

Each work-around is in place before the torchtitan module that would fail is imported:
    device      torchtitan takes "no accelerator" for CUDA, and asks the device for its name, its
                memory and to be selected: `CpuDevice` answers for the CPU
    permute     expert permutation calls a Triton kernel, which needs a driver: the same indices
                computed by torch operators
    attention   torch carries the random state of recomputed fused attention, dropout or not, and on
                CPU puts it in the wrong place when parameters are DTensors: plain attention
                instead; and DTensor has no rule for either on CPU: each rank does its own heads
    flex        torch refuses gradients of FlexAttention on CPU, for which Inductor has no kernel;
                the operator itself has them, in plain matrix products: the check is left out, and
                attention is not compiled where the block is not. Its block mask is not compiled
                either, and lies on torch's default device, not on a GPU that has no part here
    histc       torch has no integer histogram on CPU: an exact count by `scatter_add`
    weights     DTensor has no random state for a CPU mesh: every rank fills its shards with the
                same numbers, so that experts of different ranks are copies of one another. Here
                the model starts as one rank alone would start it from the same seed, on any
                number of ranks and in any layout, pipeline stages included; gpt_oss's biases of the
                router, which torchtitan does not initialise, are zeros
    profiler    torchtitan asks torch's profiler for a GPU's activities, and fails without one: the
                trainer profiles the processor, in the same steps, into the same files
    exit        now and then a thread of gloo or of the data loader aborts the process while the
                interpreter shuts down, after training has ended: the process leaves without that
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import types
from pathlib import Path
from typing import Any

import torch
import torch._utils
import torch.distributed as dist
import torch.nn.attention.flex_attention as flex
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.attention import SDPBackend

from moe_compile.check.model_state import plain_name
from moe_compile.torch_quirks.python311_frames import with_frame_space


class CpuDevice(types.ModuleType):
    """`torch.cpu` with the calls torchtitan makes on `torch.cuda`."""

    def __init__(self) -> None:
        """Stand in for a device module."""
        super().__init__("megamoe_cpu_device")

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of `torch.cpu`."""
        return getattr(torch.cpu, name)

    def set_device(self, device: Any) -> None:
        """Do nothing: there is one CPU."""

    def current_device(self) -> int:
        """Return 0: there is one CPU."""
        return 0

    def get_device_name(self, device: Any = None) -> str:
        """Return the name torchtitan logs."""
        del device
        return "cpu"

    def get_device_properties(self, device: Any = None) -> types.SimpleNamespace:
        """Return the machine's memory as the device's."""
        del device
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(total_memory=total)

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Do nothing: the peak of resident memory cannot be reset."""

    def empty_cache(self) -> None:
        """Do nothing: there is no caching allocator."""

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Return the peak of resident memory under the names torchtitan reads."""
        del device
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}


def generate_permute_indices(
    tokens_per_expert_group: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    use_cpu: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return torchtitan's permutation to expert-major order with aligned groups.

    Shapes: `tokens_per_expert_group` `[num_ranks * experts_per_rank]`, rank-major. Returns
    indices `[max_len]` into the received rows, -1 for padding; group sizes and their ends
    `[experts_per_rank]`, int32. Groups are padded to `alignment` rows, at least one alignment.
    """
    del use_cpu
    counts = tokens_per_expert_group.view(num_ranks, experts_per_rank)
    starts = torch.cumsum(tokens_per_expert_group, 0) - tokens_per_expert_group
    totals = torch.clamp_min(counts.sum(0), alignment)
    sizes = (totals + alignment - 1) // alignment * alignment
    ends = torch.cumsum(sizes, 0)
    placed = (ends - sizes)[:, None] + (torch.cumsum(counts, 0) - counts).t()
    runs = placed.reshape(-1)  # where each (expert, rank) run starts, ascending
    slots = torch.arange(max_len, device=counts.device)
    run = torch.searchsorted(runs, slots, right=True) - 1
    within = slots - runs[run]
    source = starts.view(num_ranks, experts_per_rank).t().reshape(-1)[run] + within
    used = within < counts.t().reshape(-1)[run]
    indices = torch.where(used, source, torch.full_like(source, -1))
    return indices.to(torch.int32), sizes.to(torch.int32), ends.to(torch.int32)


def _histc(
    input: torch.Tensor,
    bins: int = 100,
    min: float = 0,
    max: float = 0,
) -> torch.Tensor:
    """Count integers in [0, bins); for floats, call torch's function."""
    if input.is_floating_point():
        return torch.ops.aten.histc(input, bins, min, max)
    flat = input.reshape(-1)
    return flat.new_zeros(bins).scatter_add(0, flat, torch.ones_like(flat))


def prepare_torch() -> None:
    """Put the work-arounds in place; call before anything of torchtitan is imported."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the text is local: ask no hub about it
    # Dynamo takes a function of this name for torch's, whole, but traces a partial one, so that
    # the graph shows which tensor is counted
    torch.histc = functools.update_wrapper(functools.partial(_histc), _histc)
    kernels = types.ModuleType("torchtitan.models.moe.kernels")
    kernels.generate_permute_indices = generate_permute_indices  # type: ignore[attr-defined]
    sys.modules["torchtitan.models.moe.kernels"] = kernels

    original = (torch._utils._get_available_device_type, torch._utils._get_device_module)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda _: CpuDevice()
    import torchtitan.tools.utils  # noqa: F401, PLC0415  (asks for the device once, at import)

    torch._utils._get_available_device_type, torch._utils._get_device_module = original
    _prepare_attention()
    _prepare_flex_attention()


def _prepare_attention() -> None:
    from torchtitan.models.attention import (  # noqa: PLC0415
        ScaledDotProductAttentionWrapper as Attention,
    )

    original = Attention.forward

    def forward(self: Any, *qkv: Any, **settings: Any) -> Any:
        if not isinstance(q := qkv[0], DTensor):
            return original(self, *qkv, **settings)
        heads = original(self, *(x.to_local() for x in qkv), **settings)
        return DTensor.from_local(heads, q.device_mesh, q.placements)

    Attention.forward = forward
    Attention.sdpa_backends = [SDPBackend.MATH]


def _prepare_flex_attention() -> None:
    from torchtitan.models import attention  # noqa: PLC0415  (after the work-arounds)

    flex._validate_device = lambda *_: None
    attention.FlexAttentionWrapper._compiled_flex_attn = flex.flex_attention
    attention._compiled_create_block_mask = _create_block_mask


def _create_block_mask(*args: Any, **settings: Any) -> flex.BlockMask:
    return flex.create_block_mask(*args, **settings, device=torch.get_default_device())


def cpu_trainer() -> type[Any]:
    """Return torchtitan's trainer, its model initialised whole; call after `prepare_torch`."""
    from torchtitan.train import Trainer  # noqa: PLC0415  (after the work-arounds)

    from torchtitan_integration.run_again import without_reads  # noqa: PLC0415

    class CpuTrainer(without_reads(Trainer)):  # type: ignore[misc]
        """torchtitan's trainer on CPUs; checkpoints loaded later replace the initial values."""

        def __init__(self, job: Any) -> None:
            super().__init__(job)
            _copy_shards(_whole_model(self), self.model_parts)
            self._profiler: Any = None
            self._is_profiled = False

        def train(self) -> None:
            """Train, and profile where the job asks for it."""
            self._is_profiled = self.job_config.profiling.enable_profiling
            self.job_config.profiling.enable_profiling = False
            try:
                super().train()
            finally:
                if self._profiler is not None:
                    self._profiler.stop()

        def train_step(self, batches: Any) -> None:
            """Train one step, within `train` as one of the profiler's."""
            if self._is_profiled and self._profiler is None:
                self._profiler = cpu_profiler(self.job_config, self.step - 1)
                self._profiler.start()
            super().train_step(batches)
            if self._profiler is not None:
                self._profiler.step()

    return CpuTrainer


def cpu_profiler(job: Any, num_steps_before: int) -> torch.profiler.profile:
    """Return a profiler with torchtitan's schedule, whose traces lie where torchtitan's would."""
    asked = job.profiling
    folder = Path(job.job.dump_folder, asked.save_traces_folder)

    def keep(profiler: torch.profiler.profile) -> None:
        path = folder / f"iteration_{profiler.step_num}" / f"rank{dist.get_rank()}_trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(".new")
        profiler.export_chrome_trace(str(fresh))
        fresh.replace(path)  # a reader never sees half of it

    warmup, active = asked.profiler_warmup, asked.profiler_active
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(
            wait=asked.profile_freq - warmup - active, warmup=warmup, active=active
        ),
        on_trace_ready=keep,
        record_shapes=True,
    )
    profiler.step_num = num_steps_before
    return profiler


def _whole_model(trainer: Any) -> torch.nn.Module:
    """Return the job's model as one rank alone initialises it; random state stays as it was."""
    from torchtitan.config import TORCH_DTYPE_MAP  # noqa: PLC0415
    from torchtitan.tools.utils import set_default_dtype  # noqa: PLC0415

    seed = [torch.initial_seed()]
    dist.broadcast_object_list(seed)  # each pipeline stage has its own; rank 0 has the job's
    dtype = TORCH_DTYPE_MAP[trainer.job_config.training.dtype]
    with torch.device("meta"), set_default_dtype(dtype):
        whole = trainer.train_spec.model_cls(trainer.model_args)
    whole.to_empty(device="cpu")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for parameter in whole.parameters():
            parameter.zero_()
        torch.manual_seed(seed[0])
        whole.init_weights(buffer_device=torch.device("cpu"))
    return whole


def _copy_shards(whole: torch.nn.Module, parts: list[torch.nn.Module]) -> None:
    """Give the parameters of `parts` the values of `whole`, of DTensors this rank's shard."""
    values = dict(whole.named_parameters(remove_duplicate=False))
    for part in parts:
        for name, parameter in part.named_parameters():
            value, own = values[plain_name(name)].detach(), parameter.detach()
            if isinstance(own, DTensor):
                mesh, placements = own.device_mesh, own.placements
                value = distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()
                own = own.to_local()
            own.copy_(value)


@with_frame_space
def main() -> None:
    """Train as `torchtitan.train` does, with torchtitan's own arguments."""
    prepare_torch()
    from torchtitan.train import main as train  # noqa: PLC0415  (after the work-arounds)

    train(cpu_trainer())
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)  # train() raises when training fails, so this is success


if __name__ == "__main__":
    main()
