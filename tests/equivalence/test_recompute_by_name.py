"""With `recompute_modules` bits are as without it: dropout, microbatches, parts, checkpoints."""

import pytest
import torch.nn.functional as F

from moe_compile.allowed_values import PARTS
from tests.equivalence.test_recompute_by_price import (
    Block,
    Checkpointed,
    InFloat32,
    Twice,
    WithoutDropout,
    normed,
    results,
)
from tests.slow_parameters import slow_but

TOKENS = 26


class Dropping(Block):
    """Values are dropped inside the MLP."""

    def dense(self, x):
        hidden = F.dropout(F.silu(normed(x) @ self.up) * 2, 0.3)
        return x + hidden @ self.down


def compare(rank, build, names, more=None):
    """Return the names of what differs, and launches without the option and with it."""
    del rank
    tokens = TOKENS + 2 * PARTS.index(names[0])  # of no other test: equal records are kept once
    expected, plain = results(build, tokens, more or {})
    options = {**(more or {}), "megamoe.recompute_modules": names}
    found, records = results(build, tokens, options)
    differ = [name for name, value in found.items() if not value.equal(expected[name])]
    return differ, [
        {r["phase"]: len(r["launches"]["0"]) for r in each} for each in (plain, records)
    ]


CASES = [
    (Dropping, ("mlp", "layernorm", "moe_act")),
    (Block, ("layernorm", "moe_act")),
    (Block, ("moe",)),
    (Block, ("megascale_moe",)),
    (Checkpointed, ("layernorm", "moe_act")),
    (Twice, ("moe_act", "mlp")),
]


@pytest.mark.parametrize(("program", "names"), slow_but(CASES[:1], CASES))
def test_no_bit_changes(mirrored_ranks, program, names):
    """Two steps with gradients summed over both, as two microbatches are."""
    for differ, (before, after) in mirrored_ranks.run(compare, program, names):
        assert differ == []
        assert after["forward"] == before["forward"]
        runs_again = names == ("moe",)
        assert after["backward"] > before["backward"] if runs_again else after == before


@pytest.mark.slow
def test_parts_of_the_batch_have_the_same_bits(mirrored_ranks):
    more = {"megamoe.batch_parts": 2, "megamoe.numerics": "bounded"}
    names = ("layernorm", "moe_act", "mlp")
    for differ, _ in mirrored_ranks.run(compare, WithoutDropout, names, more):
        assert differ == []


@pytest.mark.slow
def test_code_of_inductor_has_the_same_bits(mirrored_ranks):
    more = {"megamoe.codegen": "inductor"}
    for differ, _ in mirrored_ranks.run(compare, InFloat32, ("mlp", "layernorm"), more):
        assert differ == []
