"""The example of docs/add-a-pass.md is a pass, and its test passes."""

import dataclasses
import functools
import pathlib
import re
import sys
import types

import pytest

from moe_compile import config
from moe_compile.errors import InvalidConfig
from moe_compile.graph import query
from passes.pipeline import DYNAMO, check_order

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "add-a-pass.md").read_text()
QUESTION, PASS, TEST, FIELD, READ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
RUN = "test_it_is_launched_before_the_dispatch"


@pytest.fixture
def config_with_the_option(monkeypatch):
    source = pathlib.Path(config.__file__).read_text()
    head = "    def __post_init__(self) -> None:\n"
    text = source.replace(head, FIELD + "\n" + head, 1)
    return module_of("config_with_the_option", text, monkeypatch)


def module_of(name, text, monkeypatch):
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(text, vars(made))
    return made


def names_of(pass_text, fake_ranks, monkeypatch):
    """Return what the example's text defines, its pass in its place."""
    added = {}
    exec(QUESTION, dict(vars(query)), added)
    for name, question in added.items():  # the page adds it there
        monkeypatch.setattr(query, name, question, raising=False)
    pass_module = module_of("hoist_all_reduces", pass_text, monkeypatch)
    names = vars(module_of("test_hoist_all_reduces", TEST, monkeypatch))
    with pytest.raises(AssertionError):
        names[RUN](fake_ranks)
    made = pass_module.HoistAllReduces()
    assert f"`{made.name}`" in PAGE
    place = [p.name for p in DYNAMO.passes].index("plan_regions")
    passes = (*DYNAMO.passes[:place], made, *DYNAMO.passes[place:])
    level = dataclasses.replace(DYNAMO, passes=passes)
    check_order(level)
    monkeypatch.setattr("passes.pipeline.DYNAMO", level)
    monkeypatch.setattr("moe_compile.backend.DYNAMO", level, raising=False)
    return names


def test_the_example_does_what_the_page_says(fake_ranks, monkeypatch):
    names_of(PASS, fake_ranks, monkeypatch)[RUN](fake_ranks)


def test_the_option_of_the_page_is_known_wherever_options_are_written(config_with_the_option):
    read = config_with_the_option.from_sources
    assert read().hoist == "router"
    assert read(options={"hoist": "off"}).hoist == "off"
    assert read(table={"hoist": "off"}).hoist == "off"
    assert read(environment={"MEGAMOE_HOIST": "off"}).hoist == "off"
    assert read().digest_text() != read(options={"hoist": "off"}).digest_text()
    with pytest.raises(InvalidConfig, match=r"megamoe\.hoist is 'all'; write one of off, router"):
        read(table={"hoist": "all"})


def test_the_pass_does_nothing_where_its_option_is_off(
    fake_ranks, monkeypatch, config_with_the_option
):
    begin = PASS.index("        facts = ")
    names = names_of(PASS[:begin] + READ + PASS[begin:], fake_ranks, monkeypatch)
    asked = config_with_the_option.MegaMoEConfig
    names["MegaMoEConfig"] = asked
    names[RUN](fake_ranks)
    names["MegaMoEConfig"] = functools.partial(asked, hoist="off")
    with pytest.raises(AssertionError):
        names[RUN](fake_ranks)
