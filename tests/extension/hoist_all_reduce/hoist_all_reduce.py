"""Launch an all-reduce as soon as what it sends is there: it then runs under what follows."""

from dataclasses import dataclass

from moe_compile.graph.query import is_launch, overload_name
from moe_compile.hardware import HardwareProfile
from moe_compile.hardware.profile import RATES
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Reason
from passes.rewrite import Proposed, Rewrite


@dataclass(frozen=True)
class Hoist:
    launch: str
    before: str

    def __str__(self):
        return f"{self.launch} to before {self.before}"


@dataclass(frozen=True)
class HoistAllReduce(Rewrite[Hoist]):
    name = "hoist_all_reduce"

    def propose(self, graph, state):
        legality = state.facts_of(graph).legality
        proposals, skipped = [], []
        for launch in filter(is_all_reduce, graph.nodes):
            anchor = earliest(launch, legality)
            if anchor is None:
                skipped.append(Verdict(candidate=launch.name, reason=Reason.ALREADY_DONE))
            else:
                proposals.append(Hoist(launch.name, anchor.name))
        return Proposed(proposals=tuple(proposals), skipped=tuple(skipped))

    def apply(self, graph, proposals, state):
        nodes = {node.name: node for node in graph.nodes}
        for hoist in proposals:
            nodes[hoist.before].prepend(nodes[hoist.launch])


def is_all_reduce(node):
    return is_launch(node) and overload_name(node).endswith("::all_reduce")


def earliest(launch, legality):
    """Return the first node behind what is sent that the launch may stand before, or None."""
    order = list(legality.dependence.position)
    sent = max(map(order.index, launch.all_input_nodes))
    between = order[sent + 1 : order.index(launch)]
    legal = (n for n in between if legality.obstacle([launch], n) is None)
    return next((n for n in legal if n.op != "placeholder"), None)


def two_nodes():
    rates = dict.fromkeys(RATES, 100.0)
    origins = dict.fromkeys(RATES, "assumed: for a test")
    return HardwareProfile(name="two nodes", origins=origins, **rates)
