"""Products by their shape: what share of a large one's rate they reach, for all that price them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_compile.cost.rates import Rates
from moe_compile.errors import InvalidConfig
from moe_compile.hardware import PROFILES, load_profile
from moe_compile.hardware.cluster import Fit, load_cluster
from moe_compile.hardware.products import Product
from moe_compile.simulator.kernels import Kernels

COMPUTE = load_profile("h100").compute
LARGE = Product(rows=132 * 128, columns=256 * 64, reduction=2**20)
SIZES = st.sampled_from([1.0, 3.5, 64.0, 100.0, 128.0, 1000.0, 4096.0, 20000.0])
PRODUCTS = st.builds(
    Product,
    groups=st.sampled_from([1.0, 4.0, 33.0]),
    rows=SIZES,
    columns=SIZES,
    reduction=SIZES,
    ragged=st.sampled_from(["", "rows", "reduction"]),
)


def test_a_large_product_reaches_all_and_shorter_or_uneven_ones_less():
    assert COMPUTE.share_of(LARGE) == pytest.approx(1.0, rel=1e-3)
    short = dataclasses.replace(LARGE, reduction=COMPUTE.half_reduction)
    assert COMPUTE.share_of(short) == pytest.approx(0.5)
    one_tile_more = dataclasses.replace(LARGE, rows=133 * 128, columns=256)
    assert COMPUTE.share_of(one_tile_more) == pytest.approx(133 / 264, rel=1e-3)


def test_a_product_narrower_than_a_tile_has_tiles_as_narrow():
    narrow = Product(rows=132 * 128, columns=32, reduction=2**20)
    assert COMPUTE.share_of(narrow) == pytest.approx(1.0, rel=1e-3)
    few_rows = Product(rows=32, columns=132 * 256, reduction=2**20)
    assert COMPUTE.share_of(few_rows) == pytest.approx(0.5, rel=1e-3)


def test_groups_of_one_size_fill_a_device_together():
    one = Product(rows=128, columns=256, reduction=4096)
    many = dataclasses.replace(one, groups=132)
    assert COMPUTE.share_of(many) == pytest.approx(132 * COMPUTE.share_of(one))


def test_products_in_eight_bits_have_their_rate_and_lose_as_much_by_their_shape():
    rate = COMPUTE.fp8_tflops * 0.6 / (COMPUTE.bf16_tflops * 0.65)
    for product in (LARGE, dataclasses.replace(LARGE, groups=8, rows=100, ragged="rows")):
        ours = dataclasses.replace(product, in_eight_bits=True)
        assert COMPUTE.share_of(ours) == pytest.approx(rate * COMPUTE.share_of(product))


@given(product=PRODUCTS, groups=st.sampled_from([0.0, 0.25, 1.0]), is_gradient=st.booleans())
def test_no_part_of_a_product_is_faster_than_a_large_one(product, groups, is_gradient):
    part = product.part(groups, 0.5, is_gradient=is_gradient)
    assert 0.0 < COMPUTE.share_of(part) <= 1.0
    assert part.operations == pytest.approx(product.operations * groups * 0.5)


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda p: p.stem)
def test_the_planner_and_the_simulator_have_one_model_of_products(path):
    """At the gap of a kernel and the memory rate of `megamoe simulate` a product takes as long."""
    if path.stem == "cpu":
        assert load_profile("cpu").compute is None
        return
    cluster = load_cluster(path.stem)
    compute, kernels = cluster.compute, Kernels(cluster, Fit())
    at_rate = cluster.memory.gb_per_s * cluster.memory.share
    rates = dataclasses.replace(
        Rates.of(load_profile(path.stem), 8),
        memory_gb_per_s=at_rate,
        op_overhead_us=compute.kernel_us,
    )
    for rows in (64, 700, 4096):
        shape = {"rows": rows, "columns": 2048, "reduction": 4096}
        grouped = Product(**shape, groups=8, ragged="rows")
        for product, us in (
            (Product(**shape), kernels.gemm_us(*shape.values())),
            (grouped, kernels.grouped_us(8, *shape.values())),
        ):
            moved = 2 * product.groups * (rows * 4096 + 2048 * 4096 + rows * 2048)
            assert rates.compute_us(product.operations, moved, 1, product) == pytest.approx(us)


def test_without_curves_all_products_have_one_rate():
    rates = Rates.of(load_profile("h100"), 8)
    small = Product(groups=8, rows=16, columns=2048, reduction=4096, ragged="rows")
    operations = small.operations
    one_rate = dataclasses.replace(rates, compute=None)
    assert one_rate.compute_us(operations, 0, 1, small) == one_rate.compute_us(operations, 0, 1)
    assert rates.compute_us(operations, 0, 0, small) == pytest.approx(
        rates.compute_us(operations, 0, 0) / (0.65 * 989.4 / 600) / COMPUTE.share_of(small)
    )


def test_a_table_of_the_compiler_alone_may_lack_curves_and_a_wrong_one_is_refused(tmp_path):
    lines = (PROFILES / "h100.toml").read_text().splitlines()
    path = tmp_path / "other.toml"
    path.write_text("\n".join(line for line in lines if not line.startswith("grouped_forward")))
    assert load_profile(str(path)).compute is None
    with pytest.raises(InvalidConfig, match="missing: \\['grouped_forward'\\]"):
        load_cluster(str(path))
    surplus = '[compute]\nsurplus = { value = 1, origin = "assumed: x" }'
    path.write_text("\n".join(lines).replace("[compute]", surplus))
    with pytest.raises(InvalidConfig, match=r"compute\.surplus is 1; write"):
        load_profile(str(path))
