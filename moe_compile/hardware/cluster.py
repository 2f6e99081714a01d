"""Rates of a cluster of one kind of GPU, for the analytic simulator.

Contract
    Read from the same files as the compile path's rates; every number has an origin there.
    Rates are of one GPU and one direction; shares are of the data sheet's peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moe_compile.errors import InvalidConfig, nearest
from moe_compile.hardware.links import NETWORK, NODE, Link, links_in
from moe_compile.hardware.products import NUMBERS, Compute, compute_in
from moe_compile.hardware.profile import read_profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Device memory."""

    gb_per_s: float
    share: float
    """Share of the peak that streaming kernels reach."""
    capacity_gb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Factors of a production cluster over the sum of its kernels, fitted on published rows."""

    compute: float = 1.0
    """Factor on compute: clocks, jitter, kernels the model does not have."""
    link: float = 1.0
    """Factor on collectives: waiting for the slowest rank, congestion."""
    imbalance: float = 1.0
    """Rows of the busiest rank over the mean."""
    slow_operators: float = 1.0
    """Factor on the bytes moved by the baseline's row permutations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterProfile:
    """One GPU, its links, and fits by name."""

    name: str
    compute: Compute
    memory: Memory
    nvlink: Link
    network: Link
    fits: Mapping[str, Fit]

    def fit(self, name: str) -> Fit:
        """Return the fit called `name`, or factors of one for "none"; raise InvalidConfig."""
        if name == "none":
            return Fit()
        if name not in self.fits:
            hint = nearest(name, ["none", *self.fits])
            raise InvalidConfig(f"profile {self.name!r} has no fit {name!r}.{hint}")
        return self.fits[name]


def load_cluster(name: str) -> ClusterProfile:
    """Return the cluster of profile `name`, a path, or this device for "detect".

    Raises InvalidConfig when there is none, its tables are wrong, or a number has no origin.
    """
    file = read_profile(name)
    missing = [key for key in ("compute", "memory", "link") if key not in file.values]
    if missing:
        raise InvalidConfig(
            f"{file.path} has no table {missing[0]!r}, which `megamoe simulate` needs; name the "
            "profile of a GPU, h800 for example"
        )
    compute, links = compute_in(file), links_in(file)
    if compute is None:
        wrong = sorted(set(NUMBERS) - set(file.values["compute"]))
        raise InvalidConfig(
            f"{file.path}: [compute] must have the keys {sorted(NUMBERS)}; missing: {wrong}"
        )
    try:
        return _cluster(file.values, compute, links)
    except InvalidConfig as error:
        raise InvalidConfig(f"{file.path}: {error}") from None


def _cluster(
    values: Mapping[str, Any], compute: Compute, links: Mapping[str, Link]
) -> ClusterProfile:
    if set(links) != {NODE, NETWORK}:
        raise InvalidConfig(
            f"the profile must have exactly two links, nvlink and network; got {sorted(links)}"
        )
    return ClusterProfile(
        name=values["name"],
        compute=compute,
        memory=_build(Memory, values["memory"], "memory"),
        nvlink=links[NODE],
        network=links[NETWORK],
        fits={key: _build(Fit, fit, f"fit.{key}") for key, fit in values.get("fit", {}).items()},
    )


def _build(kind: type, table: Mapping[str, Any], where: str) -> Any:
    names = {field.name for field in fields(kind)}
    needed = names if kind is not Fit else set()
    if wrong := sorted((set(table) - names) | (needed - set(table))):
        raise InvalidConfig(
            f"[{where}] may have only the keys {sorted(names)}; missing or unknown: {wrong}"
        )
    for key, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value < 0:
            raise InvalidConfig(f"{where}.{key} is {value!r}; write a number of at least 0")
    return kind(**table)
