"""The experts of a generated layer as Python source: their order, their products, the way back.

Loops over experts that cut rows where others' begin: found by a search, or by offsets.

Names the lines may use: rows `[R, D]` received, ids `[R]` (the expert of each), runs (rows of each
rank for each expert, as integers), and the method `expert(x, e)`.

How a generated layer sorts received rows by expert and back, as Python source.

Names the lines may use: rows `[R, D]` received, flat (received counts), runs (rows of each rank for
each expert, as integers), ids `[R]` (the expert of each row), out (results, sorted). They define
perm, and label, which is ids sorted by it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from moe_compile.testing.programs.choices import Back, Cut, Decoy, Detail, Find, Order, Put, Style
from moe_compile.testing.programs.expert_lines import ACTS, BACKS, DECOYS, ROWS
from moe_compile.testing.programs.grammar import Experts

LOOPS: Final = frozenset(
    {Style.SORTED_LOOP, Style.INDEX_ADD, Style.INDEX_COPY, Style.ASSIGN, Style.STACKED}
)
"""Styles that cut sorted rows into slices."""

LISTED: Final = LOOPS | {Style.LOOP, Style.RUNS}
"""Styles whose slices are cut by integers of the host."""

ONE_BY_ONE: Final = (LISTED | {Style.DENSE, Style.SEARCHED}) - {Style.STACKED}
"""Styles that run each expert by itself."""


def hidden_method(layer: Experts) -> list[str]:
    """Return the method from gate and up, `[rows, H]` each, to hidden rows."""
    body = []
    if Detail.COLUMN_CAT in layer.details:
        body += ["gate, up = torch.cat([gate, up], -1).chunk(2, -1)"]
    if Detail.LISTS in layer.details:
        body += ["gate, up = gate * 1.0, up * 1.0", "torch._foreach_mul_([gate, up], 0.5)"]
    body += ACTS[layer.act]
    if Detail.IN_PLACE in layer.details:
        body += ["hidden.mul_(0.5)"]
    if Detail.VIEW_WRITE in layer.details:
        body += ["hidden[..., :3].add_(0.25)"]
    return ["def hidden(self, gate, up):", *indented([*body, "return hidden"])]


def expert_method(layer: Experts) -> list[str]:
    """Return the method that runs one expert on `[rows, D]`; [] where experts run at once."""
    if layer.style not in ONE_BY_ONE:
        return []
    first, last = (" + self.b1[e]", " + self.b2[e]") if Detail.BIAS in layer.details else ("", "")
    body = [
        f"gate = x @ self.w1[e]{first}",
        f"up = x @ self.{_weight_of_up(layer)}[e]",
        f"y = self.hidden(gate, up) @ self.w2[e]{last}",
    ]
    if Detail.BESIDE in layer.details:
        body += ["y = torch.cat([y[:, :5], x[:, 5:].to(y.dtype)], 1)"]
    if Decoy.GIVEN_BACK in layer.decoys:
        body += ["y = y * self.gain.to(self.gain.dtype)"]
    if Detail.DUMMY in layer.details:
        before = ["size = x.shape[0]", "x = torch.cat([x, x.new_zeros(1, x.shape[1])])"]
        body = [*before, *body, "y = y[:size]"]
    if Detail.OWN_MEAN in layer.details:
        body += ["y = y - y.mean(0)"]
    whole = "self.one(x, e)" if Detail.DUMMY_SUM in layer.details else ""
    name = "one" if whole else "expert"
    method = [f"def {name}(self, x, e):", *indented([*body, "return y.to(x.dtype)"])]
    if not whole:
        return method
    dummy = f"{whole} + self.one(x.new_zeros(1, x.shape[1]), e).sum() * 0"
    return [*method, "", "def expert(self, x, e):", f"    return {dummy}"]


def experts_method(layer: Experts) -> list[str]:
    """Return the method from received rows, rank by rank, to rows in the same order."""
    before = [line for decoy in Decoy if decoy in layer.decoys for line in DECOYS[decoy]]
    if Decoy.GIVEN_BACK in layer.decoys and not expert_method(layer):
        before += ["rows = rows * self.gain.to(self.gain.dtype)"]
    before += [line for detail in ROWS if detail in layer.details for line in ROWS[detail]]
    body = [*before, *_style_lines(layer)]
    return ["def experts(self, rows, flat, runs, extra):", *indented(body)]


def with_numbers(lines: Iterable[str], **numbers: int) -> list[str]:
    """Return the lines with numbers where their names stand in braces."""
    for name, number in numbers.items():
        lines = [line.replace(f"{{{name}}}", str(number)) for line in lines]
    return list(lines)


def indented(lines: list[str]) -> list[str]:
    """Return the lines one level deeper."""
    return [f"    {line}" if line else line for line in lines]


def _weight_of_up(layer: Experts) -> str:
    return "w1" if Detail.TIED in layer.details else "w3"


def _joined(layer: Experts, pieces: str) -> str:
    """Return the join of the pieces named, to an empty vector first where the layer does so."""
    first = "rows.new_empty(0), *" if Detail.EMPTY_JOIN in layer.details else ""
    return f"torch.cat([{first}{pieces}])" if first else f"torch.cat({pieces})"


def _style_lines(layer: Experts) -> list[str]:
    if layer.style is Style.LOOP:
        return _piece_loop(layer)
    if layer.style is Style.RUNS:
        return loop_by_offsets(layer)
    if layer.style is Style.PADDED:
        return [*padded_groups(layer), *_products(layer, ""), *PADDED_BACK]
    if layer.style is Style.SEARCHED:
        return [*labels(layer), *searched_loop(layer)]
    if layer.style is Style.DENSE:
        return [
            *labels(layer),
            "out = torch.zeros_like(rows)",
            f"for e in range({layer.local}):",
            "    y = self.expert(rows, e)",
            "    out = out + torch.where((ids == e)[:, None], y, torch.zeros_like(y))",
            "return out",
        ]
    if layer.style in LOOPS:
        return [*order_lines(layer), *_slice_loop(layer)]
    return [*order_lines(layer), *_at_once(layer), *back_lines(layer)]


def _piece_loop(layer: Experts) -> list[str]:
    e, r, nested = layer.local, layer.ranks, Detail.NESTED_CAT in layer.details
    if nested:
        return [
            "parts = torch.split(rows, runs)",
            f"mine = [{_of_expert(layer)} for e in range({e})]",
            "both = torch.cat([torch.cat([parts[i] for i in pair]) for pair in mine])",
            "slices = torch.split(both, [sum(runs[i] for i in pair) for pair in mine])",
            "ys = torch.cat([self.expert(x, e) for e, x in enumerate(slices)])",
            "done = torch.split(ys, [runs[i] for pair in mine for i in pair])",
            f"order = [e * {r} + r for r in range({r}) for e in range({e})]",
            "return torch.cat([torch.cat([done[i]]) for i in order])",
        ]
    return [
        "parts = torch.split(rows, runs)",
        "done = [None] * len(parts)",
        f"for e in range({e}):",
        f"    mine = {_of_expert(layer)}",
        "    y = self.expert(torch.cat([parts[i] for i in mine]), e)",
        "    for i, piece in zip(mine, torch.split(y, [runs[i] for i in mine])):",
        "        done[i] = piece",
        f"return {_joined(layer, 'done')}",
    ]


def _of_expert(layer: Experts) -> str:
    """Return the list of the pieces of expert `e`, one of each rank."""
    pieces = ["e", *(f"e + {layer.local * r}" for r in range(1, layer.ranks))]
    return f"[{', '.join(pieces)}]"


def _slice_loop(layer: Experts) -> list[str]:
    count = layer.local
    number = f"{count - 1} - e" if layer.order is Order.DESCENDING else "e"
    runs = [f"runs[{f'{count * r} + ' if r else ''}{number}]" for r in range(layer.ranks)]
    sizes = f"[{' + '.join(runs)} for e in range({count})]"
    if layer.style is Style.STACKED:
        return [f"sizes = {sizes}", *_stacked(layer), *back_lines(layer)]
    cut, padded = [f"sizes = {sizes}"], "x"
    if Detail.LONGEST in layer.details:
        cut += ["longest = max(sizes)"]
        padded = "torch.cat([x, x.new_zeros(longest - x.shape[0], x.shape[1])])"
    cut += [f"slices = torch.split({sorted_rows(layer)}, sizes)"]
    call = f"self.expert({padded}, {number})" + ("" if padded == "x" else "[:x.shape[0]]")
    if layer.style is Style.SORTED_LOOP:
        return [
            *cut,
            f"done = [{call} for e, x in enumerate(slices)]",
            f"out = {_joined(layer, 'done')}",
            *back_lines(layer),
        ]
    write = {
        Style.INDEX_ADD: "out = out.index_add(0, i, {y})",
        Style.INDEX_COPY: "out = out.index_copy(0, i, {y})",
        Style.ASSIGN: "out[i] = {y}",
    }[layer.style]
    return [
        *cut,
        "out = torch.zeros_like(rows)",
        "for e, (x, i) in enumerate(zip(slices, torch.split(perm, sizes))):",
        f"    {write.format(y=call)}",
        "return out",
    ]


def _at_once(layer: Experts) -> list[str]:
    backwards = layer.order is Order.DESCENDING
    flip = ".flip(0)" if backwards else ""
    bias = Detail.BIAS in layer.details
    per = f"per = flat.view({layer.ranks}, -1).sum(0){flip}"
    if layer.style is Style.BATCHED:
        return [per, *_batched(layer, flip, bias=bias)]
    ends, shift = ["offs = torch.cumsum(per, 0, dtype=torch.int32)"], []
    if Detail.SUMS_WRITTEN in layer.details:
        numbers = f"torch.arange({layer.local}){flip}"
        ends = [
            f"other = {numbers}.repeat_interleave(per, output_size=rows.shape[0])",
            "per.copy_(per.cumsum(0))",
            "offs = per.to(torch.int32)",
        ]
        shift = ["x = x + self.w2[other, 0]"]
    return [per, *ends, f"x = {sorted_rows(layer)}", *shift, *_products(layer, flip)]


def _products(layer: Experts, flip: str) -> list[str]:
    """Return grouped products of `x`, rows by expert up to `offs`, in `out`."""
    bias = Detail.BIAS in layer.details
    first, last = (" + self.b1[label]", " + self.b2[label]") if bias else ("", "")
    up = _weight_of_up(layer)
    products = [
        f"gate = torch._grouped_mm(x, self.w1{flip}, offs=offs){first}",
        f"up = torch._grouped_mm(x, self.{up}{flip}, offs=offs)",
    ]
    if layer.style is Style.FUSED:
        products = [
            f"both = torch._grouped_mm(x, torch.cat([self.w1, self.{up}], -1){flip}, offs=offs)",
            "gate, up = both.chunk(2, -1)",
        ]
        products += [f"gate = gate{first}"] if bias else []
    last_product = f"torch._grouped_mm(self.hidden(gate, up), self.w2{flip}, offs=offs){last}"
    out = [f"out = {last_product}"]
    if Detail.BESIDE in layer.details:
        out += ["out = torch.cat([out[:, :5], x[:, 5:]], 1)"]
    if Detail.CROSSED in layer.details:
        weight = "(self.wt.float() * 0.75).to(x.dtype).transpose(-2, -1)"
        products += [f"gate = gate + torch._grouped_mm(x, {weight}{flip}, offs=offs)"]
    if Detail.BANK in layer.details:
        looked_up = "looked = torch.bmm(x[:, None], self.w1[label])[:, 0]"
        products = [looked_up, *products, "gate = gate + looked"]
    return [*products, *out]


ALIGNED: Final = 8
"""Rows that padded groups have multiples of."""
PADDED_BACK: Final = (
    "back = out.new_empty(padded.shape)",
    "back[at, :] = out",
    "return back[:-1]",
)
"""Lines that put the results of padded groups in the order received; padding stands last."""


def padded_groups(layer: Experts) -> list[str]:
    """Return lines that define `x`, groups padded with zeros as torchtitan's are, and `offs`."""
    return with_numbers(
        [
            "each = flat.view({r}, {e})",
            "sizes = (torch.clamp_min(each.sum(0), {a}) + {a} - 1) // {a} * {a}",
            "ends = sizes.cumsum(0)",
            "offs = ends.to(torch.int32)",
            "run_starts = (ends - sizes)[:, None] + (each.cumsum(0) - each).t()",
            "run_starts = run_starts.reshape(-1)",
            "slots = torch.arange((rows.shape[0] + {e} * {a} + {a} - 1) // {a} * {a})",
            "run = torch.searchsorted(run_starts, slots, right=True) - 1",
            "within = slots - run_starts[run]",
            "source = (flat.cumsum(0) - flat).view({r}, {e}).t().reshape(-1)[run] + within",
            "at = torch.where(within < each.t().reshape(-1)[run], source, -1)",
            "padded = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])",
            "x = padded[at]",
        ],
        r=layer.ranks,
        e=layer.local,
        a=ALIGNED,
    )


