"""A generated attention layer over sequences of a rank's own tokens, as Python source."""

from __future__ import annotations

from typing import Final

from moe_compile.testing.programs.choices import Within
from moe_compile.testing.programs.expert_text import indented
from moe_compile.testing.programs.grammar import POSITIONS, OwnAttention

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
"""What becomes of `h` `[sequences, positions, D]` before attention."""
ATTEND: Final = {
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
    """Return the source of class `Layer<number>`; its input is `[T, D]`, T a multiple."""
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
        *ATTEND.get(kind, plain),
        *AFTER.get(kind, []),
        "return x + h.reshape(x.shape), []",
    ]
    body = ["def __init__(self):", *indented(constructor), "", "def forward(self, x):"]
    return [f"class Layer{number}(nn.Module):", *indented([*body, *indented(forward)])]
