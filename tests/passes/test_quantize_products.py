"""Grouped products of experts in eight bits, where asked for and each has such a form."""

import re

import pytest
import torch
import torch.nn.functional as F

from moe_compile.backend import rewrite
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import RegionRefused
from moe_compile.journal.entries import PassReport
from moe_compile.journal.reasons import Reason
from moe_compile.ops.scaled_products import AS_IT_IS, GROUPED_MM_FP8
from moe_compile.regions.grouped_products import is_grouped
from passes.quantize_products import BOUND, QuantizeProducts
from tests.capture import dynamo_graphs
from tests.layers import Centred, FusedGateUp, GroupedExperts, LoopExperts
from tests.slow_parameters import one_per_reason, slow_but

E, A = "e4m3", AS_IT_IS
TOKENS = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
ASKED = {"hardware": "cpu", "chunks": 2, "expert_compute": "fp8_blockwise"}


def rewritten(program, tokens=TOKENS, **options):
    """Return the graph, what was applied, and why products were left."""
    (gm,) = dynamo_graphs(program, tokens)
    state, _ = rewrite(gm, MegaMoEConfig(**(ASKED | options)))
    reports = [r for _, r in state.journal.records if isinstance(r, PassReport)]
    applied = [a for r in reports if r.pass_name == QuantizeProducts.name for a in r.applied]
    left = [v for r in reports for v in r.skipped if v.option == "expert_compute"]
    return gm, applied, left, state


def layer(style, group, dtype=torch.bfloat16):
    return style(16, 32, 8, 2, group, dtype)


def products(graph):
    found = [n for n in graph.nodes if n.target is GROUPED_MM_FP8]
    return found, [n for n in graph.nodes if is_grouped(n)]


FORMS = [
    ("fp8_blockwise", "blockwise", "e4m3"),
    ("fp8_rowwise", "rowwise", "e4m3"),
    ("fp8_blockwise_e5m2", "blockwise", "e5m2"),
]


@pytest.mark.parametrize(("compute", "recipe", "gradient"), slow_but(FORMS[:1], FORMS))
def test_every_product_of_every_chunk_is_in_eight_bits(fake_ranks, compute, recipe, gradient):
    program = layer(GroupedExperts, fake_ranks)
    gm, applied, left, state = rewritten(program, expert_compute=compute)
    ours, others = products(gm.graph)
    assert (len(ours), others, left) == (6, [], [])
    assert all(node.args[3:] == (recipe, "e4m3", gradient, "bf16") for node in ours)
    said = f"6 grouped products of region 0: {compute} (gate, up, down, grad_input)"
    assert applied == [f"{said} (lossy: {BOUND})"]
    (one,) = state.experts
    assert (one.plan.expert_compute, one.plan.num_chunks) == (compute, 2)


CHOSEN = [
    (("gate", "grad_input"), {"w1": (E, E, A), "w3": (A, E, A), "w2": (A, E, A)}),
    (("up", "down"), {"w3": (E, A, A), "w2": (E, A, A)}),
    (("grad_input",), dict.fromkeys(("w1", "w3", "w2"), (A, E, A))),
    (("down", "grad_weight"), {"w1": (A, A, E), "w3": (A, A, E), "w2": (E, A, E)}),
]


@pytest.mark.parametrize(("chosen", "expected"), CHOSEN)
def test_products_are_found_by_their_place(fake_ranks, chosen, expected):
    """In both chunks; the model's weights are w1 of the gate, w3 of up, w2 of down."""
    gm, _, left, state = rewritten(layer(GroupedExperts, fake_ranks), fp8_products=chosen)
    ours, others = products(gm.graph)
    found = [(weight_of(node), node.args[4:]) for node in ours]
    assert sorted(found) == sorted(2 * [*expected.items()])
    assert (len(ours) + len(others), left) == (6, [])
    assert state.experts[0].plan.fp8_products == chosen


def weight_of(product):
    """Return the name of the parameter that a product multiplies by."""
    node = product.args[1]
    while node.op != "placeholder":
        node = node.args[0]
    return re.search(r"w\d", node.name)[0]


class Bilinear(GroupedExperts):
    """Neither of its first products goes through an activation."""

    def experts(self, rows, received):
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        h = torch._grouped_mm(rows, self.w1, offs=offs) * torch._grouped_mm(rows, self.w3, offs)
        return torch._grouped_mm(h, self.w2, offs=offs)


class Deep(GroupedExperts):
    """Three products, one after another."""

    def experts(self, rows, received):
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        h = torch._grouped_mm(rows, self.w1, offs=offs)
        h = torch._grouped_mm(h, self.w2, offs=offs)
        return torch._grouped_mm(torch._grouped_mm(h, self.w3, offs=offs), self.w2, offs=offs)


