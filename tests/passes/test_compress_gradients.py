"""A reduce-scatter of float32 gradients becomes an exchange of bfloat16 and a float32 sum."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.graph.query import is_launch, overload_name, tensor_of
from moe_compile.journal.reasons import Reason
from passes.compress_gradients import CompressGradients
from tests.capture import state
from tests.gradient_sums import check_rounded_once, contribution

C10D = torch.ops._c10d_functional
ATEN = torch.ops.aten


def asked(**options):
    found = state(**{"gradient_wire": "bf16_fp32_sum", **options})
    found.is_backward = True
    return found


def reduce_scatter(x, op="sum"):
    group = dist.group.WORLD
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(x, op, group.size(), group.group_name))


def traced(program, *inputs, symbolic=False):
    """Return the graph of `program`, whose first input is named as gradients of results are."""
    gm = make_fx(program, tracing_mode="symbolic" if symbolic else "fake")(*inputs)
    gm.graph.find_nodes(op="placeholder")[0].name = "tangents_1"
    return gm


def compress(gm, given_state=None):
    report = CompressGradients().run(gm.graph, given_state or asked())
    gm.graph.lint()
    gm.recompile()
    return report


def calls(graph):
    return [overload_name(n).partition("::")[2] for n in graph.nodes if n.op == "call_function"]


def carried_bytes(graph):
    return sum(
        tensor_of(n.all_input_nodes[0]).nbytes for n in graph.nodes if is_launch(n)
    )  # what a rank's part of each collective holds


def test_what_was_bfloat16_travels_as_it_was(fake_ranks):
    gm = traced(lambda x: reduce_scatter(x.float()), torch.ones(4, 3, dtype=torch.bfloat16))
    before = carried_bytes(gm.graph)
    report = compress(gm)
    gm.graph.eliminate_dead_code()
    assert calls(gm.graph) == ["all_to_all_single", "wait_tensor", "view", "sum"]
    assert report.measures == {"gradient_bytes_before": 48.0, "gradient_bytes": 24.0}
    assert (before, carried_bytes(gm.graph)) == (48, 24)


def test_what_was_float32_is_rounded_once(fake_ranks):
    gm = traced(lambda x: reduce_scatter(x * 2, "avg"), torch.ones(4, 3))
    before = carried_bytes(gm.graph)
    compress(gm)
    assert calls(gm.graph) == [
        "mul", "convert_element_type", "all_to_all_single", "wait_tensor", "view", "sum", "div",
    ]  # fmt: skip
    assert carried_bytes(gm.graph) == before / 2
    assert all(tensor_of(n) is not None for n in gm.graph.nodes if n.op == "call_function")


def test_what_lies_transposed_in_memory_is_sent_row_by_row(fake_ranks):
    gm = traced(lambda x: reduce_scatter(x.t()), torch.ones(3, 4))
    compress(gm)
    (launch,) = [n for n in gm.graph.nodes if is_launch(n)]
    assert tensor_of(launch.all_input_nodes[0]).is_contiguous()


def coalesced(x):
    group = dist.group.WORLD.group_name
    (flying,) = C10D.reduce_scatter_tensor_coalesced([x], "sum", 2, group)
    return C10D.wait_tensor(flying)


def in_flight_and_awaited(x):
    flying = C10D.reduce_scatter_tensor(x, "sum", 2, dist.group.WORLD.group_name)
    return ATEN.view.default(flying, [-1]), C10D.wait_tensor(flying)


def alone(x):
    return C10D.wait_tensor(C10D.reduce_scatter_tensor(x, "sum", 1, dist.group.WORLD.group_name))


def squared(gradient):
    return (gradient * 2) * (gradient + 1)


def over_replicas(gradient, op="sum"):
    return C10D.wait_tensor(C10D.all_reduce(gradient, op, dist.group.WORLD.group_name))


FLOAT32 = "it must reduce float32, and reduces a different type"
SUMS = "it must sum or average, and does neither"
RESULT = "its result must go straight to an output of the graph, but the graph computes with it"
ONCE_MORE = "the forward pass computes it too, and the backward pass only computes it again"


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (lambda x: reduce_scatter(x.bfloat16()), FLOAT32),
        (lambda x: reduce_scatter(x.double()), FLOAT32),
        (lambda x: reduce_scatter(x, "max"), SUMS),
        (alone, Reason.NO_FEWER_BYTES),
        (lambda x: reduce_scatter(x[:3]), Reason.SIZE),
        (coalesced, Reason.COALESCED),
        (in_flight_and_awaited, Reason.READERS),
        (lambda x: reduce_scatter(x) @ x.t(), RESULT),
        (lambda x: (reduce_scatter(x) * 2).sum(), RESULT),
        (lambda x: (reduce_scatter(x) * 1e6).floor() % 2, RESULT),
        (lambda x: squared(reduce_scatter(x)), RESULT),
        (lambda x: 2 / reduce_scatter(x), RESULT),
        (lambda x: reduce_scatter(x).to(torch.int32).float(), RESULT),
        (lambda x: reduce_scatter(x).view(torch.int32), RESULT),
        (lambda x: over_replicas(reduce_scatter(x), "max"), RESULT),
        (lambda x: reduce_scatter(torch.ones(4, 3)) + x[:2], ONCE_MORE),
    ],
)
def test_what_is_no_sum_of_float32_gradients_stays(fake_ranks, program, reason):
    gm = traced(program, torch.ones(4, 3))
    before = str(gm.graph)
    report = compress(gm)
    (left,) = report.skipped
    if isinstance(reason, str):
        assert left.reason is Reason.NO_PARAMETER_GRADIENT
        assert left.detail == reason
    else:
        assert left.reason is reason
    assert (report.applied, report.measures, str(gm.graph)) == ((), {}, before)


def test_off_unless_asked_and_never_in_a_forward_graph(fake_ranks):
    gm = traced(lambda x: reduce_scatter(x), torch.ones(4, 3))
    off = asked(gradient_wire="same")
    assert [left.reason for left in compress(gm, off).skipped] == [Reason.NOT_ASKED]
    forward = asked()
    forward.is_backward = False
    (left,) = compress(gm, forward).skipped
    assert left.reason is Reason.NO_PARAMETER_GRADIENT
    assert left.detail == "it is in a forward graph"
    gathering = asked()
    gathering.gathered_groups |= {fake_ranks.group_name}
    (left,) = compress(gm, gathering).skipped
    assert left.reason is Reason.NO_PARAMETER_GRADIENT
    assert left.detail.startswith("its process group also gathers tokens")
    assert compress(gm).changed


def test_what_has_a_symbolic_size_stays_and_is_not_specialised(fake_ranks):
    """Sizes were read to be reported, and code was compiled for each of them."""
    gm = traced(lambda x: reduce_scatter(x[0].expand(4, -1)), torch.ones(4, 3), symbolic=True)
    columns = tensor_of(gm.graph.find_nodes(op="placeholder")[0]).shape[1].node
    before = len(columns.shape_env.guards)
    assert [left.reason for left in compress(gm).skipped] == [Reason.SIZE]
    assert len(columns.shape_env.guards) == before


def test_a_gradient_may_be_cast_scaled_and_added_to_on_its_way_out(fake_ranks):
    def program(x, accumulated, mask):
        mean = -reduce_scatter(x) / 8
        return (accumulated + mean.view(-1)).to(torch.bfloat16), mean.clone() * mask

    gm = traced(program, torch.ones(4, 3), torch.ones(6), torch.ones(2, 3))
    assert compress(gm).changed


def test_a_gradient_may_be_summed_over_replicas_on_its_way_out(fake_ranks):
    gm = traced(lambda x: over_replicas(reduce_scatter(x)) / 2, torch.ones(4, 3))
    assert compress(gm).changed


def test_a_gradient_may_be_waited_for_twice(fake_ranks):
    gm = traced(lambda x: C10D.wait_tensor(reduce_scatter(x)) * 2, torch.ones(4, 3))
    assert compress(gm).changed
    assert calls(gm.graph) == [
        "convert_element_type", "all_to_all_single", "wait_tensor", "view", "sum", "mul",
    ]  # fmt: skip


def reduce_both_ways(rank, op, shape, is_cast_up, is_transposed, seed):
    """Return the result after the pass, and every rank's contribution to this rank's part."""
    ranks = dist.get_world_size()
    parts = [contribution(r, shape, seed) for r in range(ranks)]
    if is_cast_up:
        parts = [part.to(torch.bfloat16) for part in parts]
    mine = parts[rank]
    if is_transposed:
        mine = mine.transpose(0, -1).contiguous().transpose(0, -1)
    gm = traced(lambda x: reduce_scatter(x.float(), op), mine)
    compress(gm)
    return gm(mine), [part.float().chunk(ranks)[rank] for part in parts]


def check_reduction(pool, op, rows, rest, *how):
    shape = (rows * pool.num_ranks, *rest)
    for result, parts in pool.run(reduce_both_ways, op, shape, *how):
        check_rounded_once(result, parts, 1 / pool.num_ranks if op == "avg" else 1.0)


REDUCTIONS = {
    "op": st.sampled_from(["sum", "avg"]),
    "rows": st.integers(1, 5),
    "rest": st.lists(st.integers(1, 5), max_size=2),
    "is_cast_up": st.booleans(),
    "is_transposed": st.booleans(),
    "seed": st.integers(0, 999),
}


@settings(max_examples=25, deadline=None)
@given(**REDUCTIONS)
def test_four_ranks_sum_what_each_rounded_once(
    four_ranks, op, rows, rest, is_cast_up, is_transposed, seed
):
    check_reduction(four_ranks, op, rows, rest, is_cast_up, is_transposed, seed)
