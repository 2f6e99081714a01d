"""What is kept for the backward pass by price, and what never is computed again."""

import functools

import pytest
import torch
import torch._functorch.config as functorch_config
from functorch.compile import min_cut_rematerialization_partition
from torch import fx, nn
from torch._library.fake_class_registry import FakeScriptObject
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from moe_compile.backend import rewrite
from moe_compile.codegen import run_on_aot_graph, trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.layer_program import aot_graphs
from moe_compile.cost.sizes import NominalSizes, nominal_hints
from moe_compile.graph.precedence import integers_taken
from moe_compile.graph.query import is_launch, overload_name, value_of
from moe_compile.journal.reasons import Reason
from moe_compile.recompute.choose_kept import Search, holds_tensors_alone
from moe_compile.recompute.kept import results_of
from moe_compile.recompute.never_again import keep_what_is_never_computed_again
from moe_compile.recompute.policies import BUDGET
from moe_compile.recompute.prices import beside_waits
from moe_compile.recompute.storages import Storages
from moe_compile.report.explain import short_lines
from moe_compile.report.process_report import record_of, report_of
from passes.pipeline import JOINT
from tests.block_layers import WIDTH
from tests.capture import graphs_traced_once
from tests.layers import GroupedExperts

TOKENS = 64


class Block(nn.Module):
    """A dense part, dropout, experts."""

    def __init__(self, group, dtype=torch.bfloat16):
        super().__init__()
        self.experts = GroupedExperts(WIDTH, 96, 4, 2, group, dtype)
        self.up = nn.Parameter(torch.randn(WIDTH, 128).to(dtype))
        self.down = nn.Parameter(torch.randn(128, WIDTH).to(dtype))

    def dense(self, x):
        hidden = torch.nn.functional.dropout(torch.nn.functional.silu(x @ self.up), 0.3)
        return x + hidden @ self.down

    def forward(self, x):
        h = self.dense(x)
        return h + self.experts(h)


class Attending(Block):
    """Attention without dropout in place of the dense part."""

    def dense(self, x):
        q, k, v = ((x @ self.up)[:, i * 32 : i * 32 + 32].view(1, 1, -1, 32) for i in range(3))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + out.reshape(len(x), -1) @ self.down[:32]


class Checkpointed(Block):
    def forward(self, x):
        h = checkpoint(self.dense, x, use_reentrant=False)
        return h + self.experts(h)


def captured(layer, **options):
    """Return the graph of a layer, its inputs, and the state for it."""
    x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    gm, *_ = graphs_traced_once(layer, x)
    given = {"hardware": "h100", "chunks": 1, "equal_tokens": True, "recompute": "price"}
    state, _ = rewrite(gm, MegaMoEConfig(**{**given, **options}))
    return gm, [value_of(node) for node in gm.graph.find_nodes(op="placeholder")], state


def traced(layer, **options):
    gm, inputs, state = captured(layer, **options)
    return *trace_both(gm, inputs, state), state


def searched(layer, look):
    """Return what `look` makes of a search, and of torch's partition without a budget."""
    gm, inputs, state = captured(layer, activation_budget=0.5)
    found = []

    def partition(joint, joint_inputs, **settings):
        run_on_aot_graph(JOINT, joint.graph, state)
        run = functools.partial(
            min_cut_rematerialization_partition, joint, joint_inputs, **settings
        )
        sizes = NominalSizes({})
        sizes.learn(joint.graph)
        with nominal_hints(joint.graph, sizes):
            search = Search(joint, state, sizes, run, settings["num_fwd_outputs"])
            default = search.default()
            keep_what_is_never_computed_again(joint.graph)
            found.append(look(search, default))
        return default.modules

    aot_graphs(gm, inputs, partition)
    return found[0]


def test_a_budget_is_kept_and_collectives_run_once(fake_ranks):
    plain, plain_backward, _ = traced(Block(fake_ranks), recompute="save_exchanges")
    forward, backward, state = traced(Block(fake_ranks), activation_budget=0.6)
    figures = state.kept
    assert figures["kept_bytes"] <= figures["kept_bytes_allowed"] < figures["kept_bytes_before"]
    assert figures["kept_bytes_allowed"] == int(0.6 * figures["kept_bytes_before"])
    assert 0 <= figures["again_hidden_us"] <= figures["again_us"] > 0
    dropped = figures["kept_bytes_before"] - figures["kept_bytes"]
    assert figures["again_bytes"] >= dropped > 0
    for one, other in ((forward, plain), (backward, plain_backward)):
        assert [names(one, is_launch)] == [names(other, is_launch)]
    assert not names(backward, integers_taken)
    assert not {"aten::native_dropout", "aten::sort", "aten::topk"} & {*names(backward)}


