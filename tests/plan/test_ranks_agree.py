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

skew, num_ranks, *ranks = map(int, sys.argv[1:])
config = MegaMoEConfig(
    equal_tokens=True, chunks="auto", dispatch_wire="auto", combine_wire="auto", numerics="lossy",
    hardware="h800", chunk_edges="auto", routing_skew=skew,
)
for rank in ranks:
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    layer = GroupedExperts(256, 512, 4 * num_ranks, 2, dist.group.WORLD)
    x = torch.randn(65536, 256, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(layer, x)
    state, compilation = rewrite(gm, config)
    (region,) = compilation.regions
    said = {"decision": region.decision, "plan": state.plan_digest}
    print("SAID", json.dumps(said))
    dist.destroy_process_group()
print("HASH", hash("a") % 1000)
"""


def decisions(ranks_of_processes, num_ranks, skew=0):
    """Return the hash functions of the processes, and all decisions with their plans."""

    def run(ranks):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *map(str, (skew, num_ranks, *ranks))],
            cwd=ROOT, text=True, capture_output=True, timeout=900, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(17 * ranks[0])},
        )  # fmt: skip
        said = [line for line in done.stdout.splitlines() if line.startswith(("SAID", "HASH"))]
        assert len(said) == len(ranks) + 1
        return said[-1], said[:-1]

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(run, ranks_of_processes))
    return {hashed for hashed, _ in found}, {d for _, decided in found for d in decided}


def check(decided):
    """Of one decision, to change something: which one is for the tests of prices."""
    (only,) = decided
    assert '"chosen": "' in only and '"chosen": "one chunk"' not in only


@pytest.mark.slow
def test_first_and_last_rank_draw_the_same_popularities():
    hashes, decided = decisions([(0,), (7,)], 8, skew=1)
    assert len(hashes) == 2 and '"routing_skew": 1' in next(iter(decided))
    check(decided)


@pytest.mark.slow
def test_ranks_of_eight_nodes_in_processes_of_other_hash_seeds_decide_alike():
    """One rank of each node, and of each place in a node, in eight processes of other seeds."""
    hashes, decided = decisions([(8 * node, 8 * node + node) for node in range(8)], 64)
    assert len(hashes) == 8
    check(decided)
