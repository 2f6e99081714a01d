"""How a generated layer sorts received rows by expert and back, as Python source.

Names the lines may use: rows `[R, D]` received, flat (received counts), runs (rows of each rank for
each expert, as integers), ids `[R]` (the expert of each row), out (results, sorted). They define
perm, and label, which is ids sorted by it.
"""

from __future__ import annotations

from moe_compile.testing.programs.choices import Back, Detail, Order
from moe_compile.testing.programs.expert_lines import BACKS
from moe_compile.testing.programs.grammar import Experts


def labels(layer: Experts) -> list[str]:
    """Return what defines `ids`, the expert of each received row."""
    if layer.order in (Order.SEARCH, Order.MISMATCHED):
        places = "torch.arange(rows.shape[0])"
        return [
            f"ids = torch.searchsorted(flat.cumsum(0), {places}, right=True) % {layer.local}",
        ]
    numbers = f"torch.arange({layer.local}).repeat({layer.ranks})"
    return [f"ids = {numbers}.repeat_interleave(flat, output_size=rows.shape[0])"]


def order_lines(layer: Experts) -> list[str]:
    """Return what defines `perm` and, sorted by it, `label`."""
    made = labels(layer)
    if layer.order is Order.SORT:
        return [*made, "label, perm = torch.sort(ids, stable=True)"]
    if layer.order is Order.PIECES:
        return [*made, *_pieces(layer), "label = ids[perm]"]
    if layer.order is Order.SEGMENTS:
        return [*made, *_segments(layer), "label = ids[perm]"]
    if layer.order is Order.PLACES:
        return [*made, *_places(layer), "label = ids[perm]"]
    places = "torch.arange(rows.shape[0])"
    perm = {
        Order.UNSTABLE: "torch.argsort(ids)",
        Order.DESCENDING: "torch.argsort(ids, descending=True, stable=True)",
        Order.MISMATCHED: "torch.argsort(ids, descending=True, stable=True)",
        Order.PLACE_AMONG_ALL: f"torch.argsort(ids * 3 + {places} % 3, stable=True)",
        Order.KEY: f"torch.argsort(ids * rows.shape[0] + {places}, stable=True)",
    }.get(layer.order, "torch.argsort(ids, stable=True)")
    return [*made, f"perm = {perm}", "label = ids[perm]"]


def sorted_rows(layer: Experts) -> str:
    """Return the rows by expert."""
    if Detail.WIDE in layer.details:
        return "torch.gather(rows, 0, perm[:, None].expand(-1, rows.shape[1]))"
    if layer.order is Order.PIECES:
        return "torch.cat([torch.split(rows, runs)[i] for i in by_expert])"
    return "rows[perm]"


def back_lines(layer: Experts) -> list[str]:
    """Return what puts the results `out`, which are sorted, in the order received."""
    if layer.back is not Back.PIECES:
        return BACKS[layer.back]
    sizes = "[runs[i] for i in by_expert]"
    return [
        f"parts = torch.split(out, {sizes})",
        "return torch.cat([parts[by_expert.index(i)] for i in range(len(parts))])",
    ]


def _pieces(layer: Experts) -> list[str]:
    numbers = [e + r * layer.local for e in range(layer.local) for r in range(layer.ranks)]
    return [
        f"by_expert = {numbers}",
        "places = torch.split(torch.arange(rows.shape[0]), runs)",
        "perm = torch.cat([places[i] for i in by_expert])",
    ]


def _segments(layer: Experts) -> list[str]:
    return [
        f"starts = (flat.cumsum(0) - flat).view({layer.ranks}, -1).t().reshape(-1)",
        f"lengths = flat.view({layer.ranks}, -1).t().reshape(-1)",
        f"run = torch.arange({layer.ranks * layer.local})",
        "run = run.repeat_interleave(lengths, output_size=rows.shape[0])",
        "perm = starts[run] + torch.arange(run.shape[0]) - (lengths.cumsum(0) - lengths)[run]",
    ]


def _places(layer: Experts) -> list[str]:
    return [
        f"hot = (ids[:, None] == torch.arange({layer.local})).long()",
        "first = hot.sum(0).cumsum(0) - hot.sum(0)",
        "place = first[ids] + (hot.cumsum(0) * hot).sum(1) - 1",
        "perm = torch.zeros_like(place).index_copy(0, place, torch.arange(ids.shape[0]))",
    ]
