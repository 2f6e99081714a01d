"""Activations that leave the device come back before they are read, and no bit changes."""

import dataclasses
import sys
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moe_compile.backend import rewrite
from moe_compile.codegen import EVERY_LEVEL, trace_graphs
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.sizes import NominalSizes
from moe_compile.errors import ContractViolation
from moe_compile.graph.query import (
    is_copy,
    is_copy_wait,
    is_offload,
    overload_name,
    tensor_of,
    value_of,
)
from moe_compile.hardware import load_profile
from moe_compile.journal.entries import Dropped
from moe_compile.journal.reasons import Reason
from moe_compile.ops import host_copies
from moe_compile.schedule.liveness import Liveness
from moe_compile.testing.host_copies import copies_on_cpu
from passes import offload_activations
from passes.verify_schedule import VerifySchedule
from tests.capture import dynamo_graphs, state
from tests.layers import GroupedExperts
from tests.scheduled_layers import one_rank_group
from tests.this_torch import has_host_copies, need

OPTIONS = {"codegen": "fx", "hardware": "cpu", "equal_tokens": True}
ROWS, WIDTH = 1024, 256
MIB = ROWS * WIDTH * 4
"""Bytes of an activation below: the least that is copied."""


@pytest.fixture
def copies():
    need(has_host_copies)
    with copies_on_cpu() as copies:
        yield copies


STEPS = {
    "linear": lambda layer, x: layer(x),
    "silu": lambda layer, x: F.silu(x) * layer.weight[0],
    "sine": lambda layer, x: torch.sin(x) + x,
    "norm": lambda layer, x: F.layer_norm(x, [WIDTH]) * layer.bias,
    "transposed": lambda layer, x: (x.t() * layer.bias[:, None]).t().contiguous(),
    "halves": lambda layer, x: torch.cat(x.chunk(2, 1)[::-1], 1) * layer.bias,
}


class Steps(nn.Module):
    """Steps one after another, each with parameters of its own."""

    def __init__(self, names):
        super().__init__()
        self.names = tuple(names)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in names)

    def forward(self, x):
        for name, layer in zip(self.names, self.layers, strict=True):
            x = STEPS[name](layer, x)
        return x


DEEP = ("linear", "silu", "norm", "linear", "sine", "linear", "silu", "linear")


def compiled(module, **options):
    torch._dynamo.reset()
    ours = {f"megamoe.{name}": value for name, value in {**OPTIONS, **options}.items()}
    return torch.compile(module, backend="megamoe", fullgraph=True, options=ours)


