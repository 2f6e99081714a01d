"""The report as it is printed: what is hidden, of which region, and in all."""

import io

from rich.console import Console

from moe_compile.report.explain import print_report

EMPTY = {
    "regions": [],
    "attention": [],
    "graphs": [],
    "left_alone": [],
    "dropped_passes": [],
    "compilations": 1,
    "recompiles": 0,
    "hardware": "cpu",
}
REGION = {
    "where": "a.py:9 in forward",
    "graph": "a.py:3 in forward",
    "num_ranks": 2,
    "num_local_experts": 4,
    "num_chunks": 1,
    "num_host_reads": 1,
    "verdict": "left whole",
    "remarks": [],
}


def graph(phase, where="a.py:3 in forward", **figures):
    times = {"compute_us": 20000.0, "exchange_us": 10000.0, "hidden_us": 7500.0}
    times |= {"exposed_us_before": 9000.0, "exposed_us": 2500.0}
    return {"where": where, "phase": phase, "launches": {"0": ["a", "b"]}, **times, **figures}


def printed(**changes):
    text = io.StringIO()
    print_report({**EMPTY, **changes}, Console(file=text, width=200))
    return text.getvalue()


def test_a_region_in_one_piece_says_what_of_its_exchanges_is_hidden():
    others = graph("forward", where="b.py:1 in forward", hidden_us=0.0)
    graphs = [graph("forward"), graph("backward"), others]
    text = printed(regions=[REGION], graphs=graphs)
    assert "whole, scheduled: 15.00 of 20.00 ms hidden (predicted)" in text
    assert "left whole" not in text
    chunked = {**REGION, "verdict": "chunked", "num_chunks": 2}
    assert "whole" not in printed(regions=[chunked], graphs=graphs)
    refused = {**REGION, "verdict": "an operator of the experts mixes rows"}
    assert "mixes rows" in printed(regions=[refused], graphs=graphs)
    assert " whole " in printed(regions=[REGION])


def test_graphs_have_a_sum_and_the_share_of_all_that_is_hidden():
    text = printed(graphs=[graph("forward"), graph("backward")])
    (row,) = [line for line in text.splitlines() if line.strip().startswith("all ")]
    assert row.split() == ["all", "4", "40.00", "20.00", "15.00", "18.00", "->", "5.00"]
    assert "Hidden (predicted): 15.00 of 20.00 ms of collectives, 75%" in text
    assert "Hidden" not in printed()


def test_attention_of_equal_blocks_is_one_line():
    one = {
        "where": "a.py:5 in forward",
        "is_region": False,
        "remarks": [],
        "verdict": "no exchange",
    }
    text = printed(attention=[one, one, {**one, "where": "a.py:7 in forward"}])
    assert text.count("a.py:5") == 1 and "no exchange (2 times)" in text and "a.py:7" in text
