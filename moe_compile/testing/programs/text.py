"""A generated program as Python source, complete: run it to see the differences from eager.

Contract
    `source_of` is a function of the program alone; equal programs have equal text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from moe_compile.testing.programs.attention_text import attention_class, own_attention_class
from moe_compile.testing.programs.capacity_text import capacity_class
from moe_compile.testing.programs.choices import (
    Groups,
    Heads,
    Poison,
    Reader,
    Routing,
    Running,
    Sharing,
    Style,
    Tally,
    Wrapping,
)
from moe_compile.testing.programs.expert_text import indented
from moe_compile.testing.programs.grammar import (
    IN_EIGHT_BITS,
    NODE_SUMMING,
    NUM_NODES,
    PARTED,
    TWO_HOPS,
    WITHOUT_READS,
    Attention,
    Capacity,
    Experts,
    Layer,
    OwnAttention,
    Program,
    Rewrite,
)
from moe_compile.testing.programs.layer_text import layer_class

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
"""The text by which a layer calls an exchange, and the source that defines the exchange."""


HEAD: Final = """\
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    all_to_all_single_autograd,
)
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

wait_tensor = torch.ops._c10d_functional.wait_tensor
"""

PARAMETER: Final = """\
def parameter(generator, *shape):
    scale = shape[-2] ** -0.5 if len(shape) > 1 else 0.5
    drawn = torch.randn(*shape, generator=generator, device="cpu") * scale
    return nn.Parameter(drawn.to(torch.get_default_device(), DTYPE))
"""

FAVOUR: Final = {
    Routing.SCORES: "return torch.zeros(experts)",
    Routing.ONE_EXPERT: "return 100.0 * (torch.arange(experts) == SEED % experts)",
    Routing.FIRST_RANK: "return 100.0 * (torch.arange(experts) < experts // {ranks})",
}

ROUNDED: Final = """\
from moe_compile.ops.quantized_rows import pack_rows, unpack_rows

ROUNDED_LAYERS = ()  # whose rows are rounded as those that travel in eight bits
ROUNDED_MODES = (True, False)  # where they are: with gradients, without


class RoundedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        return unpack_rows(pack_rows(rows, None), rows.shape[1], rows.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return unpack_rows(pack_rows(gradient, None), gradient.shape[1], gradient.dtype)


def rounded(rows, layer):
    rounds = layer in ROUNDED_LAYERS and torch.is_grad_enabled() in ROUNDED_MODES
    return RoundedRows.apply(rows) if rounds else rows
"""

PRODUCT: Final = """\
from moe_compile.ops.scaled_products import GROUPED_MM_FP8

EIGHT_BITS = False  # whether products that run eagerly are in eight bits


def multiplied(x, weight, *, offs):
    if EIGHT_BITS and not torch.compiler.is_compiling():
        return GROUPED_MM_FP8(x, weight, offs, "blockwise", "e4m3", "e4m3", "bf16")
    return torch._grouped_mm(x, weight, offs=offs)
"""

ACTIVATION: Final = """\
class OwnActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.where(x > 0, x * x, x * 0.25)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.where(x > 0, 2 * x, torch.full_like(x, 0.25))
"""

MAIN: Final = """\
if __name__ == "__main__":
    from moe_compile.testing.programs.judge import print_judgement

    print_judgement(__file__)
"""

OF_UNKNOWN_LENGTH: Final = frozenset({Tally.BINCOUNT_CUT, Tally.BINCOUNT_VIEWED, Tally.UNIQUE})
"""Counts that make tensors whose length depends on the data."""

ROUNDING: Final = (Rewrite.TOKENS, Rewrite.NO_READS_IN_CHUNKS, Rewrite.SCORES)
BOUNDS: Final = dict.fromkeys((*ROUNDING, *sorted(NODE_SUMMING, key=str)), 0.05)
"""Relative errors of rewrites that round differently: weights' gradients in slices of tokens, rows
times their scores, sums per token on nodes."""

FLAT_BOUNDS: Final = {Rewrite.HOP_SLICES: BOUNDS[Rewrite.TOKENS]}
"""The same where rows come in one hop after all: slices of tokens then round."""

BOUND_OF_LOSSES: Final = 1e-4
"""Relative error of programs with losses in parts of the batch: a loss adds up the sums of parts,
and its gradient is that of the whole, with terms in another order."""

BOUND_OF_CALLS: Final = 2.0**-7
"""Relative error of parameters that several checkpointed calls share, each by itself in parts: one
rounding of bfloat16."""

BOUND_OF_HEADS: Final = 0.05
"""Relative error of attention that rounds differently in groups of heads."""


def source_of(program: Program) -> str:
    """Return the whole text of `program`."""
    blocks = [HEAD, _settings(program), PARAMETER]
    layers = list(program.layers)
    if any(isinstance(layer, Experts | Capacity) for layer in layers):
        favour = FAVOUR[program.routing].replace("{ranks}", str(program.num_ranks))
        blocks.append(f"def favour(experts):\n    {favour}\n")
    written = "\n\n\n".join(_in_groups(program, i) for i in range(len(layers))) + "\n"
    if program.rewrite in IN_EIGHT_BITS:
        for before, after in (("(", ", got, sent"), ("([", ", probs]")):
            rows = f"{before}rounded(routed, type(self).__name__){after}"
            written = written.replace(f"{before}routed{after}", rows)
    if program.rewrite is Rewrite.PRODUCTS:
        written = written.replace("torch._grouped_mm(", "multiplied(")
    blocks_of_names = (
        ("OwnActivation", ACTIVATION),
        ("rounded(", ROUNDED),
        ("multiplied(", PRODUCT),
    )
    for name, block in (*EXCHANGES, *blocks_of_names):
        blocks += [block] if name in written else []
    model = "\n".join(model_class(program)) + "\n"
    if needed := [name for name in ("own_group", "second_group") if f"{name}()" in written + model]:
        blocks.insert(1, f"from moe_compile.testing.process_groups import {', '.join(needed)}\n")
    blocks += [written, model, MAIN]
    return "\n\n".join(blocks)


def _settings(program: Program) -> str:
    heads = [layer.heads for layer in program.layers if isinstance(layer, Attention)]
    rounds = Heads.LATENT in heads  # keys and values differ in head size
    bound = BOUNDS.get(program.rewrite, BOUND_OF_HEADS if rounds else 0.0)
    if program.rewrite in PARTED and program.has_losses:
        bound = max(bound, BOUND_OF_LOSSES)
    if program.is_called_in_parts:
        bound = max(bound, BOUND_OF_CALLS)
    flat = FLAT_BOUNDS.get(program.rewrite, 0.0)
    rows = max(sum(step) for step in program.tokens)
    top_k = max((a.top_k for a in program.experts), default=1)
    raises = any(Reader.FAILING_CHECK in a.readers for a in program.experts)
    unknown = any(
        a.tally in OF_UNKNOWN_LENGTH or a.style is Style.SEARCHED for a in program.experts
    )
    lines = [
        f"DTYPE = torch.{program.dtype}",
        f"WIDTH, HIDDEN, SEED = {program.width}, {program.hidden}, {program.seed}",
        f"TOKENS = {list(program.tokens)}  # per step: of each rank",
        f"OPTIONS = {options_of(program)}",
        f"DYNAMIC = {True if program.dynamic else None}",
        f"UNKNOWN_LENGTHS = {unknown}  # are captured",
        f'BACKWARD = "{program.backward.name.lower()}"',
        *_images(program),
        *_poison(program),
        f"BOUND = {bound}  # of the error, relative",
        *([f"FLAT_BOUND = {flat}  # where rows come in one hop"] if flat else []),
        f"MIRRORED = {_is_mirrored(program)}  # one process, the other ranks its mirror images",
        f"CAPACITY = {rows * top_k}",
        f"RAISES = {raises}",
    ]
    if program.rewrite in TWO_HOPS:
        local = program.experts[0].local
        lines += [f"RANKS, NODES, LOCAL = {program.num_ranks}, {NUM_NODES}, {local}  # experts"]
    if program.rewrite in PARTED:
        parts = f"{PARTED[program.rewrite]}, {program.positions}"
        lines += [f"PARTS, POSITIONS = {parts}  # of the batch; of a sequence"]
    return "\n".join(lines) + "\n"


def _images(program: Program) -> list[str]:
    """Return the line that lists the steps in which the first layer runs, [] if it always runs."""
    if program.running is Running.ALWAYS:
        return []
    runs = [i == 0 or (program.seed + i) % 3 > 0 for i in range(len(program.tokens))]
    return [f"IMAGES = {runs}  # per step: whether the first layer runs"]


def _poison(program: Program) -> list[str]:
    """Return the line that lists the NaN tokens, [] without any."""
    kind = program.poison
    return [f'POISON = "{kind.name.lower()}"'] if kind is not Poison.NONE else []


def _is_mirrored(program: Program) -> bool:
    """Whether one process can stand for all ranks: they have as many tokens in every step.

    Gathered tokens are those of all ranks, of which a rank takes its own rows; a mirror gathers
    nothing. A second group needs all ranks, and a mirror has no sums over ranks.
    """
    is_agreed = program.rewrite in WITHOUT_READS  # by all ranks, whether a step runs again
    if program.rewrite is Rewrite.GATHERED or program.groups is not Groups.WORLD or is_agreed:
        return False
    if any(Reader.METRICS in a.readers for a in program.experts):
        return False
    return all(len({*step}) == 1 for step in program.tokens)


def _in_groups(program: Program, number: int) -> str:
    """Return the class of a layer, its exchanges over the groups that the program names."""
    layer = program.layers[number]
    if isinstance(layer, Experts):
        layer = replace(layer, ranks=program.num_ranks)
    text = "\n".join(_class(layer, number))
    if program.groups is Groups.LAYERS_APART and (number or len(program.layers) == 1):
        return text.replace("dist.group.WORLD", "second_group()")
    if program.groups is Groups.ROWS_APART:
        made = "self.group, self.rank"
        text = text.replace(made, f"self.rows_group = second_group()\n        {made}")
        for splits in ("got, sent", "sent, got"):
            text = text.replace(f"{splits}, self.group)", f"{splits}, self.rows_group)")
    return text


def _class(layer: Layer, number: int) -> list[str]:
    if isinstance(layer, Experts):
        return layer_class(layer, number)
    if isinstance(layer, Capacity):
        return capacity_class(layer, number)
    if isinstance(layer, OwnAttention):
        return own_attention_class(layer, number)
    return attention_class(layer, number)


GATHERED: Final = {"megamoe.dispatch": "all_gather", "megamoe.equal_tokens": True}

REWRITES: Final[Mapping[Rewrite, dict[str, Any]]] = {
    Rewrite.CHUNKS: {},
    Rewrite.UNSCHEDULED: {"megamoe.schedule": False},
    Rewrite.RECOMPUTE: {"megamoe.recompute": "recompute_exchanges"},
    Rewrite.MODEL_RECOMPUTE: {"megamoe.recompute": "model"},
    Rewrite.FP8: {"megamoe.dispatch_wire": "fp8"},
    Rewrite.PRODUCTS: {"megamoe.expert_compute": "fp8_blockwise"},
    Rewrite.TOKENS: {"megamoe.chunk_by": "tokens"},
    Rewrite.BY_LOAD: {"megamoe.chunk_edges": "load"},
    Rewrite.GATHERED: GATHERED,
    Rewrite.SCORES: {"megamoe.apply_scores": "before_down"},
    Rewrite.HOPS: {"megamoe.nodes": "exact"},
    Rewrite.HOP_SLICES: {"megamoe.nodes": "exact", "megamoe.chunk_by": "tokens"},
    Rewrite.HOPS_FP8: {"megamoe.nodes": "exact", "megamoe.dispatch_wire": "fp8"},
    Rewrite.NODE_SUMS: {"megamoe.nodes": "rounded"},
    Rewrite.SUM_SLICES: {"megamoe.nodes": "rounded", "megamoe.chunk_by": "tokens"},
    Rewrite.HOP_BOTH: {"megamoe.nodes": "exact", "megamoe.hop_slices": 2},
    Rewrite.SUM_BOTH: {"megamoe.nodes": "rounded", "megamoe.hop_slices": 2},
    Rewrite.NO_READS: {"megamoe.chunks": 1},
    Rewrite.NO_READS_IN_CHUNKS: {"megamoe.chunk_by": "tokens"},
    **{rewrite: {"megamoe.batch_parts": parts} for rewrite, parts in PARTED.items()},
}


def options_of(program: Program) -> dict[str, Any]:
    """Return the options of `torch.compile` that `program` is compiled with."""
    extra = REWRITES[program.rewrite]
    heads = any(isinstance(layer, Attention) for layer in program.layers)
    groups = {"megamoe.attention_chunks": 2} if heads else {}
    if program.rewrite in WITHOUT_READS:
        extra = {**extra, "megamoe.host_reads": "none", "megamoe.equal_tokens": True}
        extra |= {"megamoe.row_room": program.row_room}
    return {"megamoe.chunks": program.chunks, **groups, **extra}


def model_class(program: Program) -> list[str]:
    """Return the source of class `Program`, whose layers are `Layer0`, `Layer1`, ..."""
    made = [f"self.layer{i} = Layer{i}()" for i in range(len(program.layers))]
    calls: list[str] = []
    if program.groups is Groups.OWN_SUM:
        made += ["self.own = own_group()"]
        calls += ['extra.append(wait_tensor(all_reduce(x.detach() * 1.0, "sum", self.own)))']
    if program.running is Running.IF_ANY:
        made += ['self.register_buffer("images", torch.zeros(3, dtype=torch.bool))']
    constructor = ["def __init__(self):", *indented(["super().__init__()", *made])]
    if program.sharing is Sharing.INSIDE:
        calls += _one_inside(program)
    else:
        for i, layer in enumerate(program.layers):
            call = _call(program, i, layer)
            is_optional = program.running is Running.IF_ANY and i == 0
            calls += ["if self.images.any():", *indented(call)] if is_optional else call
    if program.sharing is Sharing.WEIGHTS:
        calls += _call(program, 0, program.layers[0])
    if program.sharing is Sharing.ROUTING:
        calls += ["", *_call(program, 0, program.layers[0], routing="routing")]
    body = ["extra = []", *_around(program, calls), "return x, extra"]
    forward = ["def forward(self, x):", *indented(body)]
    return ["class Program(nn.Module):", *indented([*constructor, "", *forward])]


def _one_inside(program: Program) -> list[str]:
    """Return calls of all layers between routing and rows of the first, or of that one again."""
    inside = list(enumerate(program.layers))[1:] or [(0, program.layers[0])]
    calls = ["routing = self.layer0.route(x)"]
    for i, layer in inside:
        calls += [*_call(program, i, layer), "x = x * (1 + routing[4][0] * 0.125)"]
    return [*calls, *_call(program, 0, program.layers[0], routing="routing")]


def _call(program: Program, i: int, layer: Layer, routing: str = "") -> list[str]:
    before: list[str] = []
    if not isinstance(layer, Experts):
        call = f"self.layer{i}"
    elif i == 0 and (routing or program.sharing is Sharing.ROUTING):
        before = [] if routing else ["routing = self.layer0.route(x)"]
        call = "lambda x: self.layer0(x, routing)"
    else:
        call = f"lambda x: self.layer{i}(x, self.layer{i}.route(x))"
    if program.wrapping is Wrapping.CHECKPOINT:
        line = f"y, more = checkpoint({call}, x, use_reentrant=False)"
    else:
        line = f"y, more = {call.removeprefix('lambda x: ')}" + ("" if "lambda" in call else "(x)")
    residual = "x + y" if program.wrapping is Wrapping.RESIDUAL else "y"
    return [*before, line, "extra += more", f"x = {residual}"]


def _around(program: Program, calls: list[str]) -> list[str]:
    if program.wrapping is Wrapping.AUTOCAST:
        return ["with torch.autocast(x.device.type, dtype=torch.bfloat16):", *indented(calls)]
    if program.wrapping is Wrapping.NO_GRAD_HALF:
        kept = ["kept = x", "with torch.no_grad():", *indented(calls), "x = kept + x * 0.125"]
        return [*kept, *calls]
    return calls
