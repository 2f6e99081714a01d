"""Costs are the formulas their docstrings name."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.cost.tasks import COMPUTE, LINK
from moe_compile.errors import InvalidConfig
from moe_compile.hardware.cluster import Fit, load_cluster
from moe_compile.simulator.kernels import Kernels
from moe_compile.simulator.layer_costs import LayerCosts
from moe_compile.simulator.layer_tasks import bound_us, time_layer
from moe_compile.simulator.method import (
    AttentionSharding,
    Crossing,
    ExpertSharding,
    Method,
    Overlap,
)
from moe_compile.simulator.models import MODELS, TABLE_2, find_model
from moe_compile.simulator.scenario import count_memory, make_setting, predict, schedules
from moe_compile.simulator.step import predict_step

H800 = load_cluster("h800")
PURE_LINK = dataclasses.replace(
    H800.nvlink, gb_per_s=1.0, gather_share=1.0, exchange_share=1.0, latency_us=0.0
)
PURE = dataclasses.replace(H800, nvlink=PURE_LINK)
"""A link of one byte per nanosecond and no latency: times are bytes."""
PURE_FAST = dataclasses.replace(
    PURE, nvlink=dataclasses.replace(PURE_LINK, gb_per_s=100.0, contention=0.0)
)
TENSOR = Method(attention=AttentionSharding.HEADS, experts=ExpertSharding.SLICES)


def costs(model="352b", method=None, profile=H800, tokens=8192, fit=None):
    return LayerCosts(
        model=find_model(model),
        method=method or Method(),
        profile=profile,
        fit=fit or Fit(),
        seq_len=8192,
        tokens=tokens,
    )


@pytest.mark.parametrize("model", [shape.name for shape in TABLE_2])
def test_collectives_move_the_bytes_of_the_papers_equations(model):
    """MegaScale-MoE equations 1 to 4, in elements: b * s * h is tokens times width."""
    shape, n, tokens = find_model(model), 8, 8192
    bsh, crossing = tokens * shape.width, (n - 1) / n
    heads = costs(model, TENSOR, PURE)
    ulysses = costs(model, Method(), PURE)
    bf16, us = 2, 1e3  # bytes per element, bytes per microsecond
    attention = heads.before_attention_us() + heads.after_attention_us()
    assert attention * us == pytest.approx(2 * bsh * crossing * bf16)
    attention = ulysses.before_attention_us() + ulysses.after_attention_us()
    volume = 2 * shape.head_width * tokens * crossing * (1 + 1 / shape.heads_per_kv) / n
    assert attention * us == pytest.approx(volume * bf16)
    experts = ulysses.dispatch_us() + ulysses.combine_us()
    assert experts * us == pytest.approx(2 * shape.top_k / n * bsh * crossing * bf16)
    slices = heads.dispatch_us() + heads.combine_us()
    assert slices * us == pytest.approx(2 * bsh * crossing * bf16)


def test_gathering_rows_wins_above_top_k_6_of_8_ranks():
    """MegaScale-MoE figure 7."""
    for top_k in range(1, 9):
        model = dataclasses.replace(find_model("352b"), top_k=top_k)
        exchanged = dataclasses.replace(costs(), model=model)
        gathered = dataclasses.replace(exchanged, method=Method(gathers_rows=True))
        assert (gathered.dispatch_us() < exchanged.dispatch_us()) is (top_k > 6)


def test_a_token_goes_to_as_many_nodes_as_drawing_experts_evenly_hits():
    deepseek = find_model("deepseek-v3")
    far = Method(attention=AttentionSharding.WHOLE, ranks=1, expert_ranks=64)
    assert far.remote_nodes(deepseek, H800) == pytest.approx(4 * 7 / 8)
    free = dataclasses.replace(deepseek, max_nodes=0)
    missed = math.comb(256 - 32, 8) / math.comb(256, 8)
    assert far.remote_nodes(free, H800) == pytest.approx(8 * (1 - missed) * 7 / 8)
    assert Method().remote_nodes(find_model("352b"), H800) == 0.0


def test_a_plain_all_to_all_sends_a_row_once_per_expert_and_not_once_per_node():
    """56 of 63 other ranks are on other nodes; once per node it is 3.5 rows of a token for 7."""
    profile = dataclasses.replace(H800, network=dataclasses.replace(H800.network, latency_us=0.0))
    far = Method(attention=AttentionSharding.WHOLE, ranks=1, expert_ranks=64)
    flat = dataclasses.replace(far, crossing=Crossing.FLAT)
    by_node, by_expert = (
        costs("deepseek-v3", method, profile).dispatch_us() for method in (far, flat)
    )
    rate = profile.network.gb_per_s * profile.network.exchange_share
    assert by_expert == pytest.approx(8192 * 8 * 7168 * 2 * 56 / 64 / rate / 1e3)
    assert by_expert / by_node == pytest.approx(2.0)
    near = dataclasses.replace(flat, expert_ranks=8)
    assert (
        costs("deepseek-v3", near).dispatch_us()
        == costs("deepseek-v3", dataclasses.replace(far, expert_ranks=8)).dispatch_us()
    )


@pytest.mark.parametrize("chunks_tokens", [False, True])
def test_replayed_chunks_move_slices_of_gradients_once_and_no_rows(chunks_tokens):
    """Gradients of weights are read and written; kernels beside them move rows in passing."""
    ideal = Method(overlap=Overlap.CHUNKS, num_chunks=2, chunks_tokens=chunks_tokens)
    kernel = dataclasses.replace(PURE_FAST.compute, kernel_us=0.0)
    profile = dataclasses.replace(PURE_FAST, compute=kernel)
    busy = [
        sum(
            phase.busy_us(COMPUTE)
            for phase in time_layer(costs("phi-3.5-moe", method, profile)).phases
        )
        for method in (ideal, dataclasses.replace(ideal, replays_chunks=True))
    ]
    model = find_model("phi-3.5-moe")
    weights = 0 if chunks_tokens else 2 * model.num_experts / 8 * model.expert_weights * 2
    memory = profile.memory.gb_per_s * profile.memory.share
    assert busy[1] - busy[0] == pytest.approx(weights / memory / 1e3)


def test_products_are_bound_by_operations_or_by_memory():
    kernels = Kernels(H800, Fit())
    many = kernels.grouped_us(4, 4096, 14336, 4096) - H800.compute.kernel_us
    operations = 2.0 * 4 * 4096 * 14336 * 4096
    share = 0.65 * 4096 / (4096 + 256)
    assert many == pytest.approx(operations / (989.4e6 * share))
    few = kernels.grouped_us(4, 1, 14336, 4096) - H800.compute.kernel_us
    assert few == pytest.approx(4 * 14336 * 4096 * 2 / (3350e3 * 0.8), rel=1e-3)
    fit = Kernels(H800, Fit(compute=1.3))
    assert fit.memory_us(1e6) == pytest.approx(1.3 * kernels.memory_us(1e6))


def test_a_gradient_sum_that_is_not_fused_moves_half_as_much_again():
    """At 16 rows both are bound by memory: 8 bytes per weight against 12."""
    kernels = Kernels(H800, Fit())
    fused, plain = (kernels.grouped_gradient_us(4, 16, 8192, 8192, n) - 6.0 for n in (8, 12))
    assert plain / fused == pytest.approx(1.5, rel=0.01)


METHODS = st.builds(
    Method,
    overlap=st.sampled_from(
        [Overlap.SEQUENTIAL, Overlap.INTER_OP, Overlap.CHUNKS, Overlap.TILES, Overlap.TWO_BATCHES]
    ),
    num_chunks=st.integers(2, 4),
    chunks_tokens=st.just(True),
    rebuilds=st.booleans(),
    dispatch_bytes=st.sampled_from([1.0, 2.0]),
)
FITS = st.builds(
    Fit, compute=st.floats(0.9, 1.5), link=st.floats(0.9, 3.0), imbalance=st.floats(1.0, 1.3)
)


@settings(deadline=None)
@given(
    model=st.sampled_from([shape.name for shape in TABLE_2]),
    method=METHODS,
    fit=FITS,
    tokens=st.sampled_from([4096, 8192, 32768]),
)
def test_free_collectives_bound_every_schedule_of_one_batch(model, method, fit, tokens):
    layer = costs(model, method, fit=fit, tokens=tokens)
    assert time_layer(layer).total_us >= bound_us(layer) * (1 - 1e-9)


@settings(deadline=None)
@given(model=st.sampled_from([shape.name for shape in TABLE_2]), fit=FITS)
def test_overlap_hides_and_never_loses_collectives(model, fit):
    sequential = time_layer(costs(model, Method(), fit=fit))
    overlapped = time_layer(costs(model, Method(overlap=Overlap.INTER_OP), fit=fit))
    assert overlapped.link_us == pytest.approx(sequential.link_us)
    assert overlapped.exposed_us <= sequential.exposed_us * (1 + 1e-9)
    assert sequential.exposed_us == pytest.approx(sequential.link_us)
    assert overlapped.total_us <= sequential.total_us * (1 + 1e-9)


@pytest.mark.parametrize("by_tokens", [False, True])
def test_chunks_move_the_same_bytes_with_a_latency_each(by_tokens):
    whole = time_layer(costs(method=Method(overlap=Overlap.INTER_OP)))
    method = Method(overlap=Overlap.CHUNKS, num_chunks=4, chunks_tokens=by_tokens)
    chunked = time_layer(costs(method=method))
    latencies = 3 * 4 * H800.nvlink.latency_us  # three more of four exchanges
    assert chunked.link_us - whole.link_us == pytest.approx(latencies)
    assert sum(s.stream == LINK for p in chunked.phases for s in p.spans) == 4 + 4 * 4


def between_nodes(overlap, overlap_slowdown):
    """Return a layer whose exchanges take longer than all else, compute no slower beside them."""
    slow = {"gb_per_s": 5.0, "contention": 0.0, "overlap_slowdown": overlap_slowdown}
    profile = dataclasses.replace(H800, network=dataclasses.replace(H800.network, **slow))
    method = Method(overlap=overlap, attention=AttentionSharding.WHOLE, ranks=1, expert_ranks=64)
    return costs("deepseek-v3", method, profile)


@pytest.mark.parametrize("overlap", [Overlap.INTER_OP, Overlap.TWO_BATCHES, Overlap.TILES])
def test_between_nodes_collectives_take_longer_beside_compute(overlap):
    calm, busy = (time_layer(between_nodes(overlap, share)) for share in (0.0, 0.4))
    assert busy.total_us > calm.total_us
    for without in (Overlap.SEQUENTIAL, Overlap.IDEAL):
        calm, busy = (time_layer(between_nodes(without, share)) for share in (0.0, 0.4))
        assert busy == calm


def test_fused_tiles_slow_their_collective_by_half_of_the_share_while_they_compute():
    """0.25 for 0.5: of what computing takes a fifth is lost to the link."""
    calm, busy = (between_nodes(Overlap.TILES, share) for share in (0.0, 0.5))
    compute_us = calm.second_experts_us(1.0) + calm.permute_us(1.0) + calm.wide_sums_us(1.0)
    for layer, lost_us in ((calm, 0.0), (busy, compute_us / 5)):
        spans = {s.name: s for s in time_layer(layer).phases[0].spans}
        found = spans["experts 2"].end_us - spans["experts 2"].start_us
        assert found == pytest.approx(calm.combine_us() + lost_us)


def test_parts_of_the_batch_move_the_bytes_of_the_whole_and_hide_more_of_them():
    whole, halves = (
        time_layer(
            costs(
                "mixtral-8x7b",
                Method(overlap=Overlap.INTER_OP, batch_parts=parts),
                PURE_FAST,
                tokens=65536,
            )
        )
        for parts in (1, 2)
    )
    assert halves.link_us == pytest.approx(whole.link_us)
    assert halves.exposed_us < whole.exposed_us / 2


def test_more_of_anything_that_helps_never_hurts_a_step():
    setting = make_setting("352b", "h800", changes={"gpus": 480})
    base = predict_step(setting).seconds
    faster = {
        "nvlink": dataclasses.replace(H800.nvlink, gb_per_s=450.0),
        "network": dataclasses.replace(H800.network, gb_per_s=100.0),
        "memory": dataclasses.replace(H800.memory, gb_per_s=4800.0),
    }
    for part, better in faster.items():
        profile = dataclasses.replace(H800, **{part: better})
        assert predict_step(dataclasses.replace(setting, profile=profile)).seconds < base


def test_rebuilding_saves_the_memory_the_paper_counts():
    """Section 4.1: (2kf + 4 + 2/m) of (2n + 2k + 3kf + 12 + 5/m) units per layer."""
    setting = make_setting("mixtral-8x7b", "h800")
    kept = dataclasses.replace(setting, method=dataclasses.replace(setting.method, rebuilds=True))
    k, f, m, n = 2, 3.5, 4, 8
    share = (2 * k * f + 4 + 2 / m) / (2 * n + 2 * k + 3 * k * f + 12 + 5 / m)
    ratio = count_memory(kept).activations / count_memory(setting).activations
    assert ratio == pytest.approx(share)


def test_optimizer_states_of_all_gpus_are_one_copy_of_the_model():
    """ZeRO-1: 12 bytes per parameter, once; the first stage has the embedding, here as all have."""
    for model in ("352b", "mixtral-8x22b"):
        setting = make_setting(model, "h800", changes={"gpus": 960, "pipeline": 4})
        shape = setting.model
        held = count_memory(setting).optimizer * 960
        embedding = shape.vocab_size * shape.width
        assert held == pytest.approx(12 * (shape.num_params - 2 * embedding + 4 * embedding))


def test_gradients_of_chunks_of_tokens_are_summed_once():
    """Each chunk's own would read and write fp32 sums anew; chunks of experts have own weights."""
    for by_tokens, count in ((True, 1), (False, 4)):
        method = Method(overlap=Overlap.CHUNKS, num_chunks=4, chunks_tokens=by_tokens)
        names = [span.name for span in time_layer(costs(method=method)).phases[1].spans]
        assert sum(name.startswith("experts 1 dW") for name in names) == count


