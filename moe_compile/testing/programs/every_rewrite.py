"""A program for every rewrite and option, with chunks without rows and ranks without tokens.

Contract
    All of them are rewritten: a region that is left as it was written checks nothing. They run
    without Inductor, which rounds differently.
    Newly allocated memory holds NaN, as far as the allocator reuses it and torch fills it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.distributed as dist

from moe_compile.testing.process_groups import be_deterministic, rank_device
from moe_compile.testing.programs.choices import (
    Backward,
    Counts,
    Detail,
    Groups,
    Move,
    Poison,
    Reader,
    Routing,
    Sharing,
    Style,
    Wrapping,
)
from moe_compile.testing.programs.grammar import (
    NUM_NODES,
    NUM_RANKS,
    TWO_HOPS,
    Attention,
    Capacity,
    Experts,
    Program,
    Rewrite,
)
from moe_compile.testing.programs.legal import legal
from moe_compile.testing.programs.run import RankFindings, run
from moe_compile.testing.programs.text import source_of

FOUR_RANKS: Final = NUM_NODES * NUM_RANKS
UNEVEN: Final = ((9, 14),)
"""Tokens by step and rank."""
TWICE: Final = (*UNEVEN, (16, 3))
"""Two steps: code is compiled for one number of tokens, then for any."""
EVEN: Final = ((8, 8),)

GROUPED: Final = Experts(local=4, top_k=2, style=Style.GROUPED)
LOOP: Final = Experts(local=4, top_k=2)
ONE: Final = Program(layers=(GROUPED,), tokens=UNEVEN)
PADDED: Final = Program(layers=(replace(GROUPED, style=Style.PADDED),), tokens=EVEN)
LOOPED: Final = Program(layers=(LOOP,), tokens=UNEVEN)
CHECKPOINTED: Final = replace(ONE, wrapping=Wrapping.CHECKPOINT)

PROGRAMS: Final[Mapping[str, Program]] = {
    "chunks": replace(ONE, tokens=TWICE),
    "chunks of a loop": LOOPED,
    "chunks, gate and up in one": replace(ONE, layers=(replace(GROUPED, style=Style.FUSED),)),
    "chunks, biases": replace(LOOPED, layers=(replace(LOOP, details=frozenset({Detail.BIAS})),)),
    "chunks, rows searched": replace(LOOPED, layers=(replace(LOOP, style=Style.SEARCHED),)),
    "chunks, rows by offsets": replace(LOOPED, layers=(replace(LOOP, style=Style.RUNS),)),
    "chunks, counts gathered": replace(
        ONE, layers=(replace(GROUPED, counts=Counts.LEGACY_GATHERED),)
    ),
    "chunks, exchanges in place": replace(
        ONE, layers=(replace(GROUPED, counts=Counts.LEGACY, move=Move.WRITTEN_OUT),)
    ),
    "chunks, scores travel too": replace(
        ONE, layers=(replace(GROUPED, details=frozenset({Detail.PROBS_TRAVEL})),)
    ),
    "chunks beside a shared expert": replace(
        ONE, layers=(replace(GROUPED, readers=frozenset({Reader.SHARED_EXPERT})),)
    ),
    "chunks under autocast": replace(LOOPED, wrapping=Wrapping.AUTOCAST, dtype="float32"),
    "chunks, dynamic": replace(ONE, dynamic=True),
    "chunks, gradients accumulated": replace(ONE, tokens=UNEVEN * 2, backward=Backward.ACCUMULATED),
    "chunks, two backwards": replace(ONE, backward=Backward.TWICE),
    "chunks, two layers": replace(ONE, layers=(GROUPED, LOOP), wrapping=Wrapping.RESIDUAL),
    "chunks, one layer twice": replace(ONE, sharing=Sharing.WEIGHTS),
    "chunks, layers over groups": replace(
        ONE, layers=(GROUPED, GROUPED), groups=Groups.LAYERS_APART
    ),
    "chunks, rows over a group": replace(ONE, groups=Groups.ROWS_APART),
    "chunks, not scheduled": replace(ONE, rewrite=Rewrite.UNSCHEDULED),
    "chunks by load": replace(ONE, rewrite=Rewrite.BY_LOAD),
    "chunks of tokens": replace(ONE, rewrite=Rewrite.TOKENS),
    "chunks of a capacity": Program(
        layers=(Capacity(local=4, top_k=2),), tokens=EVEN, dtype="float32", width=32, hidden=32
    ),
    "recompute: exchanges saved": CHECKPOINTED,
    "recompute: exchanges again": replace(CHECKPOINTED, rewrite=Rewrite.RECOMPUTE),
    "recompute: the model's": replace(CHECKPOINTED, rewrite=Rewrite.MODEL_RECOMPUTE),
    "dispatch in eight bits": replace(ONE, rewrite=Rewrite.FP8),
    "tokens gathered": replace(ONE, tokens=EVEN, rewrite=Rewrite.GATHERED),
    "no host reads": replace(PADDED, tokens=EVEN * 2, rewrite=Rewrite.NO_READS),
    "no host reads, steps again": replace(PADDED, rewrite=Rewrite.NO_READS, row_room=0.5),
    "no host reads, in chunks": replace(PADDED, rewrite=Rewrite.NO_READS_IN_CHUNKS),
    "attention by heads": Program(layers=(Attention(),), tokens=EVEN),
    "two parts of the batch": replace(LOOPED, tokens=EVEN, rewrite=Rewrite.PARTS),
    "three parts of the batch": replace(LOOPED, tokens=((9, 9),), rewrite=Rewrite.THREE_PARTS),
    "a rank without tokens": replace(ONE, tokens=((7, 0),)),
    "a rank without rows": replace(ONE, routing=Routing.FIRST_RANK),
    "chunks without rows": replace(ONE, routing=Routing.ONE_EXPERT),
    "chunks without rows, by load": replace(
        ONE, routing=Routing.ONE_EXPERT, rewrite=Rewrite.BY_LOAD
    ),
    "a loop's chunks without rows": replace(LOOPED, routing=Routing.ONE_EXPERT),
    "a token that is NaN": replace(LOOPED, poison=Poison.TOKEN),
    "two hops": replace(ONE, rewrite=Rewrite.HOPS),
    "two hops, by tokens": replace(ONE, rewrite=Rewrite.HOP_SLICES),
    "two hops, both in slices": replace(ONE, rewrite=Rewrite.HOP_BOTH),
    "two hops in eight bits": replace(ONE, rewrite=Rewrite.HOPS_FP8),
    "two hops to a rank without tokens": replace(ONE, tokens=((4, 0),), rewrite=Rewrite.HOPS),
    "sums on nodes": replace(ONE, rewrite=Rewrite.NODE_SUMS),
    "sums on nodes, by tokens": replace(ONE, rewrite=Rewrite.SUM_SLICES),
    "sums on nodes, both in slices": replace(ONE, rewrite=Rewrite.SUM_BOTH),
}
"""Programs by name; on two ranks, or in two hops on four."""

ON_ALL_RANKS: Final = (
    "chunks", "chunks by load", "chunks of tokens", "dispatch in eight bits", "tokens gathered",
    "a rank without rows", "two hops", "sums on nodes",
)  # fmt: skip
"""Programs that are run on all ranks too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One program for so many ranks, as text."""

    name: str
    num_ranks: int
    options: str
    """Options asked of megamoe."""
    text: str


def items_for(num_ranks: int) -> Iterator[Item]:
    """Yield all programs for two or four ranks, then some for `num_ranks`.

    Programs for more ranks than there are come too: the record shows that they are left out.
    """
    small = [_item(name, legal(program)) for name, program in PROGRAMS.items()]
    yield from sorted(small, key=lambda item: item.num_ranks)
    if num_ranks > NUM_RANKS:
        for name in ON_ALL_RANKS:
            program = PROGRAMS[name]
            if program.rewrite not in TWO_HOPS or num_ranks % NUM_NODES == 0:
                yield _item(f"{name}, {num_ranks} ranks", on_ranks(legal(program), num_ranks))


def on_ranks(program: Program, num_ranks: int) -> Program:
    """Return `program` for so many ranks, its numbers of tokens in turn."""
    tokens = (tuple(step[i % NUM_RANKS] for i in range(num_ranks)) for step in program.tokens)
    return replace(program, tokens=tuple(tokens))


def _item(name: str, program: Program) -> Item:
    """Return the item of a program; no rank of it stands for others."""
    text = source_of(program).replace("\nMIRRORED = True ", "\nMIRRORED = False ")
    options = text.partition("\nOPTIONS = ")[2].partition("\n")[0].replace("megamoe.", "")
    return Item(name=name, num_ranks=program.num_ranks, options=options, text=text)


def run_item(item: Item) -> tuple[RankFindings, float]:
    """Run a program on this rank; return its findings and the seconds it took.

    Torch's deterministic algorithms stay in use.
    """
    be_deterministic()
    began = time.monotonic()
    poison()
    return run(dist.get_rank(), item.text), time.monotonic() - began


BLOCK_BYTES: Final = (2**12, 2**16, 2**20, 2**24)
"""Sizes of blocks that held NaN."""
BLOCKS: Final = 4
"""Number of blocks of each size."""


def poison(device: str | torch.device | None = None) -> None:
    """Poison memory of a device, by default of this rank's."""
    place = rank_device() if device is None else torch.device(device)
    held = [
        torch.full((size // 2,), torch.nan, device=place, dtype=torch.bfloat16)
        for size in BLOCK_BYTES
        for _ in range(BLOCKS)
    ]
    del held
