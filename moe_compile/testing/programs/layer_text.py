"""A generated MoE layer as Python source: its routing, counts and splits, its rows and losses.

Names the lines may use: x `[T, D]`, scores and chosen `[T, k]` while tokens are routed, flat (the
expert of each row), order (rows by expert), counts, noted (values returned besides); then out
`[R, D]` (rows that came back, in `order`), scores `[T k]`, result `[T, D]` and extra.
"""

from __future__ import annotations

import itertools
from typing import Final

from moe_compile.testing.programs.choices import (
    Counts,
    Decoy,
    Detail,
    Loss,
    Move,
    Order,
    Padding,
    Splits,
    Tally,
    Unsort,
    Weighing,
)
from moe_compile.testing.programs.expert_text import (
    LISTED,
    expert_method,
    experts_method,
    hidden_method,
    indented,
    with_numbers,
)
from moe_compile.testing.programs.grammar import POSITIONS, READ_IN, Experts
from moe_compile.testing.programs.reader_text import lines_at

CUTS: Final = {
    Padding.SENT: "order = order[:sum(sent)]",
    Padding.NARROWED: "order = order.narrow(0, 0, sum(sent))",
    Padding.COUNTED: "order = order[:counts.sum().item()]",
}

WEIGHTS: Final = {
    Weighing.COLUMN: "scores[order][:, None]",
    Weighing.NEW_AXIS: "scores.flatten()[order, None]",
    Weighing.UNSQUEEZED: "scores.unsqueeze(1)[order]",
    Weighing.SELECTED: "torch.index_select(scores, 0, order).view(-1, 1)",
}

BY_TOKEN: Final = {
    Unsort.EMPTY: ["new = torch.empty_like(out)", "new[order] = out"],
    Unsort.COLUMNS: ["new = out.new_empty(out.shape)", "new[order, :] = out"],
    Unsort.INVERSE: ["new = out[torch.argsort(order)]"],
    Unsort.EINSUM: ["new = out.new_empty(out.shape)", "new.index_copy_(0, order, out)"],
}
"""Ways back that hold all rows of each token before they weigh them."""

SEQUENCES: Final = f"x.shape[0] // {POSITIONS}"
ROUTED: Final = {
    Loss.Z_LOSS: ["noted.append(torch.logsumexp((x @ self.router).float(), -1).square().mean())"],
    Loss.SEQUENCE: [
        f"ones = torch.ones({SEQUENCES}, {POSITIONS} * {{k}})",
        f"times = torch.zeros({SEQUENCES}, {{n}})",
        f"times = times.scatter_add_(1, chosen.view({SEQUENCES}, -1), ones)",
        f"means = scores.view({SEQUENCES}, {POSITIONS}, {{n}}).mean(1)",
        "noted.append((times * means).sum(1).mean())",
    ],
}
RETURNED: Final = {
    Loss.CROSS_ENTROPY: [
        "labels = torch.arange(x.shape[0]) % WIDTH",
        "extra.append(F.cross_entropy(result.float(), labels))",
    ],
    Loss.MSE: ["extra.append(F.mse_loss(result.float(), torch.tanh(x.detach()).float()))"],
}


def routed_losses(layer: Experts) -> list[str]:
    """Return lines that compute losses of scores, every expert's of each token."""
    lines = (line for loss, lines in ROUTED.items() if loss in layer.losses for line in lines)
    return with_numbers(lines, n=layer.local * layer.ranks, k=layer.top_k)


def padded_labels(layer: Experts) -> list[str]:
    """Return lines that give rows of padding an expert that does not exist."""
    if layer.padding is Padding.NONE:
        return []
    repeated = f".repeat_interleave({layer.top_k})" if layer.top_k > 1 else ""
    return [
        "padding = ~(x.detach()[:, 0] <= 0.25)",
        f"flat = torch.where(padding{repeated}, {layer.local * layer.ranks}, flat)",
    ]


def weights(layer: Experts) -> str:
    """Return the scores of sorted rows, as a column or where rows are numbers as these."""
    column = WEIGHTS[layer.weighing]
    return f"{column}.flatten()" if Detail.ONE_NUMBER in layer.details else column


def gathered(layer: Experts) -> str:
    """Return the expression for the rows that are sent, before any detail changes them."""
    tokens = f"order // {layer.top_k}"
    if layer.unsort is Unsort.COLUMN_INDEX:
        return f"torch.gather(x, 0, {_in_columns(tokens)})"
    return f"x[{tokens}]"