@pytest.mark.parametrize("model", MODELS)
def test_every_model_runs_under_every_schedule_it_is_offered(model):
    setting = make_setting(model, "h200", changes={"gpus": 2048, "pipeline": 16})
    rows = [predict(name, changed) for name, changed in schedules(setting).items()]
    assert all(row.seconds > 0 and 0 < row.mfu_percent < 100 for row in rows)
    ideal = next(row for row in rows if row.schedule == "ideal")
    assert ideal.of_bound_percent == pytest.approx(100.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 241}, "write a multiple of 120"),
        ({"expert_ranks": 5}, "cannot share them evenly"),
        ({"pipeline": 0}, "pipeline is 0; write 1 or more"),
        ({"pipelin": 2}, "Did you mean 'pipeline'"),
    ],
)
def test_what_cannot_be_is_said_with_what_to_write(changes, message):
    with pytest.raises(InvalidConfig, match=message):
        predict_step(make_setting("352b", "h800", changes=changes))


def test_a_model_is_simulated_with_the_fit_of_its_own_cluster():
    fits = {model: make_setting(model, "h800").fit for model in ("352b", "deepseek-v3")}
    assert fits["352b"] == H800.fit("bytedance")
    assert fits["deepseek-v3"] == H800.fit("routed")
    assert make_setting("352b", "h200").fit == Fit()
    assert make_setting("352b", "h800", fit="none").fit == Fit()


def test_chunks_need_experts_to_split():
    for chunks, local in itertools.product((2, 8), (1, 4)):
        method = Method(overlap=Overlap.CHUNKS, num_chunks=chunks, expert_ranks=32 // local)
        if chunks <= local:
            method.check(find_model("352b"))
        else:
            with pytest.raises(InvalidConfig, match="chunk by tokens"):
                method.check(find_model("352b"))
