"""A hardware profile of what was measured: links between ranks, and the rates of a device.

Contract
    What was not measured stays as the profile started from has it. Fits are left out. What is
    written loads.
    Within a machine measured numbers are the node's link, among several machines the network's;
    the slowdowns of compute and collectives side by side go to the link that all ranks have.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from moe_compile.check.links import link_of
from moe_compile.hardware.links import CTAS, NETWORK, NODE, spread_of
from moe_compile.hardware.profile import load_profile, read_profile
from moe_compile.hardware.sourced_file import dump_sourced, put_number

FILE: Final = "measured.toml"
DIGITS: Final = 3


def write_profile(
    out: Path,
    start: str,
    machine: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    beside: Mapping[str, float] | None = None,
    rates: Mapping[str, Any] | None = None,
) -> Path:
    """Write the profile into folder `out` and return its path.

    `rows` are of `links`, of all ranks that were measured together; `beside` has the `contention`
    and `overlap_slowdown` of the link that all ranks have, `rates` those of a device by their path
    in a profile. Raises LookupError where a collective was not measured.
    """
    sizes = sorted({row["ranks"] for row in rows})
    table = tomllib.loads(read_profile(start).path.read_text())
    table.pop("fit", None)
    table["name"] = Path(FILE).stem
    chip = machine["cpu"] if machine["gpu"].startswith("none") else machine["gpu"]
    origin = f"measured: {datetime.now(UTC).date()} on {chip}, torch {machine['torch']}"
    for path, value in (rates or {}).items():
        put_number(table, path, value, origin)
    for num_ranks in sizes:
        is_all = num_ranks == sizes[-1]
        name = NETWORK if is_all and len(sizes) > 1 else NODE
        numbers = link_of(rows, num_ranks)
        if name == NETWORK:  # the other bytes stay on a machine
            of_gathers = spread_of(num_ranks, sizes[0], is_gather=True).between
            numbers["gb_per_s"] *= spread_of(num_ranks, sizes[0], is_gather=False).between
            numbers["gather_gb_per_s"] *= of_gathers
        more = beside or {} if is_all else {}
        for path, value in _numbers(table, name, numbers, more).items():
            put_number(table, path, _short(value), f"{origin}, {num_ranks} ranks")
    for link in table.get("link", []) if beside else ():
        if "contention" in link:  # measured, in place of what follows from them
            link.pop(CTAS, None)
    file = out / FILE
    file.write_text(dump_sourced(table))
    load_profile(str(file))
    return file


def _numbers(
    table: Mapping[str, Any], name: str, numbers: Mapping[str, float], beside: Mapping[str, float]
) -> dict[str, float]:
    """Return what is measured of a link by its path in the profile."""
    found: dict[str, float] = {}
    places = [i for i, link in enumerate(table.get("link", [])) if link["name"] == name]
    if name == NETWORK or not places:  # the compiler's own link
        found |= {"link_gb_per_s": numbers["gb_per_s"], "link_latency_us": numbers["latency_us"]}
    for place in places:
        peak = table["link"][place]["gb_per_s"]["value"]
        found |= {
            f"link.{place}.exchange_share": min(numbers["gb_per_s"] / peak, 1.0),
            f"link.{place}.gather_share": min(numbers["gather_gb_per_s"] / peak, 1.0),
            f"link.{place}.latency_us": numbers["latency_us"],
            **{f"link.{place}.{key}": value for key, value in beside.items()},
        }
    return found


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