def _in_columns(index: str) -> str:
    return f"({index})[:, None].expand(-1, WIDTH)"


def result_lines(layer: Experts) -> list[str]:
    """Return lines that weigh the rows that came back and sum those of each token."""
    is_weighed = Detail.PROBS_TRAVEL in layer.details
    if layer.unsort in BY_TOKEN:
        return [*BY_TOKEN[layer.unsort], _sum_by_token(layer, is_weighed=is_weighed)]
    weigh = [] if is_weighed else ["out = out * weights.to(out.dtype)"]
    tokens = f"order // {layer.top_k}"
    if Detail.ONE_NUMBER in layer.details:
        summed = f"x.new_zeros(x.shape[0]).index_add(0, {tokens}, out.to(x.dtype))"
        return [*weigh, f"result = x * {summed}[:, None]"]
    if layer.unsort is Unsort.IN_PLACE:
        sums = "result = torch.zeros_like(x)"
        return [*weigh, sums, f"result.index_add_(0, {tokens}, out.to(x.dtype))"]
    add = f"index_add(0, {tokens}"
    if layer.unsort is Unsort.COLUMN_INDEX:
        add = f"scatter_add(0, {_in_columns(tokens)}"
    return [*weigh, f"result = torch.zeros_like(x).{add}, out.to(x.dtype))"]


def _sum_by_token(layer: Experts, *, is_weighed: bool) -> str:
    k = layer.top_k
    by_token, scores = f"new.view(x.shape[0], {k}, WIDTH)", f"scores.view(x.shape[0], {k})"
    if is_weighed:
        return f"result = {by_token}.sum(1).to(x.dtype)"
    if layer.unsort is Unsort.EINSUM:
        product = f'torch.einsum("tkd,tk->td", {by_token}, {scores}.to(out.dtype))'
        return f"result = {product}.to(x.dtype)"
    return f"result = ({by_token} * {scores}[..., None].to(out.dtype)).sum(1).to(x.dtype)"


TALLIES: Final = {
    Tally.COMPARE: ["counts = (flat[:, None] == torch.arange({n})).sum(0)"],
    Tally.BINCOUNT: ["counts = torch.bincount(flat, minlength={n})"],
    Tally.HISTC: ["counts = torch.histc(flat.float(), {n}, 0, {n}).long()"],
    Tally.SCATTER_ADD: [
        "counts = torch.zeros({n}, dtype=torch.int64)",
        "counts = counts.scatter_add(0, flat, torch.ones_like(flat))",
    ],
    Tally.ONE_HOT: ["counts = F.one_hot(flat, {n}).sum(0)"],
    Tally.SCATTER_ADD_IN_PLACE: [
        "counts = flat.new_zeros({n}).scatter_add_(0, flat, torch.ones_like(flat))",
    ],
    Tally.BINCOUNT_CUT: ["counts = torch.bincount(flat, minlength={n})[:{n}]"],
    Tally.BINCOUNT_VIEWED: [
        "counts = torch.bincount(flat, minlength={n})",
        "counts = counts.view({r}, {e}).reshape(-1)",
    ],
    Tally.UNIQUE: [
        "found, counts = torch.unique(flat, return_counts=True)",
        "counts = flat.new_zeros({n}).index_put((found,), counts)",
    ],
}

OWN: Final = "[:, self.rank * {e} : self.rank * {e} + {e}].reshape(-1)"
COUNTS: Final = {
    Counts.FUNCTIONAL: [
        "arrived = wait_tensor(all_to_all_single(counts, None, None, self.group))",
    ],
    Counts.LAZY: ["arrived = all_to_all_single(counts, None, None, self.group)"],
    Counts.LEGACY: [
        "arrived = torch.empty_like(counts)",
        "dist.all_to_all_single(arrived, counts)",
    ],
    Counts.MATRIX: [
        "arrived = all_to_all_single(counts.view({r}, -1), None, None, self.group)",
        "arrived = wait_tensor(arrived)",
    ],
    Counts.GATHERED: [
        "everyone = wait_tensor(all_gather_tensor(counts, 0, self.group))",
        "arrived = everyone.view({r}, -1)" + OWN,
    ],
    Counts.LEGACY_GATHERED: [
        "everyone = counts.new_empty({r} * {n})",
        "dist.all_gather_into_tensor(everyone, counts)",
        "arrived = everyone.view({r}, -1)" + OWN,
    ],
    Counts.LEGACY_LISTED: [
        "parts = [torch.empty_like(counts) for _ in range({r})]",
        "dist.all_gather(parts, counts)",
        "mine = [part[self.rank * {e} : self.rank * {e} + {e}] for part in parts]",
        "arrived = torch.cat(mine)",
    ],
}

