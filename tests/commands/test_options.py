"""The option reference is what the options are."""

from dataclasses import fields
from pathlib import Path

import pytest

from moe_compile.cli import main
from moe_compile.config import CHOICES, MegaMoEConfig
from moe_compile.errors import InvalidConfig

DOCS = Path(__file__).parents[2] / "docs"


def test_the_committed_page_is_what_is_generated(capsys):
    assert main(["options"]) == 0
    assert capsys.readouterr().out == (DOCS / "options.md").read_text()


def test_the_default_of_a_closed_option_is_one_of_its_values():
    defaults = {f.name: f.default for f in fields(MegaMoEConfig)}
    assert CHOICES and all(defaults[name] in values for name, values in CHOICES.items())


@pytest.mark.parametrize("option", fields(MegaMoEConfig), ids=lambda field: field.name)
def test_a_value_of_another_type_is_refused_whatever_the_option(option):
    """What a type admits is read off the field: an option is added by its field alone."""
    with pytest.raises(InvalidConfig, match=f"megamoe.{option.name} is <object"):
        MegaMoEConfig(**{option.name: object()})
