"""Why no test notices some changes: they change no behaviour, or none that could do harm.

Contract
    Keys are a module and a change as `operators.py` writes it. An entry is consulted only for a
    mutant that the tests let pass.
"""

from __future__ import annotations

from typing import Final

Key = tuple[str, str]

EQUIVALENT: Final[dict[Key, str]] = {}
"""No input can tell the changed source from the one written."""

HARMLESS: Final[dict[Key, str]] = {}
"""Behaviour differs, and the tests do not show it; they count as survivors."""
