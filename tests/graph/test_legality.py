"""What may run later, and what nothing needs: data, writes, modes, random draws.

The order of gradients is asked for in test_gradient_order.py.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_mutation
from torch.distributed._functional_collectives import all_reduce
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from moe_compile.errors import ContractViolation
from moe_compile.graph.edit import erase_dead, erase_unused, substitute
from moe_compile.graph.effects import draws_random, is_pure
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.legality import Hazard
from moe_compile.graph.modes import changes_mode
from tests.capture import dynamo_graphs
from tests.this_torch import has_autocast_by_functions, need


def graph_of(program, *more):
    x = torch.randn(4, 8, requires_grad=True)
    gm, *_ = dynamo_graphs(program, x, *more)
    return gm.graph


def called(graph, name):
    """Return the nodes that call a function or method of this name, in graph order."""
    return [n for n in graph.nodes if getattr(n.target, "__name__", n.target) == name]


def hazard(program, moved="sin", anchor="neg"):
    """Return what forbids running the first `moved` just before the first `anchor`."""
    graph = graph_of(program)
    obstacle = GraphFacts(graph).legality.obstacle(
        called(graph, moved)[:1], called(graph, anchor)[0]
    )
    return None if obstacle is None else obstacle.hazard


def plain(x):
    y = x.sin()
    z = x * 2
    return y.neg() + z


def written_through_a_view(x):
    a = x * 2
    y = a.sin()
    a.view(-1)[:3].mul_(2)
    return y.neg() + a


def written_through_a_subclass(x):
    a = x.detach() * 2
    y = a.sin()
    TwoTensor(a, a * 3).mul_(2)
    return y.neg() + a + x


def written_before(x):
    a = x * 2
    a.view(-1)[:3].mul_(2)
    y = a.sin()
    z = x * 3
    return y.neg() + z


def given_other_memory(x):
    """The tracer's value of `a` has its last memory: no write of it seemed to reach `b`."""
    a = torch.ones(4, 8)
    b = a.view(-1)
    y = b.sin()
    a.mul_(2)
    z = y.neg()
    a.set_(torch.zeros(4, 8))
    return z, a


KEPT = torch.ones(4, 8)


def given_other_data(x):
    b = KEPT.view(-1)
    y = b.sin()
    KEPT.mul_(2)
    z = y.neg()
    KEPT.data = torch.zeros(4, 8)
    return z


def autocast_in_between(x):
    y = x.sin()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = x.detach() @ x.detach().T
    return y.neg(), z


def inside_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = x.sin()
    return y.neg()


def inside_vmap(x):
    counts = torch.arange(4)
    y = torch.vmap(lambda c: c * 2)(counts)
    return y.neg() + x.long()[:, 0]


def attends(x):
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(*(3 * [x[None]]))
        z = x.sin()
    return y.neg() + z.exp()


def attends_in_a_function_of_its_own(x):
    with sdpa_kernel(SDPBackend.MATH):
        attend = lambda y: F.scaled_dot_product_attention(*(3 * [y[None]]))  # noqa: E731
        y = checkpoint(attend, x, use_reentrant=False)
    return y.neg()


def inside_no_grad(x):
    z = x * 2
    with torch.no_grad():
        y = z.sin()
    return y.neg() + z


def dropped_out(x):
    y = F.dropout(x, 0.5)
    return y.neg() + torch.randn(4, 8)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (plain, None),
        (written_through_a_view, Hazard.WRITTEN_MEANWHILE),
        (written_through_a_subclass, Hazard.WRITTEN_MEANWHILE),
        (written_before, None),
        (given_other_memory, Hazard.WRITTEN_MEANWHILE),
        (given_other_data, Hazard.WRITTEN_MEANWHILE),
        (autocast_in_between, None),
        (inside_autocast, Hazard.MODE_CHANGES),
        (inside_no_grad, Hazard.MODE_CHANGES),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_forbids_a_motion_is_named(program, expected):
    assert hazard(program) is expected


def test_integers_do_not_leave_a_vmap():
    """They were taken out of any mode, though only autocast leaves integers alone."""
    assert hazard(inside_vmap, moved="mul") is Hazard.MODE_CHANGES


def test_attention_alone_does_not_leave_the_choice_of_its_backend():
    """It ran under the choice of where it was moved, by another kernel."""
    moved = "scaled_dot_product_attention"
    assert hazard(attends, moved=moved) is Hazard.MODE_CHANGES
    assert hazard(attends, moved="sin", anchor="exp") is None
    moved = "tag_activation_checkpoint"
    assert hazard(attends_in_a_function_of_its_own, moved=moved) is Hazard.MODE_CHANGES


