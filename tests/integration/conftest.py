"""Ranks of torchtitan jobs, which its work-arounds for a CPU have changed: apart from others'.

They end with these tests, and after every few jobs (`titan_jobs.py`).
"""

import importlib

import pytest

from moe_compile.testing.rank_pool import RankPool
from tests.conftest import TIMEOUT_S
from tests.integration.titan_jobs import LOGGED, OURS, SAVES, PlainJob, train

POOLS = {2: "two", 4: "four", 8: "eight"}


def work_around():
    """Before any test imports torchtitan, which asks for the device once."""
    importlib.import_module("tests.integration.titan_worker")


@pytest.fixture(scope="package")
def kept_two_ranks():
    with RankPool(2, timeout_s=TIMEOUT_S, at_start=work_around) as pool:
        yield pool


@pytest.fixture(scope="package")
def plain_job(kept_two_ranks, tmp_path_factory):
    """The small job on two ranks, experts in two chunks; it logs and writes checkpoints."""
    spy = importlib.import_module("tests.integration.reduce_scatter_spy")  # imports torchtitan
    folder = tmp_path_factory.mktemp("plain")
    kept_two_ranks.run(spy.watch)
    ranks = train(kept_two_ranks, 2, folder, OURS, LOGGED, SAVES, renewed=False)
    return PlainJob(ranks=ranks, folder=folder, num_rounded=kept_two_ranks.run(spy.count))


@pytest.fixture(scope="package")
def kept_four_ranks():
    with RankPool(4, timeout_s=TIMEOUT_S, at_start=work_around) as pool:
        yield pool


@pytest.fixture(scope="package")
def kept_eight_ranks():
    with RankPool(8, timeout_s=TIMEOUT_S, at_start=work_around) as pool:
        yield pool


@pytest.fixture(scope="module")
def pool_for(request):
    """Return the least pool that has so many ranks: each rank imports torchtitan.

    Four and eight ranks end with the module that asked for them: a start takes each a second, and
    eight that are idle take a third of a core, for the threads that jobs left them.
    """
    used = {}

    def pool(ranks):
        number = next(word for most, word in POOLS.items() if ranks <= most)
        if number not in used:
            used[number] = request.getfixturevalue(f"kept_{number}_ranks")
            used[number].regroup()
        return used[number]

    yield pool
    for number in used.keys() - {"two"}:
        used[number].renew()
