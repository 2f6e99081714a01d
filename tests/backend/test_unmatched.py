"""A graph with an exchange and no region is never silent: a warning, a report, and `strict`."""

import dataclasses
import json
import logging

import pytest
import torch
from torch.distributed import _functional_collectives as collectives

from moe_compile import backend
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import RegionRefused
from moe_compile.report.explain import print_report
from moe_compile.report.graph_breaks import GraphBreak, forget_frames
from tests.capture import dynamo_graphs
from tests.layers import GroupedExperts

FX = {"megamoe.codegen": "fx", "megamoe.chunks": 2}


@pytest.fixture(autouse=True)
def no_frames_of_other_tests():
    forget_frames()


def one_way(x, group):
    """Sends rows by sizes that only a run knows, and never back."""
    counts = x[:, 0].abs().to(torch.int64)[:2] * 0 + 16
    sizes = counts.tolist()
    for size in sizes:
        torch._check(size >= 0)
    return collectives.all_to_all_single(x, sizes, sizes, group) * 2


def by_sizes_read_before(x, group):
    """Sends rows by sizes that are integers of Python already, as behind a graph break."""
    return collectives.all_to_all_single(x, [20, 12], [20, 12], group) * 2


def in_equal_parts(x, group):
    return collectives.all_to_all_single(x, None, None, group) * 2


def gathered(x, group):
    return collectives.all_gather_tensor(x, 0, group) * 2


def compile_program(program, group, **options):
    backend._warn_once.cache_clear()
    (gm,) = dynamo_graphs(lambda x: program(x, group), torch.randn(32, 16, requires_grad=True))
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    return backend.megamoe(gm, inputs, options={**FX, **options})


def warnings_of(caplog):
    return [r.message for r in caplog.records if r.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("program", "reason", "remedy"),
    [
        (one_way, "by the same two split lists, swapped", "send the rows back"),
        (by_sizes_read_before, "its split sizes must come from", "take the split sizes from"),
        (in_equal_parts, "its split sizes are static", "nothing if it dispatches no tokens"),
    ],
)
def test_an_exchange_without_a_region_is_warned_of_once(
    fake_ranks, caplog, tmp_path, program, reason, remedy
):
    """There was no line, no report, and the job ended as if all were well."""
    report = tmp_path / "report.json"
    with caplog.at_level(logging.WARNING, logger="moe_compile"):
        compile_program(program, fake_ranks, **{"megamoe.report": str(report)})
        (warning,) = warnings_of(caplog)
        again = backend._warn_once.cache_info().currsize
    assert again == 1
    assert "test_unmatched.py:" in warning and reason in warning and remedy in warning
    assert warning in json.loads(report.read_text())["warnings"]


def test_the_same_place_is_warned_of_once_however_often_it_is_compiled(fake_ranks, caplog):
    with caplog.at_level(logging.WARNING, logger="moe_compile"):
        compile_program(in_equal_parts, fake_ranks)
        told = warnings_of(caplog)
        backend._warn_once(told[0])
    assert warnings_of(caplog) == told


def beside_another(x, group):
    """The same exchange, in a graph where its node has another name."""
    return one_way(collectives.all_to_all_single(x, None, None, group) * 2, group)


def test_the_exchange_that_is_spoken_of_is_the_one_whose_place_is_given(fake_ranks, caplog):
    """The first of the graph was given, whatever the reason was of."""
    with caplog.at_level(logging.WARNING, logger="moe_compile"):
        compile_program(beside_another, fake_ranks)
    (warning,) = warnings_of(caplog)
    assert " in one_way is left as it is, like others, and no MoE region" in warning
    assert "docs/reasons.md#no_combine" in warning


def test_another_name_of_the_node_makes_no_other_warning(fake_ranks):
    """Layers of different kinds that call one function were each warned of."""
    said = set()
    for program in (beside_another, lambda x, g: beside_another(in_equal_parts(x, g), g)):
        (gm,) = dynamo_graphs(lambda x, p=program: p(x, fake_ranks), torch.randn(32, 16))
        said.update(backend.rewrite(gm, MegaMoEConfig())[1].warnings())
    assert len(said) == 1


