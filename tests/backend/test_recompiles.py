"""A layer compiles once more for other token counts, once for one token, never for routing."""

import torch
import torch.distributed as dist

from tests.layers import GroupedExperts


def count_compilations(rank, steps):
    """Run a step per entry of `steps`: (tokens, favoured expert or None); return graphs so far."""
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    layer = GroupedExperts(16, 24, 8, 2, dist.group.WORLD)
    compiled = torch.compile(
        layer, backend="megamoe", fullgraph=True,
        options={"megamoe.codegen": "fx", "megamoe.chunks": 2},
    )  # fmt: skip
    seen = []
    for tokens, expert in steps:
        with torch.no_grad():
            if expert is not None:
                layer.router[:, expert] += 5.0
        x = torch.rand(tokens, 16, dtype=torch.bfloat16).requires_grad_()
        compiled(x).sum().backward()
        seen.append(counters["stats"]["unique_graphs"])
    return seen


def test_other_token_counts_cost_one_compilation_and_one_token_one_more(mirrored_ranks):
    steps = [(32, None), (48, None), (24, None), (2, None), (1, None), (77, None), (1, None)]
    for seen in mirrored_ranks.run(count_compilations, steps):
        assert seen == [1, 2, 2, 2, 3, 3, 3]


def test_routing_costs_none(mirrored_ranks):
    for seen in mirrored_ranks.run(count_compilations, [(32, None), (32, 0), (32, 7), (32, 3)]):
        assert seen == [1, 1, 1, 1]
