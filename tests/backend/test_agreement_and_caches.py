"""A rank that finds its code in caches and one that compiles agree as two that compile.

Each of the two compiles once, and each pool's processes have compiled nothing before.
"""

import os

import pytest
import torch
import torch.distributed as dist

from moe_compile.report.process_report import REPORT
from moe_compile.runtime.launch_records import executed_records
from moe_compile.testing.rank_pool import RankPool
from tests.backend.inductor_runs import counters
from tests.backend.test_agreement import WIDTH, step
from tests.backend.test_inductor import HITS, MISSES, hits_and_misses
from tests.layers import GroupedExperts

TOKENS = (32, 40, 32)
"""Of the steps: compiled code serves all."""


def steps_with_caches(rank, caches):
    """Return hits and misses, what became of the region, what graphs launch, and all values."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(caches[rank])
    torch.manual_seed(rank)
    layer = GroupedExperts(WIDTH, 24, 4, 2, dist.group.WORLD)
    options = {"megamoe.chunks": 2}
    ours = torch.compile(layer, backend="megamoe", fullgraph=True, dynamic=True, options=options)
    values = [step(ours, torch.randn(n, WIDTH, dtype=torch.bfloat16)) for n in TOKENS]
    values.append([p.grad for p in layer.parameters()])
    made = [
        (region.verdict, region.num_chunks) for c in REPORT.compilations for region in c.regions
    ]
    records = [(r["phase"], r["launches"], r["measures"]) for r in executed_records()]
    return hits_and_misses(counters()), made, records, [v for several in values for v in several]


@pytest.mark.slow
def test_a_cache_hit_on_one_rank_and_a_cold_compilation_on_the_other_agree(tmp_path):
    """Both run rewritten, in one compilation for all numbers of tokens, to the same bits."""
    warm, cold = tmp_path / "warm", tmp_path / "cold"
    with RankPool(2) as pool:
        first = pool.run(steps_with_caches, [warm, tmp_path / "other"])
    with RankPool(2) as pool:
        second = pool.run(steps_with_caches, [warm, cold])
    assert [counts for counts, *_ in (*first, *second)] == [MISSES, MISSES, HITS, MISSES]
    for _, made, records, _ in (*first, *second):
        assert made == [("chunked", 2)]
        assert records == first[0][2] and [phase for phase, *_ in records] == [
            "forward",
            "backward",
        ]
    for before, after in zip(first, second, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before[3], after[3], strict=True))
