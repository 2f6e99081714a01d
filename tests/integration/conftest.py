"""Ranks of torchtitan jobs, which its work-arounds for a CPU have changed: apart from others'."""

import importlib

import pytest

from moe_compile.testing.rank_pool import RankPool
from tests.conftest import TIMEOUT_S


def work_around():
    """Before any test imports torchtitan, which asks for the device once."""
    importlib.import_module("tests.integration.titan_worker")


@pytest.fixture(scope="session")
def kept_two_ranks():
    with RankPool(2, timeout_s=TIMEOUT_S, at_start=work_around) as pool:
        yield pool


@pytest.fixture(scope="session")
def kept_four_ranks():
    with RankPool(4, timeout_s=TIMEOUT_S, at_start=work_around) as pool:
        yield pool
