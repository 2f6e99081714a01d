"""The table of other packages' layers: what it says of results, and that results are measured."""

import pytest
import torch

from benchmarks.acceptance import on_rank
from benchmarks.acceptance.cases import CASES
from benchmarks.acceptance.compare import differences
from benchmarks.acceptance.one_case import FX
from benchmarks.acceptance.table import crashes_of, is_equal, page_of


def on(**found):
    empty = {"graphs": 1, "breaks": [], "regions": [], "warnings": [], "num_compared": 3}
    return {**empty, "differences": {"aot_eager": {}}, **found}


def case(**runs):
    return {
        "name": "layer",
        "package": "package",
        "version": "1.2",
        "num_ranks": 2,
        "failed_measures": {},
        "runs": runs,
    }


def page(*cases):
    return page_of({"versions": {"torch": "2.13.0", "python": "3.11"}, "cases": cases})


def test_a_layer_that_is_captured_whole_and_chunked_is_one_row():
    layer = case(fx=[on(regions=[["layer.py:1", "chunked", 2]])] * 2)
    assert "| layer | package 1.2 | 2 | 1 | 1, 1 in chunks |  | yes | no |" in page(layer)
    assert f"1 of {len(CASES)} layers and models were run: 0 crash where" in page(layer)


def test_bounded_chunks_are_measured_by_stable_sorts_alone():
    apart = {"aot_eager": {"gradient of w": 1e-3}, "stable sorts": {}}
    bounded = on(regions=[["layer.py:1", "chunked", 2]], differences=apart)
    whole = on(regions=[["layer.py:1", "a sort", 1]])
    layer = case(**{"fx": [whole], "fx, 2 chunks": [whole], "fx, 2 chunks, bounded": [bounded]})
    assert "| 1, 0 in chunks | 1 | yes | no |" in page(layer)
    assert "0 run in chunks, in their first step, and 1 where numerics are bounded." in page(layer)
    bounded["differences"]["stable sorts"] = {"gradient of w": 1e-3}
    assert is_equal(layer) == "no"


def test_one_rank_that_differs_in_one_run_is_enough():
    differs = on(differences={"aot_eager": {"output 0": 0.5, "gradient of w": 0.25}})
    layer = case(**{"fx": [on(), on()], "fx, 2 chunks": [on(), differs]})
    assert is_equal(layer) == "no"
    assert "fx, 2 chunks, rank 1: 2 tensors differ from aot_eager, by up to 5.0e-01" in page(layer)


def test_an_error_is_a_crash_where_the_measure_ran():
    layer = case(fx={"crash": "ValueError: no"})
    assert crashes_of(layer) == {"fx": "ValueError: no"}
    assert crashes_of(layer | {"failed_measures": {"aot_eager": "ValueError: no"}}) == {}
    assert crashes_of({"name": "layer", "failure": "not done after 9 s"})
    assert "1 crash where `aot_eager` works" in page(layer)


def test_code_in_a_break_is_printed_as_it_is_and_the_text_around_it_without_markup():
    layer = case(fx=[on(breaks=["a.py:1 in f, <lambda>: Dynamo does not trace `if n > 0:`"])])
    assert "first break: a.py:1 in f, (lambda): Dynamo does not trace `if n > 0:`" in page(layer)


def test_what_only_one_run_has_differs():
    one = torch.ones(1)
    assert differences({"a": one, "b": one}, {"a": one}) == {"b": float("inf")}
    assert differences({"a": one * 2}, {"a": one}) == {"a": 1.0}
    nan = torch.tensor([float("nan")])
    assert differences({"a": nan}, {"a": nan.clone()}) == {}
    assert differences({"a": nan}, {"a": one})


@pytest.fixture(scope="module")
def measured(two_ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("measures")
    two_ranks.run(on_rank.keep_measure, "own layer", "aot_eager", str(folder))
    return folder


@pytest.mark.slow
def test_a_layer_of_ours_is_chunked_and_equal_and_a_false_measure_is_noticed(two_ranks, measured):
    kept = torch.load(measured / "aot_eager-1.pt")
    torch.save(kept | {"step 0: output 0": kept["step 0: output 0"] + 1}, measured / "false-1.pt")
    torch.save(torch.load(measured / "aot_eager-0.pt"), measured / "false-0.pt")
    backends = ["aot_eager", "false"]
    ranks = two_ranks.run(on_rank.compare_with, "own layer", FX, backends, str(measured))
    assert [one["graphs"] for one in ranks] == [1, 1]
    assert {(verdict, chunks) for _, verdict, chunks in ranks[0]["regions"]} == {("chunked", 2)}
    assert [one["differences"]["aot_eager"] for one in ranks] == [{}, {}]
    assert [list(one["differences"]["false"]) for one in ranks] == [[], ["step 0: output 0"]]
