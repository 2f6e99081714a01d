"""Choices of storages within a budget, against all choices there are."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from moe_compile.recompute.cut import around
from moe_compile.recompute.fill_budget import filling
from moe_compile.recompute.storages import Step, Storages

KINDS = ("choice", "choice", "choice", "never", "forced")


def program(*steps, needed):
    """Return storages of steps (reads, bytes, kind), each of which makes one."""
    return Storages(
        steps=tuple(
            Step(
                name=str(number),
                makes=(number,),
                reads=tuple(reads),
                is_free_to_choose=kind == "choice",
                is_forced=kind == "forced",
            )
            for number, (reads, _, kind) in enumerate(steps)
        ),
        nbytes=tuple(nbytes for _, nbytes, _ in steps),
        made_by=tuple(range(len(steps))),
        needed=tuple(needed),
        places={},
    )


@st.composite
def programs(draw):
    """Return a program of a few steps, and prices."""
    number = draw(st.integers(2, 6))
    steps = [
        (
            sorted(draw(st.sets(st.integers(0, i - 1), max_size=2))) if i else [],
            draw(st.integers(1, 9)),
            draw(st.sampled_from(KINDS)) if i else "choice",
        )
        for i in range(number)
    ]
    needed = sorted(draw(st.sets(st.integers(0, number - 1), min_size=1)))
    return program(*steps, needed=needed), [draw(st.integers(1, 9)) for _ in steps]


def all_choices(storages, ns):
    numbers = range(len(storages.nbytes))
    subsets = (set(s) for n in range(len(numbers) + 1) for s in itertools.combinations(numbers, n))
    return [storages.kept(chosen, ns) for chosen in subsets]


@given(made=programs(), budget=st.integers(0, 40))
def test_no_choice_lies_below_the_line_between_the_cuts_around_a_budget(made, budget):
    storages, ns = made
    below, above = around(storages, ns, budget)
    choices = all_choices(storages, ns)
    assert below in choices and above in choices
    if below == above:
        least, fastest = min(c.nbytes for c in choices), min(c.again_ns for c in choices)
        is_least = budget < least == below.nbytes
        assert is_least or (below.nbytes <= budget and below.again_ns == fastest)
        return
    assert below.nbytes <= budget < above.nbytes
    worth, price = below.again_ns - above.again_ns, above.nbytes - below.nbytes
    sums = [worth * c.nbytes + price * c.again_ns for c in (below, above, *choices)]
    assert sums[0] == sums[1] == min(sums)


@given(made=programs(), budget=st.integers(0, 40))
def test_choices_fit_where_any_does_and_the_first_is_as_fast_as_the_cut(made, budget):
    storages, ns = made
    found = filling(storages, ns, budget, 3)
    below, _ = around(storages, ns, budget)
    fits = any(c.nbytes <= budget for c in all_choices(storages, ns))
    assert all((one.nbytes <= budget) is fits for one in found)
    assert found[0].again_ns <= below.again_ns and 1 <= len(found) <= 3
    assert found == sorted(found, key=lambda one: one.again_ns)


def test_a_budget_between_two_cuts_is_used_up():
    """The cuts keep 9 bytes or 1; with 8 the best keeps the dearest two of three."""
    steps = [((), 1, "never"), ((0,), 3, "choice"), ((0,), 3, "choice"), ((0,), 3, "choice")]
    storages = program(*steps, needed=(1, 2, 3))
    ns = [0, 30, 31, 32]
    assert [kept.nbytes for kept in around(storages, ns, 8)] == [1, 9]
    (best, *_) = filling(storages, ns, 8, 4)
    assert (best.storages, best.nbytes, best.again_ns) == ({0, 2, 3}, 7, 30)
    dear = program(*((r, 2 * b, k) for r, b, k in steps[:3]), ((0,), 5, "choice"), needed=(1, 2, 3))
    (best, *_) = filling(dear, [0, 60, 60, 10], 13, 4)
    assert (best.storages, best.again_ns) == ({0, 1, 3}, 60)


def test_what_is_computed_again_for_two_readers_takes_its_time_once():
    """0 makes 1; 2 and 3 read it: dropped together they run 1 once."""
    steps = [((), 1, "never"), ((0,), 8, "choice"), ((1,), 8, "choice"), ((1,), 8, "choice")]
    storages = program(*steps, needed=(2, 3))
    kept = storages.kept({0}, [0, 100, 10, 10])
    assert (kept.again, kept.nbytes, kept.again_ns) == ({1, 2, 3}, 1, 120)
