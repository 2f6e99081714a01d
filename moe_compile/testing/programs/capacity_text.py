"""A generated MoE layer with a capacity per expert as Python source: even exchanges alone.

Names the lines may use: x `[T, D]`, experts (of all ranks), room (slots of each), chosen, slot, top
and kept `[T, k]`, sent and back (slots of all experts in any shape), rows and out
`[ranks, local, room, D]`, extra (values returned besides).
"""

from __future__ import annotations

from typing import Final

from moe_compile.testing.programs.choices import Across, Extra, Fill, Mixing, Move, Room, Sent
from moe_compile.testing.programs.expert_lines import ACTS
from moe_compile.testing.programs.expert_text import indented, with_numbers
from moe_compile.testing.programs.grammar import NUM_RANKS, Capacity

ROOMS: Final = {
    Room.EVEN: "-(-x.shape[0] * {k} // {n})",
    Room.SCARCE: "-(-x.shape[0] * {k} // {2n})",
    Room.AMPLE: "-(-x.shape[0] * {2k} // {n})",
    Room.SIXTEEN: "max(16, -(-x.shape[0] * {k} // {n}))",
}

MASKS: Final = [
    "expert = F.one_hot(chosen, {n}).to(x.dtype)",
    "place = F.one_hot(slot.clamp(max=room - 1), room).to(x.dtype)",
    'combine = torch.einsum("sk,ske,skc->sec", (top * kept).to(x.dtype), expert, place)',
    'sent = torch.einsum("sec,sm->ecm", (combine > 0).to(x.dtype), x)',
]
INDEX: Final = "index = torch.where(kept, chosen * room + slot, {n} * room).reshape(-1)"
FILLS: Final = {
    Fill.EINSUM: MASKS,
    Fill.PRODUCT: MASKS,
    Fill.INDEX_COPY: [
        INDEX,
        "sent = x.new_zeros({n} * room + 1, WIDTH)",
        "sent = sent.index_copy(0, index, x.repeat_interleave({k}, 0))[:-1]",
    ],
    Fill.GATHER: [
        INDEX,
        "source = torch.full(({n} * room + 1,), x.shape[0])",
        "taken = torch.arange(x.shape[0]).repeat_interleave({k})",
        "source = source.index_copy(0, index, taken)[:-1]",
        "sent = torch.cat([x, x.new_zeros(1, WIDTH)])[source]",
    ],
}
GATHERED_BACK: Final = [
    "back = back.view(-1, WIDTH)",
    "rows = torch.cat([back, back.new_zeros(1, WIDTH)])[index].view(-1, {k}, WIDTH)",
    "result = (rows * (top * kept)[:, :, None].to(rows.dtype)).sum(1)",
]
EMPTIES: Final = {
    Fill.EINSUM: ['result = torch.einsum("sec,ecm->sm", combine, back.view({n}, room, WIDTH))'],
    Fill.PRODUCT: ["result = combine.view(x.shape[0], -1).mm(back.view(-1, WIDTH))"],
    Fill.INDEX_COPY: GATHERED_BACK,
    Fill.GATHER: GATHERED_BACK,
}
"""Ways in which tokens take the slots that came back."""

SHAPES: Final = {
    Sent.EXPERTS: "{n}, room, WIDTH",
    Sent.RANKS: f"{NUM_RANKS}, " + "{e}, room, WIDTH",
    Sent.MATRIX: "{n} * room, WIDTH",
    Sent.FLAT: f"{NUM_RANKS}, -1",
}
RECEIVED: Final = f"{NUM_RANKS}, " + "{e}, room, WIDTH"

MOVES: Final = {
    Move.FUNCTIONAL: "all_to_all_single_autograd({}.contiguous(), None, None, self.group)",
    Move.OF_ITSELF: "EvenExchange.apply(self.group, {})",
}
"""Exchanges of equal parts."""

IN_LOOPS: Final = (Across.CHUNKED, Across.INDEXED, Across.UNBOUND)
"""Ways that run experts one by one, each with parameters of its own."""

