"""The share of (query, key) pairs that FlexAttention computes under its block mask.

Contract
    It follows from the graph alone: the mask's code is evaluated at pairs of positions. Values that
    it reads of tensors are known in a run only, and count as kept: torchtitan's block_causal mask,
    causal and within documents, counts as causal.
    A kernel computes a whole block where the mask keeps any pair of it, and skips the block if it
    keeps none (Dong et al. 2024, Flex Attention, on BlockMask): a causal mask keeps a half, and
    half its diagonal. Masks are taken to be alike for every sequence and head.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch.fx as fx

from moe_compile.graph.query import argument_of, overload_name

MOST_BLOCKS: Final = 16_384
"""Limit of blocks evaluated: all up to 16,384 tokens of each kind, then evenly spaced rows."""
POSITION_OF_MASK: Final = {"flex_attention": 4, "flex_attention_backward": 9}
"""Operator -> place of its block mask among its arguments (torch._higher_order_ops)."""

Known = int | bool | None
"""Value of the mask's code for one pair; None where it is known in a run only."""

ARITHMETIC: Final[Mapping[str, Callable[..., Any]]] = {
    "aten::add": operator.add,
    "aten::sub": operator.sub,
    "aten::mul": operator.mul,
    "aten::floor_divide": operator.floordiv,
    "aten::remainder": operator.mod,
    "aten::ge": operator.ge,
    "aten::gt": operator.gt,
    "aten::le": operator.le,
    "aten::lt": operator.lt,
    "aten::eq": operator.eq,
    "aten::ne": operator.ne,
    "aten::logical_not": operator.not_,
}
"""Operators whose value is known where all their arguments are."""
CONNECTIVES: Final[Mapping[str, bool]] = {
    "aten::bitwise_and": False,
    "aten::logical_and": False,
    "aten::bitwise_or": True,
    "aten::logical_or": True,
}
"""Operator -> the value of one operand that decides the result."""
CONSTANTS: Final = {"aten::new_ones": True, "aten::new_zeros": False}
"""Operators that begin a conjunction and a disjunction of masks (`and_masks`, `or_masks`)."""


def kept_share(attention: fx.Node, num_queries: int, num_keys: int) -> float:
    """Return the share of pairs that are computed; 1 where the graph has no mask."""
    target: Any = attention.target
    mask = argument_of(attention, POSITION_OF_MASK[target.name()], "block_mask")
    *_, query_block, key_block, code = mask
    owner = attention.graph.owning_module
    module = getattr(owner, str(code.target), None) if isinstance(code, fx.Node) else None
    if not isinstance(module, fx.GraphModule):
        return 1.0
    rows, columns = _blocks(num_queries, query_block), _blocks(num_keys, key_block)
    sampled = max(1, min(len(rows), MOST_BLOCKS // len(columns)))
    looked_at = [rows[(2 * i + 1) * len(rows) // (2 * sampled)] for i in range(sampled)]
    kept = sum(_keeps_any(module.graph, row, column) for row in looked_at for column in columns)
    return kept / (sampled * len(columns))


def _blocks(length: int, block: int) -> list[tuple[int, int]]:
    """Return the first and the last position of each block."""
    return [(start, min(start + block, length) - 1) for start in range(0, length, block)]


def _keeps_any(mask: fx.Graph, queries: tuple[int, int], keys: tuple[int, int]) -> bool:
    """Return whether a block is computed, judged by its corners."""
    corners = ((q, k) for q in reversed(queries) for k in keys)
    return any(_value(mask, (0, 0, q, k)) is not False for q, k in corners)


def _value(mask: fx.Graph, pair: tuple[int, int, int, int]) -> Known:
    """Return the mask's value for (sequence, head, query, key); None where it reads tensors."""
    given = iter(pair)
    known: dict[fx.Node, Known] = {}
    for node in mask.nodes:
        if node.op == "placeholder":
            known[node] = next(given, None)
        elif node.op == "output":
            result: Any = node.args[0]
            return known.get(result) if isinstance(result, fx.Node) else result
        else:
            known[node] = _applied(node, known)
    return None


def _applied(node: fx.Node, known: Mapping[fx.Node, Known]) -> Known:
    name = overload_name(node)
    values: list[Any] = [known.get(a) if isinstance(a, fx.Node) else a for a in node.args]
    if name in CONSTANTS:
        return CONSTANTS[name]
    if name in CONNECTIVES:
        return _connected(values, decides=CONNECTIVES[name])
    if name not in ARITHMETIC or None in values or node.kwargs:
        return None
    result: Known = ARITHMETIC[name](*values)
    return result


def _connected(values: Sequence[Known], *, decides: bool) -> Known:
    """Return a conjunction (`decides` False) or a disjunction; None where bits are combined."""
    if any(value is decides for value in values):
        return decides
    return not decides if all(isinstance(value, bool) for value in values) else None
