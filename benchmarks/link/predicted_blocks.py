"""`python -m benchmarks.link.predicted_blocks`: what blocks in parts of the batch should hide.

The block of the preset "parts" is traced on one rank, by itself or several to a graph, and its
schedule priced by the rates of a recorded run of that preset. Nothing runs. The link is set so that
exchanges of the same blocks and sequences, whole, take as long as their compute, or twice; times
are held against the longer of those two, as overlap.py has it. The floor is what forward and
backward could take if each hid all it can: compute of one cannot run under exchanges of the other.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.fx as fx
from torch._dynamo.exc import BackendCompilerFailed
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.link.block import Block, Stack
from benchmarks.link.cases import RATIOS, BlockCase
from benchmarks.link.subjects import DTYPE
from benchmarks.link.variants import EXPERTS_ALONE
from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.report.process_report import predicted_measures
from moe_compile.report.provenance import recorded_command

RECORDED: Final = Path(__file__).parents[1] / "results" / "overlap_parts_cpu.json"
SHAPES: Final = ((1, 2), (2, 2), (4, 2), (2, 4))
"""Blocks to a graph, parts of the batch."""
SEQUENCES: Final = 2
"""Of each rank, of 1024 tokens, as in the preset; as many as parts, where these are more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Predicted:
    """One graph's forward and backward; milliseconds, as the schedule has them."""

    blocks: int
    parts: int
    ratio: str
    compute_ms: float
    """Of the same whole."""
    exchange_ms: float
    """Of the same whole."""
    step_ms: float
    floor_ms: float

    @property
    def of_longer(self) -> float:
        """Return the step's time over the longer of compute and communication."""
        return self.step_ms / max(self.compute_ms, self.exchange_ms)

    @property
    def floor_of_longer(self) -> float:
        """Return the least that `of_longer` could be."""
        return self.floor_ms / max(self.compute_ms, self.exchange_ms)

    @property
    def hidden(self) -> float:
        """Return what runs at once, over the shorter of the two."""
        both = self.compute_ms + self.exchange_ms - self.step_ms
        return both / min(self.compute_ms, self.exchange_ms)


class _Traced(Exception):
    """All that was wanted of the compiler."""


@functools.cache
def predict(
    blocks: int, parts: int, sequences: int, profile: str, link_gb_per_s: float
) -> list[dict[str, float]]:
    """Return the measures of the forward and of the backward; needs a process group of two."""
    case = BlockCase(name="", num_ranks=2, tokens=2048, batch=2 * sequences, experts=8)
    module = Stack(Block(case, dist.group.WORLD, EXPERTS_ALONE) for _ in range(blocks)).to(DTYPE)
    for block in module.blocks:
        block.experts.router.data = block.experts.router.data.float()
    found: list[dict[str, float]] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        state, _ = rewrite(gm, config)
        found.extend(predicted_measures(one.graph) for one in trace_both(gm, inputs, state))
        raise _Traced

    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(_with_link(profile, link_gb_per_s))
        file.flush()
        config = MegaMoEConfig(
            batch_parts=parts, chunks=1, equal_tokens=True, codegen="fx", hardware=file.name
        )
        torch._dynamo.reset()
        shape = (case.sequence, sequences, case.width)
        try:
            torch.compile(module, backend=backend, fullgraph=True)(
                torch.zeros(shape, dtype=DTYPE, requires_grad=True)
            )
        except BackendCompilerFailed as failed:
            if not isinstance(failed.inner_exception, _Traced):
                raise
    return found


def _with_link(profile: str, link_gb_per_s: float) -> str:
    text, number = re.subn(
        r"(link_gb_per_s = \{ value = )[0-9.e+-]+", rf"\g<1>{link_gb_per_s}", profile
    )
    if number != 1:
        raise ValueError("the recorded profile has no link_gb_per_s")
    return text


def predictions(profile: str) -> Iterator[Predicted]:
    """Yield every shape at every ratio."""
    for ratio in ("1:1", "1:2"):
        for blocks, parts in SHAPES:
            sequences = max(SEQUENCES, parts)
            compute, exchange, rate = _whole(blocks, sequences, profile, RATIOS[ratio])
            phases = predict(blocks, parts, sequences, profile, rate)
            yield Predicted(
                blocks=blocks,
                parts=parts,
                ratio=ratio,
                compute_ms=compute,
                exchange_ms=exchange,
                step_ms=sum(one["compute_us"] + one["exposed_us"] for one in phases) / 1e3,
                floor_ms=sum(max(one["compute_us"], one["exchange_us"]) for one in phases) / 1e3,
            )


def _whole(blocks: int, sequences: int, profile: str, ratio: float) -> tuple[float, float, float]:
    """Return compute and exchanges of the whole in ms, and the GB/s of the link at the ratio."""
    fast, slow = (predict(blocks, 1, sequences, profile, rate) for rate in (1.0, 0.5))
    compute_us = sum(one["compute_us"] for one in fast)
    at_full, at_half = (sum(one["exchange_us"] for one in whole) for whole in (fast, slow))
    moving_us = at_half - at_full  # at 1 GB/s, without latencies
    latencies_us = at_full - moving_us
    exchange_us = compute_us / ratio
    return compute_us / 1e3, exchange_us / 1e3, moving_us / (exchange_us - latencies_us)


def main() -> None:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.link.predicted_blocks", description=__doc__
    )
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    torch._dynamo.config.capture_scalar_outputs = True
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    recorded = json.loads(RECORDED.read_text())
    profile = next(c for c in recorded["cases"] if c["name"] == "parts-2")["megamoe_profile"]
    rows = []
    for row in predictions(profile):
        found = {name: getattr(row, name) for name in ("of_longer", "floor_of_longer", "hidden")}
        rows.append({**asdict(row), **found})
        sys.stdout.write(
            f"{row.ratio}  {row.blocks} blocks, {row.parts} parts: compute {row.compute_ms:.0f}, "
            f"exchanges {row.exchange_ms:.0f}, step {row.step_ms:.0f} ms: {row.of_longer:.2f} of "
            f"the longer, at least {row.floor_of_longer:.2f}, {row.hidden:.0%} hidden\n"
        )
        sys.stdout.flush()
    if arguments.json:
        head = {"command": recorded_command("benchmarks.link.predicted_blocks", sys.argv[1:])}
        arguments.json.write_text(
            json.dumps({**head, "profile": profile, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
