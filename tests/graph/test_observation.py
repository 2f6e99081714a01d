"""What functions of Python write and draw, whatever their names say."""

import logging
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

from moe_compile.graph.dependence import Dependence, storages, written_arguments
from moe_compile.graph.effects import draws_random, is_pure, may_draw
from moe_compile.graph.inner_graphs import is_opaque, registers_hook
from moe_compile.graph.observation import observed, running_on
from moe_compile.graph.query import called_name, is_assertion
from tests.capture import dynamo_graphs
from tests.slow_parameters import slow_but
from tests.this_torch import has_hooks, need


def graph_of(program, *inputs):
    gm, *_ = dynamo_graphs(program, *inputs)
    return gm.graph


def writers(program, *inputs):
    """Return, per node that writes, the names of what it writes."""
    nodes = [n for n in graph_of(program, *inputs).nodes if n.op.startswith("call")]
    return {n.name: [a.name for a in written_arguments(n)] for n in nodes if written_arguments(n)}


@torch.library.custom_op("megamoe_tests::bump", mutates_args={"b"})
def bump(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    b += 1
    return a.clone()


@bump.register_fake
def _(a, b):
    return torch.empty_like(a)


def normed(x, y):
    return F.batch_norm(x, y, y + 1, training=True)


WRITES = {
    "inplace by position": lambda x, y: F.leaky_relu(y, 0.1, True),
    "a module that passes inplace by position": lambda x, y: nn.ReLU6(inplace=True)(y),
    "input by keyword": lambda x, y: F.relu(input=y, inplace=True),
    "of a list": lambda x, y: torch._foreach_mul_([y], 2.0),
    "running statistics": normed,
    "statistics of instances": lambda x, y: F.instance_norm(x[None], y[:2], (y + 1)[:2]),
    "an embedding that renormalises": lambda x, y: F.embedding(
        torch.arange(2), y[None], max_norm=1.0
    ),
    "shifted bits": lambda x, y: y.long().__ilshift__(1),
    "out": lambda x, y: torch.add(x[0], 1.0, out=y),
    "a custom operator": lambda x, y: torch.ops.megamoe_tests.bump(x, y),
    "a part of a subclass": lambda x, y: TwoTensor(y, y.clone()).mul_(2),
    "a subclass, inplace by position": lambda x, y: F.relu(TwoTensor(y, y.clone()), True),
}


@pytest.mark.parametrize("case", slow_but([*WRITES][::3], WRITES))
def test_what_a_function_writes_is_seen(case):
    """A module passes `inplace` by position, and a batch norm names no write at all."""
    found = writers(lambda x, y: (WRITES[case](x, y), x.sum()), torch.rand(2, 3), torch.rand(3))
    assert len(found) == 1, found
    (written,) = found.values()
    assert written, found


def test_augmented_shifts_write():
    def program(y):
        y <<= 1
        y >>= 2
        return y + 1

    assert [*writers(program, torch.arange(4)).values()] == [["l_y_"], ["y"]]


DRAWS = {
    "binomial": lambda x: torch.binomial(x, x),
    "gamma": torch._standard_gamma,
    "inside of a decomposition": lambda x: torch.svd_lowrank(x, 2)[1],
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of attention": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], dropout_p=0.5
    ),
}


@pytest.mark.parametrize("case", DRAWS)
def test_what_draws_is_seen(case):
    nodes = graph_of(DRAWS[case], torch.rand(4, 4)).nodes
    assert any(map(draws_random, nodes))


QUIET = {
    "evaluated": lambda x: F.batch_norm(x, x[0], x[1], training=False),
    "dropout that is off": lambda x: F.dropout(x, 0.5, False),
    "attention without dropout": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None]
    ),
    "reshapes": lambda x: x.t().reshape(2, -1).contiguous().flatten(),
    "sizes from values": lambda x: torch.nonzero(x),
    "integers": lambda x: (x > 0).long().bincount(minlength=3) & 1,
}


@pytest.mark.parametrize("case", QUIET)
def test_what_only_computes_is_pure(case):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        graph = graph_of(QUIET[case], torch.rand(4, 4))
    calls = [n for n in graph.nodes if n.op.startswith("call") and not is_assertion(n)]
    assert calls and all(map(is_pure, calls)), calls


def test_what_fails_on_fakes_may_write_and_draw_anything():
    graph = graph_of(lambda x, y: torch.relu(x) + y, torch.ones(2), torch.ones(2))
    (relu,) = graph.find_nodes(op="call_function", target=torch.relu)
    relu.target = _raises
    assert written_arguments(relu) == (relu.args[0],)
    assert draws_random(relu) and not is_pure(relu)


def _raises(x):
    raise ZeroDivisionError


