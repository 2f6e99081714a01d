"""Pools of ranks, started once and shared."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_compile.testing.rank_pool import RankPool


@pytest.fixture(scope="module")
def two_ranks():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def four_ranks():
    with RankPool(4) as pool:
        yield pool


@pytest.fixture(scope="session")
def fake_ranks():
    """This process as rank 0 of two that do not exist: graphs can be traced, not run."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.group.WORLD
    dist.destroy_process_group()
