"""Whether an option may have a value, and what to write instead.

Contract
    Each check returns where the value is allowed, and raises InvalidConfig where it is not.
"""

from __future__ import annotations

import math
from typing import Any, Final

from moe_compile.errors import InvalidConfig, nearest

AMOUNTS: Final = {
    "max_memory_increase": "a fraction of at least 0, as 0.05",
    "routing_skew": "0 for experts that are chosen evenly, else a number above it, as 0.5",
}
"""What to write of each amount."""


def check_number(name: str, chunks: object) -> None:
    """Raise InvalidConfig for anything but "auto" or a whole number of at least 1."""
    whole = isinstance(chunks, int) and not isinstance(chunks, bool) and chunks >= 1
    if not whole and chunks != "auto":
        raise InvalidConfig(
            f'megamoe.{name} is {chunks!r}; write "auto" or a whole number of at least 1'
        )


def check_chunk_by(chunk_by: str, slices: object, edges: str) -> None:
    """Raise InvalidConfig as `check_number`, and for what chunks of tokens do not have.

    There `chunks` is the number of slices, and no chunk of experts has `edges`.
    """
    check_number("hop_slices", slices)
    if edges == "load" and chunk_by == "tokens":
        raise InvalidConfig(
            f'megamoe.chunk_edges is {edges!r}, with chunk_by = "tokens", whose chunks have rows '
            "of all experts; leave out one of the two"
        )
    if slices not in ("auto", 1) and chunk_by == "tokens":
        raise InvalidConfig(
            f'megamoe.hop_slices is {slices}, with chunk_by = "tokens"; leave out chunk_by: '
            "megamoe.chunks then cuts the experts, and hop_slices hop 1"
        )


def check_amount(name: str, amount: Any) -> None:
    """Raise InvalidConfig for anything but a number of at least 0."""
    is_number = isinstance(amount, int | float) and not isinstance(amount, bool)
    if not is_number or not math.isfinite(amount) or amount < 0:
        raise InvalidConfig(f"megamoe.{name} is {amount!r}; write {AMOUNTS[name]}")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InvalidConfig for anything but one of `choices`."""
    if value not in choices:
        raise InvalidConfig(
            f"megamoe.{name} is {value!r}; write one of {', '.join(choices)}."
            + (nearest(value, choices) if isinstance(value, str) else "")
        )
