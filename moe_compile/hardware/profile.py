"""Hardware rates that the time estimates divide by.

Contract
    A profile is data: the same on every rank that names it, never measured on the spot.
    NVML is asked once which one holds, or the user says it; no GPU means the `cpu` profile.
    A profile with a number whose origin is not stated does not load.
    Other distributions add profiles under names of their own (docs/extend.md).

Host costs are the time of the thread that runs compiled code, in microseconds: reads, integers,
launches, kernels. All are zero where the host is the device, or is taken to run ahead of it for
ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Final, Self

from moe_compile.entry_points import PROFILES as OUTSIDE
from moe_compile.entry_points import installed, load, unusable
from moe_compile.errors import InvalidConfig, listed
from moe_compile.hardware.detect import detected_profile
from moe_compile.hardware.links import (
    HOST_LINK,
    NETWORK,
    NODE,
    HostLink,
    Link,
    host_link_in,
    host_link_table,
    link_table,
    links_in,
    with_contention,
)
from moe_compile.hardware.products import TABLE, Compute, compute_in, compute_table
from moe_compile.hardware.sourced_file import (
    SourcedFile,
    check_origin,
    dump_sourced,
    read_sourced,
    sourced_lines,
)

HOST: Final = "host"


@dataclass(frozen=True, kw_only=True, slots=True)
class HostCosts:
    """Microseconds of the host."""

    read_us: float = 0.0
    """Time of a read of the device, once all work queued before it is done."""
    integer_us: float = 0.0
    """Time of one integer that compiled code takes out of a tensor it read."""
    launch_us: float = 0.0
    """Time to launch a collective, an all-to-all too."""
    launch_us_per_rank: float = 0.0
    """More time of an all-to-all, per rank of its group: two sizes, a send and a receive."""
    kernel_us: float = 0.0
    """Time of one kernel that compiled code launches."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Number -> its origin; complete when it was loaded."""

    def scaled(self, factor: float) -> Self:
        """Return the costs of a host that takes `factor` times as long."""
        return replace(self, **{name: getattr(self, name) * factor for name in NUMBERS})


NUMBERS: Final = tuple(f.name for f in fields(HostCosts) if f.name != "origins")

NO_HOST: Final = HostCosts()


def host_in(file: SourcedFile) -> HostCosts:
    """Return the host costs that a profile's file states; zero where it has no such table.

    Raises InvalidConfig where the table lacks a number, or has another.
    """
    table = file.values.get(HOST)
    if table is None:
        return NO_HOST
    if wrong := sorted(set(NUMBERS) ^ set(table)):
        raise InvalidConfig(
            f"megamoe.hardware: {file.path}: table {HOST} must have exactly the keys "
            f"{sorted(NUMBERS)}; missing or unknown: {wrong}"
        )
    origins = {name: file.origins[f"{HOST}.{name}"] for name in NUMBERS}
    return HostCosts(**{name: float(table[name]) for name in NUMBERS}, origins=origins)


def host_table(host: HostCosts) -> dict[str, Any]:
    """Return the table of these costs, its numbers beside their origins, for `dump_sourced`."""
    return {
        name: {"value": getattr(host, name), "origin": host.origins.get(name)} for name in NUMBERS
    }


