"""Links of a profile for the compiler: read from the tables of a file, and written as such.

Contract
    A link that is read, written and read again is the same, and so are its origins.
    A file states a peak and the share of it that exchanges reach; a `GroupLink` has their product.
    Written, that product is the peak and the share is 1. A gather share that nobody stated is 1.
    A link states its `contention`, measured, or the `ctas` that it follows from: blocks of NCCL's
    kernels hold an SM each, and compute has the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.sourced_file import SourcedFile

NODE: Final = "nvlink"
NETWORK: Final = "network"
NUMBERS: Final = ("num_ranks", "gb_per_s", "latency_us", "contention", "overlap_slowdown")
SHARES: Final = ("exchange_share", "gather_share")
COUNTED: Final = "computed: counted in gb_per_s"
CTAS: Final = "ctas"


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupLink:
    """The way between the ranks of one process group, per rank and direction, by all-to-all."""

    num_ranks: int = 0
    """Ranks it joins; 0 for any number."""
    gb_per_s: float
    latency_us: float
    contention: float = 0.0
    """Share by which compute slows while an exchange runs."""
    overlap_slowdown: float = 0.0
    """Share by which an exchange slows while compute runs."""
    gather_share: float | None = None
    """Rate of an all-gather or a reduce-scatter over `gb_per_s`; None where one rate is stated."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Number -> where it comes from; complete when it was loaded."""


def with_contention(file: SourcedFile) -> SourcedFile:
    """Return `file`, its links with the contention that follows from their CTAs, where stated.

    Raises InvalidConfig where a GPU has no more SMs than that.
    """
    origins, links = dict(file.origins), []
    num_sms = file.values.get("compute", {}).get("num_sms", 0)
    for i, stated in enumerate(file.values.get("link", ())):
        link = {name: value for name, value in stated.items() if name != CTAS}
        origin = origins.pop(f"link.{i}.{CTAS}", "")
        if CTAS in stated and "contention" not in link:
            if not 0 <= stated[CTAS] < num_sms:
                raise InvalidConfig(
                    f"megamoe.hardware: {file.path}: link {link['name']} has {stated[CTAS]} ctas, "
                    f"and compute.num_sms is {num_sms}; write fewer, or contention"
                )
            link["contention"] = num_sms / (num_sms - stated[CTAS]) - 1.0
            of_sms = origins["compute.num_sms"]
            origins[f"link.{i}.contention"] = (
                f"computed: num_sms ({of_sms}) over num_sms less ctas ({origin}), less 1"
            )
        links.append(link)
    values = {**file.values, "link": links} if links else file.values
    return SourcedFile(path=file.path, values=values, origins=origins)


def tables_in(file: SourcedFile) -> dict[str, tuple[Mapping[str, Any], dict[str, str]]]:
    """Return the tables of a file's links by name, each with the origins of its numbers."""
    tables = enumerate(file.values.get("link", ()))
    return {
        table["name"]: (table, {n: file.origins[f"link.{i}.{n}"] for n in table if n != "name"})
        for i, table in tables
    }


def node_link(table: Mapping[str, Any], origins: Mapping[str, str], path: Path) -> GroupLink:
    """Return the link of a node; raise InvalidConfig where its table lacks a number."""
    if missing := sorted({*NUMBERS, *SHARES} - set(table)):
        raise InvalidConfig(
            f"megamoe.hardware: {path}: link {NODE} has no {missing[0]}; write it and its origin"
        )
    return GroupLink(
        **{name: table[name] for name in NUMBERS if name != "gb_per_s"},
        gb_per_s=table["gb_per_s"] * table["exchange_share"],
        gather_share=gather_share(table),
        origins={
            **{name: origins[name] for name in NUMBERS},
            "gb_per_s": _computed("gb_per_s", "times", table, origins),
            "gather_share": _computed("gather_share", "over", table, origins),
        },
    )


def network_origins(table: Mapping[str, Any], origins: Mapping[str, str]) -> dict[str, str]:
    """Return the origins of what a profile has of the link between nodes, by its own names."""
    own = {name: origins[name] for name in ("contention", "overlap_slowdown") if name in table}
    own["gather_share"] = _computed("gather_share", "over", table, origins)
    return {f"inter_node_{name}": origin for name, origin in own.items()}


def gather_share(table: Mapping[str, Any]) -> float:
    """Return the rate of gathers over that of exchanges."""
    return float(table["gather_share"] / table["exchange_share"])


def _computed(name: str, how: str, table: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """Return the origin of a number that the share of exchanges is part of."""
    if table["exchange_share"] == 1.0:
        return origins[name]
    return f"computed: {name} ({origins[name]}) {how} exchange_share ({origins['exchange_share']})"


def link_table(
    name: str, numbers: Mapping[str, float | None], origins: Mapping[str, str]
) -> dict[str, Any]:
    """Return the table of a link, its numbers beside their origins, for `dump_sourced`."""
    told = {
        number: {"value": 1.0 if value is None else value, "origin": origins.get(number)}
        for number, value in numbers.items()
    }
    return {"name": name, **told, "exchange_share": {"value": 1.0, "origin": COUNTED}}


def node_table(link: GroupLink) -> dict[str, Any]:
    """Return the table of a node's link."""
    numbers = {name: getattr(link, name) for name in (*NUMBERS, "gather_share")}
    return link_table(NODE, numbers, link.origins)
