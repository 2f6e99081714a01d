"""Which rows a generated layer sends, how tokens take them back, and its losses, as Python source.

Names the lines may use: x `[T, D]`, scores and chosen `[T, k]` while tokens are routed, flat (the
expert of each row), order (rows by expert), counts, noted (values returned besides); then out
`[R, D]` (rows that came back, in `order`), scores `[T k]`, result `[T, D]` and extra.
"""

from __future__ import annotations

from typing import Final

from moe_compile.testing.programs.choices import Detail
from moe_compile.testing.programs.grammar import POSITIONS, Experts
from moe_compile.testing.programs.sender_choices import Loss, Padding, Unsort, Weighing

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
"""Ways back that have every row of each token, and weigh rows then."""

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
    numbers = {"{n}": str(layer.local * layer.ranks), "{k}": str(layer.top_k)}
    lines = [line for loss, lines in ROUTED.items() if loss in layer.losses for line in lines]
    for name, number in numbers.items():
        lines = [line.replace(name, number) for line in lines]
    return lines


def result_losses(layer: Experts) -> list[str]:
    """Return lines that compute losses of the result."""
    return [line for loss, lines in RETURNED.items() if loss in layer.losses for line in lines]


def padded_labels(layer: Experts) -> list[str]:
    """Return lines that give rows of padding an expert that does not exist."""
    if layer.padding is Padding.NONE:
        return []
    repeated = f".repeat_interleave({layer.top_k})" if layer.top_k > 1 else ""
    return [
        "padding = ~(x.detach()[:, 0] <= 0.25)",
        f"flat = torch.where(padding{repeated}, {layer.local * layer.ranks}, flat)",
    ]


def cut_lines(layer: Experts) -> list[str]:
    """Return the line that leaves out rows of padding, once split sizes are read."""
    return [] if layer.padding is Padding.NONE else [CUTS[layer.padding]]


def weights(layer: Experts) -> str:
    """Return the scores of sorted rows, as a column or where rows are numbers as these."""
    column = WEIGHTS[layer.weighing]
    return f"{column}.flatten()" if Detail.ONE_NUMBER in layer.details else column


def gathered(layer: Experts) -> str:
    """Return the rows that are sent, before anything is done to them."""
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
