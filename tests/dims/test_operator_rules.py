"""Each rule of the table says no more of an operator than numbers bear out."""

import operator

import pytest
import torch
import torch.nn.functional as F

from moe_compile.dims import operators
from moe_compile.dims.factors import Lost, flat
from moe_compile.dims.operators import RULES, operator_name
from tests.dims.perturbed import Claims

I3 = torch.tensor([2, 0, 1])
INDEX = torch.tensor([[1, 0, 2, 1], [0, 0, 1, 2], [2, 1, 0, 0]])
IMAGE = (2, 4, 5, 6)
aten = torch.ops.aten


def written(function):
    """Return a function that writes into memory of its own what `function` writes in place."""

    def call(x, *others):
        y = x.clone()
        function(y, *others)
        return y

    return call


SAMPLES = {
    "pointwise": (lambda x, y, z: F.silu(torch.where(x > y, x * y, z)), (3, 4), (4,), (3, 1)),
    "casts": (lambda x: aten.alias(x.clone().detach().to(torch.float32)), (3, 4)),
    "written": (written(lambda y, x: y.copy_(x).mul_(2).fill_(1.0)), (3, 4), (4,)),
    "lifted": (lambda x: aten.lift_fresh(x), (3, 4)),
    "expanded": (lambda x: x.expand(2, 3, 5), (3, 1)),
    "views": (lambda x: x.view(2, 2, 15).view(4, 15).reshape(4, 3, 1, 5).squeeze(2), (4, 3, 5)),
    "views of others": (lambda x: aten._unsafe_view(x.unsqueeze(1), [4, 15]), (4, 3, 5)),
    "aliases": (lambda x: aten._reshape_alias(x, [12, 5], [5, 1]), (4, 3, 5)),
    "turned": (lambda x: x.permute(2, 0, 1).transpose(0, 1), (3, 4, 5)),
    "t": (lambda x: aten.t(x), (3, 4)),
    "of numbers": (
        [torch.zeros_like, torch.ones_like, lambda x: torch.full_like(x, 2.0)],
        (3, 4),
    ),
    "empty": (lambda x: torch.empty_like(x).zero_(), (3, 4)),
    "new": (
        [lambda x: x.new_zeros(3, 2), lambda x: x.new_ones(3), lambda x: x.new_full((2,), 1.0)],
        (3, 4),
    ),
    "new and empty": (lambda x: x.new_empty(3).zero_(), (3, 4)),
    "softmax": (
        [lambda x: x.softmax(-1), lambda x: x.log_softmax(1), lambda x: aten._safe_softmax(x, 0)],
        (3, 4, 5),
    ),
    "scans": (
        [
            lambda x: x.cumsum(1),
            lambda x: x.cumprod(0),
            lambda x: x.cummax(1),
            lambda x: x.cummin(0),
            lambda x: x.logcumsumexp(1),
        ],
        (3, 4),
    ),
    "turned round": ([lambda x: x.flip(0), lambda x: x.roll(1, 1)], (3, 4)),
    "sorted": ([lambda x: x.sort(1), lambda x: x.topk(2, -1), lambda x: F.glu(x, 1)], (3, 4)),
    "slices": ([lambda x: x[:, 1:3], lambda x: x[:, :4] * 2, lambda x: x[::2]], (3, 4)),
    "windows": (lambda x: x.unfold(1, 2, 1), (3, 4)),
    "repeated": ([lambda x: x.repeat_interleave(2, 1), lambda x: x.repeat(2, 2)], (3, 4)),
    "repeats": ([lambda: aten.repeat_interleave(I3)],),
    "padded": (
        [
            lambda x: F.pad(x, (1, 0)),
            lambda x: F.pad(x, (1, 0), mode="reflect"),
            lambda x: F.pad(x, (1, 0), mode="replicate"),
        ],
        (2, 3, 4),
    ),
    "padded images": (
        [
            lambda x: F.pad(x, (0, 0, 0, 2), mode="reflect"),
            lambda x: F.pad(x, (1, 0, 0, 0), mode="replicate"),
        ],
        (2, 3, 4, 5),
    ),
    "fourier": (
        [
            torch.fft.rfft,
            lambda x: torch.fft.irfft(torch.fft.rfft(x), 4),
            lambda x: torch.fft.fft(torch.fft.rfft(x, dim=0), dim=0),
        ],
        (3, 4),
    ),
    "triangles": ([lambda x: x.tril(), lambda x: x.triu(1)], (2, 3, 3)),
    "convolved": (F.conv2d, IMAGE, (3, 4, 2, 2)),
    "norm of groups": (lambda x: F.group_norm(x, 2), IMAGE),
    "pooled": (
        [
            lambda x: F.avg_pool2d(x, 2),
            lambda x: F.max_pool2d(x, 2),
            lambda x: F.adaptive_avg_pool2d(x, 2),
        ],
        IMAGE,
    ),
    "pooled volumes": (
        [
            lambda x: F.avg_pool3d(x, 2),
            lambda x: F.max_pool3d(x, 2),
            lambda x: F.adaptive_avg_pool3d(x, 2),
        ],
        (2, 3, 4, 4, 4),
    ),
    "places": (
        [
            lambda x: x.gather(1, INDEX),
            lambda x: x.scatter(1, INDEX, x * 2),
            lambda x: x.scatter(1, INDEX, 0.5),
        ],
        (3, 4),
    ),
    "added at places": (
        [
            lambda x, y: x.scatter_add(0, INDEX, y),
            lambda x, y: x.scatter_reduce(1, INDEX, y, "sum"),
        ],
        (3, 4),
        (3, 4),
    ),
    "products": (
        [lambda x, y, z: x @ y, lambda x, y, z: torch.addmm(z, x, y)],
        (3, 4),
        (4, 5),
        (5,),
    ),
    "batched": (
        [lambda x, y, z: x @ y, lambda x, y, z: torch.baddbmm(z, x, y)],
        (2, 3, 4),
        (2, 4, 5),
        (2, 1, 5),
    ),
    "einsum": (lambda x, y: torch.einsum("sec,sm->ecm", x, y), (5, 3, 2), (5, 4)),
    "layer norm": (lambda x, w, b: F.layer_norm(x, (3, 4), w, b), (2, 3, 4), (3, 4), (3, 4)),
    "rms norm": (lambda x, w: [*aten._fused_rms_norm(x, [4], w, 1e-5)], (2, 3, 4), (4,)),
    "attention": (
        aten.scaled_dot_product_attention,
        (2, 3, 4, 6),
        (2, 3, 5, 6),
        (2, 3, 5, 7),
        (3, 4, 5),
    ),
    "attention with fewer KV heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (2, 4, 4, 6),
        (2, 2, 5, 6),
        (2, 2, 5, 6),
    ),
    "indexed": ([lambda x: x[:, I3], lambda x: x.index_select(0, I3)], (4, 3)),
    "embedding": (lambda w: F.embedding(INDEX, w), (3, 4)),
    "masked": (written(lambda y: operator.setitem(y, torch.ones(3).bool(), 0.5)), (3, 4)),
    "written through a view": (
        written(lambda y, x: (y[:, :2].copy_(x), y[:, 2:].copy_(x))),
        (3, 4),
        (3, 2),
    ),
    "selected": ([lambda x: x[-1], lambda x: x.select(1, 2) * x[:, 2]], (3, 4)),
    "unbound": (lambda x: [a * 2 for a in x.unbind(1)], (3, 4)),
    "cut": (
        [lambda x: x.chunk(2, 1), lambda x: x.split([1, 3], 1), lambda x: x.split(4, 1)],
        (3, 4),
    ),
    "joined again": (lambda x: torch.cat([a.exp() for a in x.chunk(4, 1)], 1), (3, 4)),
    "joined in another order": (lambda x: torch.cat(x.chunk(4, 1)[::-1], 1), (3, 4)),
    "joined": (lambda x, y: torch.cat([x, y], 1).split([4, 5], 1)[1] * 2, (3, 4), (3, 5)),
    "stacked": (lambda x, y: torch.stack([x, y], 1), (3, 4), (3, 4)),
    "stacked again": (lambda x: torch.stack([a.exp() for a in x.unbind(0)], 1), (3, 4)),
    "stacked in another order": (lambda x: torch.stack(x.unbind(0)[::-1]), (3, 4)),
    "reduced": (
        [
            lambda x: x.sum(1),
            lambda x: x.amax((0, 2), keepdim=True),
            lambda x: x.mean(),
            lambda x: x.max(1),
        ],
        (3, 4, 5),
    ),
    "complex": (lambda x: torch.view_as_real(torch.view_as_complex(x) * 2), (3, 4, 2)),
}
ELSEWHERE = {
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_cudnn_attention", "_fused_rms_norm",
}  # fmt: skip
"""Operators of other devices, whose rule has a sample by another."""


