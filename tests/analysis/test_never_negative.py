"""Formulas that are at least zero by form, and those that may be less."""

import pytest
import sympy
from torch.utils._sympy.functions import FloorDiv, Max

from moe_compile.analysis.never_negative import is_never_negative

A, B = sympy.symbols("a b", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        (A + 2 * B, True),
        (A - B, False),
        (Max(A - B, A), True),
        (Max(A - B, B - 2 * A), False),
        (FloorDiv(A + B, 2), True),
        (FloorDiv(A - B, 2), False),
        (FloorDiv(A, sympy.Integer(2)) * (A - B), False),
    ],
)
def test_only_what_takes_nothing_away_is_never_negative(formula, expected):
    assert is_never_negative(formula) is expected