def _stacked(layer: Experts) -> list[str]:
    """Return batched products of slices of `sizes` rows, padded to the longest."""
    flip = ".flip(0)" if layer.order is Order.DESCENDING else ""
    return [
        "longest = max(sizes)",
        f"slices = torch.split({sorted_rows(layer)}, sizes)",
        "padded = torch.stack([F.pad(x, (0, 0, 0, longest - x.shape[0])) for x in slices])",
        *_batch_products(layer, flip, bias=Detail.BIAS in layer.details),
        "done = [y[:size] for y, size in zip(out, sizes)]",
        f"out = {_joined(layer, 'done')}",
    ]


def _batch_products(layer: Experts, flip: str, *, bias: bool) -> list[str]:
    first, last = (f" + self.b{i}{flip}[:, None]" if bias else "" for i in (1, 2))
    return [
        f"gate = torch.bmm(padded, self.w1{flip}){first}",
        f"up = torch.bmm(padded, self.{_weight_of_up(layer)}{flip})",
        f"out = torch.bmm(self.hidden(gate, up), self.w2{flip}){last}",
    ]


def _batched(layer: Experts, flip: str, *, bias: bool) -> list[str]:
    e = layer.local
    label = f"{e - 1} - label" if flip else "label"
    return [
        f"slot = torch.arange(label.shape[0]) - (per.cumsum(0) - per)[{label}]",
        f"place = ({label}) * CAPACITY + slot",
        f"padded = rows.new_zeros({e} * CAPACITY, rows.shape[1])",
        f"padded = padded.index_copy(0, place, {sorted_rows(layer)}).view({e}, CAPACITY, -1)",
        *_batch_products(layer, flip, bias=bias),
        f"out = out.view({e} * CAPACITY, -1)[place]",
    ]


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
    """Return the loop over the rows that each rank sent for each expert."""
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


def labels(layer: Experts) -> list[str]:
    """Return lines that define `ids`, the expert of each received row."""
    if layer.order in (Order.SEARCH, Order.MISMATCHED):
        places = "torch.arange(rows.shape[0])"
        return [
            f"ids = torch.searchsorted(flat.cumsum(0), {places}, right=True) % {layer.local}",
        ]
    numbers = f"torch.arange({layer.local}).repeat({layer.ranks})"
    return [f"ids = {numbers}.repeat_interleave(flat, output_size=rows.shape[0])"]


def order_lines(layer: Experts) -> list[str]:
    """Return lines that define `perm` and, sorted by it, `label`."""
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
    """Return lines that put the sorted results `out` in the order received."""
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
