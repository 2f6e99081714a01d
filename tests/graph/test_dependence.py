"""Which arguments a node writes, seen through aliases."""

import operator

import pytest
import torch

from moe_compile.graph.dependence import Dependence, written_arguments
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


@pytest.mark.gpu
def test_a_triton_kernel_writes_only_what_it_stores_to():
    """torchtitan's permutation kernel reads the counts and writes the indices."""
    kernels = pytest.importorskip("torchtitan.models.moe.kernels", reason="needs megamoe[titan]")
    counts = torch.full((8,), 3, device="cuda")
    graph = graph_of(lambda c: kernels.generate_permute_indices(c, 4, 2, 64, 8)[0], counts)
    (kernel,) = [n for n in graph.nodes if "triton_kernel_wrapper" in str(n.target)]
    written = written_arguments(kernel)
    assert written and graph.find_nodes(op="placeholder")[0] not in written