OUTWARD: Final = "x = rows.transpose(0, 1).reshape({e}, -1, WIDTH)"
INWARD: Final = f"out = out.view({{e}}, {NUM_RANKS}, room, -1).transpose(0, 1)"
LOOPS: Final = {
    Across.CHUNKED: [
        "parts = rows.chunk({e}, dim=1)",
        "out = torch.cat([self.expert(part, e) for e, part in enumerate(parts)], 1)",
    ],
    Across.INDEXED: [
        "parts = [rows[:, e].reshape(-1, WIDTH) for e in range({e})]",
        "done = [self.expert(part, e) for e, part in enumerate(parts)]",
        f"out = torch.stack([y.view({NUM_RANKS}, room, WIDTH) for y in done], 1)",
    ],
    Across.UNBOUND: [
        OUTWARD,
        "out = torch.stack([self.expert(part, e) for e, part in enumerate(x.unbind(0))])",
        INWARD,
    ],
}
PRODUCTS: Final = {
    Across.EINSUM: 'torch.einsum("gecm,emh->gech", {x}, {w})',
    Across.OUTERMOST: 'torch.einsum("ecm,emh->ech", {x}, {w})',
    Across.BATCHED: "torch.bmm({x}, {w})",
    Across.MATMUL: "torch.matmul({x}, {w})",
}

BEFORE: Final = {
    Mixing.SHARED_BIAS: ["rows = rows + self.shared"],
    Mixing.MEAN: ["rows = rows - rows.mean(1, keepdim=True)"],
    Mixing.NORM: ["rows = F.layer_norm(rows.transpose(1, 2), ({e}, WIDTH)).transpose(1, 2)"],
    Mixing.IN_PLACE: ["rows = rows * 1.0", "rows.mul_(0.5)"],
    Mixing.RECEIVED: ["extra.append(rows * 1.0)"],
    Mixing.DETACHED: ["rows = torch.cat([rows[:, :1].detach(), rows[:, 1:]], 1)"],
    Mixing.ONE_WEIGHT: [],
}
AFTER: Final = {
    Mixing.DROPOUT: ["out = F.dropout(out, 0.25)"],
    Mixing.NEXT: ["out = torch.cat([out[:, 1:], out[:, :1]], 1)"],
    Mixing.FLIPPED: ["out = out.flip(1)"],
}
"""Lines that mix experts, ahead of them (`BEFORE`) and behind them (`AFTER`)."""


def capacity_class(layer: Capacity, number: int) -> list[str]:
    """Return the source of class `Layer<number>`; its input is `[T, D]`, equal T on all ranks."""
    methods = [_constructor(layer, number), _expert(layer), _experts(layer), _forward(layer)]
    body: list[str] = []
    for method in methods:
        body += ["", *method] if body and method else method
    numbers = {
        "n": layer.local * NUM_RANKS, "2n": 2 * layer.local * NUM_RANKS,
        "k": layer.top_k, "2k": 2 * layer.top_k, "e": layer.local,
    }  # fmt: skip
    return [f"class Layer{number}(nn.Module):", *indented(with_numbers(body, **numbers))]


def _constructor(layer: Capacity, number: int) -> list[str]:
    shapes = {"w1": "WIDTH, HIDDEN", "w2": "HIDDEN, WIDTH"}
    shapes |= {"w3": "WIDTH, HIDDEN"} if Extra.GATED in layer.extras else {}
    if Extra.BIAS in layer.extras:
        shapes |= {"b1": "HIDDEN", "b2": "WIDTH"}
    made = [f"self.{name} = {_parameter(layer, shape)}" for name, shape in shapes.items()]
    if Extra.BESIDE in layer.extras:
        made += ["self.s1 = parameter(shared, WIDTH, WIDTH)"]
    if Mixing.SHARED_BIAS in layer.mixing:
        made += ["self.shared = parameter(own, WIDTH)"]
    body = [
        "super().__init__()",
        "self.group, self.rank = dist.group.WORLD, dist.get_rank()",
        f"shared = torch.Generator().manual_seed(SEED + {10 * number})",
        f"own = torch.Generator().manual_seed(SEED + {10 * number} + 1 + self.rank)",
        "self.router = parameter(shared, WIDTH, {n})",
        *made,
    ]
    return ["def __init__(self):", *indented(body)]


def _parameter(layer: Capacity, shape: str) -> str:
    if layer.across in IN_LOOPS:
        return f"nn.ParameterList([parameter(own, {shape}) for _ in range({{e}})])"
    return f"parameter(own, {{e}}, {shape})"


def _hidden(layer: Capacity) -> list[str]:
    """Return lines from gate, and up if experts are gated, to hidden rows."""
    gated = Extra.GATED in layer.extras
    return ACTS[layer.act] if gated else [line.replace(" * up", "") for line in ACTS[layer.act]]


