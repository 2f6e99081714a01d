"""Every layout the recipe has prints the losses of torchtitan, and lies as torchtitan's does.

Where torchtitan's gradients are wrong it prints those of the same layout that is not compiled; that
these are right is shown by one rank (test_one_rank.py).
"""

import functools
from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from moe_compile.errors import InvalidConfig
from tests.integration.layout_table import TESTED, has_mended_gradients, table
from tests.integration.titan_jobs import (
    NOT_COMPILED,
    OURS,
    STEPS,
    STOCK,
    ranks_of,
    small_job,
    train,
)
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.layout import KEYS, Layout, check_layout

ROOT = Path(__file__).parents[2]
CHOSEN = tuple(TESTED[i] for i in (4, 8, 11, 14, 19, 23, 26))
"""Every axis and every model at least once, on four ranks."""
NO_CHECKPOINTING = {KEYS["checkpointing"]: "none", KEYS["selective"]: "op"}


@pytest.fixture(scope="module")
def plain(pool_for, tmp_path_factory):
    """Results of a job that is not compiled, once for all ways of activation checkpointing: same
    values."""

    @functools.cache
    def run(items):
        settings = dict(items)
        folder, ranks = tmp_path_factory.mktemp("plain"), ranks_of(settings)
        return train(pool_for(ranks), ranks, folder, settings)

    return lambda *changes: run(tuple({k: v for c in changes for k, v in c.items()}.items()))


@pytest.mark.parametrize("layout", exhaustive_but(CHOSEN, TESTED), ids=map(str, range(len(TESTED))))
def test_losses_and_placements_are_torchtitans(pool_for, plain, tmp_path, layout):
    settings = small_job(layout)
    ranks = ranks_of(settings)
    theirs = right = plain(settings, NO_CHECKPOINTING, STOCK)
    if has_mended_gradients(layout):
        right = plain(settings, NO_CHECKPOINTING, NOT_COMPILED)
    ours = train(pool_for(ranks), ranks, tmp_path, settings, OURS)
    assert [sorted(rank.steps) for rank in ours] == [list(range(1, STEPS + 1))] * len(ours)
    assert [rank.steps for rank in ours] == [rank.steps for rank in right]
    assert [rank.placements for rank in ours] == [rank.placements for rank in theirs]
    assert [rank.state_keys for rank in ours] == [rank.state_keys for rank in theirs]
    for rank, other in zip(ours, theirs, strict=True):
        carriers = {name.replace(".moe.experts", ".expert_carrier") for name in other.gathered}
        assert set(rank.gathered) == carriers
        assert set(rank.verdicts) == {"chunked"} and set(rank.chunks) == {2}
        on_other_axes = {group for axis, group in rank.groups.items() if axis != "ep"}
        assert rank.groups["ep"] not in on_other_axes


def test_the_table_in_the_docs_is_of_this_code():
    assert (ROOT / "docs/layouts.md").read_text() == table()


@pytest.mark.parametrize("axis", ["tp", "pp"])
def test_whole_replicas_are_refused_beside_another_axis(axis):
    with pytest.raises(InvalidConfig, match="data_parallel_shard_degree = 2"):
        check_layout(Layout(dp_replicate=2, dp_shard=1, **{axis: 2}))