def test_a_node_given_other_inputs_is_seen_anew():
    graph = graph_of(lambda x, y: F.leaky_relu(x * 2, 0.1, True) + y, *torch.ones(2, 3))
    (leaky,) = graph.find_nodes(op="call_function", target=F.leaky_relu)
    first = observed(leaky)
    other = graph.find_nodes(op="placeholder")[0]
    leaky.replace_input_with(leaky.args[0], other)
    assert first.written != observed(leaky).written == (other,)


def test_what_vmap_runs_is_followed_and_its_levels_stay():
    """Tensors inside of `vmap` have no memory of their own: a pass failed on them."""
    graph = graph_of(lambda x, y: torch.vmap(lambda row: row * y)(x) + 1, *torch.ones(2, 3, 3))
    dependence = Dependence(graph)
    levels = [n for n in graph.nodes if str(n.name).endswith("_nesting")]
    assert levels and not any(map(is_pure, levels))
    (product,) = graph.find_nodes(op="call_function", target=operator.mul)
    assert dependence.reads(product) & storages(graph.find_nodes(op="placeholder")[0])


@torch._dynamo.allow_in_graph
def noisy_where_gradients_are(x, y):
    return y + torch.rand_like(y) if torch.is_grad_enabled() and x.requires_grad else y * 1


@torch._dynamo.allow_in_graph
def writes_where_gradients_are(x, y):
    if x.requires_grad:
        y.add_(1)
    return y * 1


def in_a_program(function, has_gradients):
    def program(x, y):
        with torch.set_grad_enabled(has_gradients):
            return function(x * 2, y) + 1

    return program


@pytest.mark.parametrize("has_gradients", [True, False])
def test_functions_that_are_not_torchs_run_under_the_modes_of_their_nodes(has_gradients):
    """They were run without gradients, and did other things than in the program."""
    inputs = torch.ones(2, requires_grad=True), torch.ones(2)
    for function in (noisy_where_gradients_are, writes_where_gradients_are):
        graph = graph_of(in_a_program(function, has_gradients), *inputs)
        (node,) = [n for n in graph.nodes if called_name(n) == function.__name__]
        assert (draws_random(node) or bool(written_arguments(node))) is has_gradients


def hooked(x, y):
    x = x * 2
    x.register_hook(lambda gradient: gradient * y)
    return x.sin()


def test_a_hook_stays_though_nobody_reads_what_it_hooks():
    """It was taken for an operator that computes, and erased with what it read."""
    need(has_hooks)
    graph = graph_of(hooked, torch.ones(2, requires_grad=True), torch.ones(2))
    (hook,) = [n for n in graph.nodes if registers_hook(n)]
    assert not is_pure(hook) and not written_arguments(hook)


def test_what_runs_code_of_no_graph_may_write_and_draw_and_stays():
    leaf_function = getattr(torch._dynamo.decorators, "leaf_function", None)
    if leaf_function is None:
        pytest.skip("this torch has no leaf functions")

    @leaf_function
    def leaf(x):
        return (x * 2,)

    leaf.register_fake(lambda x: (x * 2,))
    graph = graph_of(lambda x: leaf(x)[0] + 1, torch.ones(2))
    (node,) = [n for n in graph.nodes if is_opaque(n)]
    assert draws_random(node) and written_arguments(node) and not is_pure(node)


def test_operators_of_others_may_draw_without_saying_so():
    graph = graph_of(lambda x, y: torch.ops.megamoe_tests.bump(x, y) + x.sin(), *torch.ones(2, 3))
    may = [n for n in graph.nodes if may_draw(n)]
    assert [called_name(n) for n in may] == ["bump"]
    assert not any(map(draws_random, may))


def two_products_under_autocast(x, y):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.bmm(torch.bmm(x[None], x.t()[None]), x[None]) * y


def test_functions_of_torch_that_take_two_types_under_autocast_alone_write_nothing():
    """Run without autocast the second product fails: bfloat16 meets float32."""
    assert writers(two_products_under_autocast, torch.rand(3, 3), torch.rand(3)) == {}


def test_what_fails_when_tried_leaves_no_record_in_torchs_log(caplog):
    """One of two layouts that are tried fails: torch would log a trace of it as an error."""
    fake = FakeTensorMode(shape_env=ShapeEnv())
    rows = fake.shape_env.create_unbacked_symint()
    weight = torch.empty(2, 8, 8, dtype=torch.bfloat16)

    def fails():
        with fake, pytest.raises(GuardOnDataDependentSymNode):
            by_columns = torch.empty(8, rows, dtype=torch.bfloat16).t()
            offs = torch.empty(2, dtype=torch.int32)
            torch._grouped_mm(by_columns, fake.from_tensor(weight), offs=offs)

    def errors():
        return [record for record in caplog.records if record.levelno >= logging.ERROR]

    with running_on(fake):
        fails()
    assert not errors()
    fails()
    assert any("failed while" in record.getMessage() for record in errors())
