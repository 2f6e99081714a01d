"""AOTAutograd's cache takes what is handed to Inductor.

That a second process finds it there is tested in test_inductor.py, and in
test_agreement_and_caches.py.
"""

from unittest import mock

import pytest
import torch
import torch._inductor.config as inductor_config

from moe_compile.backend import megamoe
from moe_compile.torch_quirks.aot_cache_allowlist import SETTING, cacheable_functions
from tests.attention_layers import NormedAttention
from tests.block_layers import SerialBlock, block_input
from tests.capture import dynamo_graphs
from tests.layers import (
    FusedGateUp,
    GatheredCounts,
    GroupedExperts,
    LoopExperts,
    SegmentStarts,
    SharedAndBias,
    SortedChunks,
)
from tests.slow_parameters import slow_but

try:
    from torch._functorch._aot_autograd import autograd_cache
except ImportError:
    autograd_cache = None

needs_torchs_check = pytest.mark.skipif(
    not hasattr(autograd_cache, "check_node_safe"),
    reason="what decides whether a node is taken is private to torch, and has another name here",
)

TWO = {"megamoe.chunks": 2}


def handed_over(module, x, options):
    """Return the graph that Inductor gets for `module`, and the settings."""
    gm = dynamo_graphs(module, x)[0]
    with mock.patch("moe_compile.codegen.compile_fx") as inductor:
        megamoe(gm, [x], options=options)
    return inductor.call_args.args[0].graph, inductor.call_args.kwargs["config_patches"]


def refused(graph, settings):
    """Return why the cache refuses a graph, by node."""
    why = {}
    with inductor_config.patch({k: v for k, v in settings.items() if k == SETTING}):
        for node in graph.nodes:
            try:
                autograd_cache.check_node_safe(node)
            except autograd_cache.BypassAOTAutogradCache as reason:
                why[node.name] = str(reason)
    return why


class ChecksCounts(GroupedExperts):
    """The user demands that few rows are sent to the last rank."""

    def splits(self, counts, received):
        sent, got = super().splits(counts, received)
        torch._check(sent[-1] <= 2)
        return sent, got


@needs_torchs_check
@pytest.mark.parametrize(
    "style",
    slow_but(
        [GroupedExperts, GatheredCounts],
        [
            GroupedExperts,
            LoopExperts,
            FusedGateUp,
            SortedChunks,
            SharedAndBias,
            GatheredCounts,
            SegmentStarts,
            ChecksCounts,
        ],
    ),
)
def test_a_layer_of_any_style_is_taken(style, fake_ranks):
    x = torch.randn(32, 16, dtype=torch.bfloat16)
    assert refused(*handed_over(style(16, 16, 4, 2, fake_ranks), x, TWO)) == {}


@needs_torchs_check
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"megamoe.chunks": 1}, marks=pytest.mark.slow),
        {**TWO, "megamoe.dispatch_wire": "fp8", "megamoe.combine_wire": "fp8"},
        {"megamoe.dispatch": "all_gather"},
    ],
    ids=str,
)
def test_a_layer_rewritten_in_any_way_is_taken(options, fake_ranks):
    x = torch.randn(32, 16, dtype=torch.bfloat16)
    assert refused(*handed_over(GroupedExperts(16, 16, 4, 2, fake_ranks), x, options)) == {}


@needs_torchs_check
def test_a_block_is_taken_and_so_is_attention_under_a_choice_of_kernels(fake_ranks):
    block = SerialBlock(fake_ranks, fake_ranks)
    assert refused(*handed_over(block, block_input(), {**TWO, "megamoe.attention_chunks": 2})) == {}
    x = torch.randn(2, 4, 32)
    attention = NormedAttention(32, 4, 4, 16, fake_ranks)
    assert refused(*handed_over(attention, x, {"megamoe.attention_chunks": 2})) == {}


def test_the_users_marks_stay():
    own = {"some.function": "3"}
    with inductor_config.patch({SETTING: own}):
        assert cacheable_functions({})[SETTING].items() >= own.items()
    asked = {SETTING: own}
    assert cacheable_functions(asked)[SETTING].items() >= own.items()


def test_a_graph_without_a_region_is_left_as_it_came(fake_ranks):
    assert handed_over(lambda x: x * 2, torch.arange(3), {})[1] == {}


def test_one_that_reads_the_host_keeps_what_it_saved(fake_ranks):
    """A second backward needs it; nothing else of the graph is ours."""
    _, settings = handed_over(lambda x: x * sum(x.tolist()), torch.arange(3), {})
    assert settings.keys() == {"post_grad_custom_pre_pass", SETTING}
