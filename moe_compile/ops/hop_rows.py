"""Indices and sizes of two hops, in which a token crosses to a node once.

Contract
    The rows that two hops bring, reordered by `fan`, are in the order of the flat all-to-all: by
    sender, then by expert, then by token. Every index is computed on the device; the host reads
    sizes alone.
    No token chooses an expert twice, and the rows of an expert stand in the order of tokens.

Ranks are `node * L + place`, N nodes of L ranks, E experts on each, n = N L. T tokens, k of the
n E experts for each. Hop 1 goes in S slices of tokens, token t in slice t S // T; hop 2 of each
slice in C chunks of every rank's experts, chunk c those from `edges[c]` to `edges[c + 1]`.

    hop 1, over ranks of equal place    x[far]: a token once for each node it needs, by slice, node,
                                        token
    hop 2, over the ranks of a node     [near], of a slice: once for each expert there, by chunk,
                                        rank, expert, node
    [fan], of a chunk                   by sender, expert: the flat rows of its experts
    [back], of a chunk                  rows in the order of `fan` as hop 2 brought them

Worked example: 2 nodes of one rank, 2 experts each; tokens that choose [0, 3] and [2, 3]. Rank 0
sends token 0 to itself and tokens 0, 1 to node 1: far = [0, 0, 1], whose masks there are [10] for
token 0 (expert 3) and [11] for token 1. Node 1 takes near = [1, 0, 1]: expert 2 of token 1,
expert 3 of both. In two slices far = [0, 0 | 1], and near = [0 | 0, 0] of the rows each brought.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F

from moe_compile.ops.permute import LIBRARY

WORD = 32
"""Experts that one integer of a mask stands for."""

LIBRARY.define(
    "hop_table(Tensor chosen, Tensor counts, int nodes, int local, int[] edges, int slices) "
    "-> (Tensor, Tensor)"
)
LIBRARY.define("hop_sizes(Tensor table, Tensor tokens, int[] edges, int place) -> Tensor")
LIBRARY.define(
    "far_rows(Tensor chosen, int nodes, int per_node, int slices, SymInt num_rows) "
    "-> (Tensor, Tensor, Tensor)"
)
LIBRARY.define(
    "near_rows(Tensor masks, int per_node, int[] edges, SymInt num_rows) -> (Tensor, Tensor)"
)
LIBRARY.define("fan_rows(Tensor counts, SymInt num_rows) -> Tensor")
LIBRARY.define("back_rows(Tensor counts, SymInt num_rows) -> Tensor")
LIBRARY.define("chunk_rows(Tensor counts, int[] edges, SymInt num_rows) -> (Tensor, Tensor)")


def hop_table(
    chosen: torch.Tensor,
    counts: torch.Tensor,
    nodes: int,
    local: int,
    edges: list[int],
    slices: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the table for every rank, `[n, S (E + C L + 1)]` int32, and tokens for each node.

    The row of rank (b, m) has, for each slice, the number of rows for each of its experts, of rows
    of each chunk for each rank of node b, and of tokens that need node b. `chosen` `[..., k]` are
    experts, `counts` the rows for each. Tokens are `[S, N]`.
    """
    per_node = local * edges[-1]
    needs = _needs(chosen // per_node, nodes).to(torch.int64)
    by_expert, tokens = counts.reshape(1, -1).to(torch.int64), needs.sum(0, keepdim=True)
    if slices > 1:
        of_expert = _needs(chosen, nodes * per_node).to(torch.int64)
        by_expert, tokens = _by_slice(of_expert, slices), _by_slice(needs, slices)
    by_rank = by_expert.view(slices, nodes, local, -1)
    told = [by_rank]
    for first, last in itertools.pairwise(edges):
        on_node = by_rank[..., first:last].sum(3)
        told.append(on_node[:, :, None, :].expand(-1, -1, local, -1))
    told.append(tokens[:, :, None, None].expand(-1, -1, local, -1))
    table = torch.cat(told, 3).permute(1, 2, 0, 3)
    return table.reshape(nodes * local, -1).to(torch.int32), tokens


def hop_sizes(
    table: torch.Tensor, tokens: torch.Tensor, edges: list[int], place: int
) -> torch.Tensor:
    """Return rows of hop 1 to and from each node, then of hop 2 to and from each place.

    Numbers of hop 1 are by slice, those of hop 2 by slice and chunk.
    `table` `[N, L, S, E + C L + 1]` is received from all ranks, `tokens` `[S, N]` is this rank's
    own.
    """
    local = table.shape[1]
    on_node = table[..., edges[-1] : -1].unflatten(3, (-1, local))
    return torch.cat(
        [
            tokens.reshape(-1),
            table[:, place, :, -1].T.reshape(-1),
            on_node[:, place].sum(0).reshape(-1),
            on_node[..., place].sum(0).permute(1, 2, 0).reshape(-1),
        ]
    )


def far_rows(
    chosen: torch.Tensor, nodes: int, per_node: int, slices: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens of hop 1, `[num_rows]`, experts of the node that each needs, and slots.

    Experts are masks, `[num_rows, words]` int32: one bit an expert, `per_node` of them. A row's
    slot, `[num_rows]`, is how many nodes before its own need its token.
    """
    needs = _needs(chosen, nodes * per_node).view(-1, nodes, per_node)
    needed = needs.any(2)
    node, token = torch.nonzero_static(needed.T, size=num_rows).unbind(1)
    if slices > 1:
        order = torch.argsort(_slice_of(token, needs.shape[0], slices), stable=True)
        node, token = node[order], token[order]
    bits = F.pad(needs, (0, -per_node % WORD)).unflatten(2, (-1, WORD)).to(torch.int64)
    masks = (bits << torch.arange(WORD, device=chosen.device)).sum(3).to(torch.int32)
    return token, masks[token, node], _before(needed[token], node)


def near_rows(
    masks: torch.Tensor, per_node: int, edges: list[int], num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the rows of hop 1 that go on in hop 2, and their slots.

    Both `[num_rows]`, by chunk and then by expert. A row's slot is how many experts of the node
    before its own need the same row of hop 1.
    """
    needs, experts = _bits(masks, per_node), None
    if len(edges) > 2:
        experts = _by_chunk(per_node // edges[-1], edges, masks.device)
        needs = needs[:, experts]
    place, row = torch.nonzero_static(needs.T, size=num_rows).unbind(1)
    expert = place if experts is None else experts[place]
    return row, _before(_bits(masks[row], per_node), expert)


def fan_rows(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the place of each flat row among the rows that hop 2 brought, `[num_rows]`.

    `counts` `[N, L, S, E]` are rows by sender, slice and expert. Rows came by slice, place, expert,
    node.
    """
    ahead = _starts(counts.permute(2, 1, 3, 0)).permute(3, 1, 2, 0)
    flat = counts.permute(0, 1, 3, 2)
    return _moved_runs(flat, ahead - _starts(flat), num_rows)


def back_rows(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return the inverse of `fan_rows`: the flat place of each row that hop 2 brought."""
    came, flat = counts.permute(2, 1, 3, 0), counts.permute(0, 1, 3, 2)
    return _moved_runs(came, _starts(flat).permute(3, 1, 2, 0) - _starts(came), num_rows)


def chunk_rows(
    counts: torch.Tensor, edges: list[int], num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the flat place of each row in an order by chunk, and the inverse.

    `counts` `[N, L, S, E]`. Within a chunk rows lie by sender and expert, as in the flat order.
    """
    by_expert = counts.sum(2).reshape(-1)
    runs = _by_chunk(by_expert.shape[0] // edges[-1], edges, counts.device)
    moved = by_expert[runs]
    starts, flat = _starts(moved), _starts(by_expert)
    shifts_back = torch.empty_like(flat).scatter(0, runs, starts - flat[runs])
    order = _moved_runs(moved, flat[runs] - starts, num_rows)
    return order, _moved_runs(by_expert, shifts_back, num_rows)


def _by_chunk(ranks: int, edges: list[int], device: torch.device) -> torch.Tensor:
    """Return the numbers of the experts of so many ranks by chunk, then by rank and expert."""
    first = torch.arange(ranks, device=device)[:, None] * edges[-1]
    pairs = itertools.pairwise(edges)
    return torch.cat([(first + torch.arange(*pair, device=device)).view(-1) for pair in pairs])


def _by_slice(needs: torch.Tensor, slices: int) -> torch.Tensor:
    """Return the sums `[S, ...]` of the tokens' `needs` `[T, ...]` by slice."""
    tokens = torch.arange(needs.shape[0], device=needs.device)
    of_slice = _slice_of(tokens, needs.shape[0], slices)
    sums = torch.zeros((slices, needs.shape[1]), dtype=needs.dtype, device=needs.device)
    return sums.index_add(0, of_slice, needs)


def _slice_of(token: torch.Tensor, number: int, slices: int) -> torch.Tensor:
    """Return the slice of each token of so many."""
    return token * slices // number


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


def _bits(masks: torch.Tensor, number: int) -> torch.Tensor:
    """Return the first bits of `masks`, `[R, words]`, as integers, `[R, number]`."""
    bits = (masks[:, :, None] >> torch.arange(WORD, device=masks.device)) & 1
    return bits.flatten(1)[:, :number]


def _before(marks: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """Return the number of `marks` `[R, number]` of each row before its `column` `[R]`."""
    columns = torch.arange(marks.shape[1], device=marks.device)
    return (marks * (columns < column[:, None])).sum(1)


def _starts(counts: torch.Tensor) -> torch.Tensor:
    """Return the start of each run of rows, in the shape of `counts`, runs in its order."""
    flat = counts.reshape(-1)
    return (torch.cumsum(flat, 0) - flat).view(counts.shape)


for function in (hop_table, hop_sizes, far_rows, near_rows, fan_rows, back_rows, chunk_rows):
    LIBRARY.impl(function.__name__, function, "CompositeImplicitAutograd")
HOP_TABLE = torch.ops.megamoe.hop_table.default
HOP_SIZES = torch.ops.megamoe.hop_sizes.default
FAR_ROWS = torch.ops.megamoe.far_rows.default
NEAR_ROWS = torch.ops.megamoe.near_rows.default
FAN_ROWS = torch.ops.megamoe.fan_rows.default
BACK_ROWS = torch.ops.megamoe.back_rows.default
CHUNK_ROWS = torch.ops.megamoe.chunk_rows.default