def _expert(layer: Capacity) -> list[str]:
    """Return the method that runs one expert; [] where experts run at once."""
    if layer.across not in IN_LOOPS:
        return []
    e = "0" if Mixing.ONE_WEIGHT in layer.mixing else "e"
    first, last = (f", self.b1[{e}]", f", self.b2[{e}]") if Extra.BIAS in layer.extras else ("", "")
    gated = [f"up = F.linear(x, self.w3[{e}].t())"] if Extra.GATED in layer.extras else []
    body = [
        f"gate = F.linear(x, self.w1[{e}].t(){first})",
        *gated,
        *_hidden(layer),
        f"return F.linear(hidden, self.w2[{e}].t(){last})",
    ]
    return ["def expert(self, x, e):", *indented(body)]


def _experts(layer: Capacity) -> list[str]:
    """Return the method from received slots to the slots sent back, in one shape."""
    before = [line for mixing in BEFORE if mixing in layer.mixing for line in BEFORE[mixing]]
    after = [line for mixing in AFTER if mixing in layer.mixing for line in AFTER[mixing]]
    if Extra.OWN_NORM in layer.extras:
        before += [
            "norm = torch.sqrt(rows.pow(2).mean(-1, keepdim=True) + 0.5)",
            "rows = (rows / norm).to(rows.dtype)",
        ]
    lines = LOOPS[layer.across] if layer.across in IN_LOOPS else _at_once(layer)
    body = [*before, *lines, *after, "return out"]
    return ["def experts(self, rows, room, extra):", *indented(body)]


def _at_once(layer: Capacity) -> list[str]:
    part = "[:1].expand({e}, -1, -1)" if Extra.EXPANDED in layer.extras else ""
    is_dense = Mixing.ONE_WEIGHT in layer.mixing
    biased, outermost = Extra.BIAS in layer.extras, layer.across is not Across.EINSUM

    def product(x: str, name: str) -> str:
        if is_dense:
            return f"{x} @ self.{name}[0]"
        written = PRODUCTS[layer.across].replace("{x}", x)
        return written.replace("{w}", f"self.{name}{part}")

    first, last = (f" + self.b{i}[:, None]" if biased else "" for i in (1, 2))
    x = "x" if outermost else "rows"
    lines = [f"gate = {product(x, 'w1')}{first}"]
    lines += [f"up = {product(x, 'w3')}"] if Extra.GATED in layer.extras else []
    lines += [*_hidden(layer)]
    if layer.across is Across.MATMUL and biased and not is_dense:
        lines += [f"out = torch.baddbmm(self.b2[:, None], hidden, self.w2{part})"]
    else:
        lines += [f"out = {product('hidden', 'w2')}{last}"]
    return [OUTWARD, *lines, INWARD] if outermost else lines


def _forward(layer: Capacity) -> list[str]:
    shape, extras = SHAPES[layer.sent], layer.extras
    call = "self.experts(rows, room, extra)"
    if Extra.CHECKPOINT in extras:
        call = "checkpoint(self.experts, rows, room, extra, use_reentrant=False)"
    move = MOVES[layer.move]
    body = [
        "extra = []",
        "scores = torch.softmax((x @ self.router).float(), -1)",
        "chosen = torch.topk(scores + favour({n}), {k}, -1)[1]",
        "top = scores.gather(1, chosen)",
        f"room = {ROOMS[layer.room]}",
        "hot = F.one_hot(chosen.reshape(-1), {n})",
        "slot = ((hot.cumsum(0) - 1) * hot).sum(-1).view(chosen.shape)",
        "kept = slot < room",
        *FILLS[layer.fill],
        f"sent = sent.reshape({shape})",
        f"rows = {move.format('sent')}.view({RECEIVED})",
        *(["again = torch.tanh(sent)"] if Extra.SENT_READ in extras else []),
        *(["common = F.relu(x @ self.s1)"] if Extra.BESIDE in extras else []),
        f"out = {call}",
        f"out = out.reshape({shape})",
        f"back = {move.format('out')}",
        *(["back = back + again"] if Extra.SENT_READ in extras else []),
        *(["back.mul_(0.5)"] if Extra.HALVED_WRITTEN in extras else []),
        *EMPTIES[layer.fill],
        *(["result = result + common"] if Extra.BESIDE in extras else []),
    ]
    if Extra.LOSS in extras:
        body += ["extra.append((scores.mean(0) * hot.float().mean(0)).sum() * {n})"]
    return ["def forward(self, x):", *indented([*body, "return result.to(x.dtype), extra"])]