MOVES: Final = {
    Move.FUNCTIONAL: "all_to_all_single_autograd",
    Move.FUNCTION: "exchange",
    Move.OF_ITSELF: "exchange_of_itself",
    Move.TOGETHER: "exchange_together",
    Move.WRITTEN_OUT: "exchange_written_out",
    Move.HALVED: "exchange_halved",
    Move.HANDLE: "exchange_by_handle",
}
"""Functions by which rows travel (`text.py`, but for the first)."""

SUMS: Final = "{name}.reshape({r}, -1).sum(1)"
SPLITS: Final = {
    Splits.TOLIST: "{list} = {name}.reshape({r}, -1).sum(1).tolist()",
    Splits.ITEM: "{list} = [v.item() for v in {name}.reshape({r}, -1).sum(1)]",
    Splits.UNBIND: "{list} = [v.sum().item() for v in {name}.reshape({r}, -1).unbind(0)]",
    Splits.RUNNING: "ends = {name}.reshape({r}, -1).sum(1).cumsum(0)\n"
    "first = ends[0].item()\nends.sub_(first)\n{list} = [first, ends[1].item()]",
    Splits.CPU: '{list} = {name}.reshape({r}, -1).sum(1).to("cpu", non_blocking=True).tolist()',
}


def layer_class(layer: Experts, number: int) -> list[str]:
    """Return the source of class `Layer<number>`."""
    methods = [
        _constructor(layer, number),
        _route(layer),
        hidden_method(layer),
        expert_method(layer),
        experts_method(layer),
        _forward(layer),
    ]
    body: list[str] = []
    for method in methods:
        body += ["", *method] if body and method else method
    return [f"class Layer{number}(nn.Module):", *indented(body)]


def _constructor(layer: Experts, number: int) -> list[str]:
    e, experts = layer.local, layer.local * layer.ranks
    body = [
        "super().__init__()",
        "self.group, self.rank = dist.group.WORLD, dist.get_rank()",
        f"shared = torch.Generator().manual_seed(SEED + {10 * number})",
        f"own = torch.Generator().manual_seed(SEED + {10 * number} + 1 + self.rank)",
        f"self.router = parameter(shared, WIDTH, {experts})",
        f"self.w1 = parameter(own, {e}, WIDTH, HIDDEN)",
        f"self.w3 = parameter(own, {e}, WIDTH, HIDDEN)",
        f"self.w2 = parameter(own, {e}, HIDDEN, WIDTH)",
    ]
    if Detail.BIAS in layer.details:
        body += [f"self.b1 = parameter(own, {e}, HIDDEN)", f"self.b2 = parameter(own, {e}, WIDTH)"]
    if Detail.CROSSED in layer.details:
        body += [f"self.wt = parameter(own, {e}, HIDDEN, WIDTH)"]
    if {Decoy.SHARED_WEIGHT, Decoy.GIVEN_BACK} & layer.decoys:
        body += ["self.gain = parameter(own, WIDTH)"]
    return ["def __init__(self):", *indented([*body, *lines_at(layer, "buffers")])]


def _route(layer: Experts) -> list[str]:
    numbers = {"n": layer.local * layer.ranks, "e": layer.local, "r": layer.ranks}
    body = [
        "scores = torch.sigmoid((x @ self.router).float())",
        f"chosen = torch.topk(scores + favour({layer.local * layer.ranks}), {layer.top_k}, -1)[1]",
        "noted = []",
        *routed_losses(layer),
        "scores, flat = scores.gather(1, chosen).reshape(-1), chosen.reshape(-1)",
        *padded_labels(layer),
        "order = torch.argsort(flat, stable=True)",
        *with_numbers(TALLIES[layer.tally], **numbers),
        *_split_lines(layer, with_numbers(COUNTS[layer.counts], **numbers)),
        *([CUTS[layer.padding]] if layer.padding in CUTS else []),
        "return scores, order, counts, arrived, sent, got, runs, noted",
    ]
    return ["def route(self, x):", *indented(body)]


