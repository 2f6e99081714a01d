"""Rows of a region travel as the transport has it that the option names; all else stays."""

import pytest
import torch
from torch import fx

from moe_compile.errors import InvalidConfig
from moe_compile.graph.query import is_all_to_all, is_integer
from moe_compile.journal.reasons import Reason
from moe_compile.plan.plan_digest import groups_rewritten
from passes.outside import find_transport
from passes.pipeline import DYNAMO, run_level
from passes.route_exchanges import Routed, RouteExchanges
from tests.added import add_distribution, forget
from tests.capture import dynamo_graphs, state
from tests.layers import WAIT, GroupedExperts

NAME = "column_halves"
ENTRIES = f"[megamoe.transports]\n{NAME} = tests.extension.{NAME}.{NAME}:ColumnHalves\n"


@pytest.fixture
def added(tmp_path, monkeypatch):
    add_distribution(tmp_path, monkeypatch, ENTRIES)
    yield
    forget()


def planned(program, width=16, **options):
    """Return a graph after our passes, what became of the exchanges, and the state."""
    x = torch.randn(32, width, dtype=torch.bfloat16, requires_grad=True)
    (gm,) = dynamo_graphs(program, x)
    after = state(**options)
    *_, result = run_level(DYNAMO, gm.graph, after)
    after.withdraw(())
    return gm.graph, result, after


def layer(group, style=GroupedExperts, width=16):
    return style(width, 24, 8, 2, group)


def text(graph):
    """Return what the graph computes, nodes by number."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    return [
        (n.op, str(n.target), str(fx.node.map_arg((n.args, n.kwargs), lambda a: f"%{number[a]}")))
        for n in graph.nodes
    ]


GATHERED = {"dispatch": "all_gather", "equal_tokens": True}


@pytest.mark.parametrize("options", [{"chunks": 1}, {"chunks": 2}, GATHERED], ids=str)
def test_torchs_own_transport_emits_what_stands_there(fake_ranks, options):
    graph, result, after = planned(layer(fake_ranks), **options)
    assert not result.changed
    before = text(graph)
    proposals = tuple(
        Routed(
            exchange=f"{exchange} of {region}", launches=tuple(n.name for n in launches),
            transport="functional", loses="", row_bytes_before=1.0, row_bytes=1.0,
        )
        for region, each in after.launches.items() for exchange, launches in each.items()
    )  # fmt: skip
    RouteExchanges().apply(graph, proposals, after)
    assert text(graph) == before
    assert not {n for one in proposals for n in one.launches} & {n.name for n in graph.nodes}


@pytest.mark.parametrize("chunks", [1, 2])
def test_each_chunk_of_both_exchanges_is_carried_so(added, fake_ranks, chunks):
    graph, result, after = planned(layer(fake_ranks), chunks=chunks, transport=NAME)
    assert result.applied == tuple(f"{n} of region 0 by {NAME}" for n in ("dispatch", "combine"))
    assert result.measures == {"row_bytes_before": 32.0, "row_bytes": 32.0}
    assert sum(map(is_all_to_all, graph.nodes)) == 1 + 2 * 2 * chunks
    (plan,) = after.plan.rewrites
    assert plan.name == "route_exchanges" and len(plan.proposals) == 2
    assert not after.has_outside_rewrites
    other = {"1": ["all_gather_into_tensor(float32)"]}
    assert groups_rewritten(after, other) == set()


class LaunchesWithoutGradient(GroupedExperts):
    def forward(self, x):
        _, chosen = self.route(x)
        order = torch.argsort(chosen.reshape(-1), stable=True)
        counts = (chosen.reshape(-1)[:, None] == torch.arange(self.num_experts)).sum(0)
        received = self.exchange_counts(counts)
        sent, got = self.splits(counts, received)
        rows = self.exchange(x[order // self.top_k], got, sent)
        return self.exchange(rows * 2, sent, got)

    def exchange(self, rows, got, sent):
        with torch.no_grad():
            launched = torch.ops._c10d_functional.all_to_all_single(
                rows, got, sent, self.group.group_name
            )
        return torch.ops._c10d_functional.wait_tensor(launched)


class ReadsUnawaited(LaunchesWithoutGradient):
    """Something reads what is not awaited yet."""

    def exchange(self, rows, got, sent):
        launched = torch.ops._c10d_functional.all_to_all_single(
            rows, got, sent, self.group.group_name
        )
        return torch.ops._c10d_functional.wait_tensor(launched) + launched[:0].sum()


class AwaitsTwice(LaunchesWithoutGradient):
    def exchange(self, rows, got, sent):
        launched = torch.ops._c10d_functional.all_to_all_single(
            rows, got, sent, self.group.group_name
        )
        return WAIT(WAIT(launched))


def test_what_is_awaited_twice_is_awaited_once(added, fake_ranks):
    graph, result, _ = planned(layer(fake_ranks, AwaitsTwice), chunks=1, transport=NAME)
    assert len(result.applied) == 2
    waits = [n for n in graph.nodes if n.target is WAIT and not is_integer(n)]
    assert len(waits) == 4 and all(is_all_to_all(n.args[0]) for n in waits)


WITHOUT_EXAMPLE = "the rows are not known to have an even number of columns"
WITH_SCALES = "the gradient of rows of eight bits is sent by torch's collectives"


@pytest.mark.parametrize(
    ("style", "options", "left"),
    [
        (GroupedExperts, GATHERED, [(Reason.OTHER, WITHOUT_EXAMPLE)] * 2),
        (GroupedExperts, {"dispatch_wire": "fp8"}, [(Reason.OTHER, WITH_SCALES)]),
        (LaunchesWithoutGradient, {"chunks": 1}, [(Reason.STATE_CHANGES, "")] * 2),
        (ReadsUnawaited, {"chunks": 1}, [(Reason.UNKNOWN_FORM, "")] * 2),
    ],
)
def test_what_it_cannot_carry_stays_and_has_a_reason(added, fake_ranks, style, options, left):
    program = layer(fake_ranks, style, 128)
    _, result, _ = planned(program, 128, transport=NAME, **options)
    assert [(v.reason, v.detail) for v in result.skipped] == left
    assert all(v.option == "transport" and v.is_asked and v.where for v in result.skipped)
    assert len(result.applied) + len(result.skipped) == 2


def test_an_unknown_transport_names_the_nearest(added):
    with pytest.raises(InvalidConfig, match=r"megamoe\.transport: .* mean 'column_halves'"):
        find_transport("column_half")
    with pytest.raises(InvalidConfig, match="Did you mean 'functional'"):
        find_transport("functionals")
