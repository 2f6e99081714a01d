"""A rank that finds its code in Inductor's cache and one that compiles agree as two that compile.

Each of the two compiles once, and each pool's processes have compiled nothing before.
"""

import os

import pytest
import torch
import torch.distributed as dist

from moe_compile.runtime.launch_records import executed_records
from moe_compile.testing.rank_pool import RankPool
from tests.backend.test_agreement import WIDTH, step
from tests.layers import GroupedExperts


def step_with_cache(rank, caches):
    """Return Inductor's hits and misses, and what the compiled graphs say that they launch."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches[rank])
    torch.manual_seed(rank)
    layer = GroupedExperts(WIDTH, 24, 4, 2, dist.group.WORLD)
    ours = torch.compile(layer, backend="megamoe", fullgraph=True, options={"megamoe.chunks": 2})
    step(ours, torch.randn(32, WIDTH, dtype=torch.bfloat16))
    found = torch._dynamo.utils.counters["inductor"]
    counts = [found.get(f"fxgraph_cache_{key}", 0) for key in ("hit", "miss")]
    return counts, [(r["phase"], r["launches"], r["measures"]) for r in executed_records()]


@pytest.mark.slow
def test_a_cache_hit_on_one_rank_and_a_cold_compilation_on_the_other_agree(tmp_path):
    warm, cold = tmp_path / "warm", tmp_path / "cold"
    with RankPool(2) as pool:
        first = pool.run(step_with_cache, [warm, tmp_path / "other"])
    with RankPool(2) as pool:
        second = pool.run(step_with_cache, [warm, cold])
    assert [counts for counts, _ in first] == [[0, 2], [0, 2]]
    assert [counts for counts, _ in second] == [[2, 0], [0, 2]]
    records = [record for _, record in (*first, *second)]
    assert all(record == records[0] for record in records)
    assert [phase for phase, *_ in records[0]] == ["forward", "backward"]
