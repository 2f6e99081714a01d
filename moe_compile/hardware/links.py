"""Links of a profile, read from tables of a file and written as such; a collective's bytes on them.

Contract
    A link that is read, written and read again is the same, and so are its origins.
    A link states its `contention`, measured, or the `ctas` that it follows from: blocks of NCCL's
    kernels hold an SM each, and compute has the others.
    `spread_of` is pure arithmetic on a group's size, shared by the compiler's estimates, the
    planner's prices and the cluster simulator. A group no larger than a node is taken to lie within
    one; a larger one fills nodes.

Formulas: n ranks, g per node, shares of the bytes that leave a rank; both ways run at once
    all-to-all                   every other rank is sent the same: g - 1 of n - 1 within the node,
                                 the rest over the network, each row once per expert there
    all-gather, reduce-scatter   data that enters a node enters once, by one of its g adapters, and
                                 goes round within it: n - g of g (n - 1) over the network,
                                 n (g - 1) of g (n - 1) within
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.sourced_file import SourcedFile

NODE: Final = "nvlink"
NETWORK: Final = "network"
CTAS: Final = "ctas"
US_PER_GB_PER_S: Final = 1e-3
"""Microseconds a byte takes at 1 GB/s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The path between the ranks of one process group, per rank and direction."""

    num_ranks: int = 0
    """Ranks it joins; 0 for any number."""
    gb_per_s: float
    """Its peak rate, or the rate of an all-to-all where no share of a peak is stated."""
    exchange_share: float = 1.0
    """Share of the peak that an all-to-all reaches."""
    gather_share: float | None = None
    """Share of the peak that all-gather and reduce-scatter reach; None where one rate is stated."""
    latency_us: float
    contention: float = 0.0
    """Share by which compute slows while a collective runs: its kernels hold SMs."""
    overlap_slowdown: float = 0.0
    """Share by which a collective slows while compute runs."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Number -> its origin; complete when it was loaded."""

    @property
    def exchange_gb_per_s(self) -> float:
        """Return the rate of an all-to-all."""
        return self.gb_per_s * self.exchange_share

    @property
    def gather_gb_per_s(self) -> float:
        """Return the rate of an all-gather or a reduce-scatter."""
        return self.gb_per_s * (self.gather_share or self.exchange_share)

    @property
    def gather_over_exchange(self) -> float | None:
        """Return the rate of gathers over that of exchanges; None where one rate is stated."""
        return None if self.gather_share is None else self.gather_share / self.exchange_share


NUMBERS: Final = tuple(one.name for one in fields(Link) if one.name != "origins")


@dataclass(frozen=True, kw_only=True, slots=True)
class HostLink:
    """The path between a GPU and its pinned host memory, one direction.

    Copies are taken to slow neither compute nor collectives, and not to be slowed: copy engines
    hold no SM. On most machines network adapters share a PCIe switch with GPUs, and then both are
    slower where they send at once; a profile's rate leaves room for it or not, as its origin says.
    """

    gb_per_s: float
    """Achieved rate of a large copy."""
    latency_us: float
    """Time of an empty copy."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Number -> its origin; complete when it was loaded."""

    def copy_us(self, nbytes: float) -> float:
        """Return the time of one copy of so many bytes."""
        return self.latency_us + sent_us(nbytes, self.gb_per_s)


HOST_LINK: Final = "host_link"
HOST_LINK_NUMBERS: Final = ("gb_per_s", "latency_us")


def host_link_in(file: SourcedFile) -> HostLink | None:
    """Return the link to the host that a profile's file states; None where it has no such table.

    Raises InvalidConfig where the table has other numbers, or a rate that is not above 0.
    """
    table = file.values.get(HOST_LINK)
    if table is None:
        return None
    if set(table) != set(HOST_LINK_NUMBERS) or not table["gb_per_s"] > 0:
        raise InvalidConfig(
            f"megamoe.hardware: {file.path}: table {HOST_LINK} must have the numbers "
            f"{' and '.join(HOST_LINK_NUMBERS)}, with a rate above 0; got {dict(table)}"
        )
    origins = {name: file.origins[f"{HOST_LINK}.{name}"] for name in HOST_LINK_NUMBERS}
    return HostLink(**{name: float(table[name]) for name in HOST_LINK_NUMBERS}, origins=origins)


