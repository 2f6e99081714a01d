"""Costs are the textbook's: operations over the matmul rate, bytes over a bandwidth."""

import operator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from torch.fx.experimental.proxy_tensor import make_fx

from moe_compile.cost.amounts import amounts_of
from moe_compile.cost.cost_model import estimate_costs, us_by_bound
from moe_compile.cost.rates import Bound
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.query import is_launch, is_wait, overload_name
from moe_compile.hardware import HardwareProfile
from moe_compile.hardware.products import Product
from tests.scheduled_layers import c10d, one_rank_group

UNIT = HardwareProfile(
    name="unit",
    matmul_tflops=1e-6,  # one operation per microsecond
    memory_gb_per_s=1e9,
    op_overhead_us=0.0,
    link_gb_per_s=1e-3,  # one byte per microsecond
    link_latency_us=5.0,
)


def costs_of(program, *inputs):
    one_rank_group()
    graph = make_fx(program, tracing_mode="fake")(*inputs).graph
    costs = estimate_costs(graph, NominalSizes({}), UNIT)
    return {node: cost for node, cost in costs.items() if node.op == "call_function"}


def compute_us(program, *inputs):
    return sum(c.compute_us for c in costs_of(program, *inputs).values())


A, B = torch.ones(3, 5), torch.ones(5, 7)


@pytest.mark.parametrize(
    ("program", "inputs", "operations"),
    [
        (torch.mm, (A, B), 2 * 3 * 5 * 7),
        (torch.addmm, (torch.ones(7), A, B), 2 * 3 * 5 * 7),
        (torch.addmm, (torch.ones(3, 7), A, B), 2 * 3 * 5 * 7),
        (torch.bmm, (torch.ones(4, 3, 5), torch.ones(4, 5, 7)), 4 * 2 * 3 * 5 * 7),
        (
            torch.baddbmm,
            (torch.ones(4, 3, 7), torch.ones(4, 3, 5), torch.ones(4, 5, 7)),
            4 * 2 * 3 * 5 * 7,
        ),
    ],
)
def test_matrix_products_cost_two_operations_per_multiply_add(program, inputs, operations):
    assert compute_us(program, *inputs) == pytest.approx(operations, rel=1e-3)


ENDS = torch.tensor([2, 5, 8], dtype=torch.int32)
ROWS, WEIGHTS = torch.ones(8, 16).bfloat16(), torch.ones(3, 16, 24).bfloat16()


@pytest.mark.parametrize(
    ("program", "inputs", "product"),
    [
        (torch.mm, (A, B), Product(rows=3, columns=7, reduction=5)),
        (torch.addmm, (torch.ones(3, 7), A, B), Product(rows=3, columns=7, reduction=5)),
        (
            torch.bmm,
            (torch.ones(4, 3, 5), torch.ones(4, 5, 7)),
            Product(groups=4, rows=3, columns=7, reduction=5),
        ),
        (
            lambda x, w, ends: torch._grouped_mm(x, w, offs=ends),
            (ROWS, WEIGHTS, ENDS),
            Product(groups=3, rows=8 / 3, columns=24, reduction=16, ragged="rows"),
        ),
        (
            lambda x, dy, ends: torch._grouped_mm(x.t(), dy, offs=ends),
            (ROWS, torch.ones(8, 24).bfloat16(), ENDS),
            Product(groups=3, rows=16, columns=24, reduction=8 / 3, ragged="reduction"),
        ),
    ],
    ids=["mm", "addmm", "bmm", "grouped", "gradient of grouped"],
)
def test_a_product_carries_its_shape(program, inputs, product):
    """Groups that offsets divide are taken to have as many rows each."""
    graph = make_fx(program, tracing_mode="fake")(*inputs).graph
    found = [amounts_of(node, NominalSizes({})) for node in graph.nodes]
    (amounts,) = (one for one in found if one.product is not None)
    assert amounts.product == product
    assert amounts.operations == pytest.approx(product.operations)


def test_a_triton_kernel_of_the_model_is_a_kernel():
    """It was free, followed what reads it, and ran behind a wait that it could have hidden."""
    graph = fx.Graph()
    counts, out = graph.placeholder("counts"), graph.placeholder("out")
    counts.meta["val"], out.meta["val"] = torch.zeros(64), torch.zeros(256)
    kernel = graph.call_function(
        triton_kernel_wrapper_functional,
        kwargs={"kernel_idx": 0, "kwargs": {"counts": counts, "out": out}},
    )
    kernel.meta["val"] = {"out": torch.zeros(256)}
    graph.output(graph.call_function(operator.getitem, (kernel, "out")))
    cost = estimate_costs(graph, NominalSizes({}), replace(UNIT, op_overhead_us=3.0))[kernel]
    assert cost.compute_us == pytest.approx(3.0, rel=1e-3)