def drawn(sizes):
    generator = torch.Generator().manual_seed(sum(sizes))
    return torch.rand(sizes, dtype=torch.float64, generator=generator) + 0.5


def claims(name):
    """Return what is said of each function of a sample."""
    functions, *sizes = SAMPLES[name]
    each = functions if isinstance(functions, list) else [functions]
    return [Claims(function, [drawn(one) for one in sizes]) for function in each]


@pytest.mark.parametrize("name", SAMPLES)
def test_nothing_wrong_is_said_of_an_operator(name):
    assert not [wrong for said in claims(name) for wrong in said.wrong()]


def test_every_rule_has_a_sample():
    run = {operator_name(func) for name in SAMPLES for c in claims(name) for func in c.operators}
    assert {*RULES} - run <= ELSEWHERE | {"scaled_dot_product_attention"}


BROKEN = {
    "_softmax": "softmax",
    "sum": "reduced",
    "mm": "products",
    "scatter": "places",
    "index": "indexed",
    "select": "selected",
    "split_with_sizes": "cut",
    "native_layer_norm": "layer norm",
    "_fft_r2c": "fourier",
    "slice": "slices",
    "convolution": "convolved",
    "stack": "stacked in another order",
}
"""Operator whose rule is broken -> a sample that has it."""


def unclosed(rule):
    """Return a rule that does not say which indices come together, or are picked."""

    def broken(call):
        known = len(call.flow.notes.closed)
        found = rule(call)
        del call.flow.notes.closed[known:]
        for picked in call.picked:
            picked.clear()
        return found

    return broken


