import pytest

from benchmarks.compile_time.__main__ import Row, ratio_of_starts, ratios_of_chunks
from benchmarks.compile_time.one_compile import subject
from benchmarks.compile_time.starts import Start


def row(subject, chunks, cpu_s):
    return Row(subject=subject, chunks=chunks, cpu_s=cpu_s, all_cpu_s=(cpu_s,), wall_s=0.0)


def start(cpu_s):
    return Start(cpu_s=cpu_s, wall_s=0.0, step_1_s=0.0)


def test_the_most_chunks_are_compared_with_the_fewest():
    rows = [
        row("layer", 4, 30.0),
        row("layer", 2, 24.0),
        row("layer", 1, 20.0),
        row("block", 1, 9.0),
    ]
    assert ratios_of_chunks(rows) == {"layer": 1.5, "block": 1.0}


def test_what_a_start_takes_without_compilation_counts_for_neither():
    starts = {"first": start(60.0), "second": start(20.0), "uncompiled": start(10.0)}
    assert ratio_of_starts(starts) == 0.2


def test_the_layer_that_is_compiled_is_one_graph_with_an_exchange_there_and_back(no_group_stays):
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        raise InterruptedError

    with (
        subject("layer", backend) as compile_it,
        pytest.raises(Exception, match="InterruptedError"),
    ):
        compile_it()
    (gm,) = graphs
    launches = [n for n in gm.graph.nodes if "all_to_all" in str(n.target)]
    assert len(launches) == 3  # counts too
