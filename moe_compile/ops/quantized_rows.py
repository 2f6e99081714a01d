"""The operators of the quantised wire: rows to messages, messages to rows, and rows by index.

Contract
    Each operator equals its reference below byte for byte, on a GPU by a
    Triton kernel that reads and writes each byte once, elsewhere by the reference itself.
    An index may be negative and then counts from the end, as in `rows[index]`.
    A message carries no gradient; `dequantize_exchanged` gives the rows theirs.

Shapes: S rows to choose from, R rows of a message, D columns, M = row_bytes(D).

Rows to messages and back in plain PyTorch: the specification, and the CPU path.
Bytes and values are those of `moe_compile.ops.wire_format`. Compilers fuse this code: it has only
elementwise operators, one reduction per block, one concatenation and, where blocks do not fill a
row, a second one or a choice of columns.

Shapes: S rows to choose from, R rows of a message, D columns, B blocks, M = row_bytes(D).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from moe_compile.ops.product_formats import ELEMENTS, quantized
from moe_compile.ops.wire_format import (
    BLOCK,
    SCALE_BYTES,
    num_blocks,
    payload_bytes,
    row_bytes,
)

LIBRARY = torch.library.Library("megamoe", "FRAGMENT")
LIBRARY.define("gather_quantize_pack(Tensor rows, Tensor? index=None) -> Tensor")
LIBRARY.define("unpack_dequantize(Tensor message, int width, ScalarType dtype) -> Tensor")
LIBRARY.define(
    "unpack_dequantize_permute(Tensor message, Tensor index, int width, ScalarType dtype) -> Tensor"
)
LIBRARY.define("gather_rows(Tensor rows, Tensor index) -> Tensor")

GATHER_QUANTIZE_PACK = torch.ops.megamoe.gather_quantize_pack.default
UNPACK_DEQUANTIZE = torch.ops.megamoe.unpack_dequantize.default
UNPACK_DEQUANTIZE_PERMUTE = torch.ops.megamoe.unpack_dequantize_permute.default
GATHER_ROWS = torch.ops.megamoe.gather_rows.default

HAS_KERNELS: Final = (
    torch.version.cuda is not None and importlib.util.find_spec("triton") is not None
)
if HAS_KERNELS:  # a torch without CUDA has no use for triton, and starts faster without it
    from moe_compile.ops.kernels.gather_rows import gather_rows
    from moe_compile.ops.kernels.pack_rows import gather_quantize_pack, unpack_dequantize


def implement(
    library: torch.library.Library,
    references: Mapping[Any, Callable[..., Any]],
    fakes: Mapping[Any, Callable[..., Any]],
    kernels: Mapping[Any, Callable[..., Any]],
) -> None:
    """Give the operators of `library` their reference, their fake and, for CUDA, their kernel."""
    for operator, reference in references.items():
        name = operator._schema.name
        library.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fakes[operator], lib=library)
        if HAS_KERNELS:
            library.impl(name, kernels[operator], "CUDA")


def has_kernel(device: torch.device) -> bool:
    """Whether kernels of ours run the operators on `device`."""
    return device.type == "cuda" and HAS_KERNELS


def pack_rows(rows_SD: torch.Tensor, index_R: torch.Tensor | None = None) -> torch.Tensor:
    """Return the message `[R, M]`, uint8, of rows `index_R`, or of all where there is no index.

    Raises ValueError for rows that are no matrix of floating-point numbers.
    """
    _check_rows(rows_SD)
    rows_RD = rows_SD if index_R is None else rows_SD[index_R]
    num_rows, width = rows_RD.shape
    filled = num_blocks(width) * BLOCK - width
    values_RD = rows_RD
    if filled:  # not by F.pad: of a sum of numbers that a host reads, it asks what it is
        values_RD = torch.cat([rows_RD, rows_RD.new_zeros((num_rows, filled))], dim=1)
    values_RB = values_RD.float().reshape(num_rows, num_blocks(width), BLOCK)
    payload, scales_RB = quantized(values_RB, [2], ELEMENTS["e4m3"])
    payload_RD = payload.view(torch.uint8).reshape(num_rows, width + filled)
    scales = scales_RB.reshape(-1).view(torch.uint8)
    scales_RM = scales.reshape(num_rows, SCALE_BYTES * num_blocks(width))
    return torch.cat([payload_RD[:, : payload_bytes(width)], scales_RM], dim=1)


def unpack_rows(message_RM: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the rows `[R, width]` of a message `[R, M]`, rounded once to `dtype`."""
    check_message(message_RM, width)
    payload_RD = message_RM[:, :width].view(torch.float8_e4m3fn).float()
    scales = message_RM[:, payload_bytes(width) :].reshape(-1).view(torch.float32)
    scales_RB = scales.reshape(message_RM.shape[0], num_blocks(width))
    if width % BLOCK:  # by an index: Inductor miscompiles slices of repeated or expanded columns
        block_D = torch.arange(width, device=message_RM.device) // BLOCK
        return (payload_RD * scales_RB[:, block_D]).to(dtype)
    blocked = payload_RD.reshape(-1, num_blocks(width), BLOCK) * scales_RB.unsqueeze(-1)
    return blocked.reshape(-1, width).to(dtype)


