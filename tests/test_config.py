"""Options: defaults, precedence, and errors that say what to write instead."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.config import MegaMoEConfig, from_sources, split_options
from moe_compile.errors import InvalidConfig


def test_options_win_over_the_table_and_the_table_over_the_environment():
    environment = {"MEGAMOE_CHUNKS": "2", "MEGAMOE_STRICT": "1", "MEGAMOE_CODEGEN": "fx"}
    table = {"chunks": 3, "codegen": "inductor"}
    config = from_sources(options={"chunks": 4}, table=table, environment=environment)
    assert (config.chunks, config.codegen, config.strict) == (4, "inductor", True)


@pytest.mark.parametrize("name", ["chunks", "attention_chunks"])
def test_a_number_of_chunks_may_come_from_the_environment(name):
    for text, value in (("3", 3), ("auto", "auto")):
        config = from_sources(environment={f"MEGAMOE_{name.upper()}": text})
        assert getattr(config, name) == value


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("2000000", 2000000), ("2e9", 2e9)])
def test_a_share_or_a_number_of_bytes_may_come_from_the_environment(text, value):
    assert from_sources(environment={"MEGAMOE_OFFLOAD_BUDGET": text}).offload_budget == value


def test_prefixed_options_are_ours_and_the_rest_go_to_inductor():
    ours, inductor = split_options({"megamoe.chunks": 2, "max_autotune": True})
    assert (ours, inductor) == ({"chunks": 2}, {"max_autotune": True})


@pytest.mark.parametrize(("text", "budget"), [("0.5", 0.5), ("3000", 3000), ("1", 1)])
def test_a_budget_of_the_environment_is_a_share_or_bytes(text, budget):
    variables = {"MEGAMOE_RECOMPUTE": "price", "MEGAMOE_ACTIVATION_BUDGET": text}
    found = from_sources(environment=variables).activation_budget
    assert found == budget and type(found) is type(budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk": 2}, "no option 'chunk'. Did you mean 'chunks'?"),
        ({"dispatch_padding": "worst"}, "'dispatch_padding' any more; leave the option out"),
        ({"chunks": 0}, 'write "auto" or a whole number of at least 1'),
        ({"chunks": True}, "megamoe.chunks is True"),
        ({"codegen": "inducto"}, "Did you mean 'inductor'?"),
        ({"batch_parts": "all"}, "batch_parts is 'all'; write \"auto\" or a whole number"),
        (
            {"blocks_per_graph": 0},
            "megamoe.blocks_per_graph is 0; write a whole number of at least 1",
        ),
        ({"chunk_by": "batch"}, "write one of auto, experts, tokens"),
        ({"attention_split": "both"}, "'attention_split' any more; leave the option out: megamoe"),
        ({"async_tp": True}, "'async_tp' any more; leave the option out. For Inductor's"),
        ({"schedule": "yes"}, "write true or false"),
        ({"equal_tokens": 1}, "megamoe.equal_tokens is 1; write true or false"),
        ({"dispatch": "all_gathr"}, "Did you mean 'all_gather'?"),
        ({"max_memory_increase": -0.1}, "fraction of at least 0"),
        ({"max_memory_increase": float("nan")}, "fraction of at least 0"),
        ({"routing_skew": -0.5}, "megamoe.routing_skew is -0.5; write 0 if experts are"),
        ({"routing_skew": float("nan")}, "routing_skew is nan; write 0 if"),
        ({"routing_skew": True}, "routing_skew is True; write 0 if"),
        ({"offload_budget": -1}, "megamoe.offload_budget is -1; write a share from 0 to 1, such"),
        ({"offload_budget": 1.5}, "or a whole number of bytes, such as 2000000000"),
        ({"chunk_edges": "loads"}, "write one of even, load, auto. Did you mean 'load'?"),
        ({"step_peak_bytes": -5}, "write a whole number of at least 0"),
        ({"node_ranks": 2.0}, "megamoe.node_ranks is 2.0; write a whole number of at least 0"),
        (
            {"recompute": "price", "activation_budget": 1.5},
            "activation_budget is 1.5; write a share",
        ),
        ({"recompute": "price", "activation_budget": 0}, "activation_budget is 0; write a share"),
        ({"recompute": "price", "activation_budget": True}, "is True; write a share above 0"),
        ({"recompute": "price", "activation_budget": float("nan")}, "is nan; write a share above"),
        ({"activation_budget": 0.5}, 'does not use a budget; write recompute = "price"'),
        ({"disable_passes": "rewrite_regions"}, "write a list of pass names"),
        ({"disable_passes": ["sort_nodes", 1]}, "write a list of pass names"),
        ({"expert_gradients": "e5m2"}, 'write expert_compute = "fp8_blockwise_e5m2"'),
        (
            {"recompute_modules": ["layernorm", "moe_acts"]},
            "has 'moe_acts', which it does not know; write a list of",
        ),
        ({"recompute_modules": ["moe_acts"]}, "Did you mean 'moe_act'?"),
        ({"recompute_modules": "layernorm"}, "write a list of layernorm, moe_act"),
        ({"recompute_modules": [1]}, "write a list of layernorm, moe_act"),
    ],
)
def test_a_wrong_option_says_what_to_write_instead(options, message):
    with pytest.raises(InvalidConfig) as caught:
        from_sources(options=options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("MEGAMOE_CHUNKZ", "2", "MEGAMOE_CHUNKZ: megamoe has no option 'chunkz'"),
        ("MEGAMOE_STRICT", "maybe", "write 1 or 0"),
        ("MEGAMOE_CHUNKS", "two", "megamoe.chunks is 'two'"),
        ("MEGAMOE_CHUNKS", "\u00b2", "megamoe.chunks is"),
        ("MEGAMOE_MAX_MEMORY_INCREASE", "much", "write a number"),
        ("MEGAMOE_OFFLOAD_BUDGET", "half", "MEGAMOE_OFFLOAD_BUDGET is 'half'; write a number"),
        ("MEGAMOE_ROUTING_SKEW", "-1", "megamoe.routing_skew is -1.0; write 0 if"),
    ],
)
def test_a_wrong_variable_is_named(variable, text, message):
    with pytest.raises(InvalidConfig) as caught:
        from_sources(environment={variable: text})
    assert message in str(caught.value)


@given(name=st.text(min_size=1, max_size=12))
def test_any_unknown_name_is_refused(name):
    if name in MegaMoEConfig.__dataclass_fields__:
        return
    with pytest.raises(InvalidConfig):
        from_sources(options={name: 1})


def test_the_report_path_is_no_part_of_the_cache_identity():
    assert MegaMoEConfig(report="a").digest_text() == MegaMoEConfig(report="b").digest_text()
    assert MegaMoEConfig(chunks=2).digest_text() != MegaMoEConfig(chunks=3).digest_text()


def test_slices_of_hop_1_are_beside_chunks_of_experts():
    assert MegaMoEConfig(hop_slices=3, chunks=2).hop_slices == 3
    assert MegaMoEConfig(hop_slices=1, chunk_by="tokens").hop_slices == 1
    with pytest.raises(InvalidConfig, match="leave out chunk_by, so that"):
        MegaMoEConfig(hop_slices=2, chunk_by="tokens")
    with pytest.raises(InvalidConfig, match=r"megamoe.hop_slices is 0; write"):
        MegaMoEConfig(hop_slices=0)


@pytest.mark.parametrize(("name", "value"), [("dispatch", "all_gather"), ("nodes", "exact")])
def test_scores_travel_beside_rows_and_not_beside_tokens(name, value):
    assert MegaMoEConfig(apply_scores="before_down", **{name: "auto"}).asks_for("apply_scores")
    with pytest.raises(InvalidConfig, match=f"leave out {name}, or apply_scores"):
        MegaMoEConfig(apply_scores="before_down", **{name: value})


@pytest.mark.parametrize(
    ("compute", "products", "message"),
    [
        ("fp8_blockwise", ("gate", "donw"), "has 'donw', .*Did you mean 'down'"),
        ("fp8_blockwise", "gate", "write a list of gate, up, down, grad_input, grad_weight"),
        ("fp8_blockwise", (), 'name a product, or write expert_compute = "same"'),
        (
            "same",
            ("gate", "up"),
            'write expert_compute = "fp8_blockwise", or leave out fp8_products',
        ),
        ("fp8_rowwise", ("gate", "up", "grad_weight"), 'or leave out "grad_weight"'),
        ("fp8_blockwise_e5m2", ("gate", "up"), '"fp8_blockwise", or add "grad_input"'),
    ],
)
def test_products_in_eight_bits_are_named(compute, products, message):
    found = from_sources(
        environment={"MEGAMOE_FP8_PRODUCTS": "down, grad_input"},
        table={"expert_compute": "fp8_blockwise_e5m2"},
    )
    assert found.fp8_products == ("down", "grad_input")
    with pytest.raises(InvalidConfig, match=message):
        MegaMoEConfig(expert_compute=compute, fp8_products=products)