def _split_lines(layer: Experts, exchange: list[str]) -> list[str]:
    """Return the exchange of counts and how split sizes are read.

    The input splits are read first where a reader uses them ahead of the exchange.
    """
    early, sent, got = lines_at(layer, "early"), _sent_lines(layer), _got_lines(layer)
    return [*sent, *early, *exchange, *got] if early else [*exchange, *sent, *got]


def _sent_lines(layer: Experts) -> list[str]:
    if layer.splits is Splits.SLICE_SUM:
        return ["left = counts.tolist()", f"sent = {_by_rank(layer, 'left')}"]
    return SPLITS[layer.splits].format(list="sent", name="counts", r=layer.ranks).splitlines()


def _by_rank(layer: Experts, counts: str) -> str:
    """Return the sums of the integers `counts`, by rank."""
    bounds = ["", *(str(layer.local * r) for r in range(1, layer.ranks)), ""]
    sums = (f"sum({counts}[{a}:{b}])" for a, b in itertools.pairwise(bounds))
    return f"[{', '.join(sums)}]"


def _got_lines(layer: Experts) -> list[str]:
    by_pieces = layer.order is Order.PIECES and layer.style in READ_IN["order"]
    if layer.splits is not Splits.SLICE_SUM and layer.style not in LISTED and not by_pieces:
        got = SPLITS[layer.splits].format(list="got", name="arrived", r=layer.ranks).splitlines()
        return [*got, "runs = None"]
    runs = "runs = arrived.reshape(-1).tolist()"
    return [runs, f"got = {_by_rank(layer, 'runs')}"]


def _forward(layer: Experts) -> list[str]:
    one_number = Detail.ONE_NUMBER in layer.details
    move = MOVES[layer.move]
    rows = " + ".join(f"got[{rank}]" for rank in range(layer.ranks))
    body = [
        "scores, order, counts, arrived, sent, got, runs, noted = routing",
        f"flat, n, extra = arrived.reshape(-1), {rows}, [*noted]",
        f"routed = {gathered(layer)}",
        *lines_at(layer, "before"),
        *_dispatch_lines(layer, move),
        f"weights = {weights(layer)}",
    ]
    carried = ["out = out * probs"] if Detail.PROBS_TRAVEL in layer.details else []
    between = lines_at(layer, "between")
    body += [] if layer.late else between
    body += [*_call_experts(layer), *carried]
    body += between if layer.late else []
    body += [
        *lines_at(layer, "later"),
        *_sure_lines(layer, move),
        *(["out = out.sum(-1)"] if one_number else []),
        f"out = {move}(out, sent, got, self.group)",
        *(["out = out * sure"] if Detail.SURE in layer.details else []),
        *lines_at(layer, "combined"),
        *result_lines(layer),
        *lines_at(layer, "after"),
        *(line for loss, lines in RETURNED.items() if loss in layer.losses for line in lines),
        "return result, extra",
    ]
    return ["def forward(self, x, routing):", *indented(body)]


def _dispatch_lines(layer: Experts, move: str) -> list[str]:
    rows, probs = (f"{move}({sent}, got, sent, self.group)" for sent in ("routed", "probs"))
    if Detail.PROBS_TRAVEL not in layer.details:
        return [f"rows = {rows}"]
    made = "probs = scores[order][:, None].to(routed.dtype)"
    if layer.move is Move.TOGETHER:
        return [made, f"rows, probs = {move}([routed, probs], got, sent, self.group)"]
    return [f"rows = {rows}", made, f"probs = {probs}"]


def _sure_lines(layer: Experts, move: str) -> list[str]:
    if Detail.SURE not in layer.details:
        return []
    column = "" if Detail.ONE_NUMBER in layer.details else "[:, None]"
    return [f"sure = {move}(out.amax(-1), sent, got, self.group){column}"]


def _call_experts(layer: Experts) -> list[str]:
    call = "self.experts(rows, flat, runs, extra)"
    if Detail.CHECKPOINT in layer.details:
        call = "checkpoint(self.experts, rows, flat, runs, extra, use_reentrant=False)"
    if Detail.AUTOCAST in layer.details:
        return [
            "with torch.autocast(x.device.type, dtype=torch.bfloat16):",
            f"    out = {call}",
            "out = out.to(rows.dtype)",
        ]
    return [f"out = {call}"]
