"""What may run later without changing the order in which autograd adds up a gradient."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.facts import GraphFacts
from moe_compile.graph.gradient_order import find_later_reader, find_reordered, note_outer_gradients
from moe_compile.graph.inner_graphs import bodies
from moe_compile.graph.legality import Hazard
from tests.graph.test_legality import called, graph_of, hazard


def one_other_reader(x):
    y = x.sin()
    z = x.cos()
    return y.neg() + z


def two_other_readers(x):
    y = x.sin()
    z = x.cos() + x.exp()
    return y.neg() + z


def two_other_readers_of_what_gives_it_back(x):
    """`x.float()` is x: its readers add to the gradient of x itself."""
    y = x.contiguous().sin()
    z = x.float().cos() + x.to(x.dtype).contiguous().exp()
    return y.neg() + z


def other_reader_and_a_later_one(x):
    y = x.sin()
    z = x.cos()
    return y.neg() + z + x.exp()


def other_reader_and_an_earlier_one(x):
    """Of the three terms the first two that are added change places."""
    early = x.exp()
    y = x.sin()
    z = x.cos()
    return y.neg() + z + early


def other_reader_and_returned(x):
    a = x * 2
    y = a.sin()
    z = a.cos()
    return y.neg() + z, a


def readers_without_gradient(x):
    y = x.sin()
    z = x.detach().cos() + x.detach().exp()
    return y.neg() + z


def other_reader_by_one_function_of_torch(x):
    y = x.sin()
    z = F.silu(x)
    return y.neg() + z


def other_reader_across(x):
    """What comes back through the transposition lies in memory column by column."""
    y = x.sin()
    z = x.t().contiguous()
    return y.neg() + z.t()


def other_reader_that_may_hand_it_on_across(x):
    y = x.sin()
    z = x.cos()
    return y.neg().t().contiguous() + z.t().contiguous().exp()


def other_reader_by_a_product(x):
    """What comes back through a product lies row by row, whatever follows."""
    y = x.sin()
    z = x @ torch.ones(8, 8)
    return y.neg() + z.t().contiguous().t()


def other_reader_that_sums(x):
    y = x.sin()
    z = (x * 0.5).sum()
    return y.neg() + z


def other_reader_of_two_terms(x):
    y = x.sin()
    z = x * x
    return y.neg() + z


def other_reader_of_two_terms_in_a_list(x):
    y = x.sin()
    z = torch.cat([x, x]).sum()
    return y.neg() + z


def other_reader_of_two_terms_inside_a_function(x):
    y = x.sin()
    z = F.normalize(x)
    return y.neg() + z


def other_reader_of_two_terms_inside_a_checkpoint(x):
    y = x.sin()
    z = checkpoint(lambda a: a.tanh() * a, x, use_reentrant=False)
    return y.neg() + z


def the_one_that_moves_has_two_terms(x):
    y = x * x
    z = x.cos()
    return y.neg() + z


def two_other_readers_of_what_is_handed_back_among_others(x):
    y = torch.atleast_2d(x, x.detach())[0].sin()
    z = x.cos() + x.exp()
    return y.neg() + z


def one_other_reader_of_what_was_written(x):
    base = x * 2
    y = base.mul_(0.5).sin()
    z = base.cos()
    return y.neg() + z


def two_other_readers_of_what_was_written(x):
    """The write gives back what it wrote: all three add to the gradient of one tensor."""
    base = x * 2
    y = base.mul_(0.5).sin()
    z = base.cos() + base.exp()
    return y.neg() + z


def two_other_readers_of_what_was_filled(x):
    base = torch.zeros_like(x)
    y = base.copy_(x).sin()
    z = base.cos() + base.exp()
    return y.neg() + z


def a_view_used_after_its_base_was_written(x):
    base = x * 2
    view = base.view(-1)
    base.mul_(0.5)
    y = view.sin()
    z = base.cos().sum() + base.exp().sum()
    return y.neg() + z


def beside_a_view_used_after_its_base_was_written(x):
    """The view gets its place when it is used, between the two readers."""
    base = x * 2
    view = base.view(-1)
    base.mul_(0.5)
    z = base.exp()
    y = base.sin()
    return view.cos().sum() + (y + z.sum()).neg()


def a_view_used_before_its_base_is_written(x):
    base = x * 2
    y = base.view(-1).sin()
    z = y.neg()
    base.mul_(0.5)
    return z.sum() + base


def view_among_the_outputs(x):
    """Its term comes first where AOTAutograd makes it anew of what it is a view of."""
    base = x * 2
    view = base.view(-1)
    y = base.sin()
    z = base.cos()
    return y.neg() + z, view


@pytest.mark.parametrize(
    ("program", "keeps_order"),
    [
        (one_other_reader, True),
        (two_other_readers, False),
        (two_other_readers_of_what_gives_it_back, False),
        (two_other_readers_of_what_is_handed_back_among_others, False),
        (other_reader_and_a_later_one, False),
        (other_reader_and_an_earlier_one, True),
        (other_reader_and_returned, False),
        (readers_without_gradient, True),
        (other_reader_by_one_function_of_torch, True),
        (other_reader_across, False),
        (other_reader_that_may_hand_it_on_across, False),
        (other_reader_by_a_product, True),
        (other_reader_that_sums, True),
        (other_reader_of_two_terms, False),
        (other_reader_of_two_terms_in_a_list, False),
        (other_reader_of_two_terms_inside_a_function, False),
        (other_reader_of_two_terms_inside_a_checkpoint, False),
        (one_other_reader_of_what_was_written, True),
        (two_other_readers_of_what_was_written, False),
        (two_other_readers_of_what_was_filled, False),
        (a_view_used_after_its_base_was_written, False),
        (beside_a_view_used_after_its_base_was_written, False),
        (a_view_used_before_its_base_is_written, True),
        (view_among_the_outputs, False),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_motion_keeps_the_order_of_gradients_or_is_forbidden(program, keeps_order):
    assert hazard(program) is (None if keeps_order else Hazard.GRADIENT_ORDER)


def test_two_terms_that_move_do_not_change_places_with_one():
    assert hazard(the_one_that_moves_has_two_terms, moved="mul") is Hazard.GRADIENT_ORDER


@pytest.mark.parametrize(("last", "keeps_order"), [("cos", True), ("sin", True), ("exp", False)])
def test_parts_that_run_one_after_another_keep_the_order_or_are_told(last, keeps_order):
    """Of three readers, in the order exp, sin, cos, one runs in a part behind the others."""

    def program(x):
        late = x.exp()
        y = x.sin()
        z = x.cos()
        return (late + y + z).neg()

    graph = graph_of(program)
    moved = [*called(graph, "exp"), *called(graph, "sin"), *called(graph, "cos")]

    def part(reader, source):
        assert source.op == "placeholder"
        return reader in called(graph, last)

    found = find_reordered(moved, called(graph, "neg")[0], Dependence(graph), part)
    assert (found is None) is keeps_order


@pytest.mark.parametrize(
    ("program", "of", "later"),
    [
        (lambda x: x.sin() + x.cos(), "sin cos", None),
        (lambda x: x.exp() + x.sin() + x.cos(), "sin cos", None),
        (lambda x: x.sin() + x.exp() + x.cos(), "sin cos", "exp"),
        (lambda x: x.sin() + x.cos() + x.contiguous().exp(), "sin cos", "exp"),
        (lambda x: x.sin() + x.exp(), "sin", None),
        (lambda x: x.sin() + x.cos() + x.detach().exp(), "sin cos", None),
        (lambda x: ((a := x * 2).view(-1), a.sin() + a.cos()), "sin cos", "view"),
    ],
)
def test_several_nodes_read_a_tensor_at_once_where_no_other_reads_it_behind_them(
    program, of, later
):
    graph = graph_of(program)
    together = {node for name in of.split() for node in called(graph, name)}
    (source,) = {node.args[0] for node in together}
    found = find_later_reader(together, source, Dependence(graph))
    assert found is (called(graph, later)[0] if later else None)


def test_the_order_of_gradients_that_is_kept_is_the_one_autograd_adds_in():
    """The rule rests on the order in which autograd runs; here it is seen to round otherwise."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def gradient(*functions):
        x.grad = None
        terms = [function(x) for function in functions]
        torch.stack([t.sum() for t in terms]).sum().backward()
        return x.grad

    sin, cos, exp = torch.sin, torch.cos, torch.exp
    assert torch.equal(gradient(sin, cos), gradient(cos, sin))
    assert torch.equal(gradient(sin, cos, exp), gradient(sin, exp, cos))  # the first two terms
    assert not torch.equal(gradient(sin, cos, exp), gradient(cos, exp, sin))


