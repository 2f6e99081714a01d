"""Generated attention as Python source: between exchanges of heads, or over own sequences."""

from __future__ import annotations

from typing import Final

from moe_compile.testing.programs.choices import Heads, Within
from moe_compile.testing.programs.expert_text import indented
from moe_compile.testing.programs.grammar import NUM_RANKS, POSITIONS, Attention, OwnAttention

HEADS: Final = 2 * NUM_RANKS * NUM_RANKS
HEAD_WIDTH: Final = 4
WIDTHS: Final = {Heads.OF_FIVE: 5, Heads.OF_EIGHTEEN: 18}
"""Head sizes other than `HEAD_WIDTH`."""

TO_HEADS: Final = [
    "def to_heads(self, x):",
    "    b, h, s, d = x.shape",
    "    x = x.reshape(b, 2, -1, s, d).permute(1, 0, 2, 3, 4).contiguous()",
    "    x = all_to_all_single_autograd(x, None, None, self.group)",
    "    return x.permute(1, 2, 0, 3, 4).reshape(b, -1, 2 * s, d)",
]
TO_HEADS_BY_POSITION: Final = [
    "def to_heads(self, x):",
    "    b, h, s, d = x.shape",
    "    x = x.transpose(1, 2).reshape(b, s, 2, -1, d).permute(2, 0, 1, 3, 4).contiguous()",
    "    x = all_to_all_single_autograd(x, None, None, self.group)",
    "    return x.permute(1, 0, 2, 3, 4).reshape(b, 2 * s, -1, d).transpose(1, 2)",
]
TO_POSITIONS: Final = [
    "def to_positions(self, x):",
    "    b, h, s, d = x.shape",
    "    x = x.reshape(b, h, 2, s // 2, d).permute(2, 0, 1, 3, 4).contiguous()",
    "    x = all_to_all_single_autograd(x, None, None, self.group)",
    "    return x.permute(1, 0, 2, 3, 4).reshape(b, 2 * h, s // 2, d)",
]

FUSED: Final = [
    "parts = [t.reshape(1, 2, -1, s, t.shape[-1]).permute(1, 0, 3, 2, 4) for t in (q, k, v)]",
    "parts = [t.reshape(2, 1, s, -1) for t in parts]",
    "both = all_to_all_single_autograd(torch.cat(parts, -1), None, None, self.group)",
    "both = both.permute(1, 0, 2, 3).reshape(1, 2 * s, -1)",
    "pieces = torch.split(both, [t.shape[-1] for t in parts], -1)",
    f"q, k, v = (t.reshape(1, 2 * s, -1, {HEAD_WIDTH}).transpose(1, 2) for t in pieces)",
]

TIMES: Final = 2
REPEATED: Final = (
    f"k, v = (t.unsqueeze(2).expand(-1, -1, {TIMES}, -1, -1).flatten(1, 2) for t in (k, v))"
)
MASKS: Final = {
    Heads.MASKED: "mask = torch.ones(2 * s, 2 * s, dtype=torch.bool).tril()",
    Heads.MASK_OF_THREE: "mask = torch.ones(1, 2 * s, 2 * s, dtype=torch.bool).tril()",
}
ATTEND: Final = {
    Heads.GQA: "o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)",
    Heads.DROPPED: "o = F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)",
    **dict.fromkeys(MASKS, "o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)"),
}


def attention_class(layer: Attention, number: int) -> list[str]:
    """Return the source of class `Layer<number>`; its input is `[T, D]`, equal T on all ranks."""
    shared_kv = layer.heads in (Heads.GQA, Heads.REPEATED)
    kv = HEADS // TIMES if shared_kv else HEADS
    width = WIDTHS.get(layer.heads, HEAD_WIDTH)
    key = 2 * width if layer.heads is Heads.LATENT else width
    own = HEADS if layer.heads is Heads.LATENT else kv
    constructor = [
        "super().__init__()",
        "self.group = dist.group.WORLD",
        f"shared = torch.Generator().manual_seed(SEED + {10 * number})",
        f"self.wq = parameter(shared, WIDTH, {HEADS * key})",
        f"self.wk = parameter(shared, WIDTH, {own * key})",
        f"self.wv = parameter(shared, WIDTH, {own * width})",
        f"self.wo = parameter(shared, {HEADS * width}, WIDTH)",
    ]
    moves = ["q, k, v = (self.to_heads(t) for t in (q, k, v))"]
    if layer.heads is Heads.FUSED:
        moves = FUSED
    elif layer.heads is Heads.REPEATED:
        moves = [*moves, REPEATED]
    elif layer.heads in MASKS:
        moves = [*moves, MASKS[layer.heads]]
    by_position = layer.heads is Heads.BY_POSITION
    forward = [
        f"b = {'2 - x.shape[0] % 2' if by_position else 1}",
        "s = x.shape[0] // b",
        f"q = (x @ self.wq).view(b, s, -1, {key}).transpose(1, 2)",
        f"k = (x @ self.wk).view(b, s, -1, {key}).transpose(1, 2)",
        f"v = (x @ self.wv).view(b, s, -1, {width}).transpose(1, 2)",
        *moves,
        *_attend(layer.heads),
        *(["o = o + o.flip(1)"] if layer.heads is Heads.MIXED else []),
        "o = self.to_positions(o)",
        "return o.transpose(1, 2).flatten(2).flatten(0, 1) @ self.wo, []",
    ]
    to_heads = TO_HEADS_BY_POSITION if by_position else TO_HEADS
    body = ["def __init__(self):", *indented(constructor), "", *to_heads, "", *TO_POSITIONS, ""]
    body += ["def forward(self, x):", *indented(forward)]
    return [f"class Layer{number}(nn.Module):", *indented(body)]


