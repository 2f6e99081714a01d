"""Attention under tensor parallelism goes to Inductor's async TP where everything is there."""

import dataclasses
import logging
import types

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.attention.detect_attention import find_attention
from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.graph.async_tp import AsyncTPMeans, count_fused, probe_means
from moe_compile.journal.reasons import Reason
from passes.planned.attention import not_handed_over
from passes.verify_async_tp import VerifyAsyncTP
from tests.attention_layers import TensorParallel
from tests.capture import dynamo_graphs, state

ALL = AsyncTPMeans(has_setting=True, has_nccl=True, enabled_groups=frozenset({"tp", "other"}))
ASKED = MegaMoEConfig(async_tp=True)


@pytest.mark.parametrize(
    ("config", "device", "means", "decision"),
    [
        (ASKED, "cuda", ALL, None),
        (MegaMoEConfig(), "cuda", ALL, Reason.NOT_ASKED),
        (MegaMoEConfig(async_tp=True, codegen="fx"), "cuda", ALL, Reason.NO_CODE),
        (ASKED, "cuda", dataclasses.replace(ALL, has_setting=False), Reason.NO_SETTING),
        (ASKED, "cpu", ALL, Reason.NOT_CUDA),
        (ASKED, "cuda", dataclasses.replace(ALL, has_nccl=False), Reason.NO_NCCL),
        (
            ASKED,
            "cuda",
            dataclasses.replace(ALL, enabled_groups=frozenset({"other"})),
            Reason.NOT_ENABLED,
        ),
    ],
)
def test_it_is_handed_over_where_nothing_is_missing(config, device, means, decision):
    attention = types.SimpleNamespace(device=device)
    refused = types.SimpleNamespace(groups=("tp",))
    assert not_handed_over(attention, refused, config, means) is decision


def tensor_parallel(group, **options):
    x = torch.randn(4, 6, 16, requires_grad=True)
    (gm,) = dynamo_graphs(TensorParallel(16, 8, 4, 8, group), x)
    return gm, *rewrite(gm, MegaMoEConfig(hardware="cpu", **options))


@pytest.mark.parametrize(
    ("options", "said"), [({}, Reason.NOT_ASKED), ({"async_tp": True}, Reason.NOT_CUDA)]
)
def test_on_a_cpu_nothing_is_handed_over_and_the_report_says_so(fake_ranks, options, said):
    _, found, compilation = tensor_parallel(fake_ranks, **options)
    assert compilation.attention[0].remarks == (f"not handed to Inductor's async TP: {said.value}",)
    assert not found.async_tp
    assert not compilation.has_regions


def test_this_torch_has_the_setting_and_no_group_is_enabled_unasked(fake_ranks):
    means = probe_means({fake_ranks.group_name})
    assert means.has_setting
    assert not means.enabled_groups


def test_the_groups_are_those_that_gather_and_reduce(fake_ranks):
    (gm,) = dynamo_graphs(TensorParallel(16, 8, 4, 8, fake_ranks), torch.randn(4, 6, 16))
    _, (refused,) = find_attention(gm.graph)
    assert refused.groups == (fake_ranks.group_name,)


def fused_graph(group_name):
    """What Inductor's pass leaves of a gather and two products."""

    def program(shard, b, c):
        _, products = torch.ops.symm_mem.fused_all_gather_matmul(shard, [b, c], 0, group_name)
        return products

    return make_fx(program, tracing_mode="fake")(*(torch.randn(8, 8) for _ in range(3))).graph


def test_fused_products_are_counted(fake_ranks):
    graph = fused_graph(fake_ranks.group_name)
    assert count_fused(graph) == 1
    handed = state()
    handed.async_tp = True
    report = VerifyAsyncTP().run(graph, handed)
    assert report.measures == {"num_async_tp_products": 1.0}


def test_a_graph_handed_over_in_vain_is_warned_of(fake_ranks, caplog):
    gm, found, _ = tensor_parallel(fake_ranks)
    found.async_tp = True
    inputs = [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]
    with caplog.at_level(logging.WARNING, "moe_compile.passes"):
        forward, _ = trace_both(gm, inputs, found)
    assert Reason.NO_MATCH.value in caplog.text
    assert any('"num_async_tp_products": 0.0' in str(node.args) for node in forward.graph.nodes)
