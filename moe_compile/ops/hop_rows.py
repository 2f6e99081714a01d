"""Which rows go where when a token crosses to a node once: the integers of two hops.

Contract
    What the two hops bring, `fan` of it, is in the order of the flat all-to-all: by sender, then
    by expert, then by token. Every index is computed on the device; the host reads sizes alone.
    No token chooses an expert twice, and the rows of an expert stand in the order of tokens.

Ranks are `node * L + place`, N nodes of L ranks, E experts on each, n = N L. T tokens, k of the n E
experts for each.

    hop 1, over ranks of equal place    x[far]: a token once for each node it needs, by node, token
    hop 2, over the ranks of a node     [near]: once for each expert there, by rank, expert, node
    [fan]                               by sender, expert: the flat rows
    [back]                              rows in the order of `fan` as hop 2 brought them

Worked example: 2 nodes of one rank, 2 experts each; tokens that choose [0, 3] and [2, 3]. Rank 0
sends token 0 to itself and tokens 0, 1 to node 1: far = [0, 0, 1], whose masks there are [10] for
token 0 (expert 3) and [11] for token 1. Node 1 takes near = [1, 0, 1]: expert 2 of token 1,
expert 3 of both.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from moe_compile.ops.permute import LIBRARY

WORD = 32
"""Experts that one integer of a mask stands for."""

LIBRARY.define("hop_table(Tensor chosen, Tensor counts, int nodes, int local) -> (Tensor, Tensor)")
LIBRARY.define("hop_sizes(Tensor table, Tensor tokens, int place) -> Tensor")
LIBRARY.define(
    "far_rows(Tensor chosen, int nodes, int per_node, SymInt num_rows) -> (Tensor, Tensor)"
)
LIBRARY.define("near_rows(Tensor masks, int per_node, SymInt num_rows) -> Tensor")
LIBRARY.define("fan_rows(Tensor counts, SymInt num_rows) -> Tensor")
LIBRARY.define("back_rows(Tensor counts, SymInt num_rows) -> Tensor")


def hop_table(
    chosen: torch.Tensor, counts: torch.Tensor, nodes: int, local: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what every rank is told, `[n, E + L + 1]` int32, and tokens for each node, `[N]`.

    Rank (b, m) is told the rows for each of its experts, those for each rank of node b, and how
    many tokens need node b. `chosen` `[..., k]` are experts, `counts` the rows for each.
    """
    by_rank = counts.reshape(nodes, local, -1).to(torch.int64)
    per_node = local * by_rank.shape[2]
    tokens = _needs(chosen // per_node, nodes).sum(0)
    on_node = by_rank.sum(2)
    told = [
        by_rank,
        on_node[:, None, :].expand(-1, local, -1),
        tokens[:, None, None].expand(-1, local, -1),
    ]
    return torch.cat(told, 2).flatten(0, 1).to(torch.int32), tokens


def hop_sizes(table: torch.Tensor, tokens: torch.Tensor, place: int) -> torch.Tensor:
    """Return rows of hop 1 to and from each node, then of hop 2 to and from each place.

    `table` `[N, L, E + L + 1]` is what this rank was told by all, `tokens` `[N]` its own.
    """
    local = table.shape[1]
    on_node = table[:, :, -1 - local : -1]
    return torch.cat(
        [
            tokens,
            table[:, place, -1],
            on_node[:, place].sum(0),
            on_node[:, :, place].sum(0),
        ]
    )


def far_rows(
    chosen: torch.Tensor, nodes: int, per_node: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of hop 1, `[num_rows]`, and which of their node's experts each needs.

    The latter are masks, `[num_rows, words]` int32: one bit an expert, `per_node` of them.
    """
    needs = _needs(chosen, nodes * per_node).view(-1, nodes, per_node)
    pairs = torch.nonzero_static(needs.any(2).T, size=num_rows)
    bits = F.pad(needs, (0, -per_node % WORD)).unflatten(2, (-1, WORD)).to(torch.int64)
    masks = (bits << torch.arange(WORD, device=chosen.device)).sum(3).to(torch.int32)
    return pairs[:, 1], masks[pairs[:, 1], pairs[:, 0]]


def near_rows(masks: torch.Tensor, per_node: int, num_rows: int) -> torch.Tensor:
    """Return which of the rows that hop 1 brought go on, by expert of the node, `[num_rows]`."""
    bits = (masks[:, :, None] >> torch.arange(WORD, device=masks.device)) & 1
    needs = bits.flatten(1)[:, :per_node]
    return torch.nonzero_static(needs.T, size=num_rows)[:, 1]


def fan_rows(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return where each flat row is among those that hop 2 brought, `[num_rows]`.

    `counts` `[N, L, E]` are rows by sender and expert. Rows came by place, expert, node.
    """
    ahead = _starts(counts.permute(1, 2, 0)).permute(2, 0, 1)
    return _moved_runs(counts, ahead - _starts(counts), num_rows)


def back_rows(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the inverse of `fan_rows`: which flat row each row is that hop 2 brought."""
    came = counts.permute(1, 2, 0)
    return _moved_runs(came, _starts(counts).permute(1, 2, 0) - _starts(came), num_rows)


def _moved_runs(counts: torch.Tensor, shift: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the number of each row in an order in which each run is moved by its `shift`."""
    runs = counts.reshape(-1)
    shifts = torch.repeat_interleave(shift.reshape(-1), runs, output_size=num_rows)
    return torch.arange(num_rows, device=counts.device) + shifts


def _needs(chosen: torch.Tensor, number: int) -> torch.Tensor:
    """Return `[T, number]` bools: whether a token chose each of so many."""
    chosen = chosen.reshape(-1, chosen.shape[-1])
    nothing = torch.zeros((chosen.shape[0], number), dtype=torch.bool, device=chosen.device)
    return nothing.scatter(1, chosen, True)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """Return where each run of rows starts, in the shape of `counts`, runs in its order."""
    flat = counts.reshape(-1)
    return (torch.cumsum(flat, 0) - flat).view(counts.shape)


for function in (hop_table, hop_sizes, far_rows, near_rows, fan_rows, back_rows):
    LIBRARY.impl(function.__name__, function, "CompositeImplicitAutograd")
HOP_TABLE = torch.ops.megamoe.hop_table.default
HOP_SIZES = torch.ops.megamoe.hop_sizes.default
FAR_ROWS = torch.ops.megamoe.far_rows.default
NEAR_ROWS = torch.ops.megamoe.near_rows.default
FAN_ROWS = torch.ops.megamoe.fan_rows.default
BACK_ROWS = torch.ops.megamoe.back_rows.default
