"""What is called the same, and by what it fails: marks of tensors, distances, verdicts."""

import math
import time
from dataclasses import replace

import pytest
import torch

from moe_compile.check.forms import AGAIN, AS_ASKED, AS_WRITTEN, NODE_BY_NODE, PLAIN
from moe_compile.check.marks import PIECE, Difference, distance, first_difference, mark_of, squares
from moe_compile.check.same import (
    ALL,
    FACTOR,
    FLOOR,
    FLOOR_ALONE,
    FLOOR_LOSSY,
    Found,
    Judge,
    distances_of,
    excuses,
    farthest,
    judge_precise,
)
from moe_compile.check.sections import Record
from moe_compile.config import MegaMoEConfig

X = torch.randn(1000, generator=torch.Generator().manual_seed(0))


def changed(place, value):
    other = X.clone()
    other[place] = value
    return other


@pytest.mark.parametrize(
    "other",
    [
        changed(7, X[7] * (1 + 2**-23)),
        changed(slice(3, 5), X[[4, 3]]),
        X.flip(0),
        X[:-1],
        -X,
        X.double(),
    ],
)
def test_other_bits_have_another_mark(other):
    assert mark_of(X).bits != mark_of(other).bits


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_equal_bits_have_one_mark_in_any_type_and_layout(dtype):
    x = (X.view(20, 50) * 9).to(dtype)
    assert mark_of(x).bits == mark_of(x.clone()).bits == mark_of(x.t().contiguous().t()).bits
    assert mark_of(torch.zeros(3)).bits != mark_of(-torch.zeros(3)).bits
    nan = torch.full((3,), math.nan)
    assert mark_of(nan).bits == mark_of(nan.clone()).bits


def marks(**tensors):
    return {name: mark_of(torch.tensor(value)) for name, value in tensors.items()}


def test_the_first_tensor_that_differs_is_named_in_the_order_of_computation():
    written = marks(loss=1.0, last=2.0, first=3.0)
    assert first_difference(written, dict(written)) is None
    found = first_difference(written, marks(loss=1.0, first=4.0, last=5.0))
    assert (found.name, found.written, found.found, found.num_others) == ("last", 2.0, 5.0, 1)
    assert first_difference(written, marks(loss=1.0, last=2.0)).name == "first"
    assert first_difference(written, {**written, **marks(more=1.0)}).name == "more"


def test_a_distance_is_of_norms_over_all_parts_of_a_tensor():
    half = torch.tensor([3.0, 0.0]), torch.tensor([3.0, 0.3])
    assert distance([squares(half[1], half[0])]) == pytest.approx(0.1)
    many = torch.ones(2 * PIECE + 1, dtype=torch.uint8)
    assert squares(2 * many, many) == (2 * PIECE + 1, 2 * PIECE + 1)
    assert mark_of(many).bits != mark_of(many.index_fill(0, torch.tensor(2 * PIECE), 0)).bits
    found = distances_of([{"a": (1.0, 50.0), "b": (0.0, 1.0)}, {"a": (1.0, 50.0)}])
    assert found["a"] == pytest.approx(math.sqrt(0.02)) and found["b"] == 0.0
    assert found[ALL] == pytest.approx(math.sqrt(2 / 101))
    assert (
        distances_of([{}])[ALL] == distance([(math.nan, 1.0)]) == distance([(1.0, 0.0)]) == math.inf
    )


def test_a_tensor_may_be_as_far_as_inductors_or_as_all_of_inductors_together():
    theirs = {ALL: 0.01, "noisy": 0.1, "calm": 0.001}
    limits = {
        "noisy": FACTOR * 0.1 + FLOOR,
        "calm": FACTOR * 0.01 + FLOOR,
        ALL: FACTOR * 0.01 + FLOOR,
    }
    for name, limit in limits.items():
        inside = {ALL: 0.0, name: 0.99 * limit}
        assert farthest(inside, theirs, FLOOR)[0] < 1.0
        assert farthest({**inside, name: 1.01 * limit}, theirs, FLOOR) == (
            pytest.approx(1.01), name,
        )  # fmt: skip


FIRST = Difference(name="step 1: loss", written=1.0, found=2.0, num_others=3)
FINE = Found(losses=[1.0], seconds=1.0)
OURS = replace(FINE, passes=("rewrite_regions",), regions=("chunked", "chunked"))


def judged(tmp_path, form, *found, config=None, **before):
    record = Record(path=tmp_path / "same.json", deadline=time.monotonic() + 9)
    record.put(**before)
    Judge(config or MegaMoEConfig()).judge(form, record, [*found])
    return record


def test_equal_bits_hold_and_others_fail_with_the_rank_and_the_passes(tmp_path):
    assert not judged(tmp_path, NODE_BY_NODE, OURS, OURS).data["failures"]
    record = judged(tmp_path, NODE_BY_NODE, OURS, replace(OURS, difference=FIRST))
    (failure,) = record.data["failures"]
    assert "step 1: loss on rank 1: its norm is 2, and 1 as written; 3 later" in failure["why"]
    assert "These passes changed a graph: rewrite_regions" in failure["why"]
    assert record.data["rows"][0]["first_difference"]["rank"] == 1
    assert record.data["rows"][0]["regions"] == ["4 regions chunked"]


