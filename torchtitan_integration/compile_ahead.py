"""Runs of a pipeline's stages that are no batch's: they compile all stages, and count no tokens.

Contract
    As a schedule first steps in a job of megamoe, each rank runs every stage of its own once,
    forward and backward, on a microbatch. Ranks of a stage do so together, and no stage waits for
    another: compiling takes as long as the slowest stage. Without it torch runs one stage after
    another to find out shapes, forward and then in reverse, and each compiles as its turn comes.
    The results are dropped: gradients are cleared, buffers and the random generator are as they
    were. It costs the time of one microbatch; its memory is less than that of a step.

    Torch too runs each stage once before the microbatches, to find out shapes: in the first step,
    and in the step after each validation. Torch 2.13 does so with gradients, on memory that nobody
    filled. Routers count these tokens, and their rows may have no room. Here counters and the note
    of rows without room are those of the microbatches alone.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims

from moe_compile.report.process_report import REPORT
from moe_compile.runtime.rerun import RERUN
from torchtitan_integration.job_config import asks_for_megamoe
from torchtitan_integration.routing import blocks_with_experts

LOG: Final = logging.getLogger(__name__)
SEED: Final = 20240229
Split = Callable[..., tuple[Any, list[nn.Module], bool, bool]]
"""torchtitan's `pipelining_fn`."""


def compiled_ahead(split: Split) -> Split:
    """Return `split`, whose schedule compiles all stages of megamoe's jobs as it first steps."""

    def pipeline(
        model: nn.Module,
        dims: ParallelDims,
        job: JobConfig,
        device: torch.device,
        args: Any,
        *others: Any,
    ) -> tuple[Any, list[nn.Module], bool, bool]:
        schedule, parts, is_first, is_last = split(model, dims, job, device, args, *others)
        sequences = job.parallelism.pipeline_parallel_microbatch_size
        hidden = (sequences, job.training.seq_len // dims.tp, args.dim)
        ahead = CompileAhead(schedule, parts, device, hidden, job)
        return ahead, parts, is_first, is_last

    return pipeline


class CompileAhead:
    """A schedule of torch's, which runs its stages once before it first steps."""

    def __init__(
        self,
        schedule: Any,
        parts: Sequence[nn.Module],
        device: torch.device,
        hidden: tuple[int, int, int],
        job: JobConfig,
    ) -> None:
        """Step as `schedule` does; `hidden` is the shape of the values between two stages."""
        self._schedule, self._parts, self._hidden = schedule, parts, hidden
        self._device, self._job = device, job
        self._num_microbatches = job.training.local_batch_size // hidden[0]
        self.num_graphs: int | None = None if asks_for_megamoe(job) else 0
        """Graphs that were compiled ahead; None before the first step of a job of megamoe."""

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> Any:
        """Step as torch's schedule does, the first time after all stages ran once."""
        if self.num_graphs is None:
            given = {k: v for k, v in kwargs.items() if k not in ("losses", "return_outputs")}
            self.num_graphs = self._run_once(args, given)
        with microbatches_alone(self._parts, self._num_microbatches):
            return self._schedule.step(*args, target=target, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return the schedule's own attribute."""
        return getattr(self._schedule, name)

    def _run_once(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        before, began = len(REPORT.compilations), time.monotonic()
        LOG.info("megamoe: compiling the stages of the pipeline, all at once")
        arguments, keywords = split_args_kwargs_into_chunks(args, kwargs, self._num_microbatches)
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            for part in self._parts:
                is_first = getattr(part, "tok_embeddings", None) is not None
                given = arguments[0] if is_first else (self._hidden_of(part),)
                run_and_forget(part, given, keywords[0])
        graphs, seconds = len(REPORT.compilations) - before, time.monotonic() - began
        LOG.info("megamoe: compiled %d graphs of this rank in %.0f s", graphs, seconds)
        return graphs

    def _hidden_of(self, part: nn.Module) -> torch.Tensor:
        training = self._job.training
        is_mixed = isinstance(part, FSDPModule)
        name = training.mixed_precision_param if is_mixed else training.dtype
        generator = torch.Generator(self._device).manual_seed(SEED)
        hidden = torch.randn(self._hidden, generator=generator, device=self._device)
        return hidden.to(TORCH_DTYPE_MAP[name]).requires_grad_()


def run_and_forget(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run forward and backward; leave no gradient, and buffers as they were."""
    kept = [(buffer, buffer.detach().clone()) for buffer in part.buffers()]
    out = part(*args, **kwargs)
    out.backward(torch.ones_like(out))
    RERUN.taken()  # rows without room were those of no batch
    for parameter in part.parameters():
        parameter.grad = None
    with torch.no_grad():
        for buffer, before in kept:
            buffer.copy_(before)


@contextlib.contextmanager
def microbatches_alone(parts: Sequence[nn.Module], num_microbatches: int) -> Iterator[None]:
    """Step a schedule; take out what torch's search for shapes counted and noted, if it ran.

    The search ends before any of the `parts` runs a second time. It ran if a part ran more often
    than there are microbatches.
    """
    counters = [block.moe.tokens_per_expert for block in blocks_with_experts(parts)]
    runs: Counter[nn.Module] = Counter()
    first_runs: list[tuple[list[torch.Tensor], torch.Tensor | None]] = []

    def before_run(part: nn.Module, _: Any) -> None:
        runs[part] += 1
        if runs[part] == 2 and not first_runs:
            first_runs.append(([counter.clone() for counter in counters], RERUN.taken()))

    before, noted = [counter.clone() for counter in counters], RERUN.taken()
    handles = [part.register_forward_pre_hook(before_run) for part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    RERUN.add(noted)
    for counted, note in first_runs:
        if max(runs.values()) <= num_microbatches:
            RERUN.add(note)
            continue
        for counter, then, first in zip(counters, counted, before, strict=True):
            counter.sub_(then - first)
