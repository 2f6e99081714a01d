"""Which changes are made to a source, and that each is made alone."""

import ast

import pytest

from tests.mutants import report
from tests.mutants.draw import drawn
from tests.mutants.equivalent import EQUIVALENT, HARMLESS
from tests.mutants.operators import mutate, points
from tests.mutants.report import Result, Verdict, is_enough, killed_share
from tests.mutants.sandbox import ROOT, Outcome
from tests.mutants.suites import GROUPS


def changed(source):
    """Return the changed sources, in any order."""
    return {mutate(source, p) for p in points(source)}


@pytest.mark.parametrize(
    "source, others",
    [
        ("if a:\n    f = b", {"if not a:\n    f = b"}),
        ("x = [a for a in b if c]", {"x = [a for a in b if not c]"}),
        ("x = a if b else c", {"x = a if not b else c"}),
        ("x = a < b <= c", {"x = a <= b <= c", "x = a < b < c"}),
        ("if not a:\n    f = b", {"if a:\n    f = b"}),
        ("x = a and b", {"x = a or b"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = a is b", {"x = a is not b"}),
        ("x = a == b", {"x = a != b"}),
        ("x = a | b", {"x = a & b"}),
        ("x -= a", {"x += a"}),
        ("x = a[0]", {"x = a[1]"}),
        ("x = f(k=True)", {"x = f(k=False)"}),
        ("x = any(a)", {"x = all(a)"}),
        ("x = max(a, b)", {"x = min(a, b)"}),
        ("f(a)", {"pass"}),
        ("raise Wrong(1 + 2)", {"pass"}),
    ],
)
def test_a_source_has_exactly_these_wrong_versions(source, others):
    assert changed(source) == others


@pytest.mark.parametrize(
    "source",
    [
        '"""A docstring."""',
        "assert a < 3",
        "x: int | None = a",
        "def f(x: int | str) -> int | None:\n    return x",
        "@keep(3)\ndef f():\n    return x",
        "if TYPE_CHECKING:\n    import a",
        "x = isinstance(a, int | str)",
        "x = f'{a + 1}'",
        "x = a + [b]",
    ],
)
def test_what_decides_nothing_is_not_changed(source):
    assert not points(source)


def test_every_change_of_the_product_compiles_and_differs():
    for module in [m for group in GROUPS for m in group.modules]:
        source = (ROOT / module).read_text()
        found = points(source)
        assert found
        plain = ast.unparse(ast.parse(source))
        for point in found[::40]:
            other = mutate(source, point)
            compile(other, module, "exec")
            assert other != plain, point


def test_mutants_are_a_function_of_the_seed_and_spread_over_all_modules():
    num_modules = sum(len(group.modules) for group in GROUPS)
    mutants = drawn(GROUPS, 3, 2 * num_modules)
    assert mutants == drawn(GROUPS, 3, 2 * num_modules)
    assert mutants != drawn(GROUPS, 4, 2 * num_modules)
    assert all(sum(m.module == one.module for m in mutants) == 2 for one in mutants)


def test_tests_and_modules_of_every_group_exist():
    assert all(
        (ROOT / path.split("::")[0]).exists() for g in GROUPS for path in (*g.modules, *g.tests)
    )


def test_every_explanation_is_of_a_change_that_can_be_made():
    """Else it has outlived the line that it spoke of."""
    for module, line, change in [*EQUIVALENT, *HARMLESS]:
        source = (ROOT / module).read_text()
        lines = [p.line for p in points(source) if p.change == change]
        assert line in {source.splitlines()[at - 1].strip() for at in lines}, (module, line)


def test_equivalent_changes_do_not_count_and_explained_survivors_do(monkeypatch):
    monkeypatch.setattr(report, "EQUIVALENT", {})
    monkeypatch.setattr(report, "HARMLESS", {})
    mutants = drawn(GROUPS, 0, 20)
    results = [Result(m, Outcome(passed=i < 2, cpu_s=1.0, said="")) for i, m in enumerate(mutants)]
    assert killed_share(results) == 0.9
    assert not is_enough(results)
    equivalent, harmless = (r.key for r in results[:2])
    monkeypatch.setitem(report.EQUIVALENT, equivalent, "same")
    monkeypatch.setitem(report.HARMLESS, harmless, "only slower")
    assert [r.verdict for r in results[:3]] == [
        Verdict.EQUIVALENT,
        Verdict.EXPLAINED,
        Verdict.KILLED,
    ]
    assert killed_share(results) == 18 / 19
    assert is_enough(results)
