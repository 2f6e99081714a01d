"""Loops over experts that cut rows where others' begin: found by a search, or by offsets.

Names the lines may use: rows `[R, D]` received, ids `[R]` (the expert of each), runs (rows of each
rank for each expert, as integers), and the method `expert(x, e)`.
"""

from __future__ import annotations

from typing import Final

from moe_compile.testing.programs.grammar import Experts
from moe_compile.testing.programs.loop_choices import Cut, Find, Put

FINDS: Final = {
    Find.WHERE: "i = torch.where(ids == e)[0]",
    Find.NONZERO: "i = (ids == e).nonzero().squeeze(-1)",
    Find.MASK: "i = ids == e",
    Find.ONE_HOT: "i = torch.where(hot[e])[0]",
    Find.BETWEEN: "i = ((ids > e - 1) & (ids < e + 1)).nonzero(as_tuple=True)[0]",
}
PUTS: Final = {
    Put.INDEX_ADD: "out.index_add_(0, i, y)",
    Put.ASSIGN: "out[i] = y",
    Put.ADDED: "out[i] += y",
    Put.INDEX_PUT: "out = torch.index_put(out, (i,), y)",
    Put.SCATTER_ADD: "out.scatter_add_(0, i[:, None].expand(-1, out.shape[1]), y)",
}
BY_INDICES: Final = (Put.INDEX_ADD, Put.SCATTER_ADD)
"""Ways back that take no mask."""
CUTS: Final = {
    Cut.SLICES: ["out[a:b] = self.expert(rows[a:b], e)"],
    Cut.NARROWED: [
        "y = self.expert(rows.narrow(0, a, b - a), e)",
        "out.narrow(0, a, b - a).copy_(y)",
    ],
    Cut.LISTED: ["done.append(self.expert(rows[a:b], e))"],
}


def searched_loop(layer: Experts) -> list[str]:
    """Return the loop that finds the rows of each expert, once `ids` are known."""
    e, find = layer.local, FINDS[layer.find]
    if layer.put in BY_INDICES and layer.find is Find.MASK:
        find = f"{find}.nonzero()[:, 0]".replace("ids == e", "(ids == e)")
    hot = [f"hot = F.one_hot(ids, {e}).T"] if layer.find is Find.ONE_HOT else []
    new = "empty_like" if layer.put is Put.ASSIGN else "zeros_like"
    return [
        *hot,
        f"out = torch.{new}(rows)",
        f"for e in range({e}):",
        f"    {find}",
        "    y = self.expert(rows[i], e)",
        f"    {PUTS[layer.put]}",
        "return out",
    ]


def loop_by_offsets(layer: Experts) -> list[str]:
    """Return the loop over what each rank sent for each expert."""
    e = layer.local
    if layer.cut is Cut.TENSOR_SPLIT:
        return [
            f"ends = [sum(runs[:i + 1]) for i in range({layer.ranks * e - 1})]",
            "parts = torch.tensor_split(rows, ends)",
            f"return torch.cat([self.expert(x, i % {e}) for i, x in enumerate(parts)])",
        ]
    new = "empty_like" if layer.cut is Cut.NARROWED else "zeros_like"
    first = "done = []" if layer.cut is Cut.LISTED else f"out = torch.{new}(rows)"
    return [
        first,
        "b = 0",
        f"for i in range({layer.ranks * e}):",
        f"    e, a, b = i % {e}, b, b + runs[i]",
        *(f"    {line}" for line in CUTS[layer.cut]),
        "return torch.cat(done)" if layer.cut is Cut.LISTED else "return out",
    ]