def tokens(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()


def taken_back(module, out, x, retain_graph=False):
    """Return the gradients of one backward pass, and forget them."""
    inputs = [x, *module.parameters()]
    result = out.square().sum()
    found = torch.autograd.grad(result, inputs, retain_graph=retain_graph, allow_unused=True)
    return [gradient for gradient in found if gradient is not None]


def alike(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def kept_on_device(out, copies):
    """Return the bytes of the activations that the backward pass of `out` holds on the device."""
    on_host = {t.untyped_storage().data_ptr() for t in copies.offloaded}
    held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in out.grad_fn.saved_tensors}
    return sum(s.nbytes() for place, s in held.items() if place not in on_host)


# --- values and bytes -------------------------------------------------------------------------


@settings(max_examples=5)
@given(names=st.lists(st.sampled_from([*STEPS]), min_size=2, max_size=7), budget=st.floats(0.1, 1))
def test_any_program_has_the_same_bits_and_holds_as_much_less_as_planned(names, budget):
    need(has_host_copies)
    with copies_on_cpu() as copies:
        module, x = Steps([*names, "linear"]), tokens()
        out = compiled(module)(x)
        held, expected = kept_on_device(out, copies), [out, *taken_back(module, out, x)]
        ours = compiled(module, offload_budget=budget)(x)
        saved = sum(t.nbytes for t in copies.offloaded)
        assert saved <= budget * held
        assert held - kept_on_device(ours, copies) == pytest.approx(saved, rel=0.05)
        assert alike([ours, *taken_back(module, ours, x)], expected)
        assert copies.num_reloads == len(copies.offloaded) and not copies.in_flight


def test_a_second_backward_pass_reads_the_copies_again(copies):
    module, x = Steps(DEEP), tokens()
    out = compiled(module, offload_budget=1.0)(x)
    first = taken_back(module, out, x, retain_graph=True)
    assert alike(taken_back(module, out, x), first)
    assert copies.num_reloads == 2 * len(copies.offloaded) > 0


def test_microbatches_under_way_at_once_have_copies_of_their_own(copies):
    """As in a pipeline: forward, forward, backward, backward."""
    module = Steps(DEEP)
    function = compiled(module, offload_budget=1.0)
    inputs = [tokens(seed) for seed in (1, 2)]
    alone = [taken_back(module, function(x), x) for x in inputs]
    copies.offloaded.clear()
    outs = [function(x) for x in inputs]
    assert len({t.data_ptr() for t in copies.offloaded}) == len(copies.offloaded) > 0
    together = [taken_back(module, o, x) for o, x in zip(outs, inputs, strict=True)]
    assert all(map(alike, together, alone))


def test_the_budget_may_be_a_number_of_bytes(copies):
    compiled(Steps(DEEP), offload_budget=2 * MIB + 5)(tokens())
    assert sum(t.nbytes for t in copies.offloaded) == 2 * MIB


@pytest.mark.slow
def test_code_of_inductor_has_the_same_bits(copies):
    module, x = Steps(DEEP), tokens()
    out = compiled(module, codegen="inductor")(x)
    expected = [out, *taken_back(module, out, x)]
    ours = compiled(module, codegen="inductor", offload_budget=1.0)(x)
    gradients = [taken_back(module, ours, x, retain_graph=again) for again in (True, False)]
    assert all(alike([ours, *each], expected) for each in gradients)
    assert copies.num_reloads == 2 * len(copies.offloaded) > 0 and not copies.in_flight


def chunked_layer(rank):
    """Return whether a chunked layer has the same bits, and whether tensors went and came."""
    with copies_on_cpu() as copies, mock.patch.object(offload_activations, "LEAST_BYTES", 1):
        layer = GroupedExperts(16, 24, 8, 2, dist.group.WORLD)
        x = torch.randn(24, 16, generator=torch.Generator().manual_seed(rank)).bfloat16()
        x.requires_grad_()
        found = []
        for budget in (0, 1.0):
            out = compiled(layer, chunks=2, offload_budget=budget)(x)
            found.append([out, *taken_back(layer, out, x)])
        return alike(*found), len(copies.offloaded) > 0, copies.num_reloads > 0


def test_a_chunked_layer_has_the_same_bits(mirrored_ranks):
    need(has_host_copies)
    for found in mirrored_ranks.run(chunked_layer):
        assert found == (True, True, True)


# --- both graphs ------------------------------------------------------------------------------


def traced(module, x, **options):
    """Return the graphs of a program after every pass, and its compilation."""
    gm, *_ = dynamo_graphs(module, x)
    config = MegaMoEConfig(**{**OPTIONS, **options})
    compile_state, compilation = rewrite(gm, config)
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    return [g.graph for g in trace_graphs(gm, inputs, compile_state, EVERY_LEVEL)], compilation


def report_of(compilation):
    records = compilation.journal.records
    (report,) = (r for _, r in records if r.pass_name == "offload_activations")
    return report


def verdicts(compilation):
    return report_of(compilation).skipped


def live_bytes(graph):
    """Return the live bytes during each node; the last are those that the backward finds."""
    nodes = list(graph.nodes)
    liveness = Liveness.of(nodes, NominalSizes({}))
    return [during for during, _ in liveness.live_bytes(range(len(nodes)))]


PLAIN = tuple(name for name in DEEP if name != "norm")
"""Without an operator of several results, whose bytes the count divides among them."""


def test_the_forward_graph_leaves_as_much_less_as_planned_and_its_peak_falls(copies):
    (plain, _), _ = traced(Steps(PLAIN), tokens())
    (forward, _), compilation = traced(Steps(PLAIN), tokens(), offload_budget=1.0)
    before, now = live_bytes(plain), live_bytes(forward)
    kept = filter(is_offload, forward.nodes)
    copied = sum(NominalSizes({}).nbytes(value_of(node)) for node in kept)
    assert before[-1] - now[-1] == pytest.approx(copied, rel=0.05)
    assert max(before) - max(now) > 0.5 * copied >= 2.5 * MIB
    reports = {(g, r.pass_name): r for g, r in compilation.journal.records}
    assert reports["forward", "offload_activations"].measures["offloaded_bytes"] == copied
    for graph in ("forward", "backward"):
        measures = reports[graph, "schedule_exchanges"].measures
        assert measures["copy_us"] > 0 and measures["copy_exposed_us"] == 0


def test_copies_start_where_tensors_are_made_and_end_before_they_are_read(copies):
    (forward, backward), _ = traced(Steps(DEEP), tokens(), offload_budget=1.0)
    for node in filter(is_copy, forward.nodes):
        assert node.prev is node.args[0] or is_copy(node.prev) or is_copy_wait(node.prev)
    launches = list(filter(is_copy, backward.nodes))
    assert launches
    place = {node: i for i, node in enumerate(backward.nodes)}
    for launch in launches:
        (wait,) = launch.users
        first = min(wait.users, key=place.__getitem__)
        between = [n for n in backward.nodes if place[wait] < place[n] < place[first]]
        assert all(is_copy(n) or is_copy_wait(n) for n in between)
        assert place[wait] - place[launch] > 1  # under way while others run


def test_what_breaks_a_copy_in_flight_is_told(copies):
    (_, backward), _ = traced(Steps(DEEP), tokens(), offload_budget=1.0)
    launch = next(filter(is_copy, backward.nodes))
    (wait,) = launch.users
    reader = next(iter(wait.users))
    VerifySchedule().run(backward, state())
    reader.replace_input_with(wait, launch)
    reader.append(wait)
    with pytest.raises(ContractViolation, match="before the wait"):
        VerifySchedule().run(backward, state())


# --- reasons ----------------------------------------------------------------------------------


def reasons(compilation):
    return {(v.reason, v.detail.partition(":")[0]) for v in verdicts(compilation)}


def test_what_is_not_copied_has_a_reason(copies):
    def program(x, w):
        small = torch.tanh(x[:16] @ w)
        kept = torch.tanh(x @ w)  # returned as well
        return kept, small.square().sum() + kept.square().sum()

    w = torch.randn(WIDTH, WIDTH, requires_grad=True)
    gm, *_ = dynamo_graphs(program, tokens(), w)
    compile_state, compilation = rewrite(gm, MegaMoEConfig(**OPTIONS, offload_budget=1.0))
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    trace_graphs(gm, inputs, compile_state, EVERY_LEVEL)
    said = reasons(compilation)
    shared = (
        "it shares memory with a result or with another kept tensor, so copying it would "
        "free nothing"
    )
    small = "it has less than 1 MiB, so copying it would free too little"
    assert {(Reason.MEMORY_STAYS, shared), (Reason.MEMORY_STAYS, small)} <= said


def test_a_link_without_time_and_a_budget_that_is_used_up_are_told(copies, tmp_path):
    path = tmp_path / "slow.toml"
    profile = load_profile("cpu")
    link = dataclasses.replace(profile.host_link, gb_per_s=1e-3)
    path.write_text(dataclasses.replace(profile, host_link=link).as_toml())
    _, compilation = traced(Steps(DEEP), tokens(), offload_budget=1.0, hardware=str(path))
    found = {reason for reason, _ in reasons(compilation)}
    assert found == {Reason.BY_PRICE, Reason.MEMORY_STAYS}  # statistics of the norm are small
    assert not report_of(compilation).applied
    _, compilation = traced(Steps(DEEP), tokens(), offload_budget=MIB)
    assert (Reason.NOT_ASKED, "offload_budget is used up by other tensors") in reasons(compilation)


def test_rows_that_only_a_run_knows_stay(copies):
    one_rank_group()
    layer = GroupedExperts(WIDTH, WIDTH, 4, 2, dist.group.WORLD)
    x = tokens().detach().bfloat16().requires_grad_()
    graphs, compilation = traced(layer, x, offload_budget=1.0)
    assert Reason.SIZE in {reason for reason, _ in reasons(compilation)}
    sizes = [tensor_of(n).shape for graph in graphs for n in graph.nodes if is_copy(n)]
    assert all(type(size) is int for shape in sizes for size in shape)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"equal_tokens": False}, Reason.TOKENS_MAY_DIFFER),
        ({"schedule": False}, Reason.NOT_ASKED),
        ({}, Reason.NO_HOST_COPIES),
    ],
)
def test_where_nothing_can_be_copied_the_graph_says_why(options, reason):
    """Without the kernels of the test kit, tensors of a CPU are in host memory already."""
    (forward, backward), compilation = traced(Steps(DEEP), tokens(), offload_budget=0.5, **options)
    assert [v.reason for v in verdicts(compilation)] == [reason]
    assert not any(overload_name(n).startswith("ao::") for n in (*forward.nodes, *backward.nodes))