PROFILES: Final = Path(__file__).parent / "profiles"
RATES: Final = (
    "matmul_tflops",
    "memory_gb_per_s",
    "op_overhead_us",
    "link_gb_per_s",
    "link_latency_us",
)
CLUSTER_TABLES: Final = frozenset({"compute", "memory", "link", "fit"})
"""Tables that `moe_compile.hardware.cluster` reads from the same file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareProfile:
    """Achievable rates of one device and of its link to the other ranks of a group."""

    name: str
    """Name that reports print."""
    matmul_tflops: float
    """Achieved matrix multiply rate, 1e12 floating-point operations per second."""
    memory_gb_per_s: float
    """Achieved device memory bandwidth, 1e9 bytes per second."""
    op_overhead_us: float
    """Fixed cost of one operator on the compute stream, microseconds."""
    link_gb_per_s: float
    """Bandwidth of an all-to-all per rank and direction, 1e9 bytes per second."""
    link_latency_us: float
    """Time of an empty all-to-all, microseconds."""
    node: Link | None = None
    """The link of groups within one node, where it is another; None where none is stated."""
    network: Link | None = None
    """The link between nodes, where a profile has it: its slowdowns beside compute, and its share
    for gathers. Its rate and its latency are those above."""
    host: HostCosts = NO_HOST
    """Times of the host; zero where the profile states none."""
    host_link: HostLink | None = None
    """The link to pinned host memory; None where the profile states none."""
    compute: Compute | None = None
    """Rates of products by their shape; None where the profile states none, and all have the rate
    `matmul_tflops`."""
    large_product_rate: float = 1.0
    """Rate of a product whose shape loses nothing, over `matmul_tflops`; 1 without `compute`."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Rate -> its origin; complete when the profile was loaded."""

    def __post_init__(self) -> None:
        """Raise InvalidConfig for a rate that is not positive."""
        for name in RATES:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise InvalidConfig(
                    f"hardware profile {self.name!r}: {name} must be a number of at least 0; got "
                    f"{value!r}"
                )
        for name in ("matmul_tflops", "memory_gb_per_s", "link_gb_per_s"):
            if getattr(self, name) == 0:
                raise InvalidConfig(
                    f"hardware profile {self.name!r}: {name} must be above 0, and is not"
                )

    def link_of(self, num_ranks: int) -> Link:
        """Return the link of a group: a node's if so many ranks fit in one, if not the profile's.

        Only the number of ranks counts: which ranks a group has differs from rank to rank.
        """
        if self.node is not None and 0 < num_ranks <= self.node.num_ranks:
            return self.node
        link = Link(gb_per_s=self.link_gb_per_s, latency_us=self.link_latency_us)
        if (far := self.network) is None:
            return link
        return replace(
            link,
            contention=far.contention,
            overlap_slowdown=far.overlap_slowdown,
            gather_share=far.gather_over_exchange,
        )

    def as_toml(self) -> str:
        """Return the file that loads as this profile, its rates to two digits, links as they are.

        Raises InvalidConfig when a rate has no origin.
        """
        rates = {name: getattr(self, name) for name in RATES}
        written = "\n".join([f'name = "{self.name}"', *sourced_lines(rates, self.origins)]) + "\n"
        named = ((NODE, self.node), (NETWORK, self.network))
        links = [link_table(name, link) for name, link in named if link is not None]
        tables: dict[str, Any] = {"link": links} if links else {}
        if self.compute is not None:
            tables |= {TABLE: compute_table(self.compute)}
        if self.host != NO_HOST:
            tables |= {HOST: host_table(self.host)}
        if self.host_link is not None:
            tables |= {HOST_LINK: host_link_table(self.host_link)}
        return written + dump_sourced(tables) if tables else written


def load_profile(name: str) -> HardwareProfile:
    """Return the profile called `name`, at the path `name`, or of this device for "detect".

    Raises InvalidConfig when there is no such profile, its fields are wrong or lack an origin.
    """
    if isinstance(made := _outside(name), HardwareProfile):
        return made
    file = read_profile(name)
    wanted = {"name", *RATES}
    if wrong := sorted(wanted ^ (set(file.values) - CLUSTER_TABLES - {HOST, HOST_LINK})):
        raise InvalidConfig(
            f"megamoe.hardware: {file.path} must have exactly the keys {sorted(wanted)}; missing "
            f"or unknown: {wrong}"
        )
    links, compute = links_in(file), compute_in(file)
    large = compute.large_tflops / file.values["matmul_tflops"] if compute is not None else 1.0
    return HardwareProfile(
        node=links.get(NODE),
        network=links.get(NETWORK),
        compute=compute,
        large_product_rate=large,
        host=host_in(file),
        host_link=host_link_in(file),
        origins={name: file.origins[name] for name in RATES if name in file.origins},
        **{key: file.values[key] for key in wanted},
    )


def read_profile(name: str) -> SourcedFile:
    """Return the file of the profile called `name`, at the path `name`, or of this device.

    Raises InvalidConfig when there is none or a number in it has no origin.
    """
    if name == "detect":
        name = detected_profile()
    path = Path(name) if name.endswith(".toml") else PROFILES / f"{name}.toml"
    if isinstance(outside := _outside(name), HardwareProfile):
        raise InvalidConfig(
            f"megamoe.hardware: {name!r} has no file to read, because a function makes this "
            "profile; name a profile that has a file"
        )
    path = outside or path
    try:
        return with_contention(read_sourced(path))
    except FileNotFoundError:
        known = [*sorted(_own_names()), *(entry.name for entry in installed(OUTSIDE))]
        raise InvalidConfig(
            f"megamoe.hardware: there is no profile {name!r}; write the path of a TOML file, "
            f"detect, or one of {listed(path.stem, known)}"
        ) from None


def _own_names() -> list[str]:
    return [path.stem for path in PROFILES.glob("*.toml")]


def _outside(name: str) -> HardwareProfile | Path | None:
    """Return the profile of another distribution under `name`, or the path of its file, if any."""
    if name == "detect" or name.endswith(".toml"):
        return None
    entry = next((entry for entry in installed(OUTSIDE) if entry.name == name), None)
    return made_of(entry) if entry is not None else None


def made_of(entry: EntryPoint) -> HardwareProfile | Path:
    """Return the profile or path of an entry point; raise InvalidConfig for anything else."""
    if entry.name in _own_names():
        raise unusable(entry, "has the name of a profile of megamoe", "another name")
    named = load(entry)
    named = named() if callable(named) else named
    if isinstance(named, HardwareProfile):
        for rate in RATES:
            check_origin(f"{entry.name}.{rate}", named.origins.get(rate))
        return named
    if not isinstance(named, str | Path):
        write = "the path of a TOML file, or a function that returns it or a HardwareProfile"
        raise unusable(entry, f"gives {named!r}, which is not a hardware profile", write)
    return Path(named)
