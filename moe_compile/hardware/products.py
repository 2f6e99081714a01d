"""Matrix products by their shape: the share of a large product's rate they reach on a GPU.

Contract
    For the compiler's estimates, the planner's prices and the cluster simulator alike. Shares are
    of the data sheet's peak where a table states them; `Compute.share_of` is of a large product.

Formulas
    one product, or several of one size   how evenly output tiles fill the SMs, times a factor for
                                          the length of the summed dimension
    grouped, each with rows of its own    the curve by rows of a group, times that factor
    grouped, each with a summed           the curve by its length
    dimension of its own
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Self

from moe_compile.errors import InvalidConfig
from moe_compile.hardware.sourced_file import SourcedFile

TILE_ROWS: Final = 128
TILE_COLUMNS: Final = 256
"""Output tile of a Hopper GEMM; a narrower product has a tile as narrow."""
LEAST_TILE: Final = 64
"""Rows that one instruction computes."""
LEAST_FILLED: Final = 1e-3
LEAST_SHARE: Final = 1e-9
TABLE: Final = "compute"
CURVES: Final = ("grouped_forward", "grouped_weight_gradient")


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """`groups` products of `[rows, reduction] x [reduction, columns]`."""

    groups: float = 1.0
    rows: float
    columns: float
    reduction: float
    ragged: str = ""
    """The dimension that offsets divide among the groups: `rows`, `reduction`, or none."""
    in_eight_bits: bool = False
    """Whether both factors are numbers of eight bits."""

    @property
    def operations(self) -> float:
        """Return floating-point operations."""
        return 2.0 * self.groups * self.rows * self.columns * self.reduction

    def part(self, groups: float, tokens: float, *, is_gradient: bool) -> Self:
        """Return a share of the groups, with a share of the tokens of each.

        The gradient of a weight sums over tokens.
        """
        part = replace(self, groups=self.groups * groups)
        if is_gradient:
            return replace(part, reduction=self.reduction * tokens)
        return replace(part, rows=self.rows * tokens)


@dataclass(frozen=True, slots=True)
class Curve:
    """A share against rows per expert, straight between points in the logarithm of rows."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        """Raise InvalidConfig unless rows rise and shares are within 0 to 1."""
        rows = [point[0] for point in self.points]
        if len(rows) < 2 or rows != sorted(set(rows)) or rows[0] <= 0:
            raise InvalidConfig(
                "a curve must have at least two points, with rising numbers of rows; got the "
                f"numbers {rows}"
            )
        if not all(0 < share <= 1 for _, share in self.points):
            shares = [share for _, share in self.points]
            raise InvalidConfig(
                f"every share of a curve must be above 0 and at most 1; got {shares}"
            )

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
    """Matrix units, and the shares of their peak that kernels reach."""

    bf16_tflops: float
    """Dense peak, 1e12 operations per second."""
    fp8_tflops: float
    num_sms: int
    gemm_share: float
    """Share of the bf16 peak that a large dense GEMM reaches whose tiles fill the device."""
    fp8_gemm_share: float
    half_reduction: float
    """Length of the summed dimension at which a GEMM loses half of its share."""
    attention_forward_share: float
    attention_backward_share: float
    kernel_us: float
    """Gap a kernel leaves: launch, tail, microseconds."""
    grouped_forward: Curve
    """Share of peak of a grouped GEMM by rows per expert, its reduction long, not memory-bound."""
    grouped_weight_gradient: Curve
    """The same share for the weights' gradient, which reduces over the rows."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Number -> its origin; complete when it was loaded."""

    @property
    def large_tflops(self) -> float:
        """Return the rate of a large dense GEMM."""
        return self.bf16_tflops * self.gemm_share

    @property
    def eight_bit_share(self) -> float:
        """Return the rate of a large dense GEMM in eight bits over that of one in bfloat16."""
        return self.fp8_tflops * self.fp8_gemm_share / self.large_tflops

    def share_of(self, product: Product) -> float:
        """Return the rate of a product over that of a large dense GEMM in bfloat16.

        It is at most 1, or `eight_bit_share`. Products in eight bits lose as much by their shape.
        """
        long = product.reduction / (product.reduction + self.half_reduction)
        if product.ragged == "reduction":
            share = self.grouped_weight_gradient.at(product.reduction) / self.gemm_share
        elif product.ragged:
            share = self.grouped_forward.at(product.rows) / self.gemm_share * long
        else:
            share = self._filled(product) * long
        share = min(max(share, LEAST_SHARE), 1.0)
        return share * self.eight_bit_share if product.in_eight_bits else share

    def _filled(self, product: Product) -> float:
        """Return how evenly output tiles fill the SMs, 0 to 1."""
        rows = product.rows / min(max(product.rows, LEAST_TILE), TILE_ROWS)
        columns = product.columns / min(max(product.columns, 1.0), TILE_COLUMNS)
        whole = product.groups * math.ceil(rows) * math.ceil(columns)
        waves = math.ceil(whole / self.num_sms)
        filled = product.groups * rows * columns / max(waves * self.num_sms, 1)
        return min(max(filled, LEAST_FILLED), 1.0)


NUMBERS: Final = tuple(one.name for one in fields(Compute) if one.name != "origins")


def compute_in(file: SourcedFile) -> Compute | None:
    """Return the matrix units that a file states; None where it lacks some of their numbers.

    Raises InvalidConfig where a value is no number of matrix units.
    """
    table = file.values.get(TABLE, {})
    if not set(NUMBERS) <= set(table):
        return None
    for name, value in table.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
        if name not in NUMBERS or not (is_number or name in CURVES):
            raise InvalidConfig(
                f"megamoe.hardware: {file.path}: {TABLE}.{name} is {value!r}; write "
                f"{', '.join(NUMBERS)}, numbers of at least 0"
            )
    try:
        curves = {key: Curve(tuple((float(x), float(y)) for x, y in table[key])) for key in CURVES}
    except InvalidConfig as error:
        raise InvalidConfig(f"megamoe.hardware: {file.path}: {error}") from None
    origins = {name: file.origins[f"{TABLE}.{name}"] for name in NUMBERS}
    return Compute(**{**table, **curves}, origins=origins)


def compute_table(compute: Compute) -> dict[str, Any]:
    """Return the table of matrix units, its numbers beside their origins, for `dump_sourced`."""
    numbers = {name: getattr(compute, name) for name in NUMBERS}
    numbers |= {name: [list(point) for point in numbers[name].points] for name in CURVES}
    return {n: {"value": value, "origin": compute.origins.get(n)} for n, value in numbers.items()}