def test_gathers_and_regions_are_no_reason_to_warn(fake_ranks, caplog, tmp_path):
    report = tmp_path / "report.json"
    layer = GroupedExperts(16, 24, 8, 2, fake_ranks)
    with caplog.at_level(logging.WARNING, logger="moe_compile"):
        compile_program(gathered, fake_ranks, **{"megamoe.report": str(report)})
        compile_program(lambda x, _: layer(x.bfloat16()), fake_ranks)
    assert warnings_of(caplog) == []
    assert report.exists()  # of a run that has nothing to report too


def test_rows_dispatched_beside_a_region_are_not_silent(fake_ranks, caplog):
    layer = GroupedExperts(16, 24, 8, 2, fake_ranks)

    def program(x, group):
        return layer(x.bfloat16()), one_way(x, group)

    with caplog.at_level(logging.WARNING, logger="moe_compile"):
        compile_program(program, fake_ranks)
    (warning,) = warnings_of(caplog)
    assert "beside the MoE regions" in warning and "send the rows back" in warning
    assert " in one_way is left as it is, beside" in warning
    with pytest.raises(RegionRefused, match=r"To do: send the rows"):
        compile_program(program, fake_ranks, **{"megamoe.strict": True})


def test_a_graph_that_ends_at_a_collective_is_warned_of_beside_all_else(fake_ranks):
    """Where an exchange beside a region was warned of, the end of the graph was not."""
    layer = GroupedExperts(16, 24, 8, 2, fake_ranks)

    def program(x):
        return layer(x.bfloat16()), one_way(x, fake_ranks)

    (gm,) = dynamo_graphs(program, torch.randn(32, 16))
    compilation = backend.rewrite(gm, MegaMoEConfig())[1]
    ends = GraphBreak(where="mine.py:7 in forward", why="async_op=True", is_collective=True)
    end, beside = dataclasses.replace(compilation, graph_break=ends).warnings()
    assert "no region is found around mine.py:7 in forward" in end
    assert [beside] == compilation.warnings() and "beside the MoE regions" in beside
    told = dataclasses.replace(ends, is_collective=False)
    assert dataclasses.replace(compilation, graph_break=told).warnings() == [beside]


def test_a_report_that_cannot_be_written_is_warned_of_and_ends_nothing(
    fake_ranks, caplog, tmp_path
):
    """The job ended on the rank that writes, and hung on the others."""
    (tmp_path / "folder").mkdir()
    with caplog.at_level(logging.WARNING, logger="moe_compile"):
        for _ in range(2):
            report = {"megamoe.report": str(tmp_path / "folder")}
            compile_program(gathered, fake_ranks, **report)
    (warning,) = warnings_of(caplog)
    assert "the report cannot be written to" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_strict_raises_for_rows_that_are_sent_and_never_for_equal_parts(fake_ranks):
    strict = {"megamoe.strict": True}
    with pytest.raises(RegionRefused, match=r"in one_way: .* To do: send the rows"):
        compile_program(one_way, fake_ranks, **strict)
    assert callable(compile_program(one_way, fake_ranks, **strict, **{"megamoe.chunks": 1}))
    assert callable(compile_program(in_equal_parts, fake_ranks, **strict))


def test_a_report_without_regions_prints_what_was_left(capsys):
    tables = ("regions", "attention", "graphs", "left_alone", "dropped_passes")
    figures = {"compilations": 0, "recompiles": 0, "hardware": "cpu"}
    warnings = ["megamoe: the exchange at a.py:1"]
    print_report({**{table: [] for table in tables}, **figures, "warnings": warnings})
    printed = capsys.readouterr().out
    assert "the exchange at a.py:1" in printed
    assert "No MoE region was found" in printed
