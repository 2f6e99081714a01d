"""`batch_parts = "auto"`: when the batch is divided by price, and that nothing else is changed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import is_all_to_all
from moe_compile.journal.reasons import Reason
from tests.batch_layers import POSITIONS, WIDTH, Block, Recomputed
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but

FREE = {"numerics": "bounded", "equal_tokens": True}
PROFILE = """
name = "parts pay"
matmul_tflops = { value = 0.004, origin = "assumed: products take as long as exchanges" }
memory_gb_per_s = { value = 1000.0, origin = "assumed: no operator waits for memory" }
op_overhead_us = { value = 0.01, origin = "assumed: operators cost nothing by themselves" }
link_gb_per_s = { value = 0.01, origin = "assumed: slow" }
link_latency_us = { value = 0.0, origin = "assumed: none" }
"""


class Dropped(Block):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.5)


@pytest.fixture
def pays(tmp_path):
    """A profile by which exchanges are worth hiding, of small programs too, and all the memory."""
    (tmp_path / "pays.toml").write_text(PROFILE)
    return {"hardware": str(tmp_path / "pays.toml"), "max_memory_increase": 9.0, **FREE}


def rewritten(program, x, **options):
    (gm, *_) = dynamo_graphs(program, x)
    settings = {"batch_parts": "auto", "hardware": "h100"} | options
    state, compilation = rewrite(gm, MegaMoEConfig(**settings))
    skipped = [v for v in compilation.journal.verdicts() if v.candidate == "the batch"]
    return gm, state, compilation, [verdict.reason for verdict in skipped]


def drawn(size=8):
    return torch.randn(size, POSITIONS, WIDTH, dtype=torch.bfloat16, requires_grad=True)


def experts():
    return Block(GroupedExperts, torch.bfloat16)


def exchanges(gm):
    return sum(map(is_all_to_all, gm.graph.nodes))


@pytest.mark.parametrize("chunks", slow_but([2], ["auto", 2]))
def test_a_program_that_is_predicted_to_gain_runs_in_parts(fake_ranks, pays, chunks):
    del fake_ranks
    size = 8 if chunks == "auto" else 2  # two sequences: in two parts or whole
    gm, state, compilation, skipped = rewritten(experts(), drawn(size), chunks=chunks, **pays)
    decided = state.parts
    assert skipped == [] and decided.num_parts in (2, 4) and decided.us < 0.99 * decided.whole_us
    assert len(compilation.regions) == decided.num_parts
    said, *others = compilation.rewrites
    assert {line.partition(" the ")[0] for line in others} == {"fuse_token_sums: left alone"}
    assert f"in {decided.num_parts} parts" in said and "predicted" in said
    assert chunks == "auto" or {region.num_chunks for region in compilation.regions} <= {1, 2}
    assert exchanges(gm) >= 3 * decided.num_parts


@pytest.mark.slow
def test_checkpointed_blocks_are_divided_where_they_are_computed_again(fake_ranks, pays):
    del fake_ranks
    program = Recomputed(GroupedExperts, torch.bfloat16)
    _, state, compilation, skipped = rewritten(program, drawn(), **pays)
    assert skipped == [] and state.parts.num_parts > 1
    assert len(compilation.regions) == state.parts.num_parts


@pytest.mark.slow
def test_a_program_that_is_not_runs_whole(fake_ranks):
    del fake_ranks
    _, state, compilation, skipped = rewritten(experts(), drawn(), **FREE)
    assert skipped == [Reason.BY_PRICE] and state.parts.num_parts == 1
    assert len(compilation.regions) == 1
    assert "2 parts, " in compilation.rewrites[0] and "whole, " in compilation.rewrites[0]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        pytest.param(
            {"numerics": "exact", "equal_tokens": True}, Reason.ROUNDS, marks=pytest.mark.slow
        ),
        ({"numerics": "bounded"}, Reason.NO_PRICE),
    ],
)
def test_what_forbids_a_price_is_said(fake_ranks, options, reason):
    del fake_ranks
    _, state, compilation, skipped = rewritten(experts(), drawn(), **options)
    assert skipped == [reason]
    assert state.parts.num_parts == len(compilation.regions) == 1


def test_what_is_not_proven_runs_whole_and_strict_does_not_mind(fake_ranks):
    del fake_ranks
    program = Dropped(GroupedExperts, torch.bfloat16)
    _, state, compilation, skipped = rewritten(program, drawn(), strict=True, **FREE)
    assert skipped == [Reason.BATCH_RANDOM]
    assert state.parts.num_parts == len(compilation.regions) == 1


def test_a_program_without_experts_is_not_looked_at(fake_ranks):
    del fake_ranks
    _, state, compilation, skipped = rewritten(nn.Linear(WIDTH, 4), drawn().float(), **FREE)
    assert state.parts is None and skipped == [] and compilation.rewrites == []
