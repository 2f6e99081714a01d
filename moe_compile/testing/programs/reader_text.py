"""Reads and writes of a generated layer around its exchanges, as Python source.

Names the lines may use, but those of `early`, which have x, counts, sent and noted (values
returned besides) alone: x `[T, D]`, routed `[R, D]`, counts and arrived (rows per expert), n (an
integer of the host), out (combined rows), result `[T, D]`, extra (values returned besides).
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_compile.testing.programs.choices import Reader
from moe_compile.testing.programs.expert_text import with_numbers
from moe_compile.testing.programs.grammar import Experts


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of one reader, by where they stand."""

    early: tuple[str, ...] = ()
    """While tokens are routed: rows to be sent are known to the host, counts not exchanged yet."""
    before: tuple[str, ...] = ()
    """Lines ahead of the dispatch."""
    between: tuple[str, ...] = ()
    """Lines between the exchanges, ahead of the experts; behind them if the layer is `late`."""
    later: tuple[str, ...] = ()
    """Lines between experts and combine that write to tensors the experts read."""
    combined: tuple[str, ...] = ()
    """Lines on the combined rows, before scores weigh them."""
    after: tuple[str, ...] = ()
    """Lines on the result."""
    buffers: tuple[str, ...] = ()
    """Lines in the constructor."""


PRODUCT = "product = (x.float() @ self.router.float()) * n"
BALANCE = "balance = (counts * torch.softmax((x @ self.router).float(), -1).sum(0)).sum()"

