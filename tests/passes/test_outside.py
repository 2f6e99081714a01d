"""Entry points of other distributions that cannot be used say why, and what to write."""

from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from moe_compile.entry_points import PROFILES, REWRITES, checked, hash_of_packages
from moe_compile.errors import InvalidConfig
from moe_compile.hardware import profile
from passes.outside import load_rewrites
from passes.pipeline import NAMES
from passes.rewrite import Proposed, Rewrite
from tests.added import add_distribution, forget


@dataclass(frozen=True)
class Nothing(Rewrite[str]):
    name = "nothing"

    def propose(self, graph, state):
        return Proposed()

    def apply(self, graph, proposals, state):
        raise AssertionError("there is nothing to do")


@dataclass(frozen=True)
class Weighted(Nothing):
    name = "weighted"
    weight: float


class Abstract(Rewrite[str]):
    name = "abstract"


class Unknown(Nothing):
    numerics = "roughly"


class Unsaid(Nothing):
    numerics = "lossy"


class Promised(Nothing):
    bound = "by nothing"


class Decided(Nothing):
    is_decided = True


made = Nothing()


def entry(value, name="nothing"):
    return EntryPoint(name, f"{__name__}:{value}", REWRITES)


@pytest.mark.parametrize("value", ["Nothing", "made"])
def test_a_class_and_what_is_made_of_it_are_rewrites(value):
    assert load_rewrites([entry(value)], NAMES) == (made,)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("nothing", "Missing", r"cannot be imported \(AttributeError.*write name = \"module:"),
        ("nothing", "pytest", "is not a Rewrite; write a subclass of passes.rewrite.Rewrite"),
        ("weighted", "Weighted", "cannot be made .*'weight'.* needs no arguments"),
        ("abstract", "Abstract", "cannot be made .*abstract method"),
        ("other", "Nothing", "has name = 'nothing'; write name = 'other', as its entry point"),
        ("nothing", "Unknown", "numerics = 'roughly'; write numerics = one of exact, bounded"),
        ("nothing", "Unsaid", "has bound = ''; write bound = .* else what it loses"),
        ("nothing", "Promised", "has bound = 'by nothing'; write"),
        ("nothing", "Decided", "has is_decided = True; write is_decided = False"),
        (
            "pin_order",
            "Nothing",
            "must have a name that no pass of megamoe has, but has the name of one; write "
            "another name",
        ),
    ],
)
def test_what_is_no_rewrite_says_what_to_write(name, value, message):
    with pytest.raises(InvalidConfig, match=message) as raised:
        load_rewrites([entry(value, name)], NAMES)
    assert str(raised.value).startswith(f"entry point {name} = ")


def test_they_come_by_name_whatever_order_they_are_installed_in():
    entries = [entry("Nothing", name) for name in ("b", "a")]
    assert [e.name for e in checked(entries)] == ["a", "b"]


@pytest.mark.parametrize("name", ["Nothing", "no-thing", "1st", ""])
def test_a_name_is_in_snake_case(name):
    with pytest.raises(InvalidConfig, match="write a name in snake_case"):
        checked([entry("Nothing", name)])


def test_a_name_is_there_once():
    with pytest.raises(
        InvalidConfig, match=r"has the name of another entry point, from .*; write another name"
    ):
        checked([entry("Nothing"), entry("made")])


path = Path(__file__).parents[2] / "moe_compile/hardware/profiles/h800.toml"
text = str(path)


def a_path():
    return path


def rates(origins):
    numbers = dict.fromkeys(profile.RATES, 2.0)
    return profile.HardwareProfile(name="made", origins=origins, **numbers)


def stated():
    return rates(dict.fromkeys(profile.RATES, "assumed: for a test"))


def unstated():
    return rates({})


def found(value, name="ours"):
    return profile.made_of(EntryPoint(name, f"{__name__}:{value}", PROFILES))


@pytest.mark.parametrize("value", ["path", "text", "a_path"])
def test_a_profile_is_a_path_or_a_function_that_returns_one(value):
    assert found(value) == path


def test_a_profile_is_a_function_that_returns_rates_with_their_origins():
    assert found("stated").matmul_tflops == 2.0
    with pytest.raises(InvalidConfig, match=r"ours\.matmul_tflops: origin is None"):
        found("unstated")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ours", "made", "which is not a hardware profile; write the path of a TOML file"),
        ("h800", "path", "has the name of a profile of megamoe; write another name"),
    ],
)
def test_what_is_no_profile_says_what_to_write(name, value, message):
    with pytest.raises(InvalidConfig, match=message):
        found(value, name)


def test_the_identity_is_of_every_source_of_a_package_wherever_it_lies(tmp_path, monkeypatch):
    assert hash_of_packages() == ""
    found = []
    for number, (name, content) in enumerate(
        [("a.toml", "x = 1"), ("a.toml", "x = 1"), ("a.toml", "x = 2"), ("b.toml", "x = 1")]
    ):
        folder = tmp_path / str(number)
        inner = folder / "of_several_files" / "inner"
        inner.mkdir(parents=True)
        (inner.parent / "__init__.py").write_text("raise RuntimeError('nobody imports it')")
        (inner / name).write_text(content)
        add_distribution(
            folder, monkeypatch, "[megamoe.rewrites]\nhoist = of_several_files.inner:Hoist\n"
        )
        found.append(hash_of_packages())
    forget()
    assert found[0] == found[1] and len(set(found)) == 3