MODES = {
    "hooks": lambda: torch.autograd.graph.disable_saved_tensors_hooks("not here"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "forward gradients": lambda: torch.autograd.forward_ad._set_fwd_grad_enabled(False),
}


@pytest.mark.parametrize("mode", MODES)
def test_what_with_enters_and_leaves_is_a_mode(mode):
    def program(x):
        with MODES[mode]():
            return x.sin()

    assert sum(map(changes_mode, graph_of(program).nodes)) == 2


def test_what_a_function_of_torch_sets_is_a_mode():
    """Autocast switched by functions was not seen, and readers left it."""
    need(has_autocast_by_functions)

    def program(x):
        y = x.sin()
        torch.set_autocast_enabled("cpu", True)
        z = x.cos()
        torch.set_autocast_enabled("cpu", False)
        return y.neg() + z

    assert hazard(program) is Hazard.MODE_CHANGES
    assert sum(map(changes_mode, graph_of(program).nodes)) == 2


def test_what_draws_random_numbers_does_not_move():
    assert hazard(dropped_out, moved="dropout") is Hazard.RANDOM


@pytest.mark.parametrize("is_in_place", [True, False])
@pytest.mark.parametrize("is_training", [True, False])
def test_a_dropout_draws_in_training_alone(is_training, is_in_place):
    graph = graph_of(lambda x: F.dropout(x * 2, 0.5, is_training, is_in_place))
    assert [draws_random(n) for n in called(graph, "dropout")] == [is_training]


def unneeded(program, candidates, replaced=()):
    graph = graph_of(program)
    nodes = [n for name in candidates for n in called(graph, name)]
    given = dict.fromkeys(n for name in replaced for n in called(graph, name))
    return [n.name for n in GraphFacts(graph).legality.unneeded(nodes, given)]


def fills_what_is_returned(x):
    a = torch.empty_like(x)
    a.copy_(x * 2)
    return a


def fills_what_is_seen_through_a_view(x):
    a = torch.empty_like(x)
    v = a.view(-1)
    a.copy_(x * 2)
    return v.sum()


def fills_what_nobody_reads(x):
    a = torch.empty_like(x)
    a.copy_(x * 2)
    return x.neg()


def fills_what_is_replaced(x):
    a = torch.empty_like(x)
    a.copy_(x * 2)
    return a.neg().sin()


@pytest.mark.parametrize(
    ("program", "replaced", "dead"),
    [
        (fills_what_is_returned, (), []),
        (fills_what_is_seen_through_a_view, (), []),
        (fills_what_nobody_reads, (), ["empty_like", "copy_", "mul"]),
        (fills_what_is_replaced, ("neg",), ["empty_like", "copy_", "mul", "neg"]),
        (fills_what_is_replaced, (), []),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_write_lives_as_long_as_somebody_reads_what_it_wrote(program, replaced, dead):
    names = ("empty_like", "copy_", "mul", *replaced)
    found = unneeded(program, names, replaced)
    assert len(found) == len(dead)
    assert {name.partition("_1")[0] for name in found} <= {*dead, "a", "mul", "copy_"}


def test_what_is_still_to_be_made_needs_what_it_will_read():
    """Rows made with a host integer of another region were erased, which the chunks of theirs read.

    The graph then had readers of nothing, and the pass failed.
    """

    def program(x):
        return (x * 2).neg()

    graph = graph_of(program)
    rows, result = called(graph, "mul"), called(graph, "neg")
    legality, made = GraphFacts(graph).legality, dict.fromkeys(result)
    assert legality.unneeded([*rows, *result], made) == [*rows, *result]
    assert legality.unneeded([*rows, *result], made, read_anew=rows) == result


def test_a_write_into_an_input_is_needed_whoever_reads_it():
    def program(x, buffer):
        buffer.view(-1).add_(1.0)
        return x.neg()

    graph = graph_of(program, torch.zeros(3))
    writes = called(graph, "add_")
    assert writes and GraphFacts(graph).legality.unneeded(writes, {}) == []


@pytest.mark.parametrize("is_returned", [True, False])
def test_a_triton_kernel_is_needed_while_what_it_wrote_is(is_returned):
    """It has no value of its own: torchtitan's permutation was erased, its indices returned."""

    def program(x):
        a = torch.empty_like(x)
        a.copy_(x * 2)
        return a if is_returned else x.neg()

    graph = graph_of(program)
    ((copy,), (target,)) = called(graph, "copy_"), called(graph, "empty_like")
    with graph.inserting_before(copy):
        tensors = {"source": copy.args[1], "target": target}
        settings = {"kernel_idx": 0, "constant_args_idx": 0, "grid": [(1,)], "kwargs": tensors}
        kernel = graph.call_function(triton_kernel_wrapper_mutation, kwargs=settings)
    graph.erase_node(copy)
    dead = GraphFacts(graph).legality.unneeded([kernel, target], {})
    assert dead == ([] if is_returned else [target, kernel])


def test_a_random_draw_that_nobody_reads_is_needed_for_those_that_follow():
    def program(x):
        F.dropout(x, 0.5)
        return torch.randn(4) + x.sum()

    graph = graph_of(program)
    draws = [n for n in graph.nodes if draws_random(n)]
    assert draws and GraphFacts(graph).legality.unneeded(draws, {}) == []


def test_an_assertion_of_the_user_is_needed_and_so_is_what_it_reads():
    def program(x, n):
        size = n.item()
        torch._check(size < 7)
        return x.neg()

    graph = graph_of(program, torch.tensor(3))
    (read,) = called(graph, "item")
    assert GraphFacts(graph).legality.unneeded([read], {}) == []


@pytest.mark.parametrize("name", ["dropout", "add_", "_set_grad_enabled"])
def test_what_does_more_than_make_a_value_is_not_pure(name):
    def program(x):
        with torch.no_grad():
            y = torch.zeros(4, 8)
        return F.dropout(x, 0.5) + y.add_(x.detach())

    graph = graph_of(program)
    assert called(graph, name) and not any(map(is_pure, called(graph, name)))
    assert is_pure(called(graph, "zeros")[0])


def summed_over_ranks(x):
    return all_reduce(x.cos(), "sum", dist.group.WORLD)


def asserted(x):
    torch._check(x.argmax().item() < 7)
    return x.cos()


def under_a_mode_of_its_own(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x.cos()


@pytest.mark.parametrize(
    ("function", "expected"),
    [(summed_over_ranks, False), (asserted, False), (under_a_mode_of_its_own, True)],
)
def test_what_is_recomputed_in_the_backward_does_all_that_its_graph_does(
    fake_ranks, function, expected
):
    """An all-reduce under activation checkpointing was taken for a value and no more."""
    once = graph_of(lambda x: checkpoint(function, x, use_reentrant=False))
    (call,) = [n for n in once.nodes if "checkpoint" in str(n.target)]
    assert is_pure(call) is expected
    twice = graph_of(
        lambda x: checkpoint(
            lambda y: checkpoint(function, y, use_reentrant=False), x, use_reentrant=False
        )
    )
    (call,) = [n for n in twice.nodes if "checkpoint" in str(n.target)]
    assert is_pure(call) is expected


def test_what_nobody_reads_is_erased_and_counted_and_writes_stay():
    def program(x):
        counts = x.detach() + 1
        counts.add_(1)
        return (x.sin().neg() + 1) * 2

    graph = graph_of(program)
    (output,) = graph.find_nodes(op="output")
    (sine,), (write,) = called(graph, "sin"), called(graph, "add_")
    body = [n for n in graph.nodes if n.op.startswith("call") and n is not sine]
    output.args = ((sine,),)
    assert erase_unused(body) == 3
    assert write in graph.nodes


def test_what_is_read_or_writes_is_not_erased_without_a_word():
    def program(x):
        counts = x.detach() + 1
        counts.add_(1)
        return x.sin().neg()

    graph = graph_of(program)
    (sine,), (write,), (negative,) = (called(graph, name) for name in ("sin", "add_", "neg"))
    with pytest.raises(ContractViolation, match="is to be erased, but"):
        erase_dead([sine])
    with pytest.raises(ContractViolation, match="does more than make a value"):
        substitute(write, sine)
    (output,) = graph.find_nodes(op="output")
    output.args = ((write,),)
    erase_dead([sine, negative])
    assert not {sine, negative} & {*graph.nodes}


@torch.library.custom_op("megamoe_tests::logged", mutates_args=())
def logged(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@logged.register_fake
def _(x):
    return torch.empty_like(x)


def test_an_operator_with_an_effect_is_not_pure():
    """What torch keeps in order was moved behind others, and erased where nobody read its value."""
    graph = graph_of(lambda x: torch.ops.megamoe_tests.logged(x.detach()).sum() + x.sum())
    (call,) = [n for n in graph.nodes if "logged" in str(n.target)]
    assert is_pure(call)
    handle = _register_effectful_op(torch.ops.megamoe_tests.logged.default, _EffectType.ORDERED)
    try:
        assert not is_pure(call)
    finally:
        handle.destroy()
