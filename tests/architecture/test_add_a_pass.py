"""The example of docs/add-a-pass.md is a pass, and its test passes."""

import dataclasses
import importlib
import pathlib
import re

import pytest

from passes.pipeline import DYNAMO, check_order

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "add-a-pass.md").read_text()
QUESTION, PASS, TEST = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
IMPORTED = (
    "passes.compress_gradients", "moe_compile.graph.query", "moe_compile.graph.dependence",
    "moe_compile.graph.edit", "moe_compile.graph.legality", "moe_compile.graph.precedence",
    "moe_compile.regions.surroundings", "moe_compile.backend", "tests.layers", "tests.capture",
    "torch.distributed._functional_collectives", "collections.abc",
)  # fmt: skip
"""Modules whose names the example uses."""


def test_the_example_does_what_the_page_says(fake_ranks, monkeypatch):
    names = {}
    for module in IMPORTED:
        names |= vars(importlib.import_module(module))
    for block in (QUESTION, PASS, TEST):
        exec(block, names)
    run = names["test_it_is_launched_before_the_dispatch"]
    with pytest.raises(AssertionError):
        run(fake_ranks)
    made = names["HoistAllReduces"]()
    assert f"`{made.name}`" in PAGE
    place = [p.name for p in DYNAMO.passes].index("plan_regions")
    passes = (*DYNAMO.passes[:place], made, *DYNAMO.passes[place:])
    level = dataclasses.replace(DYNAMO, passes=passes)
    check_order(level)
    monkeypatch.setattr("passes.pipeline.DYNAMO", level)
    monkeypatch.setattr("moe_compile.backend.DYNAMO", level, raising=False)
    run(fake_ranks)
