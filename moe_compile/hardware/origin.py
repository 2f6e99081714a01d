"""Where a number comes from; a number of a profile without an origin is refused.

Contract
    An origin is `kind: text`. A measurement names its day and its machine, a fit what it fits.
"""

from __future__ import annotations

import enum
import re
from typing import Final

from moe_compile.errors import InvalidConfig, nearest


class Kind(enum.Enum):
    """How a number came about, from the most to the least reliable."""

    MEASURED = "measured"
    DATASHEET = "datasheet"
    LITERATURE = "literature"
    FITTED = "fitted"
    COMPUTED = "computed"
    ASSUMED = "assumed"


MUST_SAY: Final = {
    Kind.MEASURED: (r"\d{4}-\d{2}-\d{2}.* on ", "the day and the machine: measured: 2026-01-31 on"),
    Kind.FITTED: (r"\bon ", "what it was fitted on: fitted: on"),
}
"""Kind -> what its text must match, and how to ask for it."""


def check_origin(number: str, origin: object) -> Kind:
    """Return the kind of `origin`; raise InvalidConfig when it says too little for `number`."""
    if not isinstance(origin, str) or not origin.partition(":")[2].strip():
        kinds = ", ".join(kind.value for kind in Kind)
        raise InvalidConfig(f"{number}: origin is {origin!r}; write one of {kinds}, `: `, and why")
    word, _, text = origin.partition(":")
    if word not in {kind.value for kind in Kind}:
        known = nearest(word, [kind.value for kind in Kind])
        raise InvalidConfig(f"{number}: {word!r} is no kind of origin.{known}")
    kind = Kind(word)
    pattern, wanted = MUST_SAY.get(kind, ("", ""))
    if not re.search(pattern, text):
        raise InvalidConfig(f"{number}: origin {origin!r} must say {wanted} ...")
    return kind
