"""No price is below the bound, whatever the work and however it is run."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.cost.hop_shape import HopShape
from moe_compile.cost.rates import Rates
from moe_compile.cost.region_work import RegionWork, Work
from moe_compile.hardware import load_profile
from moe_compile.hardware.products import Product
from moe_compile.plan.candidates import list_candidates
from moe_compile.plan.choose_plan import least_us
from moe_compile.plan.region_tasks import price_us
from tests.region_works import mirrored

AMOUNTS = st.floats(0, 1e6)
RATES = Rates(
    matmul_tflops=1e-3,
    memory_gb_per_s=1.0,
    op_overhead_us=3.0,
    link_gb_per_s=1.0,
    link_latency_us=5.0,
    gather_share=0.7,
    contention=0.2,
    overlap_slowdown=0.4,
    compute=load_profile("h100").compute,
    large_product_rate=2.0,
)
PRODUCTS = st.builds(
    Product,
    groups=st.sampled_from([1.0, 8.0]),
    rows=st.sampled_from([100.0, 129.0, 2048.0]),
    columns=st.sampled_from([32.0, 768.0]),
    reduction=st.sampled_from([64.0, 4096.0]),
    ragged=st.sampled_from(["", "rows", "reduction"]),
)


@st.composite
def regions(draw):
    """Draw a dispatch, experts whole or one by one, a combine, and work beside them."""

    def compute(*needs, **more):
        return Work(
            name="compute",
            needs=needs,
            operations=draw(AMOUNTS),
            product=draw(st.none() | PRODUCTS),
            nbytes=draw(AMOUNTS),
            weight_bytes=draw(st.just(0.0) | AMOUNTS),
            num_kernels=draw(st.integers(0, 3)),
            written=draw(AMOUNTS),
            slices_weights=draw(st.booleans()),
            takes_messages=draw(st.booleans()),
            **more,
        )

    def exchange(kind, need, **more):
        sizes = {"link_bytes": draw(AMOUNTS), "written": draw(AMOUNTS)}
        return Work(name=kind, needs=(need,), exchange=kind, **sizes, **more)

    num_parts = draw(st.sampled_from([1, 2, 4, 8]))
    by_expert = range(num_parts) if draw(st.booleans()) else [None]
    works = [compute(), exchange("dispatch", 0, is_chunked=True)]
    works += [compute(1, is_chunked=True, expert=expert) for expert in by_expert]
    last = len(works) - 1
    works += [exchange("combine", last, is_chunked=True), compute(0), exchange("other", 0)]
    works += [compute(last + 1, last + 2)]
    work = RegionWork(
        forward=tuple(works),
        backward=mirrored(works) if draw(st.booleans()) else (),
        num_ranks=8,
        num_parts=num_parts,
        row_bytes=draw(AMOUNTS),
        imbalance=draw(st.sampled_from([1.0, 1.4])),
        wire_shares={"fp8": 0.52},
        hops=draw(
            st.sampled_from(
                [
                    None,
                    HopShape(
                        num_nodes=2, num_local=4, num_experts=16, rows_per_token=3, row_bytes=100.0
                    ),
                ]
            )
        ),
    )
    gathered = tuple(dataclasses.replace(w, is_gather=bool(w.exchange)) for w in works)
    return dataclasses.replace(work, gathered=dataclasses.replace(work, forward=gathered))


@pytest.mark.slow
@given(work=regions())
def test_no_way_is_faster_than_its_bound(work):
    for candidate in list_candidates(work, ("experts", "tokens")):
        assert least_us(work, candidate, RATES) <= price_us(work, candidate, RATES) * (1 + 1e-9)
