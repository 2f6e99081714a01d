"""What a backward moves, read from the forward graph: by hand, and against AOTAutograd's own."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.cases import Case
from benchmarks.predicted_layer import predict_layer
from benchmarks.subjects import OneLayer
from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.hardware import HardwareProfile
from moe_compile.planning.candidates import Candidate
from moe_compile.planning.cost_model import estimate_costs
from moe_compile.planning.rates import Rates
from moe_compile.planning.region_tasks import price_us
from moe_compile.planning.sizes import NominalSizes
from moe_compile.planning.work_reader import Replayed, read_work
from tests.capture import CapturedError, dynamo_graphs

MEMORY = HardwareProfile(  # a kilobyte moved is a microsecond, all else is nothing
    name="memory",
    matmul_tflops=1e9,
    memory_gb_per_s=1.0,
    op_overhead_us=0.0,
    link_gb_per_s=1e9,
    link_latency_us=0.0,
)
OPERATORS = replace(MEMORY, name="operators", memory_gb_per_s=1e9, op_overhead_us=1.0)
CASE = Case(name="small", num_ranks=2, tokens=256, experts=4, width=128, hidden=128)
ROWS = torch.ones(8, 4, requires_grad=True)  # 128 bytes
INDEX = torch.arange(16) % 8


def backward_of(program, *inputs):
    """Return (bytes, kernels) of the backward of each operator, by its name in the graph."""
    (graph,) = (gm.graph for gm in dynamo_graphs(program, *inputs))
    work = read_work(graph, frozenset(graph.nodes), Replayed(nodes=(), exchanges={}))
    return {w.name: (w.backward_nbytes, w.backward_kernels) for w in work if w.backward}


def test_a_gather_has_rows_of_zeros_and_a_scatter():
    """Zeros written: 128; read, added to and written: 128 and 128; what is added: 256."""
    found = backward_of(lambda x, i: torch.index_select(x, 0, i), ROWS, INDEX)
    assert list(found.values()) == [(3 * 128 + 256, 2)]


def test_a_scatter_has_a_gather():
    """Of 256 bytes of rows, from a gradient of 128."""
    rows = torch.ones(16, 4, requires_grad=True)
    found = backward_of(lambda x, i, y: x.index_add(0, i, y), torch.ones(8, 4), INDEX, rows)
    assert list(found.values()) == [(128 + 256, 1)]


def test_between_elementwise_operators_nothing_is_written():
    """SwiGLU: both gradients read the output's; up's reads gate, gate's up, silu's again gate."""
    found = backward_of(lambda g, u: (F.silu(g) * u).sum(0), ROWS, ROWS.detach().requires_grad_())
    (silu, product) = (found[name] for name in found if name in ("silu", "mul"))
    assert silu == (128 + 128, 1)  # gate read, its gradient written
    assert product == (4 * 128 + 128, 1)  # up's gradient alone is written


def test_what_several_read_has_a_sum_of_gradients():
    def program(x, a, b):
        h = torch.index_select(x, 0, torch.arange(8))
        return (h @ a).sum() + (h @ b).sum()

    weights = [torch.ones(4, 4, requires_grad=True) for _ in range(2)]
    one = backward_of(lambda x, a: torch.index_select(x, 0, torch.arange(8)) @ a, ROWS, weights[0])
    two = backward_of(program, ROWS, *weights)
    assert two["h"][0] - next(iter(one.values()))[0] == 3 * 128
    assert two["h"][1] == 3


def test_the_gradient_of_what_is_broadcast_is_summed():
    """128 read twice and written whole, summed to 32 bytes; the other side reads and writes."""
    scores = torch.ones(8, 1, requires_grad=True)
    found = backward_of(lambda x, s: (x * s).sum(0), ROWS, scores)
    assert found["mul"] == ((128 + 32 + 128) + (128 + 128 + 2 * 128 + 32), 1 + 2)


def graphs_us(module, tokens, num_chunks):
    """Return the cost of all nodes of AOTAutograd's graphs after every pass, by profile."""
    found = {MEMORY: [], OPERATORS: []}

    def keep(gm, inputs):
        state, _ = rewrite(gm, MegaMoEConfig(chunks=num_chunks, equal_tokens=True, strict=True))
        for graph_module in trace_both(gm, inputs, state):
            sizes = NominalSizes(state.nominal_sizes)
            sizes.learn(graph_module.graph)
            for hardware, us in found.items():
                costs = estimate_costs(graph_module.graph, sizes, hardware)
                us.append(sum(cost.compute_us for cost in costs.values()))
        raise CapturedError

    torch._dynamo.reset()
    with pytest.raises(Exception, match="CapturedError"):
        torch.compile(module, backend=keep, fullgraph=True)(tokens)
    assert all(len(us) == 2 for us in found.values())
    return {hardware: sum(us) for hardware, us in found.items()}


@pytest.mark.parametrize(("num_chunks", "shared"), [(1, True), (2, False)])
def test_bytes_and_operators_are_those_of_the_compiled_graphs(fake_ranks, num_chunks, shared):
    subject = OneLayer(replace(CASE, shared_expert=shared), fake_ranks).of(None)
    work = predict_layer(subject.module, subject.tokens).work
    counted = graphs_us(subject.module, subject.tokens, num_chunks)
    for hardware, near in ((MEMORY, 0.03), (OPERATORS, 0.06)):
        predicted = price_us(work, Candidate(num_chunks=num_chunks), Rates.of(hardware, 2))
        assert predicted == pytest.approx(counted[hardware], rel=near), hardware.name
