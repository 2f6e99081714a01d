"""Where an order of rows may be cut."""

import sympy
from torch.utils._sympy.functions import FloorDiv

from moe_compile.regions.row_domain import Segment, Selected, UnknownIndex, cut

FIRST, SECOND = sympy.symbols("first second", integer=True, nonnegative=True)
ORDER = (Segment("run", FIRST, 0), Segment(Selected(UnknownIndex(), ()), SECOND, None))


def test_a_cut_behind_a_run_takes_it_whole():
    head, rest = cut(ORDER, [FIRST + FloorDiv(SECOND, 2)])
    assert [s.length for s in (*head, *rest)] == [
        FIRST, FloorDiv(SECOND, 2), SECOND - FloorDiv(SECOND, 2)
    ]  # fmt: skip


def test_a_cut_that_may_fall_inside_of_a_run_is_none():
    """A quotient counted as never negative, whatever it divides."""
    assert cut(ORDER, [FIRST + FloorDiv(SECOND - 5, 2)]) is None