def inside(x):
    """Two readers; the first may run behind the second where no term comes before theirs."""
    y = x.sin()
    z = x.cos()
    return y.neg() + z


def checkpointed(x, function=inside):
    return checkpoint(function, x, use_reentrant=False)


def nested(x):
    return checkpointed(x, checkpointed) + x.exp()


PROGRAMS = {
    "read by it alone": (checkpointed, False),
    "read before it": (lambda x: x.exp() + checkpointed(x), False),
    "read behind it": (lambda x: checkpointed(x) + x.exp(), True),
    "given back and read behind it": (lambda x: checkpointed(x) + x.contiguous().exp(), True),
    "read behind it without a gradient": (lambda x: checkpointed(x) + x.detach().exp(), False),
    "returned": (lambda x: (checkpointed(a := x * 2), a), True),
    "given to the next one": (lambda x: checkpointed(x) + checkpointed(x), True),
    "read behind the outer one": (nested, True),
    "read behind the outer one's last reader": (lambda x: nested(x * 2), True),
}


def innermost(graph):
    """Note outer terms all the way in; return the first graph without a graph inside."""
    note_outer_gradients(graph)
    body = next((body for node in graph.nodes for body in bodies(node)), None)
    return graph if body is None else innermost(body.graph)


@pytest.mark.parametrize(("program", "has_terms"), PROGRAMS.values(), ids=PROGRAMS)
def test_two_terms_of_an_input_change_places_only_where_none_comes_before_them(program, has_terms):
    graph = innermost(graph_of(program))
    obstacle = GraphFacts(graph).legality.obstacle(called(graph, "sin"), called(graph, "neg")[0])
    assert (obstacle is not None) is has_terms
    if has_terms:
        assert obstacle.hazard is Hazard.GRADIENT_ORDER
    together = {*called(graph, "sin"), *called(graph, "cos")}
    (source,) = {node.args[0] for node in together}
    assert find_later_reader(together, source, Dependence(graph)) is (source if has_terms else None)


def test_autograd_adds_up_over_a_checkpoint_as_over_what_is_in_it():
    """The rule rests on this: the sum inside is none of its own."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def gradient(program):
        x.grad = None
        program().sum().backward()
        return x.grad

    def several(*functions):
        return lambda y: sum(function(y) for function in functions)

    sin, cos, exp = torch.sin, torch.cos, torch.exp
    flat = gradient(lambda: several(sin, cos, exp)(x))
    assert torch.equal(gradient(lambda: checkpointed(x, several(sin, cos)) + exp(x)), flat)
    swapped = gradient(lambda: checkpointed(x, several(cos, sin)) + exp(x))
    assert not torch.equal(swapped, flat)
