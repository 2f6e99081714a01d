"""What a cluster of one kind of GPU can do: the rates of the analytic simulator.

Contract
    Read from the same files as the compile path's rates; every number has an origin there.
    Rates are of one GPU and one direction; shares are of the data sheet's peak.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from moe_compile.errors import InvalidConfig, nearest
from moe_compile.hardware.links import NETWORK, NODE, Link, links_in
from moe_compile.hardware.profile import read_profile


@dataclass(frozen=True, slots=True)
class Curve:
    """A share against rows per expert, straight between points in the logarithm of rows."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Raise InvalidConfig unless rows rise and shares are within 0 to 1."""
        rows = [point[0] for point in self.points]
        if len(rows) < 2 or rows != sorted(set(rows)) or rows[0] <= 0:
            raise InvalidConfig(f"a curve needs two points or more, rows rising; it has {rows}")
        if not all(0 < share <= 1 for _, share in self.points):
            raise InvalidConfig("shares of a curve lie above 0 and up to 1")

    def at(self, rows: float) -> float:
        """Return the share at `rows`; below the first point it falls in proportion to rows."""
        first, last = self.points[0], self.points[-1]
        if rows <= first[0]:
            return first[1] * max(rows, 1e-9) / first[0]
        if rows >= last[0]:
            return last[1]
        right = bisect.bisect_left(self.points, (rows,))
        (x0, y0), (x1, y1) = self.points[right - 1 : right + 1]
        return y0 + (y1 - y0) * math.log(rows / x0) / math.log(x1 / x0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """Matrix units, and what share of their peak kernels reach."""

    bf16_tflops: float
    """Dense peak, 1e12 operations per second."""
    fp8_tflops: float
    num_sms: int
    gemm_share: float
    """Of the bf16 peak, by a large dense GEMM whose tiles fill the device."""
    fp8_gemm_share: float
    half_reduction: float
    """Length of the summed dimension at which a GEMM loses half of its share."""
    attention_forward_share: float
    attention_backward_share: float
    kernel_us: float
    """Gap a kernel leaves: launch, tail, microseconds."""
    grouped_forward: Curve
    """Share of peak of a grouped GEMM by rows per expert, its reduction long, memory no bound."""
    grouped_weight_gradient: Curve
    """The same of the weights' gradient, whose reduction are the rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Device memory."""

    gb_per_s: float
    share: float
    """Of the peak that streaming kernels reach."""
    capacity_gb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """What a production cluster adds to the sum of its kernels, fitted on published rows."""

    compute: float = 1.0
    """Factor on compute: clocks, jitter, kernels the model does not have."""
    link: float = 1.0
    """Factor on collectives: waiting for the slowest rank, congestion."""
    imbalance: float = 1.0
    """Rows of the busiest rank over the mean."""
    slow_operators: float = 1.0
    """Factor on the bytes that the baseline's row permutations move."""


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
        """Return the fit called `name`, or none at all for "none"; raise InvalidConfig."""
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
            f"{file.path}: no table {missing[0]!r}: this profile is for the compiler alone; "
            "simulate with one of a GPU, h800 for instance"
        )
    links = links_in(file)
    try:
        return _cluster(file.values, links)
    except InvalidConfig as error:
        raise InvalidConfig(f"{file.path}: {error}") from None


def _cluster(values: Mapping[str, Any], links: Mapping[str, Link]) -> ClusterProfile:
    compute = dict(values["compute"])
    for key in ("grouped_forward", "grouped_weight_gradient"):
        compute[key] = Curve(tuple((float(x), float(y)) for x, y in compute.get(key, ())))
    if set(links) != {NODE, NETWORK}:
        raise InvalidConfig(f"links are {sorted(links)}; write one nvlink and one network")
    return ClusterProfile(
        name=values["name"],
        compute=_build(Compute, compute, "compute"),
        memory=_build(Memory, values["memory"], "memory"),
        nvlink=links[NODE],
        network=links[NETWORK],
        fits={key: _build(Fit, fit, f"fit.{key}") for key, fit in values.get("fit", {}).items()},
    )


def _build(kind: type, table: Mapping[str, Any], where: str) -> Any:
    names = {field.name for field in fields(kind)}
    needed = names if kind is not Fit else set()
    if wrong := sorted((set(table) - names) | (needed - set(table))):
        raise InvalidConfig(f"[{where}] must have {sorted(names)}; see {wrong}")
    for key, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, str | Curve) and (not is_number or value < 0):
            raise InvalidConfig(f"{where}.{key} is {value!r}; write a number of at least 0")
    return kind(**table)
