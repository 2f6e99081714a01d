"""Integers of one exchange come to the host by one copy; on a device that is not there."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.precedence import is_host_read
from moe_compile.graph.query import overload_name
from moe_compile.hardware import load_profile
from moe_compile.plan.state import CompileState
from passes.merge_host_reads import MergeHostReads
from tests.device_programs import exchange, to_list, traced


def ran(program, *vectors):
    """Return the graph after the pass, and what was applied; on a CPU its values are the same."""
    gm = traced(program, *vectors)
    expected = gm(*vectors)
    state = CompileState(config=MegaMoEConfig(), hardware=load_profile("cpu"))
    report = MergeHostReads().run(gm.graph, state)
    gm.graph.lint()
    gm.recompile()
    assert all(map(torch.equal, gm(*vectors), expected))
    return gm.graph, report.applied


def waits_for_device(graph):
    """Return how often the host waits for the device."""
    return sum(map(is_host_read, graph.nodes)) - sum(
        overload_name(n) == "aten::_local_scalar_dense" and n.args[0].meta["val"].is_cpu
        for n in graph.nodes
    )


def first_of(rows, number):
    torch._check(number >= 0)
    torch._check(number <= rows.shape[0])
    return rows.narrow(0, 0, number)


SENT, GOT = torch.tensor([2, 1, 1]), torch.tensor([3, 1, 0])
ROWS = torch.randn(4, 2)


def test_two_copies_become_one():
    def program(sent, got, rows):
        sent = to_list((sent + 0).to("cpu", non_blocking=True))
        got = to_list((got + 0).to("cpu"))
        return (exchange(rows, got, sent),)

    assert waits_for_device(traced(program, SENT, GOT, ROWS).graph) == 2
    graph, applied = ran(program, SENT, GOT, ROWS)
    assert waits_for_device(graph) == 1 and len(applied) == 2


def test_elements_of_a_tensor_on_the_device_are_copied_with_it():
    def program(sent, got, rows):
        return (exchange(rows, to_list(got * 1), to_list(sent.int() * 1)),)

    assert waits_for_device(traced(program, SENT, GOT, ROWS).graph) == 6
    assert waits_for_device(ran(program, SENT, GOT, ROWS)[0]) == 1


def test_one_vector_needs_no_exchange_and_a_long_one_is_not_copied_for_one_element():
    def program(vector, long, rows):
        return first_of(rows, sum(to_list(vector))), first_of(rows, long.select(0, 7).item())

    long = torch.full((100,), 3)
    graph, applied = ran(program, SENT, long, ROWS)
    assert waits_for_device(graph) == 2 and len(applied) == 1


def test_what_needs_an_integer_before_the_other_is_there_keeps_two_copies():
    def program(sent, got, rows):
        sent = to_list(sent.to("cpu"))
        first = first_of(rows, sent[0]).sum()
        got = to_list((got + first.long() * 0).to("cpu"))
        return exchange(rows, got, sent), first

    graph, applied = ran(program, SENT, GOT, ROWS)
    assert waits_for_device(graph) == 2 and not applied


def test_each_vector_by_itself_where_both_cannot_be():
    def program(sent, got, rows):
        sent = to_list(sent)
        first = first_of(rows, sent[0]).sum()
        return exchange(rows, to_list(got + first.long() * 0), sent), first

    assert waits_for_device(traced(program, SENT, GOT, ROWS).graph) == 6
    graph, applied = ran(program, SENT, GOT, ROWS)
    assert waits_for_device(graph) == 2 and len(applied) == 2


def test_exchanges_that_share_nothing_wait_apart():
    def program(sent, got, rows):
        sent, got = to_list(sent.to("cpu")), to_list(got.to("cpu"))
        return exchange(rows, sent, sent), exchange(rows, got, got)

    graph, applied = ran(program, SENT, GOT, ROWS)
    assert waits_for_device(graph) == 2 and not applied


def test_a_copy_that_is_needed_as_a_tensor_stays():
    def program(sent, got, rows):
        copied = sent.to("cpu")
        return exchange(rows, to_list(got.to("cpu")), to_list(copied)), copied + 1

    _, applied = ran(program, SENT, GOT, ROWS)
    assert not applied


def test_numbers_that_are_tensors_by_themselves_come_together():
    def program(sent, got, rows):
        return (exchange(rows, [got.sum().item()], [sent.sum().item()]),)

    graph, applied = ran(program, SENT, GOT, ROWS)
    assert waits_for_device(graph) == 1 and len(applied) == 2


VECTORS = st.lists(
    st.tuples(st.integers(1, 4), st.sampled_from([torch.int32, torch.int64]), st.booleans()),
    min_size=1, max_size=4,
)  # fmt: skip


@given(VECTORS, st.data())
def test_any_program_keeps_its_values(vectors, data):
    """Any reads of any vectors, on the host or not, in any order, some needed together."""
    lengths, dtypes, on_host = zip(*vectors, strict=True)
    inputs = [torch.arange(n, dtype=d) % 3 for n, d in zip(lengths, dtypes, strict=True)]
    numbers = range(len(inputs))
    uses = data.draw(
        st.lists(st.lists(st.sampled_from(numbers), min_size=1, max_size=3), max_size=3)
    )
    chained = data.draw(st.booleans())

    def program(rows, *given):
        seen, results = {}, []
        for use in uses:
            sizes = []
            for i in use:
                if i not in seen:
                    more = results[-1].shape[0] * 0 if chained and results else 0
                    vector = given[i] + more
                    seen[i] = to_list(vector.to("cpu") if on_host[i] else vector)
                sizes += seen[i]
            results.append(exchange(first_of(rows, sum(sizes)), sizes, sizes))
        return tuple(results)

    graph, _ = ran(program, torch.randn(64, 2), *inputs)
    assert waits_for_device(graph) <= len({i for use in uses for i in use})