def names(module, holds=lambda node: True):
    return [
        overload_name(node)
        for node in module.graph.nodes
        if node.op == "call_function" and holds(node)
    ]


def test_no_choice_is_slower_than_torchs_solver_with_as_many_bytes(fake_ranks):
    def look(search, default):
        for share in (0.9, 0.01):
            torchs = search.by_torchs_solver(share)
            assert torchs.kept_bytes < default.kept_bytes
            chosen = search.choose(default, torchs.kept_bytes).partition
            yield torchs.kept_bytes, torchs.us, chosen.kept_bytes, chosen.us

    found = searched(Block(fake_ranks), lambda *given: list(look(*given)))
    assert all(kept <= budget and us <= theirs for budget, theirs, kept, us in found)


def test_the_bytes_of_a_choice_are_those_that_the_partition_keeps(fake_ranks):
    """They were not: of a sort's two results both counted where one was kept."""

    def look(search, default):
        graph = search.joint.graph
        storages = Storages.of(graph, results_of(graph, search.num_results), search.sizes)
        for share in (0.9, 0.5, 0.3):
            chosen = search.choose(default, int(share * default.kept_bytes)).partition
            again = [i for i, s in enumerate(storages.steps) if s.name in chosen.again]
            kept = storages.kept(storages.not_made_by(again), [0] * len(storages.steps))
            yield chosen.kept_bytes, kept.nbytes, default.kept_bytes

    for real, predicted, default in searched(Block(fake_ranks), lambda *given: [*look(*given)]):
        assert real == predicted < default


def test_no_policy_of_the_choice_is_left(fake_ranks):
    def policies(graph):
        return {n.name: n.meta["recompute"] for n in graph.nodes if "recompute" in n.meta}

    def look(search, default):
        before = policies(search.joint.graph)
        chosen = search.choose(default, default.kept_bytes // 2).partition
        return before, [policies(m.graph) for m in chosen.modules], policies(search.joint.graph)

    before, parts, after = searched(Block(fake_ranks), look)
    assert after == before and all(part.items() <= before.items() for part in parts)


def test_attention_without_dropout_runs_again_without_the_state_of_a_generator(fake_ranks):
    forward, backward, state = traced(Attending(fake_ranks), activation_budget=2)
    assert state.kept["kept_bytes"] < 0.7 * state.kept["kept_bytes_before"]
    for one in (forward, backward):
        assert sum("scaled_dot_product" in n and "backward" not in n for n in names(one)) == 1
        assert not any("rng_state" in str(node.target) for node in one.graph.nodes)


def test_a_step_costs_less_where_the_backward_waits_before_it(fake_ranks):
    def look(search, default):
        graph = search.joint.graph
        storages = Storages.of(graph, results_of(graph, search.num_results), search.sizes)
        us = {step.name: 1.0 for step in storages.steps}
        backward = default.phases[1]
        ns = beside_waits(storages, us, backward.problem, backward.order)
        return dict(zip(us, ns, strict=True))

    ns = searched(Block(fake_ranks), look)
    assert ns["mm"] == 1, "of the dense part, whose gradients come after all exchanges"
    assert ns["floor_divide"] == 1000, "of the combine, whose gradients come before any"


def test_a_budget_that_cannot_be_met_is_told_with_the_least(fake_ranks):
    forward, _, state = traced(Block(fake_ranks), activation_budget=2)
    assert state.kept["kept_bytes"] > state.kept["kept_bytes_allowed"] == 2
    report = report_of([], [record_of(forward.graph)], hardware="h100")
    (line,) = (line for line in short_lines(report) if line.startswith("Kept for"))
    assert "cannot be met" in line and "is the least" in line
    (graph,) = report["graphs"]
    assert {key: graph[key] for key in state.kept} == pytest.approx(state.kept, abs=1e-3)

    def least(search, default):
        return search.choose(default, 2).partition.kept_bytes, default.kept_bytes

    found, default = searched(Block(fake_ranks), least)
    assert found == state.kept["kept_bytes"] < default


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"activation_budget": 0.5, "equal_tokens": False}, Reason.NO_PRICE),
        ({}, Reason.NOT_ASKED),
    ],
)
def test_where_nothing_is_chosen_the_graph_is_that_of_save_exchanges(fake_ranks, options, reason):
    forward, backward, state = traced(Block(fake_ranks), **options)
    left = [v for v in state.journal.verdicts() if v.option == "recompute"]
    assert [v.reason for v in left] == [reason] and not state.kept
    options = {**options, "activation_budget": 1.0, "recompute": "save_exchanges"}
    expected = traced(Block(fake_ranks), **options)[:2]
    assert [names(m) for m in (forward, backward)] == [names(m) for m in expected]


