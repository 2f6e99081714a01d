"""A generated MoE layer that gathers tokens itself, as Python source: no all-to-all.

Names the lines may use: everyone and total `[ranks T, D]`, scores and chosen `[ranks T, k]`, i (the
token of each row, or a mask of tokens), j (the place of each row among all chosen), rows `[R, D]`,
y (what an expert makes of them) and extra (values returned besides).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moe_compile.testing.programs.expert_lines import ACTS
from moe_compile.testing.programs.expert_text import indented
from moe_compile.testing.programs.grammar import NUM_RANKS, Picking
from moe_compile.testing.programs.picking_choices import (
    Add,
    Also,
    Otherwise,
    Routed,
    Search,
    Take,
    Weigh,
)

SUMS: Final = """\
SUMS = torch.float64 if DTYPE is torch.float32 else torch.float32  # whole numbers are exact in both
"""

FUNCTIONS: Final = """\
def gathered(x, group):
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def scattered(x, group):
    out = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=group)
    return out


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gathered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return scattered(gradient, ctx.group), None


class ScatterSums(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scattered(x, group)

    @staticmethod
    def backward(ctx, gradient):
        return gathered(gradient, ctx.group), None
"""

PARTS: Final = (("GatherTokens.", FUNCTIONS), ("SUMS", SUMS))
"""What a layer may use, and the source that defines it."""

SORTED: Final = [
    "order = torch.argsort(chosen.reshape(-1), stable=True)",
    "counts = (chosen.reshape(-1, 1) == torch.arange({n})).sum(0)",
]
PREPARES: Final = {
    Search.ONE_HOT: ["hot = F.one_hot(chosen, {n}).permute(2, 1, 0)"],
    Search.OFFSETS: [*SORTED, "ends = counts.cumsum(0).tolist()"],
    Search.GROUPED: [
        *SORTED,
        "mine = counts[self.first : self.first + {e}]",
        "start, number = torch.stack([counts[: self.first].sum(), mine.sum()]).tolist()",
        "j, ends = order.narrow(0, start, number), mine.cumsum(0, dtype=torch.int32)",
        "i = j // {k}",
    ],
}
OF_EXPERT: Final = "of_e = chosen == self.first + e"
SEARCHES: Final = {
    Search.WHERE: ["i, place = torch.where(chosen == self.first + e)"],
    Search.NONZERO: ["i, place = (chosen == self.first + e).nonzero(as_tuple=True)"],
    Search.ONE_HOT: ["place, i = torch.where(hot[self.first + e])"],
    Search.TOKENS: [OF_EXPERT, "i = of_e.any(-1).nonzero().squeeze(-1)"],
    Search.MASK: [OF_EXPERT, "i = of_e.any(-1)"],
    Search.OFFSETS: [
        "a = ends[self.first + e - 1] if self.first + e else 0",
        "j = order[a : ends[self.first + e]]",
        "i = j // {k}",
    ],
    Search.GROUPED: [],
    Search.BEST: [
        OF_EXPERT,
        "i = torch.topk((scores * of_e).sum(-1), everyone.shape[0] // 2)[1]",
    ],
}
SCORES: Final = {
    **dict.fromkeys((Search.WHERE, Search.NONZERO, Search.ONE_HOT), "scores[i, place]"),
    **dict.fromkeys((Search.TOKENS, Search.MASK, Search.BEST), "(scores * of_e).sum(-1)[i]"),
    **dict.fromkeys((Search.OFFSETS, Search.GROUPED), "scores.reshape(-1)[j]"),
}
OF_KNOWN_LENGTH: Final = frozenset({Search.OFFSETS, Search.GROUPED, Search.BEST})
"""Searches that Dynamo captures without being told to."""

TAKES: Final = {
    Take.INDEX: "everyone[i]",
    Take.SELECT: "everyone.index_select(0, i)",
    Take.COLUMNS: "everyone[i, :]",
    Take.LEADING: "everyone[None, i].reshape(-1, WIDTH)",
}
ADDS: Final = {
    Add.IN_PLACE: "total.index_add_(0, {i}, {y})",
    Add.NEW: "total = total.index_add(0, {i}, {y})",
    Add.INDEXED: "total[{i}] += {y}",
}
ROWS: Final[Mapping[Also | Otherwise, list[str]]] = {
    Otherwise.MEAN: ["rows = rows - rows.mean(0).round()"],  # whole numbers stay so
    Otherwise.FLIP: ["rows = rows + rows.flip(0)"],
    Otherwise.CUMSUM: ["rows = rows + rows.detach().cumsum(0) * 0.125"],
    Otherwise.LENGTH: ["rows = rows * (rows.shape[0] * 0.125)"],
    Also.POSITION: ["rows = rows * torch.arange(rows.shape[0])[:, None].to(rows.dtype)"],
    Also.INDEX_READ: ["rows = rows * {i}[:, None].to(rows.dtype)"],
    Otherwise.DROPOUT: ["rows = F.dropout(rows, 0.5)"],  # whole numbers stay so
    Otherwise.IN_PLACE: ["rows = rows * 1", "rows.mul_(2)"],
    Otherwise.KEPT: ["extra.append(rows.sum())"],
}
"""What happens to rows ahead of the experts; most of it makes them no rows by themselves."""

BEHIND: Final[Mapping[Also | Otherwise, list[str]]] = {
    Otherwise.READ_LATE: ["extra.append(everyone.sum() * 0.125)"],
    Otherwise.SUMS_READ: ["extra.append(total.sum())"],
    Otherwise.SUMS_CHANGED: ["total = total * 2"],
}
"""What happens to the sums, and the tokens, behind the experts."""


def picking_class(layer: Picking, number: int) -> list[str]:
    """Return the source of class `Layer<number>`; its input is `[T, D]`, equal T on all ranks."""
    methods = [
        _constructor(layer, number), _route(layer), _expert(layer), _total(layer), _forward(layer),
    ]  # fmt: skip
    body: list[str] = []
    for method in methods:
        body += ["", *method] if body else method
    numbers = {"{n}": layer.local * NUM_RANKS, "{k}": layer.top_k, "{e}": layer.local}
    for name, value in numbers.items():
        body = [line.replace(name, str(value)) for line in body]
    return [f"class Layer{number}(nn.Module):", *indented(body)]


def _constructor(layer: Picking, number: int) -> list[str]:
    shapes = {"w1": "WIDTH, HIDDEN", "w2": "HIDDEN, WIDTH"}
    shapes |= {"w3": "WIDTH, HIDDEN"} if Also.GATED in layer.also else {}
    shapes |= {"b1": "HIDDEN", "b2": "WIDTH"} if Also.BIAS in layer.also else {}
    body = [
        "super().__init__()",
        "self.group, self.rank = dist.group.WORLD, dist.get_rank()",
        "self.first = self.rank * {e}",
        f"shared = torch.Generator().manual_seed(SEED + {10 * number})",
        f"own = torch.Generator().manual_seed(SEED + {10 * number} + 1 + self.rank)",
        "self.router = parameter(shared, WIDTH, {n})",
        *(f"self.{name} = parameter(own, {{e}}, {shape})" for name, shape in shapes.items()),
    ]
    if Also.SHARED_EXPERT in layer.also:
        body += ["self.s1 = parameter(shared, WIDTH, WIDTH)"]
    return ["def __init__(self):", *indented(body)]


def _route(layer: Picking) -> list[str]:
    del layer
    body = [
        "scores = x @ self.router",
        "chosen = torch.topk(scores.double() + favour({n}), {k}, -1)[1]",
        "return scores.gather(1, chosen), chosen",
    ]
    return ["def route(self, x):", *indented(body)]


def _expert(layer: Picking) -> list[str]:
    """Return the method that runs one expert, or all on sorted rows of which `e` has the ends."""
    also, grouped = layer.also, layer.search is Search.GROUPED

    def product(x: str, i: int) -> str:
        if grouped:
            return f"torch._grouped_mm({x}, self.w{i}, offs=e)"
        bias = "" if i == 3 or Also.BIAS not in also else f"self.b{min(i, 2)}[e]"
        if Also.LINEAR in also:
            return f"F.linear({x}, self.w{i}[e].t(){bias and ', '}{bias})"
        return f"{x} @ self.w{i}[e]{bias and ' + '}{bias}"

    gated = Also.GATED in also
    acts = ACTS[layer.act] if gated else [a.replace(" * up", "") for a in ACTS[layer.act]]
    batched = Also.BATCH_OF_ONE in also and not grouped
    body = [
        *(["x = x[None]"] if batched else []),
        f"gate = {product('x', 1)}",
        *([f"up = {product('x', 3)}"] if gated else []),
        *acts,
        f"out = {product('hidden', 2)}",
        "return out[0]" if batched else "return out",
    ]
    return ["def expert(self, x, e):", *indented(body)]


def _total(layer: Picking) -> list[str]:
    """Return the method that makes the sums of all ranks' tokens."""
    also, index = layer.also, "i"
    wide = Also.WIDER_SUMS in also
    if Also.ANEW in also:
        index = "(j // {k})"
    if Otherwise.ELSEWHERE in layer.otherwise:
        is_mask = layer.search is Search.MASK
        index = "i.roll(1)" if is_mask else f"({index} + 1) % everyone.shape[0]"
    zeros = "torch.zeros_like(everyone" + (", dtype=SUMS)" if wide else ")")
    if Otherwise.ONTO_TOKENS in layer.otherwise:
        zeros = "everyone.to(SUMS)" if wide else "everyone * 1"
    grouped = layer.search is Search.GROUPED
    put = ADDS[layer.add].replace("{i}", index).replace("{y}", "y.to(total.dtype)")
    each = [
        *SEARCHES[layer.search],
        f"rows = {TAKES[layer.take]}",
        *(["rows = rows * 1"] if layer.otherwise else []),
        *_lines(ROWS, layer),
        *_weighed(layer, "rows", (Weigh.AHEAD,)),
        f"y = {_called(layer)}",
        *_weighed(layer, "y", (Weigh.BEHIND, Weigh.COLUMN)),
        put,
    ]
    body = [
        f"total = {zeros}",
        *PREPARES.get(layer.search, []),
        *(each if grouped else ["for e in range({e}):", *indented(each)]),
        *_lines(BEHIND, layer),
        "return total.to(DTYPE)" if wide else "return total",
    ]
    return ["def total(self, everyone, scores, chosen, extra):", *indented(body)]


def _lines(lines: Mapping[Also | Otherwise, list[str]], layer: Picking) -> list[str]:
    chosen = {*layer.also, *layer.otherwise}
    found = [line for member in lines if member in chosen for line in lines[member]]
    number = "i.nonzero()[:, 0]" if layer.search is Search.MASK else "i"
    return [line.replace("{i}", number) for line in found]


def _weighed(layer: Picking, name: str, places: tuple[Weigh, ...]) -> list[str]:
    if layer.weigh not in places:
        return []
    scores = SCORES[layer.search]
    if layer.weigh is Weigh.COLUMN:
        return [f"{name} = {scores}.unsqueeze(-1) * {name}"]
    return [f"{name} = {name} * {scores}[:, None]"]


def _called(layer: Picking) -> str:
    e = "ends" if layer.search is Search.GROUPED else "e"
    if Also.CHECKPOINT in layer.also:
        return f"checkpoint(self.expert, rows, {e}, use_reentrant=False)"
    return f"self.expert(rows, {e})"


def _forward(layer: Picking) -> list[str]:
    also, own = layer.also, layer.routed is not Routed.TOGETHER
    written = Also.TOKENS_WRITTEN in also
    gather, scatter = (
        ("GatherTokens.apply({}, self.group)", "ScatterSums.apply({}, self.group)")
        if Also.FUNCTIONS in also
        else (
            "all_gather_tensor_autograd({}, 0, self.group)",
            'reduce_scatter_tensor_autograd({}, "sum", 0, self.group)',
        )
    )
    # written only once they are gathered: eagerly the gather goes on until something waits for it
    overwrite = ["wait_tensor(everyone.detach())", "x.zero_()"]
    tokens = [f"everyone = {gather.format('x')}", *(overwrite if written else [])]
    chosen = [
        "chosen = all_gather_tensor(chosen, 0, self.group)",
        f"scores = {gather.format('scores')}",
    ]
    body = [
        "extra = []",
        *(["common = F.relu(x @ self.s1)"] if Also.SHARED_EXPERT in also and written else []),
        *(["x = x * 1"] if written else []),
        *([f"scores, chosen = self.route(x{' * 1' if written else ''})"] if own else []),
        *(chosen if layer.routed is Routed.AHEAD else []),
        *tokens,
        *(chosen if layer.routed is Routed.BESIDE else []),
        *([] if own else ["scores, chosen = self.route(everyone)"]),
        *(["extra.append(everyone.sum() * 0.125)"] if Also.READ_AHEAD in also else []),
        *(["common = F.relu(x @ self.s1)"] if Also.SHARED_EXPERT in also and not written else []),
        "total = self.total(everyone, scores, chosen, extra)",
        f"result = {scatter.format('total')}",
        *(["result = result + common"] if Also.SHARED_EXPERT in also else []),
        *(["extra.append((scores * (chosen < {e})).sum() * 0.125)"] if Also.LOSS in also else []),
        "return result, extra",
    ]
    return ["def forward(self, x):", *indented(body)]
