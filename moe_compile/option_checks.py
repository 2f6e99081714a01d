"""Whether an option may have a value, and what to write instead.

Contract
    Each check returns where the value is allowed, and raises InvalidConfig where it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from moe_compile.errors import InvalidConfig, nearest

NOT_BUILT: Final[Mapping[str, tuple[str, ...]]] = {
    "batch_parts": ("auto",),
}
"""Known values whose pass this version does not have."""


def check_chunks(name: str, chunks: object) -> None:
    """Raise InvalidConfig for anything but "auto" or a whole number of at least 1."""
    whole = isinstance(chunks, int) and not isinstance(chunks, bool) and chunks >= 1
    if not whole and chunks != "auto":
        raise InvalidConfig(
            f'megamoe.{name} is {chunks!r}; write "auto" or a whole number of at least 1'
        )


def check_parts(parts: object) -> None:
    """Raise InvalidConfig for anything but a whole number of at least 1."""
    if parts in NOT_BUILT["batch_parts"]:
        raise InvalidConfig(
            f"megamoe.batch_parts = {parts!r} is not available in this version; "
            "write a whole number of at least 1"
        )
    if type(parts) is not int or parts < 1:
        raise InvalidConfig(f"megamoe.batch_parts is {parts!r}; write a whole number of at least 1")


def check_share(share: Any) -> None:
    """Raise InvalidConfig for anything but a fraction of at least 0."""
    is_number = isinstance(share, int | float) and not isinstance(share, bool)
    if not is_number or not math.isfinite(share) or share < 0:
        raise InvalidConfig(
            f"megamoe.max_memory_increase is {share!r}; write a fraction of at least 0, as 0.05"
        )


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InvalidConfig for anything but one of `choices` that is built."""
    if value not in choices:
        raise InvalidConfig(
            f"megamoe.{name} is {value!r}; write one of {', '.join(choices)}."
            + (nearest(value, choices) if isinstance(value, str) else "")
        )
    if value in NOT_BUILT.get(name, ()):
        built = [c for c in choices if c not in NOT_BUILT[name]]
        raise InvalidConfig(
            f"megamoe.{name} = {value!r} is not available in this version; "
            f"write one of {', '.join(built)}"
        )
