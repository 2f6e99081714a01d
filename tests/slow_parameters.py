"""Which of a test's parameters every test run tries, and which the slow ones alone."""

import pytest


def slow_but(quick, everything):
    """Return `everything` as parameters, marked slow where not in `quick`; a tuple is several."""
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=marks)
        for x in everything
        for marks in [() if x in quick else pytest.mark.slow]
    ]
