"""Two hops as megamoe makes them: bytes of each link, when hops run, what parts hide."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_compile.cost.hop_shape import HopShape
from moe_compile.cost.tasks import COMPUTE, LINK, NODE_LINK
from moe_compile.errors import InvalidConfig
from moe_compile.hardware.cluster import Fit, load_cluster
from moe_compile.simulator.layer_costs import LayerCosts
from moe_compile.simulator.layer_tasks import bound_us, time_layer
from moe_compile.simulator.method import HOPS, AttentionSharding, Crossing, Method, Overlap
from moe_compile.simulator.models import find_model
from moe_compile.simulator.scenario import make_setting, predict, schedules
from tests.simulator.test_formulas import FITS

H100 = load_cluster("h100")
MODEL = find_model("deepseek-v3")
TOKENS = 4096
ROW = MODEL.width * 2
FAR = Method(attention=AttentionSharding.WHOLE, ranks=1, expert_ranks=64)


def pure(**network):
    """Return links of 1 GB/s without latency, where nothing slows anything: times are bytes."""
    plain = {"latency_us": 0.0, "exchange_share": 1.0, "contention": 0.0, "overlap_slowdown": 0.0}
    return dataclasses.replace(
        H100,
        nvlink=dataclasses.replace(H100.nvlink, **plain, gb_per_s=1.0),
        network=dataclasses.replace(H100.network, **plain, gb_per_s=1.0, **network),
    )


def costs(method, profile=H100, fit=None, model=MODEL, tokens=TOKENS):
    return LayerCosts(
        model=model, method=method, profile=profile, fit=fit or Fit(), seq_len=4096, tokens=tokens
    )


def far(crossing, chunks=1, by_tokens=False, **changes):
    overlap = Overlap.CHUNKS if chunks > 1 else Overlap.INTER_OP
    changes = {"overlap": overlap, **changes}
    return dataclasses.replace(
        FAR, crossing=crossing, num_chunks=chunks, chunks_tokens=by_tokens, **changes
    )


def hop_bytes(layer, hop):
    """Return the bytes of a hop in every exchange, from its times on the links of `pure`."""
    spans = [span for phase in layer.phases for span in phase.spans]
    sent = {}
    for span in spans:
        exchange, _, what = span.name.partition(": ")
        if what.startswith(hop):
            sent[exchange] = sent.get(exchange, 0.0) + (span.end_us - span.start_us) * 1e3
    return sent


@pytest.mark.parametrize("crossing", HOPS)
@pytest.mark.parametrize(("chunks", "by_tokens"), [(1, False), (2, False), (4, False), (2, True)])
def test_hops_send_the_bytes_of_their_formulas_however_they_are_cut(crossing, chunks, by_tokens):
    """At most four of eight nodes a token, one in eight its own; seven of eight rows go on."""
    layer = time_layer(costs(far(crossing, chunks, by_tokens), pure()))
    exchanges = {"dispatch", "combine'"}
    if crossing is Crossing.ROUNDED:
        exchanges |= {"combine", "dispatch'"}
    assert hop_bytes(layer, "hop 1") == {e: pytest.approx(TOKENS * 3.5 * ROW) for e in exchanges}
    assert hop_bytes(layer, "hop 2") == {e: pytest.approx(TOKENS * 7 * ROW) for e in exchanges}
    masks, scores = TOKENS * 3.5 * 4, TOKENS * 8 * 4 * 63 / 64
    assert hop_bytes(layer, "masks") == {"dispatch": pytest.approx(masks)}
    told = {"dispatch": pytest.approx(scores)}
    if crossing is Crossing.ROUNDED:
        told["dispatch'"] = pytest.approx(scores)
    assert hop_bytes(layer, "scores") == told


@pytest.mark.parametrize(
    ("crossing", "between", "within"),
    [
        (Crossing.FLAT, 28.0, 3.5),
        (Crossing.BOTH_LINKS, 14.0, 32.0),
        (Crossing.EXACT, 21.0, 2 * 0.875 + 2 * 7.0),
        (Crossing.ROUNDED, 14.0, 28.0),
    ],
)
def test_rows_of_a_layer_by_link(crossing, between, within):
    """Rows a token in four exchanges: flat 7 of 8 leave the node, and 7 of 64 go inside it."""
    sent = costs(far(crossing)).sent_per_layer
    assert sent == pytest.approx((TOKENS * between * ROW, TOKENS * within * ROW))
    half = far(crossing, dispatch_bytes=1.0, combine_bytes=1.0)
    assert costs(half).sent_per_layer == pytest.approx([one / 2 for one in sent])


def test_without_a_limit_on_nodes_a_token_goes_where_its_experts_are():
    """As the planner has it: drawn without repetition."""
    model = dataclasses.replace(MODEL, max_nodes=0)
    shape = HopShape(num_nodes=8, num_local=8, num_experts=256, rows_per_token=8, row_bytes=ROW)
    sent = costs(far(Crossing.ROUNDED), model=model).sent_per_layer
    assert sent.between == pytest.approx(TOKENS * shape.rows_between("rounded") * ROW)


def test_one_hop_runs_beside_the_other_and_beside_products():
    """In slices hop 2 of one beside hop 1 of the next; in chunks hop 2 of one beside experts."""

    def together(layer, first, second):
        spans = [(p.spans, s) for p in layer.phases for s in p.spans]
        return any(
            one.name == first and other.name == second
            for of_phase, one in spans
            for other in of_phase
            if one.start_us < other.end_us and other.start_us < one.end_us
        )

    sliced = time_layer(costs(far(Crossing.ROUNDED, 2, by_tokens=True)))
    assert together(sliced, "dispatch: hop 1 1", "dispatch: hop 2 0")
    assert together(sliced, "combine: hop 1 0", "combine: hop 2 1")
    chunked = time_layer(costs(far(Crossing.ROUNDED, 2)))
    assert together(chunked, "dispatch: hop 2 1", "experts 1 0")
    whole = time_layer(costs(far(Crossing.ROUNDED)))
    assert not together(whole, "dispatch: hop 1", "dispatch: hop 2")


def test_slices_take_one_product_and_chunks_one_each():
    for by_tokens, number in ((True, 1), (False, 2)):
        layer = time_layer(costs(far(Crossing.EXACT, 2, by_tokens)))
        names = [span.name for phase in layer.phases for span in phase.spans]
        assert sum(name.startswith("experts 1 dW") for name in names) == number
        assert sum(name.startswith("activation") for name in names) == 2 * number


def test_attention_divided_inside_the_node_is_on_the_stream_of_its_link():
    method = dataclasses.replace(far(Crossing.EXACT), attention=AttentionSharding.SEQUENCE, ranks=8)
    spans = [s for p in time_layer(costs(method)).phases for s in p.spans]
    near = {s.stream for s in spans if s.name.startswith(("qkv: in", "qkv: out"))}
    assert near == {NODE_LINK}
    assert {s.stream for s in spans} == {COMPUTE, LINK, NODE_LINK}


WAYS = st.builds(
    far,
    crossing=st.sampled_from(Crossing),
    chunks=st.sampled_from([1, 2, 4]),
    by_tokens=st.booleans(),
    batch_parts=st.sampled_from([1, 2]),
    rebuilds=st.booleans(),
    dispatch_bytes=st.sampled_from([1.0, 2.0]),
)


@settings(deadline=None, max_examples=60)
@given(method=WAYS, fit=FITS)
def test_free_collectives_bound_every_way_and_faster_links_never_make_a_layer_wait_longer(
    method, fit
):
    """One after another, so that no order of tasks changes: each link's rate counts for itself."""
    layer = costs(method, fit=fit)
    assert time_layer(layer).total_us >= bound_us(layer) * (1 - 1e-9)
    if method.overlap is not Overlap.INTER_OP:
        return
    plain = dataclasses.replace(method, overlap=Overlap.SEQUENTIAL)
    before = time_layer(costs(plain, fit=fit)).total_us
    for link in ("nvlink", "network"):
        faster = dataclasses.replace(getattr(H100, link), gb_per_s=900.0)
        profile = dataclasses.replace(H100, **{link: faster})
        after = time_layer(costs(plain, profile, fit)).total_us
        assert after <= before * (1 + 1e-9)
        if method.crossing in HOPS:
            assert after < before


