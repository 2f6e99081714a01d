"""Operations and kernels that are counted alike wherever they are priced.

Contract
    Without torch: `megamoe simulate` prices with them too.
"""

from __future__ import annotations

from typing import Final

ATTENTION_BACKWARD: Final = 2.5
"""Operations of attention's backward over its forward: five matrix products for two."""
CAUSAL_SHARE: Final = 0.5
"""Share of (query, key) pairs that a causal mask keeps; the diagonal is neglected."""
ORDER_KERNELS: Final = 9.25
"""Kernels that find each row's place by chunk and back, and gather the integers the host reads
(passes/replay/row_order.py, chunk_axis.py). Counted in the graphs that the rewrites emit, as
`cost/amounts.py` counts kernels; tests hold it against such graphs."""
ROOM_KERNELS: Final = 10.25
"""Kernels that find the slots of a chunk's rows in a buffer with room (ops/room_rows.py). Counted
as `ORDER_KERNELS` are."""


def attention_operations(
    queries: float, keys: float, widths: float, share: float, *, is_backward: bool
) -> float:
    """Return the operations of two products over a share of the pairs of query and key.

    4 B H S_q S_k D times the share, where keys and values have one head size D (Dao 2023,
    FlashAttention-2, section 4.1). `queries` are of all sequences and heads, `widths` the head
    sizes of keys and values together.
    """
    forward = 2.0 * queries * keys * widths * share
    return forward * ATTENTION_BACKWARD if is_backward else forward