def host_link_table(link: HostLink) -> dict[str, Any]:
    """Return the table of a link to the host, its numbers beside their origins."""
    return {
        name: {"value": getattr(link, name), "origin": link.origins.get(name)}
        for name in HOST_LINK_NUMBERS
    }


def sent_us(nbytes: float, gb_per_s: float) -> float:
    """Return the time of so many bytes at a rate."""
    return nbytes / gb_per_s * US_PER_GB_PER_S


def with_contention(file: SourcedFile) -> SourcedFile:
    """Return `file`, its links with the contention that follows from their CTAs, where stated.

    Raises InvalidConfig where a GPU has no more SMs than CTAs.
    """
    origins, links = dict(file.origins), []
    num_sms = file.values.get("compute", {}).get("num_sms", 0)
    for i, stated in enumerate(file.values.get("link", ())):
        link = {name: value for name, value in stated.items() if name != CTAS}
        origin = origins.pop(f"link.{i}.{CTAS}", "")
        if CTAS in stated and "contention" not in link:
            if not 0 <= stated[CTAS] < num_sms:
                raise InvalidConfig(
                    f"megamoe.hardware: {file.path}: link {link['name']} has {stated[CTAS]} "
                    f"ctas, but must have fewer than compute.num_sms, which is {num_sms}; write "
                    "fewer ctas, or write contention in place of ctas"
                )
            link["contention"] = num_sms / (num_sms - stated[CTAS]) - 1.0
            of_sms = origins["compute.num_sms"]
            origins[f"link.{i}.contention"] = (
                f"computed: num_sms ({of_sms}) over num_sms less ctas ({origin}), less 1"
            )
        links.append(link)
    values = {**file.values, "link": links} if links else file.values
    return SourcedFile(path=file.path, values=values, origins=origins)


def links_in(file: SourcedFile) -> dict[str, Link]:
    """Return the links of a file by name; raise InvalidConfig where a table has wrong numbers."""
    found = {}
    for i, table in enumerate(file.values.get("link", ())):
        name, numbers = table["name"], {key: n for key, n in table.items() if key != "name"}
        if missing := sorted(set(NUMBERS) - set(numbers)):
            raise InvalidConfig(
                f"megamoe.hardware: {file.path}: link {name} must have {missing[0]}, and has "
                "not; write its value and its origin"
            )
        for key, number in numbers.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if key not in NUMBERS or not is_number or number < 0:
                raise InvalidConfig(
                    f"megamoe.hardware: {file.path}: link {name}: {key} is {number!r}; write "
                    f"{', '.join(NUMBERS)}, numbers of at least 0"
                )
        origins = {key: file.origins[f"link.{i}.{key}"] for key in NUMBERS}
        found[name] = Link(**numbers, origins=origins)
    return found


def link_table(name: str, link: Link) -> dict[str, Any]:
    """Return the table of a link, its numbers beside their origins, for `dump_sourced`."""
    numbers = {number: getattr(link, number) for number in NUMBERS}
    if link.gather_share is None:
        numbers["gather_share"] = link.exchange_share
    told = {n: {"value": value, "origin": link.origins.get(n)} for n, value in numbers.items()}
    return {"name": name, **told}


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Shares of the bytes that leave a rank, by link."""

    within: float
    """Share over the link of its node."""
    between: float
    """Share over the network."""


def spread_of(num_ranks: int, node_ranks: int, *, is_gather: bool) -> Spread:
    """Return the links that the bytes of a collective take: an all-to-all, or a gather.

    `node_ranks` share a node, 1 where a profile has one link alone. In a group of unknown size (0)
    all bytes go over the network.
    """
    if node_ranks > 1 and 0 < num_ranks <= node_ranks:
        return Spread(within=1.0, between=0.0)
    if num_ranks <= 1:
        return Spread(within=0.0, between=1.0)
    others = num_ranks - 1
    if not is_gather:
        within = (node_ranks - 1) / others
        return Spread(within=within, between=1.0 - within)
    return Spread(
        within=num_ranks * (node_ranks - 1) / (node_ranks * others),
        between=(num_ranks - node_ranks) / (node_ranks * others),
    )


def leaving_share(num_ranks: int) -> float:
    """Return the share of a payload that leaves a rank, routed evenly; all where n is 0."""
    return (num_ranks - 1) / num_ranks if num_ranks else 1.0
