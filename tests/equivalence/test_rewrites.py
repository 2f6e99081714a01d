"""The check's programs, one for every rewrite: by gloo, and on GPUs by NCCL.

Slow are those for which ranks have to differ, or for which mirrored ones (`test_covering.py`) have
no choice. `python -m benchmarks.node` runs them all.
"""

import pytest
import torch

from moe_compile.testing.programs.every_rewrite import PROGRAMS, items_for, run_item
from moe_compile.testing.programs.grammar import NUM_RANKS
from moe_compile.testing.programs.judge import Outcome, judgement_of
from tests.slow_parameters import exhaustive_but

ITEMS = {item.name: item for item in items_for(NUM_RANKS)}
ON_TWO = [name for name, item in ITEMS.items() if item.num_ranks == NUM_RANKS]
ON_FOUR = [name for name in ITEMS if name not in ON_TWO]
QUICK = ("chunks", "chunks without rows, by load")
SLOW = (
    "chunks, counts gathered", "chunks, layers over groups", "chunks, rows over a group",
    "chunks of tokens", "chunks of a capacity", "dispatch in eight bits", "tokens gathered",
    "attention by heads", "two parts of the batch", "recompute: exchanges saved",
    "a rank without tokens", "a rank without rows", "chunks without rows", "a token that is NaN",
    "two hops", "two hops, both in slices", "two hops to a rank without tokens",
    "sums on nodes, by tokens",
)  # fmt: skip


def on_rank(rank, item):
    try:
        return run_item(item)[0]
    finally:
        torch.use_deterministic_algorithms(False)


def check(pool, name):
    judged = judgement_of(pool.run(on_rank, ITEMS[name]))
    assert judged.kind is Outcome.SAME, judged.detail
    assert judged.is_chunked, judged.verdicts


def test_every_program_is_an_item():
    assert {*ITEMS} == {*PROGRAMS} >= {*QUICK, *SLOW} and len(ON_FOUR) >= 8


@pytest.mark.parametrize("name", exhaustive_but(SLOW, ON_TWO, QUICK))
def test_a_rewrite_on_two_ranks_has_the_bits_of_eager(two_devices, name):
    check(two_devices, name)


@pytest.mark.parametrize("name", exhaustive_but(SLOW, ON_FOUR))
def test_a_rewrite_on_two_nodes_has_the_bits_of_eager(four_devices, name):
    check(four_devices, name)