def test_a_setting_of_torch_for_all_graphs_does_not_act_as_well(fake_ranks):
    alone = traced(Block(fake_ranks), activation_budget=0.8)
    with functorch_config.patch({BUDGET: 0.1}):
        both = traced(Block(fake_ranks), activation_budget=0.8)
        assert functorch_config.activation_memory_budget == 0.1
    assert both[2].kept == alone[2].kept
    assert [names(m) for m in both[:2]] == [names(m) for m in alone[:2]]


def test_sizes_that_torch_took_are_put_back(fake_ranks):
    gm, inputs, _ = captured(Block(fake_ranks))
    seen = []

    def partition(joint, joint_inputs, **settings):
        sizes = NominalSizes({})
        sizes.learn(joint.graph)
        symbols = list(sizes.by_symbol(joint.graph))
        with nominal_hints(joint.graph, sizes):
            seen.append([env.var_to_hint_override[symbol] for symbol, env, _ in symbols])
        seen.append([value for *_, value in symbols])
        seen.append([env.var_to_hint_override for _, env, _ in symbols])
        return min_cut_rematerialization_partition(joint, joint_inputs, **settings)

    aot_graphs(gm, inputs, partition)
    during, values, after = seen
    assert during == values != [] and not any(after)


def test_checkpointed_functions_keep_the_users_policy(fake_ranks):
    """Their products run again whatever the budget says, and their dropout draws the same."""
    plain = traced(Checkpointed(fake_ranks), recompute="save_exchanges")
    forward, backward, state = traced(Checkpointed(fake_ranks), activation_budget=0.7)
    assert state.kept["kept_bytes"] <= state.kept["kept_bytes_allowed"]
    for one in (plain[1], backward):
        assert sum("run_with_rng_state" in str(node.target) for node in one.graph.nodes) == 1
    again = [set(names(m)) for m in (plain[1], backward)]
    assert again[0] <= again[1]
    assert names(forward, is_launch) == names(plain[0], is_launch)


def test_a_policy_that_stands_is_left():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    for policy in (CheckpointPolicy.MUST_RECOMPUTE, None):
        node = graph.call_function(torch.ops.aten.bernoulli.default, (x,))
        node.meta["val"] = torch.empty(4)
        if policy is not None:
            node.meta["recompute"] = policy
    keep_what_is_never_computed_again(graph)
    _, user, ours = graph.nodes
    assert user.meta["recompute"] is CheckpointPolicy.MUST_RECOMPUTE
    assert ours.meta["recompute"] is CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize(
    ("call", "is_kept"),
    [
        (lambda x: torch.topk(x, 2)[0], True),
        (lambda x: torch.sort((x > 0).int(), stable=True)[1], True),
        (lambda x: x.to(torch.int64), True),
        (lambda x: torch.rand_like(x), True),
        (lambda x: x @ x, False),
        (lambda x: x > 0, False),
        (lambda x: (x > 0).sum(0), False),
        (lambda x: torch.softmax(x, -1), False),
    ],
)
def test_choices_and_random_numbers_are_kept(call, is_kept):
    graph = torch.fx.experimental.proxy_tensor.make_fx(call, tracing_mode="fake")(
        torch.randn(4, 4)
    ).graph
    keep_what_is_never_computed_again(graph)
    assert any("recompute" in node.meta for node in graph.nodes) is is_kept


def test_groups_and_meshes_among_a_graphs_inputs_keep_no_activation(fake_ranks):
    mesh = init_device_mesh("cpu", (2,))
    for value, alone in ((mesh, True), (fake_ranks, True), (torch.Generator(), False)):
        graph = fx.Graph()
        kind = type(value).__qualname__
        graph.placeholder("given").meta["val"] = FakeScriptObject(None, kind, value)
        assert holds_tensors_alone(graph) == alone
