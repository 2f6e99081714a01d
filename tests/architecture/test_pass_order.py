"""The order of passes is right without any graph: each finds the facts it needs."""

import dataclasses

import pytest

from moe_compile.errors import ContractViolation, InvalidConfig
from passes.contract import GraphPass
from passes.pipeline import DYNAMO, LEVELS, NAMES, Level, check_names, check_order


@pytest.mark.parametrize("level", LEVELS)
def test_every_pass_finds_the_facts_it_needs(level):
    check_order(level)


def test_a_wrong_order_is_found_without_a_graph():
    with pytest.raises(ContractViolation, match="chunk_attention needs"):
        check_order(Level(DYNAMO.passes[::-1]))


def test_names_are_unique_and_equal_their_modules():
    passes: list[GraphPass] = [p for level in LEVELS for p in level.passes]
    assert len(set(NAMES)) == len(NAMES)
    assert all(type(p).__module__ == f"passes.{p.name}" for p in passes)
    assert all(dataclasses.is_dataclass(p) for p in passes)


def test_disabling_an_unknown_pass_names_the_nearest():
    with pytest.raises(InvalidConfig, match="Did you mean 'chunk_regions'"):
        check_names(["chunk_region"])
