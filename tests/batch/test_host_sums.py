"""Which integers that the host reads of counts are sums of what parts read."""

import pytest
import torch
import torch.fx as fx

from moe_compile.batch.batch_proof import reads_that_add_up


def read_of(counts, steps):
    """Return a graph's counts, and what the host reads of them after `steps` of methods."""
    graph = fx.Graph()
    node = source = graph.placeholder("counts")
    node.meta["example_value"] = counts
    for name, *given in steps:
        value = getattr(node.meta["example_value"], name)(*given)
        node = graph.call_method(name, (node, *given))
        node.meta["example_value"] = value
    return source, graph.call_method("item", (node,))


SPLITS = (("view", 4, 2), ("sum", 1), ("to", torch.int64), ("select", 0, 1))


@pytest.mark.parametrize("steps", [(("select", 0, 3),), SPLITS])
def test_sums_of_counts_are_sums_of_those_of_parts(steps):
    source, read = read_of(torch.arange(8), steps)
    assert reads_that_add_up([source, read], {source}) == {read}


@pytest.mark.parametrize(
    "steps",
    [
        (("amax",),),
        (("clamp", 2), ("sum",)),
        (("to", torch.bool), ("sum",)),
        (("to", torch.float32), ("sum",)),
        (("to", torch.uint8), ("sum",)),
    ],
    ids=["largest", "bounded below", "how many are not zero", "rounded", "wrapped"],
)
def test_what_the_sum_of_parts_may_differ_from_is_read_again(steps):
    source, read = read_of(torch.arange(8), steps)
    assert reads_that_add_up([read], {source}) == set()


def test_what_is_of_no_sum_is_read_again():
    _, read = read_of(torch.arange(8), SPLITS)
    assert reads_that_add_up([read], set()) == set()