@pytest.mark.parametrize(
    ("style", "says"),
    [
        (FusedGateUp, r"`_grouped_mm` at layers.py:\d+ .*computes gate and up together"),
        (Bilinear, "it is not known which of the two"),
        (Deep, "it must have one or two products of the rows"),
    ],
)
def test_products_that_cannot_be_told_apart_are_named_together(fake_ranks, style, says):
    program = layer(style, fake_ranks)
    gm, _, (left,), state = rewritten(program, fp8_products=("gate", "down"))
    assert left.reason is Reason.PRODUCTS_TOGETHER and re.search(says, left.detail)
    assert (products(gm.graph)[0], state.experts[0].plan.fp8_products) == ([], ())
    assert products(rewritten(program)[0].graph)[0]
    if style is not Deep:
        assert products(rewritten(program, fp8_products=("gate", "up"))[0].graph)[0]
    with pytest.raises(RegionRefused, match='write "gate" and "up" both, or neither'):
        rewritten(program, fp8_products=("gate", "down"), strict=True)


@pytest.mark.parametrize(
    "options", [{"expert_compute": "same"}, {"disable_passes": ("quantize_products",)}], ids=str
)
def test_nothing_changes_unless_it_is_asked_for(fake_ranks, options):
    program = layer(GroupedExperts, fake_ranks)
    gm, applied, _, state = rewritten(program, **options)
    assert (applied, products(gm.graph)[0], len(products(gm.graph)[1])) == ([], [], 6)
    assert state.experts[0].plan.expert_compute == "same"


class Named(GroupedExperts):
    """Calls the product by its public name, and one of the weights is made in the layer."""

    def experts(self, rows, received):
        perm = torch.argsort(self.expert_of_rows(rows, received), stable=True)
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        turned = self.w1.transpose(-2, -1).contiguous()
        h = F.silu(F.grouped_mm(rows[perm], turned.transpose(-2, -1), offs=offs))
        out = F.grouped_mm(h, self.w2, offs=offs)
        return torch.zeros_like(out).index_copy(0, perm, out)


GATHERED = {"dispatch": "all_gather", "equal_tokens": True}
FORMS_OF_REGIONS = [
    (Centred, {}),
    (GroupedExperts, GATHERED),
    (Named, {}),
    (FusedGateUp, {}),
    (GroupedExperts, {"batch_parts": 2}),
]


@pytest.mark.parametrize(("style", "options"), slow_but(FORMS_OF_REGIONS[:2], FORMS_OF_REGIONS))
def test_products_of_every_form_of_a_region_are_found(fake_ranks, style, options):
    gm, applied, left, _ = rewritten(layer(style, fake_ranks), **options)
    ours, others = products(gm.graph)
    assert ours and applied and (others, left) == ([], [])


class OwnType(GroupedExperts):
    """One of its products names the type of its result."""

    def experts(self, rows, received):
        offs = torch.cumsum(received.view(self.num_ranks, -1).sum(0), 0, dtype=torch.int32)
        h = torch._grouped_mm(rows, self.w1, offs=offs, out_dtype=torch.bfloat16)
        return torch._grouped_mm(h, self.w2, offs=offs)


class Bits(GroupedExperts):
    """Experts read the bits of their rows."""

    def experts(self, rows, received):
        return super().experts(rows * (rows.view(torch.int16) % 2), received)


LEFT = {
    LoopExperts: Reason.NO_GROUPED_PRODUCT,
    OwnType: Reason.NO_GROUPED_PRODUCT,
    Bits: Reason.INTEGERS,
}


@pytest.mark.parametrize("style", one_per_reason(LEFT))
def test_products_without_such_a_form_are_left_and_it_is_said_why(fake_ranks, style):
    gm, applied, (left,), state = rewritten(layer(style, fake_ranks))
    assert (applied, left.reason, products(gm.graph)[0]) == ([], LEFT[style], [])
    assert state.experts[0].plan.expert_compute == "same"


def test_widths_that_a_recipe_cannot_multiply_are_left(fake_ranks):
    narrow = GroupedExperts(16, 24, 8, 2, fake_ranks)
    _, applied, (left,), _ = rewritten(narrow, expert_compute="fp8_rowwise")
    assert (applied, left.reason) == ([], Reason.NO_GROUPED_PRODUCT)
    assert "must have weights [E, K, N] whose K and N are multiples of 16" in left.detail
    assert rewritten(narrow)[1]


def test_strict_raises_for_it(fake_ranks):
    with pytest.raises(RegionRefused, match=r"megamoe.expert_compute was requested"):
        rewritten(layer(LoopExperts, fake_ranks), strict=True)
