"""Pools of ranks, started once and shared."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

from moe_compile.testing.rank_pool import RankPool


@pytest.fixture(scope="module")
def two_ranks():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_ranks():
    with RankPool(4) as pool:
        yield pool