def check_message(message: torch.Tensor, width: int) -> None:
    """Raise ValueError unless `message` is a message of rows of `width` columns."""
    if message.dtype is not torch.uint8 or message.dim() != 2:
        raise ValueError(
            f"a message must be a tensor [R, bytes] of uint8; got {message.dtype} of shape "
            f"{message.shape}"
        )
    if message.shape[1] != row_bytes(width):
        raise ValueError(
            f"a row of {width} columns must take {row_bytes(width)} bytes in a message; got "
            f"{message.shape[1]}"
        )


def _check_rows(rows: torch.Tensor) -> None:
    if rows.dim() != 2 or not rows.dtype.is_floating_point:
        raise ValueError(
            f"rows must be a tensor [S, D] of floating-point numbers; got {rows.dtype} of shape "
            f"{rows.shape}"
        )


def _fake_pack(rows: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    _check_rows(rows)
    num_rows = rows.shape[0] if index is None else index.shape[0]
    return rows.new_empty((num_rows, row_bytes(int(rows.shape[1]))), dtype=torch.uint8)


def _fake_unpack(
    message: torch.Tensor, index: torch.Tensor, width: int, dtype: torch.dtype
) -> torch.Tensor:
    check_message(message, width)
    return message.new_empty((index.shape[0], width), dtype=dtype)


def _pack_by_kernel(rows: torch.Tensor, index: torch.Tensor | None = None) -> torch.Tensor:
    _check_rows(rows)
    return gather_quantize_pack(rows, index)


def _unpack_by_kernel(
    message: torch.Tensor, index: torch.Tensor | None, width: int, dtype: torch.dtype
) -> torch.Tensor:
    check_message(message, width)
    return unpack_dequantize(message, index, width, dtype)


REFERENCES: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    GATHER_QUANTIZE_PACK: pack_rows,
    UNPACK_DEQUANTIZE: unpack_rows,
    UNPACK_DEQUANTIZE_PERMUTE: lambda message, index, *row: unpack_rows(message[index], *row),
    GATHER_ROWS: lambda rows, index: rows[index],
}
"""Operator -> its reference in plain PyTorch."""

_FAKES: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    GATHER_QUANTIZE_PACK: _fake_pack,
    UNPACK_DEQUANTIZE: lambda message, *row: _fake_unpack(message, message, *row),
    UNPACK_DEQUANTIZE_PERMUTE: _fake_unpack,
    GATHER_ROWS: lambda rows, index: rows.new_empty((index.shape[0], *rows.shape[1:])),
}

_KERNELS: Final[Mapping[Any, Callable[..., torch.Tensor]]] = {
    GATHER_QUANTIZE_PACK: _pack_by_kernel,
    UNPACK_DEQUANTIZE: lambda message, *row: _unpack_by_kernel(message, None, *row),
    UNPACK_DEQUANTIZE_PERMUTE: _unpack_by_kernel,
    GATHER_ROWS: lambda rows, index: gather_rows(rows, index),
}

implement(LIBRARY, REFERENCES, _FAKES, _KERNELS)
