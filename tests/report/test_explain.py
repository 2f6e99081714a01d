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


def printed(columns=200, *, verbose=False, **changes):
    text = io.StringIO()
    console = Console(file=text, width=columns, force_terminal=True, color_system=None)
    print_report({**EMPTY, **changes}, console, verbose=verbose)
    return text.getvalue()


CHUNKED = {**REGION, "verdict": "chunked", "num_chunks": 2, "remarks": ["indices checked " * 9]}


def test_eighty_columns_have_one_line_on_the_gain_and_one_for_each_region():
    """Cells of tables were cut into pieces of three letters."""
    graphs = [graph("forward"), graph("backward")]
    text = printed(80, regions=[CHUNKED, CHUNKED], graphs=graphs)
    first, second, *others = text.splitlines()
    assert first.startswith("megamoe: exposed 18.0 -> 5.0 ms per block, predicted")
    assert second == "  a.py:9: chunked, 2 chunks, 4 experts on each of 2 ranks (2 times)"
    assert all(len(line) <= 80 for line in text.splitlines())
    assert "MoE regions" not in text and "--verbose" in others[-1]
    again = printed(80, regions=[CHUNKED, CHUNKED], graphs=[graph("forward"), *graphs])
    assert again.startswith(first)  # of graphs that are compiled again the newest counts
    for whole in (printed(120, regions=[CHUNKED], graphs=graphs),
                  printed(80, verbose=True, regions=[CHUNKED], graphs=graphs)):  # fmt: skip
        assert whole.startswith(first) and "MoE regions" in whole and "Compiled graphs" in whole


def test_what_went_another_way_is_said_in_eighty_columns_too():
    text = printed(80, compilations=0, dropped_passes=["a: b"], warnings=["megamoe: an exchange"])
    assert "Passes left out: a: b" in text and "megamoe: an exchange" in text
    assert "No MoE region was found" in text


def test_integers_that_python_takes_by_themselves_have_their_lines():
    alone = {"candidate": "`_local_scalar_dense.default` at a.py:7 in f", "where": "a.py:7 in f"}
    passes = [
        {"pass": "forward_cat_split", "skipped": [alone]},
        {"pass": "unpack_integers", "applied": ["8 integers at a.py:9 in f"], "skipped": []},
    ]
    assert "single integer" not in printed(passes=passes)
    passes.append({"pass": "unpack_integers", "skipped": [alone, alone]})
    for text in (printed(passes=passes), printed(80, passes=passes)):
        assert (
            text.count("The host reads a single integer, and may wait for it, at a.py:7 in f\n")
            == 1
        )


def test_the_gain_is_per_block_of_those_that_exchange():
    other = [graph(p, where="b.py:1", exposed_us=0.0) for p in ("forward", "backward")]
    dense = graph("forward", where="c.py:1", exchange_us=0.0)
    text = printed(80, graphs=[graph("forward"), graph("backward"), *other, dense])
    assert "exposed 18.0 -> 2.5 ms per block" in text


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


def test_what_is_offloaded_is_named_and_so_is_why_nothing_is():
    of_pass = {"where": "a.py:3 in forward", "graph": "forward", "pass": "offload_activations"}
    left = {
        "candidate": "graph",
        "reason": "it cannot be",
        "detail": "on cpu",
        "to_do": "run on a GPU",
    }
    text = printed(passes=[{**of_pass, "applied": [], "skipped": [left]}] * 2)
    line = "Nothing is offloaded at a.py:3: it cannot be (on cpu); to do: run on a GPU"
    assert text.count(line) == 1
    assert "Nothing is offloaded of a graph without regions: it cannot be" in printed(
        passes=[{**of_pass, "where": "", "applied": [], "skipped": [left]}]
    )
    text = printed(passes=[{**of_pass, "applied": ["mm", "mul"], "skipped": [left]}])
    assert (
        "In host memory between forward and backward at a.py:3: mm, mul; 1 other tensors stay"
        in text
    )
    assert "offloaded" not in printed(passes=[{**of_pass, "applied": [], "skipped": []}])
