"""Every error megamoe raises on purpose."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MegaMoEError(Exception):
    """Base class of megamoe's errors; catch it to catch them all."""


class InvalidConfig(MegaMoEError, ValueError):
    """The user asked for something impossible. Names the field and the fix."""


class ContractViolation(MegaMoEError):
    """megamoe broke its own rule: a bug. Names the pass and the node."""


class RegionRefused(MegaMoEError):
    """`strict=True` and a matched region could not be transformed. Names the region and why."""


class RankDisagreement(MegaMoEError):
    """Ranks launch different collectives; running on would corrupt data silently."""


class SecondOrderGradient(MegaMoEError, RuntimeError):
    """A gradient of gradients, which no compiled program has."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the closest of `known`, or the list when none is close."""
    names = sorted(known)
    return _closest(word, names) or f" Known: {', '.join(names)}."


def listed(word: str, known: Iterable[str]) -> str:
    """Return `a, b, c.` of `known`, and the closest where one is close."""
    names = list(known)
    return f"{', '.join(names)}.{_closest(word, names)}"


def _closest(word: str, names: list[str]) -> str:
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""
