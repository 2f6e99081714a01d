"""What is known of a graph is what it is now: a pass that edits it leaves no fact of before."""

from dataclasses import replace

import pytest
import torch

from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import tensor_of
from moe_compile.journal.entries import PassReport
from passes.contract import GraphPass
from passes.pipeline import DYNAMO, Level, run_level
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts


class Looks(GraphPass):
    """Notes what is known before and after it may have edited the graph."""

    name = "looks"

    def __init__(self, edit=lambda graph: None):
        self.edit, self.seen = edit, None

    def run(self, graph, state):
        facts = state.facts_of(graph)
        self.seen = facts.dependence, facts.legality, facts.modes
        assert set(facts.dependence.position) == set(facts.modes) == set(graph.nodes)
        self.edit(graph)
        return PassReport(pass_name=self.name)


def add(graph):
    (x,) = graph.find_nodes(op="placeholder")
    Emitter(x.next).call(torch.add, x, 1)


def move(graph):
    first, second = graph.find_nodes(op="call_function")
    second.prepend(first) if first > second else first.prepend(second)


def read_other(graph):
    (x,) = graph.find_nodes(op="placeholder")
    next(iter(graph.find_nodes(op="call_function"))).args = (x, 7)


def store_value(graph):
    (x,) = graph.find_nodes(op="placeholder")
    x.meta["example_value"] = tensor_of(x).clone()


def fail(graph):
    raise RuntimeError


@pytest.mark.parametrize("edit", [add, move, read_other, store_value, fail])
def test_after_an_edit_all_facts_are_new(edit):
    (gm,) = dynamo_graphs(lambda x: (x + 1) * (x - 1), torch.ones(4))
    before, after = Looks(edit), Looks()
    run_level(Level((before, after)), gm.graph, state())
    assert all(new is not old for new, old in zip(after.seen, before.seen, strict=True))


class LooksAtACopy(Looks):
    """Looks at another graph first, as a rewrite does that is priced on a copy."""

    def run(self, graph, state):
        state.facts_of(torch.fx.Graph())
        return super().run(graph, state)


def test_a_pass_that_looked_at_a_copy_leaves_no_fact_of_before():
    (gm,) = dynamo_graphs(lambda x: (x + 1) * (x - 1), torch.ones(4))
    first, before, after = Looks(), LooksAtACopy(add), Looks()
    ours = state()
    run_level(Level((first, before, after)), gm.graph, ours)
    assert after.seen[0] is not before.seen[0] is not first.seen[0]


def test_passes_share_what_is_known_of_a_graph_that_none_edits():
    (gm,) = dynamo_graphs(lambda x: x + 1, torch.ones(4))
    first, second = Looks(), Looks()
    run_level(Level((first, second)), gm.graph, state())
    assert all(new is old for new, old in zip(second.seen, first.seen, strict=True))


def test_regions_know_the_graph_as_a_pass_after_their_detection_left_it(fake_ranks):
    """A fact that a region kept from its detection would be of the graph without the new node."""
    (gm,) = dynamo_graphs(
        GroupedExperts(16, 24, 4, 2, fake_ranks), torch.randn(32, 16, dtype=torch.bfloat16)
    )
    ours, looks = state(chunks=2), Looks(lambda graph: Emitter(graph.output_node()).call(len, ()))
    until = [p.name for p in DYNAMO.passes].index("detect_regions") + 1
    run_level(replace(DYNAMO, passes=(*DYNAMO.passes[:until], looks)), gm.graph, ours)
    (region,) = (one.region for one in ours.found.experts)
    assert set(region.facts.dependence.position) == set(gm.graph.nodes)
    assert region.facts is ours.facts_of(gm.graph)