FIXED: dict[Reader, Lines] = {
    Reader.RETURNED: Lines(after=("extra.append(arrived)",)),
    Reader.LISTED: Lines(between=("extra.extend(arrived.reshape(-1).tolist())",)),
    Reader.STATISTICS: Lines(
        between=("with torch.no_grad():", "    self.seen.add_(arrived.reshape(-1))"),
        buffers=('self.register_buffer("seen", torch.zeros({counts}))',),
    ),
    Reader.STATISTICS_VIEW: Lines(
        between=("self.table.view(2, -1)[1].add_(arrived.reshape(-1))",),
        after=("extra.append(self.table[{counts}:] * 1.0)",),
        buffers=('self.register_buffer("table", torch.zeros(2 * {counts}))',),
    ),
    Reader.LATE_STATISTICS: Lines(
        after=("self.load += counts",),
        buffers=('self.register_buffer("load", torch.zeros({counts}))',),
    ),
    Reader.HOST_RATIO: Lines(
        between=("ratio = self.scale * n", "self.scale.mul_(2)"),
        after=("extra.append(ratio)",),
        buffers=('self.register_buffer("scale", torch.ones(3))',),
    ),
    Reader.HOST_VIEW: Lines(
        between=("part = self.pair.view(-1)[1:] * n", "self.pair[1].add_(1.0)"),
        after=("extra.append(part)",),
        buffers=('self.register_buffer("pair", torch.ones(3))',),
    ),
    Reader.HOST_AUTOCAST: Lines(
        between=('with torch.autocast("cpu", dtype=torch.bfloat16):', f"    {PRODUCT}"),
        after=("extra.append(product)",),
    ),
    Reader.HOST_NO_GRAD: Lines(
        between=("with torch.no_grad():", "    fixed = x * n"),
        after=("result = result + fixed * 0.125",),
    ),
    Reader.HOST_DROPOUT: Lines(
        between=("noisy = F.dropout(x, 0.5) * n",), after=("result = result + noisy * 0.125",)
    ),
    Reader.HOST_STATE: Lines(between=("self.last = n",), buffers=("self.last = 0",)),
    Reader.DROPOUT: Lines(
        before=("routed = F.dropout(routed, 0.25)",), after=("result = F.dropout(result, 0.25)",)
    ),
    Reader.RANDOM: Lines(
        between=("noise = torch.rand_like(x)",),
        after=("result = result + noise", "extra.append(torch.rand(2))"),
    ),
    Reader.AUX_LOSS: Lines(
        between=(BALANCE,), after=("result = result + balance.to(result.dtype) * 0.0625",)
    ),
    Reader.COUNTS_LOSS: Lines(
        after=("result = result * (1.0 + arrived.reshape(-1)[0].to(result.dtype))",)
    ),
    Reader.ROWS_READ: Lines(
        between=("again = torch.tanh(routed)",), combined=("out = out + again",)
    ),
    Reader.ROWS_TWICE: Lines(
        between=("again = torch.tanh(routed) + 0.5 * routed",), combined=("out = out + again",)
    ),
    Reader.ROWS_RETURNED: Lines(after=("extra.append(routed)",)),
    Reader.ROWS_WRITTEN: Lines(later=("routed.mul_(0.5)",), after=("extra.append(routed)",)),
    Reader.INPUT_WRITTEN: Lines(
        before=("held = x * 1.0", "routed = held[order // {top_k}]"),
        later=("held.mul_(0.5)",),
        after=("result = result + held",),
    ),
    Reader.INPUT_READ: Lines(
        between=("inner = torch.sigmoid(x)",), after=("result = result + inner",)
    ),
    Reader.WEIGHT_READ: Lines(
        between=("size = self.w2.square().sum()",),
        after=("result = result + size.to(result.dtype) * 0.0625",),
    ),
    Reader.COUNTS_WRITTEN: Lines(later=("counts.add_(1)",), after=("extra.append(counts)",)),
    Reader.ARRIVED_WRITTEN: Lines(later=("arrived.mul_(2)",), after=("extra.append(arrived)",)),
    Reader.CHECK: Lines(between=("torch._check(n <= 100000)", "torch._check(got[0] >= 0)")),
    Reader.FAILING_CHECK: Lines(between=("torch._check(n >= 100000)",)),
    Reader.OUTPUT_WRITTEN: Lines(combined=("out.mul_(2)",)),
    Reader.BREAK: Lines(after=("torch._dynamo.graph_break()",)),
    Reader.SHARED_EXPERT: Lines(
        between=("common = F.relu(x @ self.s1) @ self.s2",),
        after=("result = result + common",),
        buffers=(
            "self.s1 = parameter(shared, WIDTH, HIDDEN)",
            "self.s2 = parameter(shared, HIDDEN, WIDTH)",
        ),
    ),
    Reader.EARLY_RATIO: Lines(
        early=("noted.append(self.base * sent[0])", "self.base.mul_(2)"),
        buffers=('self.register_buffer("base", torch.ones(3))',),
    ),
    Reader.EARLY_FOREACH: Lines(
        early=("noted.append(self.move * sent[0])", "torch._foreach_add_([self.move], 1.0)"),
        buffers=('self.register_buffer("move", torch.ones(3))',),
    ),
    Reader.EARLY_NORM: Lines(
        early=(
            "noted.append(self.mean * sent[0])",
            "four = self.mean + torch.arange(4.0)[:, None]",
            "F.batch_norm(four, self.mean, self.variance, training=True)",
        ),
        buffers=(
            'self.register_buffer("mean", torch.ones(3))',
            'self.register_buffer("variance", torch.ones(3))',
        ),
    ),
    Reader.EARLY_DATA: Lines(
        early=("noted.append(self.kept * sent[0])", "self.kept.data = self.kept * 2"),
        buffers=('self.register_buffer("kept", torch.ones(3))',),
    ),
    Reader.EARLY_SUBCLASS: Lines(
        early=(
            "part = torch.ones(3) * self.rank",
            "noted.append(part * sent[0])",
            "TwoTensor(part, part + 1).mul_(2)",
            "noted.append(part)",
        ),
    ),
    Reader.EARLY_POSITIONAL: Lines(
        early=(
            "apart = x.detach() * 1.0",
            "noted.append(apart * sent[0])",
            "F.leaky_relu(apart, 0.5, True)",
            "noted.append(apart)",
        ),
    ),
    Reader.HOST_VMAP: Lines(
        between=("times = torch.vmap(lambda row: row * n)(x)",),
        after=("result = result + times * 0.125",),
    ),
    Reader.EARLY_SET: Lines(
        early=(
            "half = torch.full((3,), 0.5)",
            "noted.append(half.view(-1) * sent[0])",
            "half.set_(torch.zeros(3))",
            "noted.append(half)",
        ),
    ),
    Reader.METRICS: Lines(
        after=(
            "found = result.detach().float()",
            'total = wait_tensor(all_reduce(found.sum(), "sum", self.group))',
            "spread = (found - total).square() if x.shape[0] > 1 else found * 2",
            'extra.append(wait_tensor(all_reduce(spread.sum(), "sum", self.group)))',
            'extra.append(wait_tensor(all_reduce(found.abs().sum(), "sum", self.group)))',
        ),
    ),
    Reader.ROWS_SQUARED: Lines(
        between=("squared = (routed * routed).float().sum()",),
        after=("result = result + squared.to(result.dtype) * 0.0625",),
    ),
    Reader.ROWS_NORMALIZED: Lines(
        between=("unit = F.normalize(routed)",), combined=("out = out + unit.sum(-1, True)",)
    ),
    Reader.ROWS_CHECKPOINTED: Lines(
        between=("twice = checkpoint(lambda a: torch.tanh(a) * a, routed, use_reentrant=False)",),
        combined=("out = out + twice",),
    ),
    Reader.ROWS_VIEWED: Lines(
        before=("base = routed * 1.0", "routed = base.view(-1, WIDTH)", "base.mul_(0.5)"),
        between=("side = base.float().sin().sum() + (base.float() * 0.3).cos().sum()",),
        after=("result = result + side.to(result.dtype) * 0.0625",),
    ),
    Reader.ROWS_HANDED_BACK: Lines(
        before=("source = routed", "routed = torch.atleast_2d(source, source.detach())[0]"),
        between=("both = (source.float() * 0.3).cos().sum() + source.float().square().sum()",),
        after=("result = result + both.to(result.dtype) * 0.0625",),
    ),
    Reader.WEIGHT_SQUARED: Lines(
        between=("large = (self.w2 * self.w2).sum()",),
        after=("result = result + large.to(result.dtype) * 0.0625",),
    ),
    Reader.HOOK_COUNT: Lines(
        between=(
            "hooked = self.w2 * 2",
            "scaled = hooked.sin().sum()",
            "if hooked.requires_grad:",
            "    hooked.register_hook(lambda gradient: gradient * n)",
        ),
        after=("result = result + scaled.to(result.dtype) * 0.0625",),
    ),
    Reader.HOOK_ROWS: Lines(
        later=(
            "if rows.requires_grad:",
            "    rows.register_hook(lambda gradient: gradient * 2)",
        ),
    ),
    Reader.ROWS_ACROSS: Lines(
        before=("routed = routed + self.offset",),
        between=(
            "across = torch.sin(routed.t().contiguous().float())",
            "across = (across * torch.linspace(0.1, 1.0, routed.shape[0])).sum()",
        ),
        after=("result = result + across.to(result.dtype) * 0.0625",),
        buffers=("self.offset = parameter(shared, WIDTH)",),
    ),
    Reader.AUTOCAST_SET: Lines(
        early=(
            "was = torch.is_autocast_enabled('cpu')",
            "torch.set_autocast_enabled('cpu', True)",
            "noted.append((x.detach().float() * sent[0]) @ self.router.detach().float())",
            "torch.set_autocast_enabled('cpu', was)",
        ),
    ),
    Reader.CHECK_EQUAL: Lines(
        early=(
            "whole = (x.detach() == x.detach()).sum().item()",
            "torch._check(whole == x.shape[0] * WIDTH)",
            "noted.append(whole)",
        ),
    ),
    Reader.SHIFT_WRITTEN: Lines(
        between=("rows = rows + self.shift.to(rows.dtype)",),
        later=("self.shift.mul_(0.5)",),
        buffers=('self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))',),
    ),
    Reader.SEEN: Lines(
        early=("with torch.no_grad():", "    self.met += counts"),
        buffers=('self.register_buffer("met", torch.zeros({counts}))',),
    ),
    Reader.NO_DROPOUT: Lines(
        before=("routed = F.dropout(routed, 0.0)",), after=("result = F.dropout(result, p=0.0)",)
    ),
    Reader.EXPANDED: Lines(
        after=("result = result + self.addend.expand(x.shape[0], -1)",),
        buffers=("self.addend = parameter(shared, 1, WIDTH)",),
    ),
    Reader.REPEATED: Lines(
        after=("result = result * self.factor.repeat(x.shape[0], 1)",),
        buffers=("self.factor = parameter(shared, WIDTH)",),
    ),
    Reader.EARLY_GAMMA: Lines(
        early=("noted.append(torch._standard_gamma(torch.ones(3)) * sent[0])",),
        after=("extra.append(torch.rand(2))",),
    ),
}


def lines_at(layer: Experts, place: str) -> list[str]:
    """Return the lines of all readers of `layer` at one field of `Lines`, in a fixed order."""
    chosen = [FIXED[reader] for reader in Reader if reader in layer.readers]
    found = (line for lines in chosen for line in getattr(lines, place))
    return with_numbers(found, counts=layer.ranks * layer.local, top_k=layer.top_k)
