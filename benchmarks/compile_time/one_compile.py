"""`python -m benchmarks.compile_time.one_compile`: compile one layer or block, print what it took.

Contract
    Rank 0 of two, of which the other does not exist: Dynamo's part, ours, AOTAutograd's and
    Inductor's for the CPU, forward and backward; nothing runs. CPU time is that of this process
    and of the compilers it starts. What a first compilation alone pays for, imports and torch's
    precompiled headers, was paid before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.testing._internal.distributed.fake_pg import FakeStore

import torchtitan_integration
from benchmarks.link.cases import Case
from benchmarks.link.layer import MoELayer
from moe_compile.backend import megamoe
from torchtitan_integration.cpu_launcher import prepare_torch

NUM_RANKS: Final = 2
LAYER: Final = Case(
    name="bare layer", num_ranks=NUM_RANKS, tokens=64, experts=8, width=64, hidden=64
)
CONFIG: Final = Path(torchtitan_integration.__file__).parent / "configs/deepseek_v3_debug_cpu.toml"
SUBJECTS: Final = ("layer", "block")
"""Routed experts by themselves; the routed block of the recipe that `make train` runs."""

Backend = Callable[[torch.fx.GraphModule, Sequence[Any]], Any]


class Compiled(Exception):
    """Ends a run once its graph is compiled."""


@contextlib.contextmanager
def subject(name: str, backend: Backend) -> Iterator[Callable[[], Any]]:
    """Enter the world of a subject; gives what compiles it with `backend`."""
    make = _layer if name == "layer" else _block
    with make(backend) as compile_it:
        yield compile_it


@contextlib.contextmanager
def _layer(backend: Backend) -> Iterator[Callable[[], Any]]:
    dist.init_process_group("fake", rank=0, world_size=NUM_RANKS, store=FakeStore())
    try:
        layer = torch.compile(MoELayer(LAYER, dist.group.WORLD), backend=backend, fullgraph=True)
        x = torch.zeros(LAYER.tokens, LAYER.width, dtype=torch.bfloat16, requires_grad=True)
        yield lambda: layer(x)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def _block(backend: Backend) -> Iterator[Callable[[], Any]]:
    prepare_torch()
    from torchtitan_integration.dry_run.world import (  # noqa: PLC0415  (after the work-arounds)
        call_of_graph,
        fake_rank,
        first_with_experts,
        model_of_blocks,
    )
    from torchtitan_integration.job_file import read_job  # noqa: PLC0415
    from torchtitan_integration.parallelize import apply_model_parallelism  # noqa: PLC0415

    with fake_rank(read_job(CONFIG, []), world=NUM_RANKS, rank=0) as rank:
        rank.job.compile.backend = backend
        model = model_of_blocks(rank, [first_with_experts(rank)])
        apply_model_parallelism(model, rank.dims, rank.job)
        block, given = call_of_graph(model, rank)
        block.to_empty(device="cpu")
        on_cpu = pytree.tree_map_only(torch.Tensor, _zeros, given)
        on_cpu[0].requires_grad_()
        yield lambda: block.compiled(*on_cpu)


def _zeros(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those it has waited for."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def compile_once(name: str, chunks: int) -> dict[str, float]:
    """Compile a subject in so many chunks; return CPU and wall seconds."""

    def backend(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        megamoe(gm, inputs, options={"megamoe.chunks": chunks, "megamoe.equal_tokens": True})
        raise Compiled

    torch.compile(lambda x: x + 1)(torch.zeros(8))
    with subject(name, backend) as compile_it:
        eager = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
        capture = torch._dynamo.config.patch(capture_scalar_outputs=True)
        cpu, wall = cpu_seconds(), time.monotonic()
        with eager, capture:
            try:
                compile_it()
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if not isinstance(error.inner_exception, Compiled):
                    raise
        return {"cpu_s": cpu_seconds() - cpu, "wall_s": time.monotonic() - wall}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--chunks", type=int, required=True)
    options = parser.parse_args(arguments)
    print("RESULT", json.dumps(compile_once(options.subject, options.chunks)))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
