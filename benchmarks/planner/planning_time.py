"""`python -m benchmarks.planner.planning_time`: the planner's share of compilation.

Contract
    Wall time of one process: rank 0 of a group that does not exist. Blocks of attention between
    exchanges and routed experts are captured by Dynamo, planned and compiled by Inductor for the
    CPU, forward and backward, and not run.
    Planning is all that the pass `plan_regions` does: tracing layers, pricing, what stays around.
    "cold" has an empty cache; "again" finds there what "cold" compiled, as another process would.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest import mock

import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
import torch.fx as fx
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

import passes.plan_regions
from benchmarks.link.block import Block
from benchmarks.link.cases import BlockCase, Plan
from benchmarks.planner.planned_models import CapturedError, fake_group
from moe_compile.backend import megamoe
from moe_compile.cost import traced_nodes
from moe_compile.journal.entries import PassReport
from moe_compile.plan import decide
from moe_compile.plan.state import CompileState

CASE: Final = BlockCase(
    name="planned", num_ranks=8, tokens=1024, batch=8, experts=64, heads=64, kv_heads=64
)
"""Eight local experts and KV heads: no way to run either is left out."""
PLAN: Final = Plan(attention="sp", experts="a2a")
OPTIONS: Final = {
    "megamoe.equal_tokens": True,
    "megamoe.chunks": "auto",
    "megamoe.attention_chunks": "auto",
    "megamoe.hardware": "h100",
}


@dataclass(kw_only=True, slots=True)
class Compiled:
    """Seconds of one compilation, and of the planning in it."""

    total_s: float = 0.0
    planning_s: float = 0.0
    num_decisions: int = 0

    @property
    def share(self) -> float:
        """Return planning over all."""
        return self.planning_s / self.total_s

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Count the planner's time in the body."""
        run = passes.plan_regions.PlanRegions.run

        def timed(
            self_: passes.plan_regions.PlanRegions, graph: fx.Graph, state: CompileState
        ) -> PassReport:
            began = time.perf_counter()
            report = run(self_, graph, state)
            self.planning_s += time.perf_counter() - began
            self.num_decisions += sum(one.decision is not None for one in state.regions)
            return report

        with mock.patch.object(passes.plan_regions.PlanRegions, "run", timed):
            yield


def compile_blocks(num_blocks: int, group: dist.ProcessGroup) -> Compiled:
    """Compile so many blocks in one graph, forward and backward; Inductor's cache as it is."""
    blocks = nn.Sequential(*(_block(group) for _ in range(num_blocks)))
    shape = (CASE.sequence // CASE.num_ranks, CASE.batch, CASE.width)
    x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
    found = Compiled()

    def compile_only(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        megamoe(gm, inputs, options=OPTIONS)

        def stop(*_: Any) -> Any:
            raise CapturedError

        return stop

    torch._dynamo.reset()
    traced_nodes.forget()
    decide.forget()
    eager = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    with eager, found.watching(), contextlib.suppress(CapturedError):
        began = time.perf_counter()
        try:
            torch.compile(blocks, backend=compile_only, fullgraph=True)(x)
        finally:
            found.total_s = time.perf_counter() - began
    return found


def _block(group: dist.ProcessGroup) -> Block:
    block = Block(CASE, group, PLAN)
    router = block.experts.router
    block.to(torch.bfloat16)
    router.data = router.data.float()
    return block


def measure(num_blocks: Sequence[int]) -> Iterator[tuple[str, Compiled]]:
    """Return what compiling takes, by number of blocks, cold and again."""
    with temporary_cache_dir(tempfile.mkdtemp()):
        torch.compile(lambda x: x + 1)(torch.zeros(8))  # imports and probes are no compilation
    group = fake_group(CASE.num_ranks)  # of one name, which compiled code knows it by
    for num in num_blocks:
        with tempfile.TemporaryDirectory() as folder, temporary_cache_dir(folder):
            for state in ("cold", "again"):
                yield f"{num} blocks, {state}", compile_blocks(num, group)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row per number of blocks and state of the cache."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner.planning_time", description=__doc__
    )
    parser.add_argument("--blocks", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args(arguments)
    table = Table(title="Measured: planning within compile time, this machine's CPU")
    for heading in ("graph", "decisions", "compile s", "planning s", "share"):
        table.add_column(heading)
    for name, found in measure(options.blocks):
        times = (f"{found.total_s:.2f}", f"{found.planning_s:.3f}", f"{found.share:.2%}")
        table.add_row(name, str(found.num_decisions), *times)
    Console(width=100).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
