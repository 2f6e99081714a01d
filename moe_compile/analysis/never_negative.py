"""Which formulas in counts and sizes are at least zero, told by their form.

Contract
    Counts and sizes are never negative. A formula from which something is taken away may be, also
    inside of a quotient.
"""

from __future__ import annotations

import sympy
from torch.utils._sympy.functions import FloorDiv, Max


def is_never_negative(formula: sympy.Expr) -> bool:
    """Whether `formula` is at least zero by form: made of counts and sizes, nothing taken away."""
    if formula.is_nonnegative:
        return True
    if isinstance(formula, sympy.Add | sympy.Mul):
        return all(is_never_negative(part) for part in formula.args)
    if isinstance(formula, Max | sympy.Max):
        return any(is_never_negative(part) for part in formula.args)
    if isinstance(formula, FloorDiv):
        numerator, divisor = formula.args
        return bool(divisor.is_positive) and is_never_negative(numerator)
    return False
