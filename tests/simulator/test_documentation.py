"""Every figure of docs/cluster.md's tables is what the simulator computes."""

import dataclasses
from pathlib import Path

import pytest

from moe_compile.simulator import checks
from moe_compile.simulator.explain import explain_speedup, find_bounds, predict_own_part
from moe_compile.simulator.layer_tasks import bound_us
from moe_compile.simulator.method import Crossing, Products
from moe_compile.simulator.parts_table import costs_of, find_part_shares, share_of_bound
from moe_compile.simulator.scenario import make_setting, predict, schedules
from moe_compile.simulator.setups import shipped

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "cluster.md").read_text()
PRODUCTS = (DOCS / "products.md").read_text()


def rows(first_heading, page=PAGE):
    """Return the cells of the table whose first heading is so, by first cell."""
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_heading} |"))
    found = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return found
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[name] = cells
    return found


def test_the_waterfall_is_what_is_computed():
    table = rows("what changes")
    changes = explain_speedup(1440)
    assert list(table) == [change.name for change in changes]
    for change in changes:
        seconds, gain, total, _ = table[change.name]
        assert seconds == f"{change.seconds:.2f}"
        assert gain in ("", f"{change.gain:.3f}x")
        assert total == f"{change.total_gain:.2f}x"
    own = predict_own_part(1440)
    said = f"predicted at {own.seconds:.2f} s, {own.total_gain:.2f} times as fast as Megatron-LM"
    assert said in " ".join(PAGE.split())


def test_the_bounds_are_what_is_computed():
    table = rows("model")
    profile = shipped("h800")
    for bound in find_bounds(profile, profile.fit("bytedance")):
        ideal, over, *near = table.pop(bound.model)
        assert ideal == f"{bound.ideal_ms:.2f}"
        if bound.tensor_over_ideal is not None:
            assert over == f"{bound.tensor_over_ideal:.2f}x"
        schedules = ("sequential", "inter-op", "best chunks", "tiles", "two-batches")
        shares = bound.of_bound_percent
        assert near == [f"{shares[s]:.0f} / {shares[s + ' + fp8 wire']:.0f}" for s in schedules]
    assert table == {}


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("MegaScale-MoE table 3, seconds per step", checks.check_table_3().heldout_mape_percent),
        ("MoE Parallel Folding on H100 (Eos), MFU", checks.check_eos().heldout_mape_percent),
    ],
)
def test_the_errors_are_what_is_computed(source, error):
    assert rows("source")[source][2] == f"{error:.1f} %"


def test_deepseeks_figure_is_what_is_computed():
    unfitted = checks.check_deepseek().rows[0]
    (cells,) = [cells for name, cells in rows("source").items() if name.startswith("DeepSeek-V3")]
    assert cells[2] == f"{unfitted.predicted:,.0f} ({unfitted.error_percent:+.1f} %)"


def test_ways_between_nodes_are_what_is_computed():
    predicted = []
    for nbytes in (2.0, 1.0):
        wire = {"dispatch_bytes": nbytes, "combine_bytes": nbytes}
        found = schedules(make_setting("deepseek-v3", "h100", changes=wire))
        predicted.append({name: predict(name, changed) for name, changed in found.items()})
    bf16, fp8 = predicted
    first = bf16["flat: sequential"].tokens_per_s
    table = rows("schedule | MB far / near")
    assert len(table) > 20
    for name, (sent, *rates) in table.items():
        sequences = 2 if " parts" in name else 1
        far, near = bf16[name].sent_between_mb, bf16[name].sent_within_mb
        assert sent == f"{far / sequences:.0f} / {near / sequences:.0f}"
        shown = []
        for one in (bf16, fp8):
            rate = one[name].tokens_per_s
            shown += [f"{rate / 1e3:,.0f}k", f"{rate / first:.2f}x"]
        assert rates == shown


def test_the_shares_of_parts_are_what_is_computed():
    table = rows("model, way, products")
    for row in find_part_shares("h100"):
        exchange, *shares = table.pop(f"{row.model}, {row.way}, {row.products}")
        assert exchange == f"{row.exchange_percent:.0f}"
        assert shares == [f"{x:.1f}" for x in (*row.shares.values(), row.limit, row.with_packing)]
    assert table == {}


def test_what_is_said_of_the_shares_is_what_is_computed():
    text = " ".join(PAGE.split())
    on_one_node = find_part_shares("h800")[:5]
    *said, last = (f"{row.shares['2 parts, 4 blocks']:.1f}" for row in on_one_node)
    assert f"two parts and four blocks reach {', '.join(said)} and {last} %" in text
    assert f"its limit is {on_one_node[-1].limit:.1f} %" in text
    for crossing in (Crossing.FLAT, Crossing.EXACT):
        costs = costs_of("deepseek-v3", crossing, "bf16", "h100")
        network = dataclasses.replace(costs.profile.network, contention=0.0)
        profile = dataclasses.replace(costs.profile, network=network)
        share = share_of_bound(dataclasses.replace(costs, profile=profile))
        assert f'{share:.1f} % ("{crossing.value}")' in text


IN_FP8 = {"dispatch_bytes": 1.0, "combine_bytes": 1.0}


@pytest.mark.parametrize("label", list(rows("model, schedule", PRODUCTS)))
def test_the_gain_of_products_in_fp8_is_what_is_computed(label):
    model, _, schedule = label.partition(", ")
    layout = {"ranks": 1} if model == "mixtral-8x7b" else {}
    seconds = []
    for products in (Products.BF16, Products.EXPERTS, Products.EXPERTS_FREE):
        changes = {"products": products, **IN_FP8, **layout}
        setting = make_setting(model, "h100", changes=changes)
        seconds.append(predict(schedule, schedules(setting, [schedule])[schedule]).seconds)
    whole, found, free = seconds
    gain = f"{whole / found:.3f}x of {whole / free:.3f}x"
    reached = f"{100 * (whole - found) / (whole - free):.0f} %"
    assert rows("model, schedule", PRODUCTS)[label] == [
        *(f"{s:.2f}" for s in seconds),
        gain,
        reached,
    ]


def test_what_quantising_takes_is_what_is_computed():
    us, costs = {}, None
    for products in Products:
        costs = make_setting("deepseek-v3", "h100", changes={"products": products, **IN_FP8}).costs
        us[products] = bound_us(costs)
    model, routed = costs.model, costs.routed_rows / 1e6
    came, hidden = routed * model.width, routed * model.expert_width
    weights = costs.local_experts * model.expert_weights / 1e6
    expected = [2 * weights, 3 * came, 2 * came, 2 * hidden, hidden, -2 * came]
    heading = "what a layer of deepseek-v3 moves for one sequence, forward and backward"
    assert [*rows(heading, PRODUCTS).values()] == [[f"{mb:.0f}"] for mb in expected]
    quantising = (us[Products.EXPERTS] - us[Products.EXPERTS_FREE]) / 1e3
    saved = (us[Products.BF16] - us[Products.EXPERTS_FREE]) / 1e3
    assert f"save {saved:.2f} ms and\nquantising takes {quantising:.2f} ms" in PRODUCTS
    assert f"({100 * (1 - quantising / saved):.0f} %, if" in PRODUCTS