def test_graphs_that_are_only_traced_show_what_a_gpu_would_do():
    """As a dry run on a CPU asks for it, by the profile of a GPU."""
    need(has_host_copies)
    _, compilation = traced(Steps(DEEP), tokens(), offload_budget=0.5, hardware="h100")
    assert {reason for reason, _ in reasons(compilation)} >= {Reason.BY_PRICE}


def test_a_torch_without_the_operators_and_a_profile_without_the_link_are_told(
    copies, monkeypatch, tmp_path
):
    path = tmp_path / "none.toml"
    path.write_text(dataclasses.replace(load_profile("cpu"), host_link=None).as_toml())
    _, compilation = traced(Steps(DEEP), tokens(), offload_budget=0.5, hardware=str(path))
    assert ["must have a table host_link" in v.detail for v in verdicts(compilation)] == [True]
    monkeypatch.setitem(sys.modules, host_copies.MODULE, None)
    _, compilation = traced(Steps(DEEP), tokens(), offload_budget=0.5)
    assert [v.reason for v in verdicts(compilation)] == [Reason.NO_HOST_COPIES]
    assert ["this torch has no" in v.detail for v in verdicts(compilation)] == [True]


def test_a_pass_that_is_disabled_leaves_the_graphs_alone(copies):
    disabled = {"disable_passes": ("offload_activations",)}
    graphs, compilation = traced(Steps(DEEP), tokens(), offload_budget=1.0, **disabled)
    assert not any(map(is_copy, (node for graph in graphs for node in graph.nodes)))
    found = [r for _, r in compilation.journal.records if r.pass_name == "offload_activations"]
    assert [type(r) for r in found] == [Dropped]