def _attend(heads: Heads) -> list[str]:
    plain = "o = F.scaled_dot_product_attention(q, k, v, is_causal=True)"
    if heads is Heads.MULTIPLIED:
        return ["with sdpa_kernel(SDPBackend.MATH):", *indented([plain])]
    return [ATTEND.get(heads, plain)]


P: Final = str(POSITIONS)
BEFORE: Final = {
    Within.NORM: ["h = F.rms_norm(h, (WIDTH,), self.gain)"],
    Within.TURNED: [
        "h = h.transpose(0, 1).contiguous()",
        "h = (torch.tanh(h) * 2).transpose(0, 1)",
    ],
    Within.SCALED: [f"h = h * (1 + torch.arange({P})[:, None].to(h.dtype) / 4)"],
    Within.GATED: ["h = h * torch.sigmoid(h.mean(1, keepdim=True))"],
    Within.BY_TOKEN: [f"h = (x * 2).view(x.shape[0] // {P}, {P}, WIDTH)"],
    Within.CLASS_TOKEN: ["h = torch.cat([self.token.expand(h.shape[0], 1, -1), h], 1)"],
    Within.ALL_MEAN: ["h = h + h.mean(0)"],
    Within.ALL_SUM: [f"h = h + x.cumsum(0).view(-1, {P}, WIDTH)"],
    Within.TURNED_BACK: ["h = h.transpose(0, 1).reshape(h.shape)"],
}
"""Operations on `h` `[sequences, positions, D]` before attention."""
ATTEND_WITHIN: Final = {
    Within.MASK: [
        f"mask = torch.ones({P}, {P}, dtype=torch.bool).tril()",
        "h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)",
    ],
    Within.HEADS: [
        "q, k, v = (t.unflatten(2, (2, WIDTH // 2)).transpose(1, 2) for t in (q, k, v))",
        "h = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "h = h.transpose(1, 2).flatten(2)",
    ],
    Within.QUERIES: [
        "q = self.queries.repeat(h.shape[0], 1, 1)",
        "h = F.scaled_dot_product_attention(q, k, v)",
    ],
    Within.POSITION_BIAS: [
        f"bias = self.bias.expand(h.shape[0], {P}, {P})",
        "h = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)",
    ],
    Within.NO_DROPOUT: [
        "h = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)",
        "h = F.dropout(h, 0.0)",
    ],
}
AFTER: Final = {
    Within.CLASS_TOKEN: ["h = h[:, 1:]"],
    Within.SUMMED: ["h = h + h.mean(1, keepdim=True)"],
    Within.ONTO_ZEROS: [
        f"base = torch.zeros(x.shape[0] // {P}, {P}, WIDTH, dtype=h.dtype)",
        "h = base + h",
    ],
    Within.ONTO_NEW: ["h = h.new_zeros(x.shape[0], WIDTH) + h.flatten(0, 1)"],
    Within.FOLDED: ["h = h + (h.flatten(1) @ self.folded).view(h.shape)"],
}

PARAMETERS: Final = {
    Within.NORM: ["self.gain = parameter(shared, WIDTH)"],
    Within.FOLDED: [f"self.folded = parameter(shared, {P} * WIDTH, {P} * WIDTH)"],
    Within.CLASS_TOKEN: ["self.token = parameter(shared, WIDTH)"],
    Within.QUERIES: [f"self.queries = parameter(shared, {P}, WIDTH)"],
    Within.POSITION_BIAS: [f"self.bias = parameter(shared, {P}, {P})"],
}


def own_attention_class(layer: OwnAttention, number: int) -> list[str]:
    """Return the source of class `Layer<number>`; its input is `[T, D]`, of whole sequences."""
    kind = layer.within
    constructor = [
        "super().__init__()",
        f"shared = torch.Generator().manual_seed(SEED + {10 * number})",
        "self.qkv = parameter(shared, WIDTH, 3 * WIDTH)",
    ]
    constructor += PARAMETERS.get(kind, [])
    plain = ["h = F.scaled_dot_product_attention(q, k, v, is_causal=True)"]
    forward = [
        f"h = x.view(-1, {P}, WIDTH)",
        *BEFORE.get(kind, []),
        "q, k, v = (h @ self.qkv).chunk(3, -1)",
        *ATTEND_WITHIN.get(kind, plain),
        *AFTER.get(kind, []),
        "return x + h.reshape(x.shape), []",
    ]
    body = ["def __init__(self):", *indented(constructor), "", "def forward(self, x):"]
    return [f"class Layer{number}(nn.Module):", *indented([*body, *indented(forward)])]
