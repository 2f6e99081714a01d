"""Groups of heads are said to keep all bits only where torch's kernel goes from head to head."""

from contextlib import nullcontext

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from moe_compile.attention.detect_attention import find_attention
from moe_compile.graph.facts import GraphFacts
from moe_compile.testing.cpu_rounding.cpu_bits import is_fused
from tests import attention_layers as layers
from tests import attention_variants as variants
from tests.capture import dynamo_graphs
from tests.slow_parameters import slow_but


def region_of(style, group, head_size=8, dtype=torch.float32, **shape):
    """Return the region of a layer with four query heads of this rank."""
    sizes = {"batch": 4, "kv_heads": 4} | shape
    layer = style(16, 8, sizes["kv_heads"], head_size, group, dtype)
    flash = torch.backends.cuda.flash_sdp_enabled()
    try:
        (gm,) = dynamo_graphs(layer, torch.randn(sizes["batch"], 6, 16, dtype=dtype))
        (region,), _ = find_attention(GraphFacts(gm.graph))
    finally:
        torch.backends.cuda.enable_flash_sdp(flash)
    return region


@pytest.mark.parametrize(
    ("dtype", "exact", "rounded"),
    [
        (torch.float32, (4, 8, 12, 64), (5, 6, 18, 50)),
        (torch.float64, (2, 6, 8), (5, 9)),
        (torch.bfloat16, (5, 6, 8), ()),
        (torch.float16, (5, 8), ()),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
@pytest.mark.parametrize(
    "style", slow_but([layers.SplitAttention], [layers.SplitAttention, layers.FusedAttention])
)
def test_rows_of_a_head_that_end_between_boundaries_round_by_group(
    fake_ranks, style, dtype, exact, rounded
):
    said = {d: region_of(style, fake_ranks, d, dtype).may_round(2) for d in exact + rounded}
    assert said == dict.fromkeys(exact, False) | dict.fromkeys(rounded, True)


@pytest.mark.parametrize(
    "style", slow_but([variants.UnevenRows], [*variants.ROUNDED_BY_GROUP, layers.NormedAttention])
)
def test_what_another_kernel_or_uneven_rows_make_rounds_by_group(fake_ranks, style):
    assert region_of(style, fake_ranks).may_round(2)


@pytest.mark.parametrize("style", slow_but([variants.FixedMask], variants.VARIANTS))
def test_what_the_fused_kernel_makes_of_even_rows_is_exact(fake_ranks, style):
    assert not region_of(style, fake_ranks).may_round(2)


def test_attention_rounds_by_group_where_the_process_forbids_the_fused_kernel(fake_ranks):
    with sdpa_kernel(SDPBackend.MATH):
        assert region_of(layers.SplitAttention, fake_ranks).may_round(2)
    assert not region_of(layers.SplitAttention, fake_ranks).may_round(2)


def test_a_head_alone_rounds_otherwise_than_beside_others(fake_ranks):
    """Its products were split over four threads: gradients of a hundred positions differed."""
    alone = region_of(layers.SplitAttention, fake_ranks, batch=1, kv_heads=8)
    assert [alone.may_round(n) for n in (1, 2, 4)] == [False, False, True]
    shared = region_of(layers.SplitAttention, fake_ranks, batch=1)
    several = region_of(layers.SplitAttention, fake_ranks, kv_heads=8)
    assert not shared.may_round(2)
    assert not several.may_round(4)


def heads(num=4, batch=2, positions=8, size=16):
    return torch.randn(batch, positions, num, size).transpose(1, 2)


MATH_THEN_FLASH = [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]


@pytest.mark.parametrize(
    ("operands", "extra", "backends"),
    [
        ((heads(), heads(), heads()), {}, None),
        ((heads(), heads(2), heads(2)), {"enable_gqa": True}, None),
        ((heads(), heads(1), heads(1)), {}, None),
        ((heads(), heads(4, 1), heads(4, 1)), {}, None),
        ((heads(), heads(), heads(size=8)), {}, None),
        ((heads(), heads(), heads().mT.contiguous().mT), {}, None),
        ((heads(), heads(), heads()), {"attn_mask": torch.ones(8, 8)}, None),
        ((heads(), heads(), heads()), {"attn_mask": torch.ones(1, 8)}, None),
        ((heads(), heads(), heads()), {"attn_mask": torch.ones(2, 1, 8, 8)}, None),
        ((heads(), heads(), heads()), {"attn_mask": torch.ones(1, 8, 8)}, None),
        ((heads(), heads(), heads()), {"attn_mask": torch.ones(8, 8, requires_grad=True)}, None),
        ((heads(), heads(), heads()), {"attn_mask": torch.ones(8, 1).expand(8, 8)}, None),
        ((heads(), heads(), heads()), {}, [SDPBackend.MATH]),
        ((heads(), heads(), heads()), {}, [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]),
        ((heads(), heads(), heads()), {}, MATH_THEN_FLASH),
    ],
)
def test_the_kernel_is_the_one_torch_chooses(operands, extra, backends):
    with sdpa_kernel(backends, set_priority=True) if backends else nullcontext():
        chosen = torch._fused_sdp_choice(*operands, **extra)
        graph, mode = fx.Graph(), FakeTensorMode()

        def placed(value):
            if not isinstance(value, torch.Tensor):
                return value
            node = graph.placeholder(f"input{len(graph.nodes)}")
            node.meta["example_value"] = mode.from_tensor(value)
            return node

        nodes = [placed(operand) for operand in operands]
        kwargs = {name: placed(value) for name, value in extra.items()}
        core = graph.call_function(F.scaled_dot_product_attention, tuple(nodes), kwargs)
        assert is_fused(core, nodes) == (chosen == SDPBackend.FLASH_ATTENTION.value)
