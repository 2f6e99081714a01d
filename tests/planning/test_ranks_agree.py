"""Every rank of a group decides alike, whatever its rank and the seed of its hashes."""

import os
import pathlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAM = """
import json
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts

rank, num_ranks = map(int, sys.argv[1:])
dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
layer = GroupedExperts(256, 512, 4 * num_ranks, 2, dist.group.WORLD)
x = torch.randn(65536, 256, dtype=torch.bfloat16, requires_grad=True)
(gm,) = dynamo_graphs(layer, x)
config = MegaMoEConfig(
    equal_tokens=True, chunks="auto", dispatch_wire="auto", combine_wire="auto", hardware="h800"
)
state, compilation = rewrite(gm, config)
(region,) = compilation.regions
said = {"hash": hash("a") % 1000, "decision": region.decision, "plan": state.plan_digest}
print("SAID", json.dumps(said))
"""


def decisions(ranks, num_ranks):
    """Return the set of hash functions, and of decisions with their plans, two ranks at a time."""

    def run(rank):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(rank), str(num_ranks)],
            cwd=ROOT, text=True, capture_output=True, timeout=300, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(17 * rank)},
        )  # fmt: skip
        (line,) = [text for text in done.stdout.splitlines() if text.startswith("SAID")]
        hashed, _, decided = line.partition(", ")
        return hashed, decided

    with ThreadPoolExecutor(2) as threads:
        said = list(threads.map(run, ranks))
    hashes, decided = zip(*said, strict=True)
    return set(hashes), set(decided)


def check(decided):
    """Of one decision, to change something: which one is for the tests of prices."""
    (only,) = decided
    assert '"chosen": "' in only and '"chosen": "one chunk"' not in only


def test_first_and_last_rank_of_eight_in_processes_of_other_hash_seeds_decide_alike():
    hashes, decided = decisions((0, 7), 8)
    assert len(hashes) == 2
    check(decided)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_ranks_of_sixty_four_in_processes_of_other_hash_seeds_decide_alike():
    """A process a rank, each with a seed of its own: seven seconds of one core each."""
    hashes, decided = decisions(range(64), 64)
    assert len(hashes) > 50  # of a thousand
    check(decided)