def turned(rule):
    """Return a rule that has the first two dimensions change places, of one size or not."""

    def broken(call):
        first, second, *others = rule(call)
        return [second, first, *others]

    return broken


@pytest.mark.parametrize("name", BROKEN)
def test_a_rule_that_says_too_much_is_noticed(name, monkeypatch):
    rules = {
        operator_name(f): operators.rule_of(f) for c in claims(BROKEN[name]) for f in c.operators
    }
    monkeypatch.setitem(RULES, name, unclosed(rules[name]))
    operators.rule_of.cache_clear()
    try:
        assert [wrong for said in claims(BROKEN[name]) for wrong in said.wrong()]
    finally:
        monkeypatch.undo()
        operators.rule_of.cache_clear()


@pytest.mark.parametrize("name", ["permute", "add"])
def test_dimensions_in_another_order_are_noticed(name, monkeypatch):
    def said():
        return Claims(lambda x, y: x.permute(1, 0) + y, [drawn((3, 3)), drawn((3, 3))])

    assert not list(said().wrong())
    rules = {operator_name(f): operators.rule_of(f) for f in said().operators}
    monkeypatch.setitem(RULES, name, turned(rules[name]))
    operators.rule_of.cache_clear()
    try:
        assert list(said().wrong())
    finally:
        monkeypatch.undo()
        operators.rule_of.cache_clear()


def test_places_that_an_operator_counts_are_closed():
    """A part would count from 0 again, which no change of one index shows."""
    said = Claims(lambda x: x * torch.arange(4), [drawn((3, 4))])
    assert [flat(dim) for _, dim in said.notes.closed] == [flat(said.dims[0][1])]


def test_an_operator_without_a_rule_is_refused():
    with pytest.raises(Lost, match="runs aten"):
        Claims(torch.nonzero, [drawn((3, 4))])
    with pytest.raises(Lost, match="draws random numbers"):
        Claims(torch.bernoulli, [drawn((3, 4)) - 0.5])
