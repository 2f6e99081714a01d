"""What the option `strict` raises for: what was meant and asked for, and could not be proven.

Contract
    One rule for every pass: a verdict with the option that asked for it, and a reason that says it
    is meant and not proven. Nothing is raised for what is no region, for what is done already, or
    for what does not pay: the reasons say which they are.
"""

from __future__ import annotations

from moe_compile.config import OFF
from moe_compile.errors import RegionRefused
from moe_compile.journal.entries import Journal
from moe_compile.journal.remedies import to_do


def refuse_unmet(journal: Journal, where: str) -> None:
    """Raise RegionRefused for the first verdict of what an option asked for and did not get.

    `where` is the place in the user's source that is compiled, for verdicts without their own.
    """
    unmet = next((verdict for verdict in journal.verdicts() if verdict.is_unmet), None)
    if unmet is not None:
        option, off = f"megamoe.{unmet.option}", OFF[unmet.option][0]
        raise RegionRefused(
            f"{unmet.where or where}: {option} asks for what is not done to {unmet}. "
            f"{to_do(unmet.reason)}. Set {option} = {off!r}, or megamoe.strict = False, to run it "
            "as it is"
        )
