"""Why a candidate is left as it is: raised where a proof ends, or returned in place of a find.

Contract
    Carries a reason from the closed list, and the operator or value that it is for.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_compile.journal.reasons import Reason


@dataclass(unsafe_hash=True, slots=True)
class Left(Exception):
    """A candidate is left as it is, for a reason."""

    reason: Reason
    detail: str = ""
    """The operator or value that the reason is for, "" where there is none."""

    def __str__(self) -> str:
        """Return `reason (detail)`."""
        return self.reason.said(self.detail)
