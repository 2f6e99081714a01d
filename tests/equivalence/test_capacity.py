"""Experts with a capacity, in chunks and scheduled, equal eager bit for bit, forward and backward.

The auxiliary loss is one of the outputs, and the gradient of the router has a term from it. Every
form of such a layer is in `test_covering.py`, on ranks that mirror each other.
"""

import pytest

from moe_compile.testing.programs.choices import Across, Extra, Fill, Room, Sent
from moe_compile.testing.programs.grammar import Capacity, Program
from moe_compile.testing.programs.judge import Outcome, judgement_of
from moe_compile.testing.programs.run import run
from moe_compile.testing.programs.text import source_of

OF_TENSORS = Capacity(
    local=4, top_k=2, room=Room.SCARCE, across=Across.CHUNKED, extras=frozenset({Extra.LOSS})
)
BIASED = Capacity(
    local=4, top_k=2, room=Room.SCARCE, fill=Fill.INDEX_COPY, sent=Sent.RANKS,
    across=Across.MATMUL, extras=frozenset({Extra.LOSS, Extra.BIAS}),
)  # fmt: skip


def check(pool, layer, tokens, chunks, old="MIRRORED = True", new="MIRRORED = False"):
    """Run steps of `tokens[step][rank]` rows, and return the verdicts on every compilation."""
    sizes = {"width": 32, "hidden": 64, "dtype": "float32"}
    text = source_of(Program(layers=(layer,), tokens=tokens, chunks=chunks, **sizes))
    assert old in text
    found = pool.run(run, text.replace(old, new))
    judgement = judgement_of(found)
    assert judgement.kind is Outcome.SAME, judgement.detail
    return [one.verdicts for one in found]


def test_three_chunks_of_four_experts_equal_eager(two_ranks):
    assert check(two_ranks, BIASED, ((24, 24),), 3) == [["chunked"]] * 2


@pytest.mark.slow
def test_a_capacity_of_tensors_stays_in_chunks_where_one_rank_alone_has_other_tokens(two_ranks):
    """torch reads a wrong number of it where sizes are symbols. Eager code would meet chunks."""
    tokens = ((24, 24), (23, 24), (23, 22), (24, 23))
    written = "room = -(-x.shape[0] * 2 // 16)"
    slots = "torch.ceil((x.shape[0] / 8) * torch.tensor(1.5)).to(torch.int64)"
    read = f"room = int(torch.maximum({slots}, torch.tensor(1)))"
    found = check(two_ranks, OF_TENSORS, tokens, 2, written, read)
    assert found == [["chunked"] * len({of[rank] for of in tokens}) for rank in range(2)]