def test_attention_costs_its_two_products():
    q = torch.ones(1, 2, 16, 8)
    cost = compute_us(lambda q: F.scaled_dot_product_attention(q, q, q), q)
    assert cost == pytest.approx(2 * 2 * 2 * 16 * 16 * 8, rel=0.1)


def test_causal_attention_looks_at_half_of_the_pairs():
    q = torch.ones(1, 2, 64, 8)
    full = compute_us(lambda q: F.scaled_dot_product_attention(q, q, q), q)
    causal = compute_us(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q)
    assert causal == pytest.approx(full / 2, rel=0.01)


def test_every_cost_says_what_it_follows_from():
    def program(x, w):
        gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x @ w, 1, one_rank_group()))
        return gathered.t().contiguous()

    costs = costs_of(program, torch.ones(64, 64), torch.ones(64, 64))
    assert [c.bound for c in costs.values() if c.bound is not Bound.NOTHING] == [
        Bound.COMPUTE,
        Bound.LINK,
        Bound.MEMORY,
    ]
    by_bound = us_by_bound(costs.values())
    assert sum(by_bound.values()) == pytest.approx(sum(c.compute_us for c in costs.values()))
    assert by_bound[Bound.COMPUTE] > by_bound[Bound.MEMORY] > by_bound[Bound.LAUNCH] == 0.0


def test_an_exchange_costs_latency_and_bytes_and_a_wait_nothing():
    costs = costs_of(
        lambda x: c10d.wait_tensor(c10d.all_to_all_single(x, [4], [4], one_rank_group())),
        torch.ones(4, 3),
    )
    (launch,) = [c for n, c in costs.items() if is_launch(n)]
    (wait,) = [c for n, c in costs.items() if is_wait(n)]
    assert launch.link_us == pytest.approx(5.0 + 4 * 3 * 4)
    assert (wait.compute_us, wait.link_us) == (0.0, 0.0)


@pytest.mark.parametrize("ranks", [2, 4])
def test_of_what_is_gathered_or_reduced_a_ranks_own_part_does_not_travel(ranks):
    def program(x):
        gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x, ranks, "0"))
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(gathered, "sum", ranks, "0"))

    costs = costs_of(program, torch.ones(4, 3))
    links = [c.link_us for n, c in costs.items() if is_launch(n)]
    assert links == [pytest.approx(5.0 + (ranks - 1) * 4 * 3 * 4)] * 2


def test_elementwise_chains_move_their_ends_only():
    """Four ops cost the reads of the first and the writes of the last: a compiler fuses them."""
    one = compute_us(lambda x: x + 1, A)
    four = compute_us(lambda x: ((x + 1) * 2).relu() - 3, A)
    assert four == pytest.approx(one)


def test_views_cost_nothing():
    view = torch.ops.aten._unsafe_view.default
    costs = costs_of(lambda x: view(x.view(3, 5), (5, 3)).t()[1:], A)
    assert {overload_name(n) for n, c in costs.items() if c.compute_us} == set()


def moved_bytes(program, *inputs, device="cpu"):
    """Return the bytes that a program moves, whose arithmetic is no product."""
    given = [torch.empty_like(i, device=device) for i in inputs]
    return compute_us(program, *given) * UNIT.memory_gb_per_s * 1e3


ROWS, ORDER = torch.ones(64, 8), torch.arange(64)
ROW_BYTES, ORDER_BYTES = 64 * 8 * 4, 64 * 8


def test_rows_move_once_however_many_gathers_follow_one_another():
    def program(x, order):
        return torch.zeros_like(x).index_put((order,), x[order].relu()[order])

    zeros, scattered = ROW_BYTES, ROW_BYTES
    rows = ROW_BYTES + 3 * ORDER_BYTES
    assert moved_bytes(program, ROWS, ORDER) == pytest.approx(zeros + scattered + rows)


@pytest.mark.parametrize(("device", "is_written"), [("cpu", True), ("meta", False)])
def test_a_concatenation_is_written_out_on_a_cpu_alone(device, is_written):
    def program(x, order):
        return torch.cat([x, x])[order]

    gathered = ROW_BYTES + ORDER_BYTES + ROW_BYTES  # as many rows as the order names
    joined = ROW_BYTES + 2 * ROW_BYTES if is_written else 0
    assert moved_bytes(program, ROWS, ORDER, device=device) == pytest.approx(gathered + joined)
