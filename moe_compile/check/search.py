"""Find out what of several things makes a result wrong, by trials without some of them.

Contract
    A trial is asked once for each choice. Every one halves what is open: the number of trials grows
    with the logarithm of the number of things, times the number of culprits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

Trial = Callable[[frozenset[str]], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class Culprit:
    """The things without which a result is right."""

    names: tuple[str, ...]
    """The result is right without these, and wrong where one of them comes back."""
    right_up_to: str
    """The result is right with all things up to this one and none after; "": with none at all."""
    wrong_from: str
    """The next one, with which it is wrong."""


def find_culprit(names: Sequence[str], is_right: Trial) -> Culprit | None:
    """Return what of `names`, in their order, makes a result wrong; None where it is none of them.

    `is_right` tells whether the result is right without the given ones; with all of them it is
    known to be wrong. Of two that are wrong together alone it is the later one.
    """
    known = dict[frozenset[str], bool]({frozenset(): False})

    def tried(left_out: Collection[str]) -> bool:
        choice = frozenset(left_out)
        if choice not in known:
            known[choice] = is_right(choice)
        return known[choice]

    if not tried(names):
        return None
    before, others = dict[str, str](), list(names)
    while not tried(before):
        number = first_wrong(len(others), lambda kept: tried([*before, *others[kept:]]))
        last_right = others[number - 2] if number > 1 else ""
        before[others.pop(number - 1)] = last_right
    for one in [*before][:-1]:
        if tried(before.keys() - {one}):
            del before[one]
    first = next(iter(before))
    ordered = tuple(name for name in names if name in before)
    return Culprit(names=ordered, right_up_to=before[first], wrong_from=first)


def said_of(names: Sequence[str], left_out: Collection[str], what: str = "passes") -> str:
    """Return a choice in few words: "without b", or "with passes up to a"; "" for all of `names`.

    A choice has words of its own. `what` is a word for the names.
    """
    kept = [name for name in names if name not in left_out]
    if not kept:
        return f"without {what}"
    last = names.index(kept[-1])
    others = [name for name in names[:last] if name in left_out]
    if len(names) - last - 1 == 1 and not others:
        others = [names[-1]]
    without = f"without {', '.join(others)}" if others else ""
    if last == len(names) - 1 or others == [names[-1]]:
        return without
    return " ".join(filter(None, [f"with {what} up to {names[last]}", without]))


def first_wrong(number: int, is_right: Callable[[int], bool]) -> int:
    """Return k, from 1 to `number`: the result is right with the first k - 1 things, not with k.

    With none it is known to be right, and with all of them wrong.
    """
    right, wrong = 0, number
    while wrong - right > 1:
        middle = (right + wrong) // 2
        right, wrong = (middle, wrong) if is_right(middle) else (right, middle)
    return wrong
