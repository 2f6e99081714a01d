"""What the graph does around a region is what eager does, whatever rewriting the region moves."""

import pytest
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from moe_compile.report.process_report import REPORT
from tests.outside_readers import (
    CHUNKED,
    NEEDED,
    WHOLE,
    ChecksANumber,
    ChecksCounts,
    HookOnRows,
    LegacyCountsOnHost,
    ReadAcross,
    ReadsWithoutGradient,
    SwitchesAutocast,
    WritesWhatWasRead,
)
from tests.slow_parameters import slow_but
from tests.this_torch import need


def step(function, layer, x):
    """Run one step; return all that it computed and left behind, as tensors and numbers."""
    layer.zero_grad()
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    output = pytree.tree_leaves(function(x))
    floats = [o for o in output if isinstance(o, torch.Tensor) and o.requires_grad]
    sum(o.float().square().sum() for o in floats).backward()
    gradients = [p.grad for p in (x, *layer.parameters())]
    buffers = [b.clone() for b in layer.buffers()]
    return [*output, *gradients, *buffers, torch.get_rng_state()]


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return left == right


def differing(rank, style, steps, **more):
    """Return which results differ, by number, and the verdicts on the regions."""
    torch._dynamo.reset()
    layers = [style(64, 64, 4, 2, dist.group.WORLD) for _ in range(2)]
    options = {"megamoe.codegen": "fx", "megamoe.chunks": 2, **more}
    compiled = torch.compile(layers[1], backend="megamoe", fullgraph=True, options=options)
    before = len(REPORT.as_dict()["regions"])
    found = []
    for tokens in steps:
        x = torch.randn(tokens[rank], 64, generator=torch.Generator().manual_seed(rank))
        x = x.to(torch.bfloat16)
        left, right = step(layers[0], layers[0], x), step(compiled, layers[1], x)
        found += [i for i, (a, b) in enumerate(zip(left, right, strict=True)) if not same(a, b)]
    return found, [region["verdict"] for region in REPORT.as_dict()["regions"][before:]]


@pytest.mark.parametrize("style", slow_but([LegacyCountsOnHost], CHUNKED))
def test_a_chunked_region_leaves_what_is_around_it_as_it_was(mirrored_ranks, style):
    need(*filter(None, [NEEDED.get(style)]))
    for found, verdicts in mirrored_ranks.run(differing, style, ((12, 7),)):
        assert found == []
        assert set(verdicts) == {"chunked"}


def gathered(rank, style):
    """As `differing`, with tokens moved by all-gather and reduce-scatter."""
    more = {"megamoe.dispatch": "all_gather", "megamoe.equal_tokens": True}
    return differing(rank, style, ((12, 12),), **more)


@pytest.mark.parametrize(
    "style", slow_but([WritesWhatWasRead], [ReadsWithoutGradient, WritesWhatWasRead])
)
def test_so_does_a_region_whose_tokens_are_gathered(two_ranks, style):
    for found, verdicts in two_ranks.run(gathered, style):
        assert found == []
        assert set(verdicts) == {"all-gathered"}


def complaint(rank, style):
    """Return what eager and the compiled layer raise for counts that the user forbids."""
    torch._dynamo.reset()
    layer = style(64, 64, 8, 2, dist.group.WORLD)
    options = {"megamoe.codegen": "fx", "megamoe.chunks": 2}
    compiled = torch.compile(layer, backend="megamoe", fullgraph=True, options=options)
    found = []
    for function in (layer, compiled):
        try:
            function(torch.ones(9, 64, dtype=torch.bfloat16) * (1 - 2 * rank))
        except RuntimeError as error:
            found.append(str(error).splitlines()[0])
    return found


@pytest.mark.parametrize("style", slow_but([ChecksANumber], [ChecksCounts, ChecksANumber]))
def test_what_the_user_demands_of_counts_is_still_demanded(two_ranks, style):
    """It was taken for one of the tracer's own assertions, and dropped with the old body."""
    for found in two_ranks.run(complaint, style):
        assert len(found) == 2 and "Runtime assertion failed" in found[1]


@pytest.mark.parametrize(
    "style", slow_but([*WHOLE[:1], HookOnRows, ReadAcross, SwitchesAutocast], WHOLE)
)
def test_a_region_whose_motion_would_tell_is_left_whole(mirrored_ranks, style):
    need(*filter(None, [NEEDED.get(style)]))
    for found, verdicts in mirrored_ranks.run(differing, style, ((12, 7),)):
        assert found == []
        assert "chunked" not in verdicts