def test_a_program_that_does_not_repeat_its_bits_fails_and_is_named_where_megamoe_differs(tmp_path):
    other = replace(FINE, difference=FIRST)
    record = judged(tmp_path, AGAIN, FINE, other)
    assert record.data["failures"] and record.data["repeats"] is False
    record = judged(tmp_path, NODE_BY_NODE, replace(OURS, difference=FIRST), repeats=False)
    assert "two runs of the program as written differ" in record.data["failures"][0]["why"]


@pytest.mark.parametrize(("off", "is_same"), [(FLOOR_ALONE, True), (1.01 * FLOOR_ALONE, False)])
def test_bits_that_options_leave_open_are_judged_by_distance(tmp_path, off, is_same):
    found = replace(
        OURS, difference=FIRST, excuses=("batch_parts = 2",), squares={"w": (off**2, 1.0)}
    )
    record = judged(tmp_path, NODE_BY_NODE, found)
    assert bool(record.data["failures"]) is not is_same
    assert record.data["rows"][0]["excuses"] == ["batch_parts = 2"]


@pytest.mark.parametrize(("off", "is_same"), [(0.015, True), (0.017, False)])
def test_generated_code_is_held_to_inductors_distance(tmp_path, off, is_same):
    found = replace(OURS, difference=FIRST, squares={"w": (off**2, 1.0)})
    record = judged(tmp_path, AS_ASKED, found, inductor={ALL: 0.01, "w": 0.01})
    assert bool(record.data["failures"]) is not is_same
    assert record.data["rows"][0]["distance"] == pytest.approx(off)


def test_rows_in_eight_bits_may_be_farther(tmp_path):
    found = replace(OURS, difference=FIRST, squares={"w": (0.05**2, 1.0)})
    theirs = {ALL: 1e-3, "w": 1e-3}
    assert FLOOR_LOSSY > 0.05
    for options in ({"dispatch_wire": "fp8"}, {"expert_compute": "fp8_blockwise"}):
        lossy = MegaMoEConfig(**options)
        assert not judged(tmp_path, AS_ASKED, found, config=lossy, inductor=theirs).data["failures"]
    assert judged(tmp_path, AS_ASKED, found, inductor=theirs).data["failures"]


def test_inductors_distances_are_kept_and_no_number_fails(tmp_path):
    record = judged(tmp_path, PLAIN, replace(FINE, squares={"w": (0.01, 1.0)}))
    assert record.data["inductor"]["w"] == pytest.approx(0.1) and not record.data["failures"]
    assert judged(tmp_path, PLAIN, replace(FINE, squares={"w": (math.nan, 1.0)})).data["failures"]


def test_megamoe_that_rewrote_nothing_on_any_rank_fails(tmp_path):
    nothing = replace(FINE, nothing="no all-to-all is in any graph")
    (failure,) = judged(tmp_path, NODE_BY_NODE, nothing, nothing).data["failures"]
    assert "equal results show nothing: no all-to-all" in failure["why"]
    assert not judged(tmp_path, NODE_BY_NODE, nothing, OURS).data["failures"]
    assert not judged(tmp_path, AS_WRITTEN, FINE).data["failures"]


def test_without_float64_distances_are_from_the_program_as_written(tmp_path):
    record = Record(path=tmp_path / "same.json", deadline=time.monotonic() + 9)
    judge_precise(record, ["", ""])
    assert record.data["reference"] == "as written, in float64" and "warnings" not in record.data
    judge_precise(record, ["", "NotImplementedError: no such kernel"])
    assert record.data["reference"] == "as written"
    assert "no such kernel" in record.data["warnings"][0]


REGION = {"remarks": (), "dispatch": "all_to_all"}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("quantize_products", ("products in eight bits",)),
        ("apply_scores", ("scores before the down projection",)),
        ("compress_gradients", ("gradients that travel in bfloat16",)),
        ("chunk_regions", ()),
    ],
)
def test_a_pass_that_leaves_bits_open_is_said(name, wanted):
    passes = [{"pass": name, "applied": ["a node"]}, {"pass": "apply_scores", "applied": []}]
    assert excuses(MegaMoEConfig(), {"regions": [], "attention": [], "passes": passes}) == wanted


@pytest.mark.parametrize(
    ("options", "region", "wanted"),
    [
        ({}, {}, ()),
        ({"numerics": "bounded"}, {}, ("numerics = 'bounded'",)),
        ({"batch_parts": 2}, {}, ("batch_parts = 2",)),
        ({"chunk_by": "tokens"}, {}, ('chunk_by = "tokens"',)),
        ({"nodes": "rounded"}, {}, ('nodes = "rounded"',)),
        ({"combine_wire": "fp8_forward"}, {}, ("rows in eight bits",)),
        ({}, {"dispatch": "all_gather"}, ('dispatch = "all_gather"',)),
        ({}, {"remarks": ("last bits may differ: a CPU may round a row differently depending on "
            "its address in memory (mm)", "planned")},
         ("last bits may differ: a CPU may round a row differently depending on its address in "
             "memory (mm)",)),
    ],
)  # fmt: skip
def test_what_leaves_bits_open_is_said(options, region, wanted):
    report = {"regions": [{**REGION, **region}], "attention": [], "passes": []}
    assert excuses(MegaMoEConfig(**options), report) == wanted
