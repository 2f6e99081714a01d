"""Parts of a model by name: what is found of each, and which tensors are kept no longer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from moe_compile.allowed_values import PARTS
from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.cost.amounts import is_free
from moe_compile.graph.precedence import integers_taken
from moe_compile.graph.query import is_launch, overload_name, value_of
from moe_compile.journal.reasons import Reason
from moe_compile.report.explain import short_lines
from moe_compile.report.process_report import report_of
from tests.capture import graphs_traced_once
from tests.layers import GroupedExperts, LoopExperts

TOKENS, WIDTH, HEADS, HEAD_WIDTH, LATENT = 60, 64, 4, 16, 24
MLP_HIDDEN, SHARED_HIDDEN, HIDDEN, EXPERTS, TOP_K = 80, 72, 96, 8, 2
"""Tensors of each part are told by their number of columns."""
BF16 = torch.bfloat16


def linear(inner, outer):
    return nn.Linear(inner, outer, bias=False, dtype=BF16)


class Attention(nn.Module):
    """From latents, as in DeepSeek-V2, or from the input."""

    def __init__(self, *, latent):
        super().__init__()
        self.down = linear(WIDTH, LATENT) if latent else nn.Identity()
        self.norm = nn.RMSNorm(LATENT, dtype=BF16) if latent else nn.Identity()
        self.up = linear(LATENT if latent else WIDTH, 3 * HEADS * HEAD_WIDTH)
        self.out = linear(HEADS * HEAD_WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.up(self.norm(self.down(x))).view(1, TOKENS, 3, HEADS, HEAD_WIDTH)
        q, k, v = (one.transpose(1, 2) for one in qkv.unbind(2))
        heads = F.scaled_dot_product_attention(q * 2, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).reshape(TOKENS, HEADS * HEAD_WIDTH))


class MLP(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.gate, self.up = linear(WIDTH, hidden), linear(WIDTH, hidden)
        self.down = linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention, an MLP, and experts with shared ones beside them; a norm before each."""

    def __init__(self, group, experts=GroupedExperts, *, latent=True):
        super().__init__()
        rms = [nn.RMSNorm(WIDTH, dtype=BF16) for _ in range(2)]
        self.norms = nn.ModuleList([*rms, nn.LayerNorm(WIDTH, dtype=BF16)])
        self.attention = Attention(latent=latent)
        self.mlp, self.shared = MLP(MLP_HIDDEN), MLP(SHARED_HIDDEN)
        self.experts = experts(WIDTH, HIDDEN, EXPERTS, TOP_K, group, BF16)

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        x = x + F.dropout(self.mlp(self.norms[2](x)), 0.1)
        tokens = self.norms[1](x)
        return x + self.experts(tokens) + self.shared(tokens)


class Dense(Block):
    """Without experts: by itself no pass of megamoe has anything to do."""

    def forward(self, x):
        return x + self.mlp(self.norms[1](x))


class Dropping(Dense):
    """Values are dropped between the products of the MLP."""

    def forward(self, x):
        hidden = F.dropout(F.silu(self.mlp.gate(x)) * self.mlp.up(x), 0.3)
        return x + self.mlp.down(hidden)


class Padded(Dense):
    """Rows of zeros are put behind the products, as chunks of grouped products do."""

    def forward(self, x):
        gate, up = (F.pad(one(x), (0, 0, 0, 4)) for one in (self.mlp.gate, self.mlp.up))
        return x + self.mlp.down(F.silu(gate) * up)[:TOKENS]


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


def traced(layer, *names, **options):
    """Return both graphs, and the journal's record of the parts; None without names."""
    x = torch.randn(TOKENS, WIDTH, dtype=BF16, requires_grad=True)
    gm, *_ = graphs_traced_once(layer, x)
    given = {"hardware": "h100", "chunks": 1, "equal_tokens": True, "recompute_modules": names}
    state, compilation = rewrite(gm, MegaMoEConfig(**{**given, **options}))
    inputs = [value_of(node) for node in gm.graph.find_nodes(op="placeholder")]
    graphs = trace_both(gm, inputs, state)
    records = [r for _, r in state.journal.records if r.pass_name == "recompute_modules"]
    return *graphs, next(iter(records), None), compilation


