import pytest

from benchmarks.compile_time.__main__ import Row, ratios_of_chunks
from benchmarks.compile_time.one_compile import subject


def row(subject, chunks, cpu_s):
    return Row(subject=subject, chunks=chunks, cpu_s=cpu_s, all_cpu_s=(cpu_s,), wall_s=0.0)


def test_the_most_chunks_are_compared_with_the_fewest():
    rows = [
        row("layer", 4, 30.0),
        row("layer", 2, 24.0),
        row("layer", 1, 20.0),
        row("block", 1, 9.0),
    ]
    assert ratios_of_chunks(rows) == {"layer": 1.5, "block": 1.0}


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
