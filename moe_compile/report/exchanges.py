"""Each exchange of a compilation in one line: found, or not found, why, and what to change.

Contract
    A dispatch and its combine are one entry, at the line of the dispatch; exchanges of counts and
    collectives that are no all-to-all are none.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from moe_compile.report.compilations import Compilation
from moe_compile.report.region_reports import (
    ALL_GATHERED,
    CHUNKED,
    IN_TWO_HOPS,
    LEFT_WHOLE,
    RegionReport,
)

NAMES: Final = {
    "counts": "dispatch and combine",
    "capacity": "dispatch and combine by capacity",
}
"""What says how many rows an expert gets -> what the two collectives of a region are."""
FRAME: Final = re.compile(r'File "[^"]*?([^/"]+)", line (\d+), in (\w+)')
"""A line of the user's source as Dynamo notes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """What became of one exchange."""

    where: str
    """`file.py:line in function`."""
    is_found: bool
    """Whether it is the dispatch of a MoE region, or moves heads around attention."""
    what: str
    """What it was found to be, and what is done with it; "" where it was not found."""
    because: str = ""
    """Why it was not found, or why it is left whole."""
    change: str = ""
    """What to do about that; "" where nothing is wrong."""


def exchanges_of(compilation: Compilation) -> list[Exchange]:
    """Return the exchanges of a compilation, those of regions first."""
    found = [
        *map(_of_region, compilation.regions),
        *(
            Exchange(
                where=a.where,
                is_found=True,
                what=f"attention between exchanges, {a.num_heads} heads on each of {a.num_ranks} "
                f"ranks; runs in {_chunks(a.num_chunks)}",
                because="" if a.verdict == CHUNKED else a.verdict,
            )
            for a in compilation.attention
            if a.is_region
        ),
        *(
            Exchange(
                where=left.where,
                is_found=False,
                what="",
                because=_short(left.why),
                change=left.remedy,
            )
            for left in compilation.unmatched
        ),
    ]
    return list(dict.fromkeys(found))


def _of_region(region: RegionReport) -> Exchange:
    is_rewritten = region.verdict in (CHUNKED, ALL_GATHERED, IN_TWO_HOPS)
    why = region.remarks if region.verdict == LEFT_WHOLE else (region.verdict, *region.remarks)
    done = f"runs in {_chunks(region.num_chunks)}"
    if region.verdict in (ALL_GATHERED, IN_TWO_HOPS):
        done = region.verdict
    what = NAMES[region.sized_by]
    return Exchange(
        where=region.where,
        is_found=True,
        what=f"{what}, {region.num_local_experts} experts on each of "
        f"{region.num_ranks} ranks; {done}",
        because="" if is_rewritten else _short("; ".join(why)),
        change=region.remedy,
    )


def _short(why: str) -> str:
    """Return `why` with lines of source as `file.py:line in function`."""
    return FRAME.sub(r"\1:\2 in \3", why)


def _chunks(number: int) -> str:
    return f"{number} chunks" if number > 1 else "one piece"
