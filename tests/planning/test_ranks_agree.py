"""Every rank of a group decides alike, whatever its rank and the seed of its hashes."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SEEDS = ("0", "1", "4711", "random")
PROGRAM = """
import sys

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_compile.hardware import load_profile
from passes.detect_regions import DetectRegions
from passes.plan_chunks import PlanChunks
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts

for rank in map(int, sys.argv[1:]):
    dist.init_process_group("fake", rank=rank, world_size=64, store=FakeStore())
    layer = GroupedExperts(256, 512, 256, 2, dist.group.WORLD)
    x = torch.randn(65536, 256, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(layer, x)
    ours = state(equal_tokens=True, dispatch_wire="auto", combine_wire="auto")
    ours.hardware = load_profile("h800")
    DetectRegions().run(gm.graph, ours)
    PlanChunks().run(gm.graph, ours)
    print("RANK", rank, ours.plans[0].decision)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_of_sixty_four_in_processes_of_other_hash_seeds_decide_alike():
    """Eight of the ranks, two to a process: tracing 64 split sizes takes seconds on each."""
    said = {}
    for first, seed in enumerate(SEEDS):
        ranks = [str(first), str(63 - first)]
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *ranks],
            cwd=ROOT, text=True, capture_output=True, timeout=120, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed},
        )  # fmt: skip
        lines = [s.split(" ", 2) for s in done.stdout.splitlines() if s.startswith("RANK")]
        said.update({int(rank): rest for _, rank, rest in lines})
    assert len(said) == 2 * len(SEEDS)
    (decision,) = set(said.values())
    assert "dispatch_wire='fp8'" in decision and "Why.FASTEST" in decision
