"""The order of passes is right without any graph: each finds the facts it needs."""

import dataclasses
import itertools

import pytest

from moe_compile.errors import ContractViolation, InvalidConfig
from passes.contract import Fact, GraphPass
from passes.pipeline import DYNAMO, LEVELS, NAMES, Level, check_names, check_order


@pytest.mark.parametrize("level", LEVELS)
def test_every_pass_finds_the_facts_it_needs(level):
    check_order(level)


def test_a_wrong_order_is_found_without_a_graph():
    with pytest.raises(ContractViolation, match="route_exchanges must come after quantize"):
        check_order(Level(DYNAMO.passes[::-1]))


def swapped():
    for level in LEVELS:
        for i, (first, second) in enumerate(itertools.pairwise(level.passes)):
            others = level.passes[:i], level.passes[i + 2 :]
            order = (*others[0], second, first, *others[1])
            yield pytest.param(level, order, first, second, id=f"{first.name}, {second.name}")


@pytest.mark.parametrize(("level", "order", "first", "second"), list(swapped()))
def test_neighbours_that_change_places_are_refused_or_said_to_commute(level, order, first, second):
    """Of those that commute each direction is tried by the order that `check_order` accepts."""
    commute = second.name in first.commutes_with or first.name in second.commutes_with
    try:
        check_order(dataclasses.replace(level, passes=order))
    except ContractViolation:
        assert not commute
    else:
        assert commute


def test_what_a_pass_names_stands_in_its_level():
    for level in LEVELS:
        names = {p.name for p in level.passes}
        assert all(p.after | p.commutes_with <= names for p in level.passes)


def test_every_fact_is_needed_by_some_pass():
    passes = [p for level in LEVELS for p in level.passes]
    assert set().union(*(p.requires for p in passes)) == set(Fact)


def test_names_are_unique_and_equal_their_modules():
    passes: list[GraphPass] = [p for level in LEVELS for p in level.passes]
    assert len(set(NAMES)) == len(NAMES)
    assert all(type(p).__module__ == f"passes.{p.name}" for p in passes)
    assert all(dataclasses.is_dataclass(p) for p in passes)


def test_disabling_an_unknown_pass_names_the_nearest():
    with pytest.raises(InvalidConfig, match="Did you mean 'rewrite_regions'"):
        check_names(["rewrite_region"])
