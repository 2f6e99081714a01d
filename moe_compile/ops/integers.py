"""Integers of a vector on the host, all by one call.

Contract
    `integers(vector, places)` is `[int(vector[place]) for place in places]`; the vector is on the
    host.
"""

from __future__ import annotations

from typing import Final

import torch

LIBRARY: Final = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define("integers(Tensor vector, int[] places) -> SymInt[]")


def _integers(vector: torch.Tensor, places: list[int]) -> list[int]:
    listed = vector.tolist()
    return [listed[place] for place in places]


def _unknown_integers(vector: torch.Tensor, places: list[int]) -> list[int]:
    """Return new symbols, any integers, as a tracer does for `.item()`."""
    return [vector[place].item() for place in places]


LIBRARY.impl("integers", _integers, "CPU")
torch.library.register_fake("megamoe::integers", _unknown_integers, lib=LIBRARY)
INTEGERS: Final = torch.ops.megamoe.integers.default