def kept(backward):
    """Return the sizes, but for numbers of rows, of the floating-point tensors kept, sorted."""
    given = (value_of(node) for node in backward.graph.find_nodes(op="placeholder"))
    return sorted(
        tuple(sorted(size for size in one.shape if type(size) is int and size != TOKENS))
        for one in given
        if isinstance(one, torch.Tensor) and one.is_floating_point() and one.dim() > 1
    )


def operators(module, holds=lambda node: True):
    return [n for n in module.graph.nodes if n.op == "call_function" and holds(n)]


def beyond(more, less):
    """Return what a list has beyond another, each as often as it has it more."""
    left = list(less)
    return [one for one in more if not (one in left and not left.remove(one))]


@pytest.fixture(scope="module")
def plain(fake_ranks):
    return traced(Block(fake_ranks))


@pytest.mark.parametrize(
    ("name", "fewer"),
    [
        ("moe_act", [(HIDDEN,)]),
        ("shared_experts", [(SHARED_HIDDEN,)] * 3),
        ("mlp", [(MLP_HIDDEN,)] * 3),
        ("layernorm", [(1,)] * 5 + [(LATENT,)] + [(WIDTH,)] * 3),
        ("core_attn", [(1, HEADS), (1, HEADS, HEAD_WIDTH), (WIDTH,)]),
        ("mla_up_proj", [(1, HEADS, HEAD_WIDTH)] * 3 + [(LATENT,)]),
    ],
)
def test_results_of_a_named_part_are_kept_no_longer(fake_ranks, plain, name, fewer):
    """Of an activation its result alone, which the product behind it reads: what a checkpoint that
    discards outputs frees."""
    _, backward, record, _ = traced(Block(fake_ranks), name)
    assert beyond(kept(plain[1]), kept(backward)) == fewer
    assert beyond(kept(backward), kept(plain[1])) == []
    assert record.applied == (name,) and record.skipped == ()
    figures = record.measures
    assert figures["kept_bytes_before"] - figures["kept_bytes"] == figures[f"{name}_bytes"] > 0
    assert 0 <= figures[f"{name}_hidden_us"] <= figures[f"{name}_us"] > 0


@pytest.mark.parametrize("promised", [True, False])
def test_exchanges_run_again_for_moe_alone_and_only_where_ranks_agree(fake_ranks, plain, promised):
    _, backward, record, _ = traced(Block(fake_ranks), "moe", equal_tokens=promised)
    launches, before = (len(operators(one, is_launch)) for one in (backward, plain[1]))
    assert launches > before if promised else launches == before
    said = [(v.candidate, v.reason) for v in record.skipped]
    assert said == ([] if promised else [("exchanges of moe", Reason.TOKENS_MAY_DIFFER)])
    assert not operators(backward, integers_taken)
    names = {overload_name(node) for node in operators(backward)}
    assert not names & {"aten::sort", "aten::topk"}
    assert (SHARED_HIDDEN,) not in kept(backward) and (MLP_HIDDEN,) in kept(backward)


@pytest.mark.slow
def test_the_list_of_megascale_moe_keeps_products_and_what_attention_reads(fake_ranks, plain):
    _, backward, _, _ = traced(Block(fake_ranks), "megascale_moe")
    fewer = beyond(kept(plain[1]), kept(backward))
    columns = [1] * 5 + [LATENT] + [WIDTH] * 3 + [SHARED_HIDDEN, MLP_HIDDEN, HIDDEN]
    assert fewer == [(number,) for number in columns]
    assert len(operators(backward, is_launch)) == len(operators(plain[1], is_launch))


