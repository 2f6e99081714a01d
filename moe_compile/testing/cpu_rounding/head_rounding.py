"""Whether attention in groups of heads may round otherwise than whole.

Contract
    An answer from the graph, and from what torch allows attention to run on while it is compiled.
    On a CPU it is "no" only where groups had the bits of the whole, forward and backward, in every
    case of a scan: torch 2.13, eleven head sizes from 4 to 128, 4 to 800 positions, both orders of
    heads and positions in memory, heads of their own and shared, 1 to 256 threads.

On a CPU torch takes a fused kernel that goes from head to head, or else multiplies the matrices of
all heads at once, which rounds by how many there are and how they lie in memory. The conditions of
the fused kernel are those of `use_flash_attention_cpp` in ATen's `sdp_utils_cpp.cpp`.

The fused kernel multiplies by MKL, whose products of 4- and 8-byte numbers round by where rows
begin between boundaries of 16 bytes (float32 with heads of 5 or 6, float64 with heads of 5). The
products of a head alone in a batch of one are split over threads; with several heads each thread
has heads of its own. How many threads there are is not asked, as ranks may differ in it.

"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true as is_known

from moe_compile.graph.modes import chooses_attention
from moe_compile.graph.query import argument_of, called_name, tensor_of

BOUNDARY: Final = 16
"""Bytes: products of rows that begin at its multiples round alike."""

FUSED: Final = torch.nn.attention.SDPBackend.FLASH_ATTENTION.name


def rounds_by_group(core: fx.Node, operands: Sequence[fx.Node], num_kv_heads: int) -> bool:
    """Whether attention in any number of groups may differ from the whole in the last bits.

    `operands` are query, key and value. The layout of the result's gradient does not tell: the
    kernel copies it (`flash_attention_backward_kernel_impl`).
    """
    tensors = [tensor for operand in operands if (tensor := tensor_of(operand)) is not None]
    if len(tensors) < 3 or tensors[0].device.type != "cpu":
        return False
    if not is_fused(core, operands):
        return True
    if tensors[0].element_size() < 4:
        return False
    return not all(_rows_lie_alike(tensor, num_kv_heads) for tensor in tensors)


def rounds_alone(operands: Sequence[fx.Node]) -> bool:
    """Whether a group of one query head may differ from the whole in the last bits."""
    query = tensor_of(operands[0])
    return query is None or (query.device.type == "cpu" and not is_known(query.shape[0] > 1))


def is_fused(core: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Whether the fused kernel of a CPU is proven to compute `core`.

    Where a sequence has no positions it does not, but nothing is summed there either.
    """
    tensors = [tensor for operand in operands if (tensor := tensor_of(operand)) is not None]
    if len(tensors) < 3 or not _is_fused_allowed(core):
        return False
    batches, heads, _, sizes = zip(*(tensor.shape for tensor in tensors), strict=True)
    alike = [*_pairs(batches), *_pairs(sizes), heads[1] == heads[2]]
    alike += [] if core.kwargs.get("enable_gqa") else _pairs(heads)
    dense = all(is_known(tensor.stride(-1) == 1) for tensor in tensors)
    return dense and all(map(is_known, alike)) and _is_mask_fused(core)


def _is_fused_allowed(core: fx.Node) -> bool:
    """Whether the switches leave the fused kernel to `core`: the last one before it decides."""
    allowed = torch.backends.cuda.flash_sdp_enabled()
    for node in itertools.takewhile(lambda node: node is not core, core.graph.nodes):
        if chooses_attention(node):
            backends = argument_of(node, 0, "backends")
            known = isinstance(backends, (list, tuple))
            allowed = known and FUSED in map(_backend_name, backends)
        elif node.op == "call_function" and called_name(node) == "enable_flash_sdp":
            allowed = argument_of(node, 0, "enabled") is True
    return allowed


def _backend_name(backend: Any) -> Any:
    """Return the name of a backend that a graph has as a constant or by a call with its name."""
    if isinstance(backend, fx.Node):
        return backend.args[0] if backend.args else None
    return getattr(backend, "name", None)


def _pairs(values: Sequence[Any]) -> list[Any]:
    return [first == other for first, other in itertools.pairwise(values)]


def _is_mask_fused(core: fx.Node) -> bool:
    mask = argument_of(core, 3, "attn_mask")
    if mask is None:
        return True
    tensor = tensor_of(mask) if isinstance(mask, fx.Node) else None
    return tensor is not None and tensor.ndim in (2, 4) and not tensor.requires_grad


def _rows_lie_alike(tensor: torch.Tensor, num_heads: int) -> bool:
    """Whether rows begin at boundaries, in `tensor` and in that of any group of its heads.

    A group has 1 / n of what lies outside of the heads in memory, and the same of what lies inside.
    """
    size = tensor.element_size()
    head_stride = tensor.stride(-3)
    pairs = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    steps = [stride for length, stride in pairs if not is_known(length == 1)]
    return all(
        is_known(step * size % BOUNDARY == 0)
        and (is_known(step <= head_stride) or is_known(step * size % (BOUNDARY * num_heads) == 0))
        for step in (tensor.shape[-1], tensor.storage_offset(), *steps)
    )
