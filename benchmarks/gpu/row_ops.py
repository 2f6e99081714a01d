"""Our operators on rows: how each is called, what it must equal, the bytes it moves."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from moe_compile.ops.quantized_rows import (
    GATHER_QUANTIZE_PACK,
    GATHER_ROWS,
    REFERENCES,
    UNPACK_DEQUANTIZE,
    UNPACK_DEQUANTIZE_PERMUTE,
    pack_rows,
)
from moe_compile.ops.row_sums import SUM_OF_PLACES, sum_of_places
from moe_compile.ops.wire_format import row_bytes

DTYPE: Final = torch.bfloat16
INDEX_BYTES: Final = 8
EXPONENTS: Final = 8
"""Rows are scaled by powers of two from 2**-8 to 2**8, so that blocks need scales of their own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """One set of inputs; `index` is a permutation, so that every row is read once."""

    rows_ND: torch.Tensor
    index: torch.Tensor
    message: torch.Tensor
    """Of other rows than `rows_ND`."""

    @property
    def width(self) -> int:
        """Return D."""
        return self.rows_ND.shape[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class RowOp:
    """One use of an operator; `plain` takes the same arguments."""

    name: str
    ours: Callable[..., torch.Tensor]
    plain: Callable[..., torch.Tensor]
    arguments: Callable[[Inputs], tuple[Any, ...]]
    bytes_per_row: Callable[[int], int]
    """Read plus written, each byte once, by width."""

    def run(self, inputs: Inputs) -> torch.Tensor:
        """Return what our operator makes of the inputs."""
        return self.ours(*self.arguments(inputs))

    def expected(self, inputs: Inputs) -> torch.Tensor:
        """Return what plain PyTorch makes of them."""
        return self.plain(*self.arguments(inputs))


def _row(width: int) -> int:
    return DTYPE.itemsize * width


ROW_OPS: Final = (
    RowOp(
        name="gather_quantize_pack",
        ours=GATHER_QUANTIZE_PACK,
        plain=REFERENCES[GATHER_QUANTIZE_PACK],
        arguments=lambda i: (i.rows_ND, i.index),
        bytes_per_row=lambda width: _row(width) + INDEX_BYTES + row_bytes(width),
    ),
    RowOp(
        name="unpack_dequantize_permute",
        ours=UNPACK_DEQUANTIZE_PERMUTE,
        plain=REFERENCES[UNPACK_DEQUANTIZE_PERMUTE],
        arguments=lambda i: (i.message, i.index, i.width, DTYPE),
        bytes_per_row=lambda width: _row(width) + INDEX_BYTES + row_bytes(width),
    ),
    RowOp(
        name="gather_quantize_pack, no index",
        ours=GATHER_QUANTIZE_PACK,
        plain=REFERENCES[GATHER_QUANTIZE_PACK],
        arguments=lambda i: (i.rows_ND, None),
        bytes_per_row=lambda width: _row(width) + row_bytes(width),
    ),
    RowOp(
        name="unpack_dequantize",
        ours=UNPACK_DEQUANTIZE,
        plain=REFERENCES[UNPACK_DEQUANTIZE],
        arguments=lambda i: (i.message, i.width, DTYPE),
        bytes_per_row=lambda width: _row(width) + row_bytes(width),
    ),
    RowOp(
        name="gather_rows",
        ours=GATHER_ROWS,
        plain=REFERENCES[GATHER_ROWS],
        arguments=lambda i: (i.rows_ND, i.index),
        bytes_per_row=lambda width: 2 * _row(width) + INDEX_BYTES,
    ),
    RowOp(
        name="sum_of_places, two rows each",
        ours=SUM_OF_PLACES,
        plain=sum_of_places,
        arguments=lambda i: ([i.rows_ND], i.index[: len(i.index) // 2 * 2].view(-1, 2), DTYPE),
        bytes_per_row=lambda width: _row(width) + _row(width) // 2 + INDEX_BYTES,
    ),
)


def random_inputs(device: str, num_rows: int, width: int, seed: int) -> Inputs:
    """Return inputs drawn from `seed`."""
    generator = torch.Generator(device).manual_seed(seed)
    return Inputs(
        rows_ND=_rows(device, generator, num_rows, width),
        index=torch.randperm(num_rows, generator=generator, device=device),
        message=pack_rows(_rows(device, generator, num_rows, width), None),
    )


def _rows(device: str, generator: torch.Generator, num_rows: int, width: int) -> torch.Tensor:
    values = torch.randn(num_rows, width, generator=generator, device=device)
    shape = (num_rows, 1)
    exponents = torch.randint(-EXPONENTS, EXPONENTS, shape, generator=generator, device=device)
    return torch.ldexp(values, exponents).to(DTYPE)


def extreme_rows(device: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows a quantizer gets wrong first: zero, subnormal, huge, infinite, NaN."""
    info = torch.finfo(dtype)
    generator = torch.Generator(device).manual_seed(width)
    rows = torch.randn(9, width, generator=generator, device=device).to(dtype)
    rows[1] = 0.0
    rows[2] *= info.tiny  # mostly subnormal
    rows[3] = rows[3].sign() * info.max
    rows[4, : width // 2] = 0.0
    rows[5] = -rows[5].abs()
    rows[6, width // 2] = math.inf
    rows[7, -1] = math.nan
    rows[8, 0] = -math.inf
    return rows