@pytest.mark.slow
def test_experts_in_a_loop_have_the_same_part(fake_ranks):
    before = kept(traced(Block(fake_ranks, LoopExperts))[1])
    after = kept(traced(Block(fake_ranks, LoopExperts), "moe_act")[1])
    assert set(beyond(before, after)) == {(HIDDEN,)} and beyond(after, before) == []


def test_nothing_but_the_named_part_runs_again(fake_ranks, plain):
    def again(forward, backward):
        ran = {node.name for node in operators(forward)}
        return {node.name for node in operators(backward) if node.name in ran and not is_free(node)}

    forward, backward, _, _ = traced(Block(fake_ranks), "moe_act")
    new = again(forward, backward) - again(*plain[:2])
    assert len(new) == 1 and new.pop().startswith("mul"), "silu runs again without the option too"


def test_dense_graphs_have_parts_and_what_a_graph_lacks_is_said(fake_ranks):
    _, before, _, _ = traced(Dense(fake_ranks))
    _, backward, record, compilation = traced(Dense(fake_ranks), "mlp", "moe_act", "core_attn")
    assert beyond(kept(before), kept(backward)) == [(MLP_HIDDEN,)] * 3
    assert record.applied == ("mlp",)
    assert {(v.candidate, v.reason) for v in record.skipped} == {
        ("moe_act", Reason.NO_PART), ("core_attn", Reason.NO_PART)
    }  # fmt: skip
    lines = list(short_lines(report_of([compilation], [], hardware="h100")))
    (line,) = (one for one in lines if one.startswith("Computed again in a graph without regions"))
    assert "mlp, 0.0 MB no longer kept" in line
    *_, one, other, _ = lines
    text = "recompute_modules has no effect on {} in any graph: the graph has no part of this name"
    assert [one, other] == [text.format("'moe_act'"), text.format("'core_attn'")]


def test_products_of_rows_that_are_padded_have_their_activation(fake_ranks):
    kept_of = [kept(traced(Padded(fake_ranks), *names)[1]) for names in ((), ("mlp",))]
    assert beyond(*kept_of) == [(TOKENS + 4, MLP_HIDDEN)] * 3


def test_a_dropout_in_a_named_part_runs_again_with_the_state_that_it_had(fake_ranks):
    _, backward, record, _ = traced(Dropping(fake_ranks), "mlp")
    (again,) = operators(backward, lambda node: "run_with_rng_state" in str(node.target))
    assert again.args[1] is torch.ops.aten.native_dropout.default
    assert (MLP_HIDDEN,) not in kept(backward) and record.applied == ("mlp",)


def test_checkpointed_functions_keep_their_policy_and_the_report_says_so(fake_ranks):
    before = traced(Checkpointed(fake_ranks))
    _, backward, record, _ = traced(Checkpointed(fake_ranks), "moe_act", "layernorm")
    assert record.applied == ()
    assert {v.reason for v in record.skipped} == {Reason.ALREADY_DONE}
    assert all("own activation checkpointing decides" in v.detail for v in record.skipped)
    assert kept(backward) == kept(before[1])


def test_the_budget_decides_about_the_rest(fake_ranks, plain):
    options = {"recompute": "price", "activation_budget": 0.7}
    _, backward, record, _ = traced(Block(fake_ranks), "mlp", **options)
    _, alone, _, _ = traced(Block(fake_ranks), "mlp")
    assert (MLP_HIDDEN,) not in kept(backward)
    assert record.measures["kept_bytes"] < record.measures["kept_bytes_before"]
    assert len(kept(backward)) < len(kept(alone))


def test_no_policy_of_ours_is_left(fake_ranks):
    for module in traced(Block(fake_ranks), *PARTS)[:2]:
        assert not [n for n in module.graph.nodes if str(n.meta.get("recompute", "")).endswith(
            "MUST_RECOMPUTE"
        )]  # fmt: skip
