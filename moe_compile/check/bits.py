"""Section `bits`: layers compiled by megamoe compute what they compute eagerly, bit for bit.

Contract
    A program for every rewrite and option (`rewrites.py`), its chunks without rows and ranks
    without tokens among them, runs eagerly and compiled, without Inductor: that rounds otherwise.
    Memory that is given next holds NaN, as far as the allocator gives it again and torch fills it.
    What differs, what raises, and what is not rewritten is a failure.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from moe_compile.check.record import Record, say
from moe_compile.check.rewrites import Item, items_for
from moe_compile.check.team import Team
from moe_compile.testing.joining import be_deterministic, rank_device
from moe_compile.testing.programs.judge import Kind, judgement_of
from moe_compile.testing.programs.run import Findings, run

NEEDS_S: Final = {"cpu": 20.0, "cuda": 10.0}
"""What one program takes, at most but for a slow machine."""


def check_bits(team: Team, names: Sequence[str] = ()) -> None:
    """Run the section: all programs for as many ranks, or those of `names`."""
    for item in items_for(team.num_ranks):
        if not names or item.name in names:
            check_item(team, item)


def check_item(team: Team, item: Item) -> None:
    """Run and judge one program."""
    team.run(
        item.name,
        partial(run_item, item),
        partial(judge_item, item),
        num_ranks=item.num_ranks,
        needs_s=NEEDS_S[team.device],
    )


def run_item(item: Item) -> tuple[Findings, float]:
    """Run a program on this rank; return what was found and the seconds it took.

    Torch's deterministic algorithms stay in use.
    """
    be_deterministic()
    began = time.monotonic()
    poison()
    return run(dist.get_rank(), item.text), time.monotonic() - began


def judge_item(item: Item, record: Record, found: list[tuple[Findings, float]]) -> None:
    """Record what ranks found of an item."""
    judgement = judgement_of([findings for findings, _ in found])
    seconds = max(seconds for _, seconds in found)
    record.add_row(
        {
            "program": item.name,
            "ranks": len(found),
            "options": item.options,
            "found": judgement.kind.value,
            "verdicts": list(judgement.verdicts),
            "seconds": round(seconds, 1),
            "cpu_s": round(max(findings.cpu_s for findings, _ in found), 1),
        }
    )
    is_same = record.expect(judgement.kind is Kind.SAME, item.name, judgement.detail)
    if is_same:
        why = f"it was not rewritten: {', '.join(judgement.verdicts) or 'nothing was compiled'}"
        record.expect(judgement.is_chunked, item.name, why)
    say(f"bits: {item.name}: {judgement.kind.value} in {seconds:.1f} s")


BLOCK_BYTES: Final = (2**12, 2**16, 2**20, 2**24)
"""Sizes of blocks that held NaN."""
BLOCKS: Final = 4
"""Of each size."""


def poison(device: str | torch.device | None = None) -> None:
    """Poison memory of a device, by default of this rank's."""
    place = rank_device() if device is None else torch.device(device)
    held = [
        torch.full((size // 2,), torch.nan, device=place, dtype=torch.bfloat16)
        for size in BLOCK_BYTES
        for _ in range(BLOCKS)
    ]
    del held
