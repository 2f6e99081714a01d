"""Which arguments a node writes, seen through aliases."""

import operator

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

from moe_compile.graph.dependence import Dependence, written_arguments
from moe_compile.graph.effects import draws_random, is_pure
from moe_compile.graph.inner_graphs import seeded_call
from tests.capture import dynamo_graphs


def graph_of(program, *inputs):
    (gm,) = dynamo_graphs(program, *inputs)
    return gm.graph


def test_a_write_through_a_view_reaches_later_readers_of_the_base():
    def program(x):
        y = x * 2
        y[1:].add_(1)
        return y.sum()

    graph = graph_of(program, torch.ones(4))
    dependence = Dependence(graph)
    (add,) = [n for n in graph.nodes if n.target == "add_"]
    (total,) = [n for n in graph.nodes if n.target == "sum"]
    assert add not in total.all_input_nodes
    assert total in dependence.below([add])
    assert add in dependence.above([total])


def test_a_method_that_is_not_run_writes_by_its_name():
    """Inside `vmap` the tracer's tensors are wrapped, and nothing is run on them."""
    graph = graph_of(torch.vmap(lambda row: (row * 2).add_(1)), torch.ones(2, 3))
    (add,) = [n for n in graph.nodes if n.target == "add_"]
    assert written_arguments(add) == (add.args[0],)


def test_setitem_and_augmented_assignment_write_their_first_argument():
    def program(x):
        y = x.clone()
        y[0] = 1.0
        y += 2
        return y

    graph = graph_of(program, torch.ones(3))
    writers = {n.target: written_arguments(n) for n in graph.nodes if written_arguments(n)}
    assert set(writers) == {operator.setitem, operator.iadd}
    assert all(argument.name == "y" for (argument,) in writers.values())


def test_operators_named_like_keywords_write_nothing():
    graph = graph_of(lambda x, y: (x & y) | x, *torch.ones(2, 4, dtype=torch.bool))
    named = [n for n in graph.nodes if n.target in (operator.and_, operator.or_)]
    assert len(named) == 2
    assert not any(map(written_arguments, named))


def test_a_pure_operator_writes_nothing():
    graph = graph_of(lambda x: torch.relu(x) + x.t(), torch.ones(2, 2))
    assert not any(written_arguments(n) for n in graph.nodes)


def seeded(graph):
    return [n for n in graph.nodes if seeded_call(n) is not None]


def test_dropout_recomputed_with_its_state_writes_nothing_and_draws():
    """AOTAutograd runs it by an operator that saves the state, and by one that sets it again."""
    graphs = []

    def keep(gm, inputs):
        graphs.append(gm.graph)
        return make_boxed_func(gm.forward)

    def program(x):
        return checkpoint(lambda x: (F.dropout(x, 0.5) * x).sin(), x, use_reentrant=False)

    compiler = aot_autograd(fw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    x = torch.ones(64, requires_grad=True)
    torch.compile(program, backend=compiler)(x).sum().backward()
    assert [len(seeded(graph)) for graph in graphs] == [1, 1]
    for graph in graphs:
        (node,) = seeded(graph)
        assert written_arguments(node) == ()
        assert draws_random(node) and not is_pure(node)


@pytest.mark.gpu
def test_a_triton_kernel_writes_only_what_it_stores_to():
    """torchtitan's permutation kernel reads the counts and writes the indices."""
    kernels = pytest.importorskip("torchtitan.models.moe.kernels", reason="needs megamoe[titan]")
    counts = torch.full((8,), 3, device="cuda")
    graph = graph_of(lambda c: kernels.generate_permute_indices(c, 4, 2, 64, 8)[0], counts)
    (kernel,) = [n for n in graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    written = written_arguments(kernel)
    assert written and graph.find_nodes(op="placeholder")[0] not in written
