"""Number formats of grouped products in eight bits: one table, and the arithmetic of their scales.

Contract
    A format is a row of `FORMATS`; operators ask it for blocks, types and what it cannot do.
    With a = max |element| of a block, at least the least maximum of its element type, the scale is
    a / largest and a payload is element * (largest / a), rounded to nearest, ties to even;
    quotients and products are float32. So scales of rows in blocks of 128 and e4m3 are those of
    `wire_format`, and a message feeds a product as it is.
    A block that holds an infinity or NaN has a NaN product, all of it, and no other block has.

    recipe      rows                 weight               source
    rowwise     one scale per row    one per column       torch's `_scaled_grouped_mm` on sm_90
    blockwise   1 x 128              128 x 128            DeepSeek-V3, section 3.3.2 of its report
    mxfp8       1 x 32               32 x 1               OCP Microscaling Formats 1.0
    nvfp4       1 x 16               16 x 1               "Pretraining large language models with
                                                          NVFP4", 2509.25149, appendix B

Scales of mxfp8 are powers of two: a / largest rounded up, so that no payload is cut ("Recipes for
pre-training LLMs with MXFP8", 2506.08027). nvfp4 has a second scale for each row and each column of
a weight, and numbers of four bits (`four_bits`). Both have references and no kernels yet.

Shapes: R rows, K columns in, N columns out, E experts; a weight is `[E, K, N]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from moe_compile.hardware.chip_limits import capability_of
from moe_compile.ops import four_bits
from moe_compile.ops.wire_format import BLOCK, E4M3_MAX


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """A floating-point type of a payload."""

    dtype: torch.dtype
    largest: float
    """The largest finite value."""
    half_unit: float
    """Error of a normal value as a share of it: 2**-(mantissa bits + 1)."""
    half_step: float
    """Error of a subnormal value: half the distance of two."""
    per_byte: int = 1
    """Numbers in a byte of a payload, neighbours along what a product sums."""

    @property
    def least_maximum(self) -> float:
        """Return the least maximum of a block that keeps its scale normal, and 1 / scale finite."""
        return self.largest * 2.0**-126


ELEMENTS: Final[Mapping[str, Element]] = {
    "e4m3": Element(
        dtype=torch.float8_e4m3fn, largest=E4M3_MAX, half_unit=2.0**-4, half_step=2.0**-10
    ),
    "e5m2": Element(
        dtype=torch.float8_e5m2, largest=57344.0, half_unit=2.0**-3, half_step=2.0**-17
    ),
    "e2m1": Element(
        dtype=torch.float4_e2m1fn_x2,
        largest=four_bits.LARGEST,
        half_unit=2.0**-2,
        half_step=2.0**-2,
        per_byte=2,
    ),
}
"""Element types by name; sizes from "FP8 formats for deep learning" (2209.05433), and of e2m1 from
OCP Microscaling Formats 1.0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProductFormat:
    """One recipe: blocks, types, and the products that its kernel computes."""

    name: str
    row_block: int | None
    """Columns of a row that share a scale; None: all."""
    weight_block: tuple[int | None, int]
    """K and N of the elements of a weight that share a scale; None: all."""
    elements: tuple[str, ...]
    """Element types of rows and gradients; the first is that of weights."""
    results: tuple[torch.dtype, ...]
    """Types of a product."""
    multiple: int
    """What must divide K and N."""
    capability: tuple[int, int]
    """Compute capability of the first NVIDIA GPU whose tensor cores multiply it."""
    scale: torch.dtype = torch.float32
    has_vector_scale: bool = False
    """Whether a row, and a column of a weight, has one more scale behind those of its blocks."""
    has_kernel: bool = True
    """Whether something here multiplies it on a GPU."""

    def row_scales(self, width: int) -> list[int]:
        """Return the shape of the scales of a row of `width` numbers."""
        if self.row_block is None:
            return []
        return [blocks_along(width, self.row_block) + self._more]

    def weight_scales(self, experts: int, width: int, columns: int) -> list[int]:
        """Return the shape of the scales of a weight `[experts, width, columns]`."""
        deep, wide = self.weight_block
        if deep is None:
            return [experts, columns]
        return [experts, blocks_along(width, deep) + self._more, blocks_along(columns, wide)]

    @property
    def _more(self) -> int:
        return four_bits.VECTOR_BYTES if self.has_vector_scale else 0


