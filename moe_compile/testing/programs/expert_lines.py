"""Lines of Python for activations, decoys, row details and ways back of a generated layer.

Names the lines may use: rows `[R, D]` received, flat (received counts), gate and up `[R, H]`,
perm `[R]` and out `[R, D]` sorted by it.
"""

from __future__ import annotations

from typing import Final

from moe_compile.testing.programs.choices import Act, Back, Decoy, Detail

ACTS: Final = {
    Act.RELU: ["hidden = F.relu(gate) * up"],
    Act.SILU: ["hidden = F.silu(gate) * up"],
    Act.GELU: ["hidden = F.gelu(gate) * up"],
    Act.SIGMOID: ["hidden = torch.sigmoid(gate) * up"],
    Act.TANH: ["hidden = torch.tanh(gate) * up"],
    Act.FUNCTION: ["hidden = OwnActivation.apply(gate) * up"],
    Act.WHERE: ["hidden = torch.where(gate > 0, gate, gate * 0.125) * up"],
    Act.MASKED_FILL: ["hidden = gate.masked_fill(gate < 0, 0.0).clamp(max=4.0) * up"],
}

DECOYS: Final = {
    Decoy.MEAN: ["rows = rows - rows.mean(0)"],
    Decoy.EXPAND: [
        "rows = rows + rows.unsqueeze(0).expand(rows.shape[0], -1, -1).sum(0) * 0.125",
    ],
    Decoy.ONES: [
        "wide = torch.cat([rows, rows.new_ones(rows.shape[0], rows.shape[0])], 1)",
        "rows = rows * wide.mean(1, keepdim=True)",
    ],
    Decoy.CUMSUM: ["rows = rows + rows.detach().cumsum(0) * 0.125"],
    Decoy.FLIP: ["rows = rows + rows.flip(0)"],
    Decoy.SOFTMAX: ["rows = rows * torch.softmax(rows, 0)"],
    Decoy.POSITION: ["rows = rows * torch.arange(rows.shape[0])[:, None].to(rows.dtype)"],
    Decoy.LENGTH: ["rows = rows * (rows.shape[0] * 0.125)"],
    Decoy.COUNT_VALUE: ["rows = rows * flat[0].to(rows.dtype)"],
    Decoy.SHARED_WEIGHT: ["rows = rows * self.gain"],
    Decoy.DROPOUT: ["rows = F.dropout(rows, 0.25)"],
    Decoy.RECEIVED: ["extra.append(rows * 1.0)"],
    Decoy.COUNTS_LIST: [
        "flat = flat * 1",
        "change = flat.view(2, -1).flip(1).reshape(-1) - flat",
        "torch._foreach_add_([torch.zeros_like(change), flat], [change, change])",
    ],
    Decoy.HALF: [
        "spot = torch.argsort(torch.arange(rows.shape[0]) + flat[0] * 0, stable=True)",
        "half = rows.shape[0] // 2",
        "head, tail = torch.split(rows[spot], [half, rows.shape[0] - half])",
        "rows = torch.zeros_like(rows).index_copy(0, spot, torch.cat([head * 2, tail]))",
    ],
    Decoy.BY_COLUMNS: [
        "behind = rows.new_zeros(WIDTH, rows.shape[0]).t() + rows",
        "rows = rows * behind.sum(1, keepdim=True)",
    ],
    Decoy.GIVEN_BACK: [],
    Decoy.OUTER: ["rows = rows + rows @ (rows.t() @ rows) * 0.125"],
}

ROWS: Final = {
    Detail.IN_PLACE_ROWS: ["rows.mul_(0.5)"],
    Detail.POSITIONAL: ["rows = rows * 1.0", "F.hardtanh(rows, -2.0, 2.0, True)"],
    Detail.NO_GRAD_TWIN: [
        "with torch.no_grad():",
        "    twin = rows * 0.5",
        "rows = rows + twin",
    ],
    Detail.ROW_NORM: [
        "norm = rows.float().pow(2).mean(-1, keepdim=True) + 1e-3",
        "rows = rows * torch.rsqrt(norm).to(rows.dtype)",
    ],
    Detail.OUTER_ROW: [
        "outer = torch.bmm(rows[:, :, None], rows[:, None, :2])",
        "rows = rows + outer.sum(-1) * 0.125",
    ],
    Detail.STACKED_MEAN: ["rows = torch.stack([rows, rows * rows]).mean(0)"],
    Detail.NAMED: [
        "leaky = F.leaky_relu(input=rows, negative_slope=0.5)",
        "rows = torch.mul(input=rows, other=leaky)",
    ],
    Detail.INFERRED: ["rows = (rows[:, None] * 0.5).reshape(rows.shape[0], -1)"],
    Detail.OWN_NORM: [
        "norm = torch.sqrt(rows.pow(2).mean(-1, keepdim=True) + 0.5)",
        "rows = (rows / norm).to(rows.dtype)",
    ],
    Detail.TRANSPOSED: ["rows = rows - rows.t().contiguous().sum(0)[:, None] * 0.125"],
}
"""Operations on each received row by itself, ahead of the experts."""

BACKS: Final = {
    Back.INDEX_COPY: ["return torch.zeros_like(out).index_copy(0, perm, out)"],
    Back.INDEX_PUT: ["back = torch.empty_like(out)", "back[perm] = out", "return back"],
    Back.INVERSE: ["return out[torch.argsort(perm)]"],
    Back.INVERSE_PUT: [
        "inverse = torch.empty_like(perm)",
        "inverse[perm] = torch.arange(perm.shape[0])",
        "return out[inverse]",
    ],
    Back.INVERSE_WRITTEN: [
        "turned = perm * 1",
        "turned.copy_(torch.argsort(turned, stable=True))",
        "return out[turned]",
    ],
    Back.INDEX_ADD: ["return torch.zeros_like(out).index_add(0, perm, out)"],
    Back.SCATTER: [
        "places = perm[:, None].expand(-1, out.shape[1])",
        "return torch.zeros_like(out).scatter(0, places, out)",
    ],
    Back.SCATTER_ADD: [
        "places = perm.unsqueeze(1).expand(-1, out.shape[1]).contiguous()",
        "return torch.zeros_like(out).scatter_add_(0, places, out)",
    ],
    Back.VIEW_PUT: [
        "back = torch.empty_like(out)",
        "back.view(out.shape[0], 1, out.shape[1])[perm] = out[:, None]",
        "return back",
    ],
    Back.COLUMNS_PUT: [
        "back = out.new_empty(out.shape)",
        "back[perm, :] = out",
        "return back",
    ],
    Back.MORE_ROWS: [
        "back = out.new_zeros(out.shape[0] + 2, out.shape[1])",
        "back[perm, :] = out",
        "return back[:-2]",
    ],
}