def test_each_hop_takes_the_rate_and_the_latency_of_its_own_link():
    method = far(Crossing.EXACT, overlap=Overlap.SEQUENTIAL)
    spans = {s.name: s for p in time_layer(costs(method)).phases for s in p.spans}
    for name, link, rows in (("hop 1", H100.network, 3.5), ("hop 2", H100.nvlink, 7.0)):
        span = spans[f"dispatch: {name}"]
        rate = link.gb_per_s * link.exchange_share
        us = TOKENS * rows * ROW / rate / 1e3 + link.latency_us
        assert span.end_us - span.start_us == pytest.approx(us)


def test_within_a_node_hops_are_none_and_the_layer_is_the_flat_one():
    near = dataclasses.replace(FAR, expert_ranks=8)
    layers = {
        time_layer(costs(dataclasses.replace(near, crossing=crossing))) for crossing in Crossing
    }
    assert len(layers) == 1


@pytest.mark.parametrize(
    "changes", [{"gathers_rows": True}, {"expert_slices": 2}, {"overlap": Overlap.TILES}]
)
def test_what_has_no_hops_is_refused(changes):
    with pytest.raises(InvalidConfig, match="two hops need experts that are not sliced"):
        dataclasses.replace(FAR, crossing=Crossing.EXACT, **changes)


def test_a_part_of_the_batch_is_a_sequence_or_more():
    setting = make_setting("deepseek-v3", "h100")
    found = schedules(setting)
    assert next(iter(found)) == "flat: sequential"
    assert found["exact: 2 parts"].job.micro_batch == 2
    assert found["exact: 1 chunk"].job.micro_batch == 1
    whole, parts = (predict(n, found[n]) for n in ("exact: 1 chunk", "exact: 2 parts"))
    assert parts.sent_between_mb == pytest.approx(2 * whole.sent_between_mb)
    assert parts.exposed_percent < whole.exposed_percent