FORMATS: Final[Mapping[str, ProductFormat]] = {
    "rowwise": ProductFormat(
        name="rowwise",
        row_block=None,
        weight_block=(None, 1),
        elements=("e4m3",),  # torch 2.13 multiplies no other
        results=(torch.bfloat16,),  # and has no other result
        multiple=16,  # its strides are multiples of 16 bytes
        capability=(9, 0),
    ),
    "blockwise": ProductFormat(
        name="blockwise",
        row_block=BLOCK,
        weight_block=(BLOCK, BLOCK),
        elements=("e4m3", "e5m2"),
        results=(torch.bfloat16, torch.float16, torch.float32),
        multiple=1,
        capability=(9, 0),
    ),
    "mxfp8": ProductFormat(
        name="mxfp8",
        row_block=32,
        weight_block=(32, 1),
        elements=("e4m3", "e5m2"),
        results=(torch.bfloat16, torch.float16, torch.float32),
        multiple=32,
        capability=(10, 0),
        scale=torch.float8_e8m0fnu,
        has_kernel=False,
    ),
    "nvfp4": ProductFormat(
        name="nvfp4",
        row_block=four_bits.BLOCK,
        weight_block=(four_bits.BLOCK, 1),
        elements=("e2m1",),
        results=(torch.bfloat16, torch.float16, torch.float32),
        multiple=32,  # 16 bytes
        capability=(10, 0),
        scale=torch.uint8,  # of e4m3, and of a float32
        has_vector_scale=True,
        has_kernel=False,
    ),
}
"""Recipes by name."""
ROW_AFTER_ROW: Final = torch.contiguous_format
"""The layout of a copy; .contiguous() copies nothing that has one row."""


def format_of(recipe: str) -> ProductFormat:
    """Return the format of a recipe. Raises ValueError for a recipe that there is not."""
    if recipe not in FORMATS:
        raise ValueError(f"there is no recipe {recipe!r}; write one of {', '.join(FORMATS)}")
    return FORMATS[recipe]


def refusal(chosen: ProductFormat, capability: tuple[int, int]) -> str | None:
    """Return why a GPU of some compute capability does not multiply a format; None if it does."""
    there = [
        one.name for one in FORMATS.values() if one.capability <= capability and one.has_kernel
    ]
    instead = f"write {' or '.join(there)}" if there else "no recipe runs on this GPU"
    least, found = (".".join(map(str, version)) for version in (chosen.capability, capability))
    if capability < chosen.capability:
        return (
            f"products of recipe {chosen.name!r} need the tensor cores of compute capability "
            f"{least}, and this GPU has {found}: {instead}"
        )
    if not chosen.has_kernel:
        return f"there is no kernel for products of recipe {chosen.name!r} yet: {instead}"
    return None


def format_on(device: torch.device, recipe: str) -> ProductFormat:
    """Return the format of a recipe. Raises ValueError where the GPU has no kernel for it."""
    chosen, capability = format_of(recipe), capability_of(device)
    if capability is not None and (why := refusal(chosen, capability)):
        raise ValueError(why)
    return chosen


def element_of(chosen: ProductFormat, name: str) -> Element:
    """Return the type of payload `name`. Raises ValueError where rows of `chosen` have no such."""
    if name not in chosen.elements:
        raise ValueError(
            f"rows of recipe {chosen.name!r} must be {' or '.join(chosen.elements)}; got {name!r}"
        )
    return ELEMENTS[name]


def weight_element(chosen: ProductFormat) -> Element:
    """Return the type of the payload of a weight."""
    return ELEMENTS[chosen.elements[0]]


