"""Exchanges of rows of a generated program's own, as Python source."""

from __future__ import annotations

from typing import Final

FUNCTION: Final = """\
class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, got, sent, group):
        ctx.splits, ctx.group = (got, sent), group
        return wait_tensor(all_to_all_single(rows.contiguous(), got, sent, group))

    @staticmethod
    def backward(ctx, gradient):
        got, sent = ctx.splits
        rows = all_to_all_single(gradient.contiguous(), sent, got, ctx.group)
        return wait_tensor(rows), None, None, None


def exchange(rows, got, sent, group):
    return Exchange.apply(rows, got, sent, group)
"""

OF_ITSELF: Final = """\
class ExchangeOfItself(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, rows, got, sent):
        ctx.group, ctx.got, ctx.sent = group, got, sent
        rows = rows.contiguous()
        out = rows.new_empty(size=[sum(got), *rows.size()[1:]], dtype=rows.dtype)
        dist.all_to_all_single(
            out, rows, output_split_sizes=got, input_split_sizes=sent, group=group
        )
        return out

    @staticmethod
    def backward(ctx, *gradient):
        apply = ExchangeOfItself.apply
        return None, apply(ctx.group, *gradient, ctx.sent, ctx.got), None, None


def exchange_of_itself(rows, got, sent, group):
    return ExchangeOfItself.apply(group, rows, got, sent)
"""

TOGETHER: Final = """\
def swapped(tensor, got, sent, group):
    out = tensor.new_empty(sum(got), *tensor.shape[1:])
    dist.all_to_all_single(out, tensor.contiguous(), got, sent, group=group)
    return out


class ExchangeTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx, got, sent, group, *tensors):
        ctx.splits, ctx.group = (got, sent), group
        return tuple(swapped(tensor, got, sent, group) for tensor in tensors)

    @staticmethod
    def backward(ctx, *gradients):
        got, sent = ctx.splits
        return None, None, None, *(swapped(g, sent, got, ctx.group) for g in gradients)


def exchange_together(tensors, got, sent, group):
    several = isinstance(tensors, list)
    done = ExchangeTogether.apply(got, sent, group, *(tensors if several else [tensors]))
    return done if several else done[0]
"""

EVEN: Final = """\
class EvenExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, group, rows):
        ctx.group, rows = group, rows.contiguous()
        out = torch.empty_like(rows)
        dist.all_to_all_single(out, rows, group=group)
        return out

    @staticmethod
    def backward(ctx, *gradient):
        return None, EvenExchange.apply(ctx.group, *gradient)
"""

WRITTEN_OUT: Final = """\
class Written{name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, got, sent, group):
        ctx.save_for_backward(rows)
        ctx.splits, ctx.group = (got, sent), group
        out = torch.empty((sum(got), *rows.shape[1:]), dtype=rows.dtype)
        {launch}
        return out

    @staticmethod
    def backward(ctx, gradient):
        (rows,), (got, sent) = ctx.saved_tensors, ctx.splits
        out = torch.zeros_like(rows)
        dist.all_to_all_single(out, gradient.contiguous(), sent, got, group=ctx.group)
        return {result}, None, None, None


def exchange_{function}(rows, got, sent, group):
    return Written{name}.apply(rows, got, sent, group)
"""

LAUNCH: Final = "dist.all_to_all_single(out, rows.contiguous(), got, sent, group)"
HANDLE: Final = f"handle = {LAUNCH[:-1]}, async_op=True)\n        handle.wait()"


def _written(name: str, function: str, launch: str = LAUNCH, result: str = "out") -> str:
    parts = {"name": name, "function": function, "launch": launch, "result": result}
    text = WRITTEN_OUT
    for part, value in parts.items():
        text = text.replace("{" + part + "}", value)
    return text


EXCHANGES: Final = (
    ("exchange(", FUNCTION),
    ("exchange_of_itself(", OF_ITSELF),
    ("exchange_together(", TOGETHER),
    ("EvenExchange.", EVEN),
    ("exchange_written_out(", _written("Out", "written_out")),
    ("exchange_halved(", _written("Halved", "halved", result="out * 0.5")),
    ("exchange_by_handle(", _written("ByHandle", "by_handle", HANDLE)),
)
"""How a layer calls an exchange, and the source that defines it."""