def blocks_along(size: int, block: int | None) -> int:
    """Return how many scales a dimension of `size` has; a dimension that shares one scale has 1."""
    return 1 if block is None else -(-size // block)


def quantized(
    values: torch.Tensor,
    dims: Sequence[int],
    element: Element,
    scale: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return payload and scales of float32 `values`; those along `dims` share a scale.

    The scales keep `dims`, each of size 1.
    """
    amax = values.abs().amax(list(dims), keepdim=True).clamp_min(element.least_maximum)
    largest = torch.full_like(amax, element.largest)  # by a number, torch multiplies by 1 / amax
    if scale is torch.float32:
        return (values * (largest / amax)).to(element.dtype), amax / largest
    mantissa, exponent = torch.frexp(amax / largest)  # of a power of two the mantissa is a half
    power = torch.ldexp(torch.ones_like(amax), exponent - (mantissa == 0.5).int())
    power = torch.where(amax.isfinite(), power, torch.nan)
    return (values / power).to(element.dtype), power.to(scale)


def quantized_rows(
    rows_RK: torch.Tensor, chosen: ProductFormat, element: Element
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload `[R, K]` of rows, and scales `[R]` or, in blocks, `[R, blocks]`."""
    num_rows, width = rows_RK.shape
    if chosen.has_vector_scale:
        codes, scales = four_bits.quantized_vectors(rows_RK.float())
        return codes.view(element.dtype), scales
    if chosen.row_block is None:
        payload, scales = quantized(rows_RK.float(), [1], element, chosen.scale)
        return payload, scales.reshape(num_rows)
    blocks = blocks_along(width, chosen.row_block)
    filled = _filled(rows_RK, 1, blocks * chosen.row_block)
    by_block = filled.float().reshape(num_rows, blocks, chosen.row_block)
    payload, scales = quantized(by_block, [2], element, chosen.scale)
    whole = payload.reshape(num_rows, blocks * chosen.row_block)
    return whole[:, :width].clone(memory_format=ROW_AFTER_ROW), scales.reshape(num_rows, blocks)


def quantized_weight(
    weight_EKN: torch.Tensor, chosen: ProductFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the payload `[E, K, N]` of a weight, its columns contiguous, and its scales.

    Scales are `[E, N]`, or `[E, blocks of K, blocks of N]` if the format has blocks.
    """
    experts, width, columns = weight_EKN.shape
    element = weight_element(chosen)
    deep, wide = chosen.weight_block
    if chosen.has_vector_scale:
        vectors = weight_EKN.transpose(1, 2).reshape(experts * columns, width)
        codes, scales = four_bits.quantized_vectors(vectors.float())
        payload, scales = (one.reshape(experts, columns, -1) for one in (codes, scales))
        return payload.view(element.dtype).transpose(1, 2), scales.transpose(1, 2).contiguous()
    if deep is None:
        payload, scales = quantized(weight_EKN.float(), [1], element, chosen.scale)
        return by_columns(payload), scales.reshape(experts, columns)
    down, across = blocks_along(width, deep), blocks_along(columns, wide)
    filled = _filled(_filled(weight_EKN, 1, down * deep), 2, across * wide)
    by_block = filled.float().reshape(experts, down, deep, across, wide)
    payload, scales = quantized(by_block, [2, 4], element, chosen.scale)
    whole = payload.reshape(experts, down * deep, across * wide)
    return by_columns(whole[:, :width, :columns]), scales.reshape(experts, down, across)


def by_columns(weight_EKN: torch.Tensor) -> torch.Tensor:
    """Return the same weight with columns contiguous: eight-bit tensor cores sum along memory."""
    return weight_EKN.transpose(1, 2).clone(memory_format=ROW_AFTER_ROW).transpose(1, 2)


def numbers_of_rows(payload: torch.Tensor, chosen: ProductFormat, width: int) -> torch.Tensor:
    """Return the numbers `[R, width]`, float32, of a payload of rows, without their scales."""
    if not chosen.has_vector_scale:
        return payload.float()
    return four_bits.numbers_of(payload.view(torch.uint8), width)


def scales_of_rows(scales: torch.Tensor, chosen: ProductFormat, width: int) -> torch.Tensor:
    """Return float32 scales that multiply rows `[R, width]`: `[R, 1]` or `[R, width]`."""
    if chosen.has_vector_scale:
        return four_bits.scales_of(scales, width)
    if chosen.row_block is None:
        return scales.float()[:, None]
    return scales.float().repeat_interleave(chosen.row_block, 1)[:, :width]


def numbers_of_weight(payload: torch.Tensor, chosen: ProductFormat, width: int) -> torch.Tensor:
    """Return the numbers `[width, N]`, float32, of one expert's payload, without their scales."""
    return numbers_of_rows(payload.t(), chosen, width).t()


def scales_of_weight(
    scales: torch.Tensor, chosen: ProductFormat, width: int, columns: int
) -> torch.Tensor:
    """Return float32 scales that multiply one expert's weight: `[N]` or `[width, columns]`."""
    deep, wide = chosen.weight_block
    if chosen.has_vector_scale:
        return four_bits.scales_of(scales.t(), width).t()
    if deep is None:
        return scales.float()
    down = scales.float().repeat_interleave(deep, 0)[:width]
    return down.repeat_interleave(wide, 1)[:, :columns]


def _filled(values: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Return `values` with zeros behind them along `dim`, up to `size`."""
    missing = size - int(values.shape[dim])
    if not missing:
        return values
    shape = list(values.shape)
    shape[dim] = missing
    return torch.cat([values, values.new_zeros(shape)], dim=dim)
