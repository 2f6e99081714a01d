"""What the planner reads of a layer is what AOTAutograd makes of it, forward and backward."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.triton_kernel_wrap import (
    kernel_side_table,
    triton_kernel_wrapper_mutation,
)
from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_compile.backend import rewrite
from moe_compile.codegen import trace_both
from moe_compile.config import MegaMoEConfig
from moe_compile.cost import traced_nodes
from moe_compile.cost.cost_model import estimate_costs
from moe_compile.cost.layer_program import program_of
from moe_compile.cost.rates import Rates
from moe_compile.cost.read_regions import Replayed, read_work, work_of_experts
from moe_compile.cost.region_work import RegionWork
from moe_compile.cost.sizes import NominalSizes
from moe_compile.cost.traced_nodes import TracedNodes
from moe_compile.graph.query import is_launch
from moe_compile.hardware import HardwareProfile, load_profile
from moe_compile.hardware.profile import HostCosts
from moe_compile.plan.candidates import Candidate
from moe_compile.plan.product_times import product_times
from moe_compile.plan.region_tasks import price_us
from passes.detect_regions import DetectRegions
from passes.kinds.by_counts.products import products_in_eight_bits
from passes.normalize_exchanges import NormalizeExchanges
from passes.pipeline import Level, run_level
from tests.capture import CapturedError, dynamo_graphs, state
from tests.layers import GroupedExperts
from tests.scheduled_layers import c10d, one_rank_group
from tests.slow_parameters import slow_but

MEMORY = HardwareProfile(  # a kilobyte moved is a microsecond, all else is nothing
    name="memory",
    matmul_tflops=1e9,
    memory_gb_per_s=1.0,
    op_overhead_us=0.0,
    link_gb_per_s=1e9,
    link_latency_us=0.0,
    host=HostCosts(kernel_us=1.0),  # so that tensors stand for those of a device
)
OPERATORS = replace(MEMORY, name="operators", memory_gb_per_s=1e9, op_overhead_us=1.0)
ROWS = torch.ones(8, 4, requires_grad=True)
WEIGHT = nn.Parameter(torch.ones(4, 4))
EMPTY = RegionWork(forward=(), num_ranks=1, num_parts=2, row_bytes=0.0)


def graph_of(program, *inputs):
    (gm,) = dynamo_graphs(program, *inputs)
    return gm.graph


def read_stretch(graph, nodes, chunked=()):
    """Return the work of nodes that are traced without the others."""
    replayed = Replayed(nodes=chunked, exchanges={})
    return read_work(TracedNodes(graph, nodes), replayed, EMPTY)


def work_of(program, *inputs, chunked=()):
    """Return the work of a program of which the nodes named run in chunks."""
    graph = graph_of(program, *inputs)
    nodes = [n for n in graph.nodes if n.name in chunked]
    return read_work(TracedNodes(graph), Replayed(nodes=nodes, exchanges={}), EMPTY)


def graphs_us(module, tokens, num_chunks, **options):
    """Return the cost of all nodes of AOTAutograd's graphs after every pass, by profile."""
    found = {MEMORY: [], OPERATORS: []}

    def keep(gm, inputs):
        asked = {"chunks": num_chunks, "equal_tokens": True, "strict": True, **options}
        ours, _ = rewrite(gm, MegaMoEConfig(**asked))
        for graph_module in trace_both(gm, inputs, ours):
            sizes = NominalSizes(ours.nominal_sizes)
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


class WithShared(GroupedExperts):
    """Beside the routed experts one that every token goes to."""

    def make_experts(self, width, hidden, rand):
        super().make_experts(width, hidden, rand)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return super().forward(x) + self.down(F.silu(self.up(x)))


def work_of_layer(layer, tokens, **options):
    """Return the work of a layer's one region, as the planner reads it."""
    ours, graph = state(**options), graph_of(layer, tokens)
    run_level(Level((NormalizeExchanges(), DetectRegions())), graph, ours)
    (found,) = ours.found.experts
    nodes = TracedNodes(graph, products=products_in_eight_bits(ours))
    return work_of_experts(found.region, found.proof, MEMORY, nodes)


@pytest.mark.parametrize(
    ("num_chunks", "style"),
    slow_but(
        [(1, WithShared), (2, GroupedExperts)],
        [(1, WithShared), (2, GroupedExperts), (4, GroupedExperts)],
    ),
)
def test_bytes_and_operators_are_those_of_the_compiled_graphs(fake_ranks, num_chunks, style):
    layer = style(128, 128, 8, 2, fake_ranks).to(torch.bfloat16)
    tokens = torch.randn(4096, 128, dtype=torch.bfloat16, requires_grad=True)
    work = work_of_layer(layer, tokens)
    counted = graphs_us(layer, tokens, num_chunks)
    near_memory = 0.01 if num_chunks == 1 else 0.03  # rows sorted back are not written, as in code
    for hardware, near in ((MEMORY, near_memory), (OPERATORS, 0.02)):
        predicted = price_us(work, Candidate(num_chunks=num_chunks), Rates.of(hardware, 2))
        assert predicted == pytest.approx(counted[hardware], rel=near), hardware.name


EIGHT_BITS = {"expert_compute": "fp8_blockwise"}
FED = {"dispatch_wire": "fp8"}
FED_TWICE = {**FED, "combine_wire": "fp8"}


@pytest.mark.parametrize(
    ("num_chunks", "wires"),
    slow_but([(2, {}), (1, FED)], [(1, {}), (2, {}), (1, FED), (2, FED), (2, FED_TWICE)]),
)
def test_products_in_eight_bits_have_the_bytes_of_the_compiled_graphs(
    fake_ranks, num_chunks, wires
):
    """Those of rows that come in eight bits too, and so feed them."""
    layer = GroupedExperts(128, 128, 8, 2, fake_ranks).to(torch.bfloat16)
    tokens = torch.randn(4096, 128, dtype=torch.bfloat16, requires_grad=True)
    work = work_of_layer(layer, tokens, **EIGHT_BITS)
    counted = graphs_us(layer, tokens, num_chunks, **EIGHT_BITS, **wires)
    candidate = Candidate(num_chunks=num_chunks, **wires)
    near_operators = 0.05 if wires else 0.02  # 113 for 118
    for hardware, near in ((MEMORY, 0.03), (OPERATORS, near_operators)):
        predicted = price_us(work, candidate, Rates.of(hardware, 2))
        assert predicted == pytest.approx(counted[hardware], rel=near), hardware.name


def test_products_in_eight_bits_have_their_own_rate_and_so_have_gradients_of_weights(fake_ranks):
    layer = GroupedExperts(1024, 512, 8, 2, fake_ranks).to(torch.bfloat16)
    tokens = torch.randn(4096, 1024, dtype=torch.bfloat16, requires_grad=True)
    work, before = (work_of_layer(layer, tokens, **o) for o in (EIGHT_BITS, {}))
    products = [w for phase in work.phases for w in phase if w.product and w.product.groups > 1]
    ours = [one for one in products if one.product.in_eight_bits]
    gradients = [one for one in products if one.makes_gradient]
    assert (len(ours), len(gradients)) == (6, 3) and not {*ours} & {*gradients}
    assert all(one.weight_bytes > 0 for one in (*ours, *gradients))
    quantising = [one for phase in work.phases for one in phase if one.quantises]
    assert len(quantising) == 5 + 6  # gate and up read one; each weight there and back
    rates = Rates.of(load_profile("h100"), 2)
    times = product_times(work, rates, Candidate())
    assert 0 < times.products_us < 0.65 * times.as_model_us
    plain = [w for phase in before.phases for w in phase if w.product and w.product.groups > 1]
    as_model = sum(
        rates.compute_us(w.operations, w.nbytes + w.weight_bytes, 1, w.product)
        for w in plain
        if not w.makes_gradient
    )
    assert times.as_model_us == pytest.approx(as_model, rel=0.01)
    gain = 1.0 - price_us(work, Candidate(), rates) / price_us(before, Candidate(), rates)
    assert times.gain == pytest.approx(gain, abs=0.005)
    fed = product_times(work, rates, Candidate(**FED))
    assert (fed.products_us, fed.as_model_us) == (times.products_us, times.as_model_us)
    assert f"{abs(fed.gain):.1%} " in str(fed)


def test_gradients_of_weights_in_eight_bits_have_their_rate(fake_ranks):
    layer = GroupedExperts(1024, 512, 8, 2, fake_ranks).to(torch.bfloat16)
    tokens = torch.randn(4096, 1024, dtype=torch.bfloat16, requires_grad=True)
    everything = {**EIGHT_BITS, "fp8_products": ("gate", "up", "down", "grad_input", "grad_weight")}
    works = [work_of_layer(layer, tokens, **options) for options in (everything, EIGHT_BITS)]
    made = [[w for p in one.phases for w in p if w.makes_gradient] for one in works]
    ours, before = ([w for w in each if w.product.groups > 1] for each in made)
    assert len(ours) == len(before) == 3 and all(one.product.in_eight_bits for one in ours)
    for one, other in zip(ours, before, strict=True):
        assert one.operations == other.operations and one.weight_bytes == other.weight_bytes
        assert replace(one.product, in_eight_bits=False) == other.product
    quantising = [sum(w.quantises for p in one.phases for w in p) for one in works]
    assert quantising[0] == quantising[1] + 5  # gate and up read the same rows


@pytest.mark.parametrize("num_ranks", [2, 64])
def test_a_chain_costs_the_scheduler_what_it_costs_the_planner(num_ranks):
    """One operator after another: the price is the sum of what the scheduler counts per node."""
    splits, group = [16] * num_ranks, one_rank_group()
    hardware = replace(load_profile("h100"), op_overhead_us=0.0)  # of a launch, the scheduler's

    def program(x, left, right):
        sent = c10d.all_to_all_single(x @ left, splits, splits, group)
        return torch.softmax(c10d.wait_tensor(sent) @ right, -1)

    inputs = [torch.ones(*s).bfloat16() for s in ((16 * num_ranks, 256), (256, 512), (512, 128))]
    graph = graph_of(program, *inputs)
    program_here = program_of(graph, set(graph.nodes))
    (traced,) = program_here.graphs()
    scheduled = estimate_costs(traced, NominalSizes({}), hardware).values()
    (launch,) = [node for node in graph.nodes if is_launch(node)]
    replayed = Replayed(nodes=(), exchanges={launch: "dispatch"})
    work = read_work(TracedNodes(graph), replayed, EMPTY)
    assert [w.exchange for w in work.forward if w.link_bytes] == ["dispatch"]
    planned = price_us(work, Candidate(), Rates.of(hardware, num_ranks))
    assert planned == pytest.approx(sum(c.compute_us + c.link_us for c in scheduled))


def test_work_of_a_nodes_backward_is_that_nodes():
    work = work_of(lambda x, w: F.silu(x.sin() @ w).sum(), ROWS, WEIGHT, chunked=["matmul"])
    assert [w.is_chunked for w in work.forward if w.operations] == [True]
    products = [w for w in work.backward if w.operations]
    assert [(w.makes_gradient, w.is_chunked) for w in products] == [(True, True), (False, True)]
    gradient, of_rows = products
    assert gradient.weight_bytes == of_rows.weight_bytes == 4 * 4 * 4
    assert gradient.nbytes == of_rows.nbytes == 2 * 8 * 4 * 4
    assert not any(w.is_chunked for w in (*work.forward, *work.backward) if not w.operations)


def test_a_program_without_a_gradient_has_no_backward():
    work = work_of(lambda x: (x @ x.t()).exp(), torch.ones(8, 4))
    assert work.forward and work.backward == ()


def test_a_stretch_runs_under_the_modes_that_surround_it():
    """Its first node is inside autocast, which is entered before it and left behind it."""

    def program(x, w):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ w
            z = y @ w
        return z.float() + 1

    graph = graph_of(program, ROWS, WEIGHT)
    stretch = {n for n in graph.nodes if n.name == "z"}
    (product,) = (w for w in read_stretch(graph, stretch).forward if w.operations)
    assert product.written == 8 * 4 * 2
    assert not torch.is_autocast_enabled("cpu")


def test_what_is_given_a_size_that_only_a_run_knows_is_left_out():
    """Rows as many as the host reads, summed: behind the sum all has one size again."""

    def program(x, n):
        rows = x[n.tolist()[0] :]
        return rows.exp().sum(0) + 1

    graph = graph_of(program, ROWS, torch.ones(1).long())
    rows = next(n for n in graph.nodes if n.name == "rows")
    after = {n for n in graph.nodes if n > rows}
    assert [n.name for n in program_of(graph, after).origins] == ["add"]
    assert len(program_of(graph, set(graph.nodes)).origins) > len(after)
    assert read_stretch(graph, after, [n for n in after if n.name == "exp"]) is None


class TracedOnce:
    """Counts traces, with nothing known before."""

    def __init__(self, monkeypatch, folder):
        self.num = 0
        self.folder = folder
        trace = traced_nodes.trace_work

        def counted(program):
            self.num += 1
            return trace(program)

        monkeypatch.setattr(traced_nodes, "trace_work", counted)
        traced_nodes.forget()

    def read(self, width=4):
        rows = torch.ones(8, width, requires_grad=True)
        weight = torch.ones(width, 4, requires_grad=True)
        with temporary_cache_dir(str(self.folder)):
            return work_of(lambda x, w: (x @ w).sum(), rows, weight)


@pytest.fixture
def traced_once(monkeypatch, tmp_path):
    return TracedOnce(monkeypatch, tmp_path)


def test_what_was_traced_is_kept_beside_inductors_cache(traced_once):
    first = traced_once.read()
    traced_nodes.forget()
    assert traced_once.read() == first and traced_once.num == 1
    traced_nodes.forget()
    traced_once.read(width=8)
    assert traced_once.num == 2
    others = (
        "{ half an ent",
        "{}",
        '[{"work": []}]',
        '[{"work": [{"name": 1}], "origins": []}]',
        "7",
    )
    for num, other in enumerate(others, start=3):
        for entry in (traced_once.folder / "megamoe").iterdir():
            entry.write_text(other)
        traced_nodes.forget()
        assert traced_once.read() == first and traced_once.num == num


def test_nothing_is_kept_where_inductor_keeps_nothing(traced_once):
    with torch._inductor.config.patch(force_disable_caches=True):
        traced_once.read()
    assert not (traced_once.folder / "megamoe").exists()


@torch.library.custom_op("tests_traced::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x):
    return torch.empty_like(x)


@pytest.mark.parametrize(
    ("program", "is_of_torch"),
    [
        (lambda x: torch.matmul(x, x.t()).softmax(-1), True),
        (lambda x: torch.utils.checkpoint.checkpoint(torch.exp, x, use_reentrant=False), True),
        (lambda x: F.linear(x, x), True),
        (twice, False),
        (lambda x: torch.utils.checkpoint.checkpoint(twice, x, use_reentrant=False), False),
    ],
)
def test_what_a_user_has_written_may_change_and_is_kept_in_the_process_alone(program, is_of_torch):
    graphs = [gm.graph for gm in dynamo_graphs(lambda x: program(x), ROWS.detach())]
    found = [program_of(graph, set(graph.nodes)) for graph in graphs]
    assert all(f.origins and f.is_of_torch is is_of_torch for f in found)


def text_with(kernel, **constants):
    """Return the text of a program that launches a Triton kernel, and whether all is in it."""
    graph = graph_of(torch.exp, ROWS.detach())
    (exp,) = (node for node in graph.nodes if node.op == "call_function")
    with graph.inserting_after(exp):
        launch = graph.call_function(
            triton_kernel_wrapper_mutation,
            kwargs={
                "kernel_idx": kernel_side_table.add_kernel(kernel),
                "constant_args_idx": kernel_side_table.add_constant_args(constants),
                "grid": [(1,)],
                "tma_descriptor_metadata": {},
                "kwargs": {"output_ptr": exp},
            },
        )
    program = program_of(graph, {exp, launch})
    return program.text, program.is_of_torch


def test_a_triton_kernel_is_known_by_its_source_and_its_constants():
    triton = pytest.importorskip("triton")
    kernels = pytest.importorskip("torchtitan.models.moe.kernels", reason="needs triton")
    kernel = kernels._fill_indices_kernel
    tuned = triton.autotune([triton.Config({"BLOCK_SIZE": 128})], key=[])(kernel)
    first, again, other = (text_with(kernel, BLOCK_SIZE=size) for size in (128, 128, 64))
    assert first == again
    assert first[0] != other[0]
    assert first[1] and other[1]
    assert text_with(tuned)[0] != text_with(kernel)[0]
    assert not text_with(tuned)[1]
    assert not text_with(kernel, BLOCK_SIZE=object())[1]


def test_a_stretch_may_write_in_place_what_was_computed_before_it():
    def program(x, w):
        y = x @ w
        y.add_(1.0)
        return y.exp()

    graph = graph_of(program, ROWS, WEIGHT)
    after = {n for n in graph.nodes if n.op.startswith("call")} - {
        next(n for n in graph.nodes if n.op.startswith("call"))
    }
    work = read_stretch(graph, after)
    assert work.forward and work.backward


def test_a_layer_that_cannot_be_traced_by_itself_is_not_priced(monkeypatch, fake_ranks):
    def fail(program):
        raise RuntimeError("of torch")

    monkeypatch.setattr(traced_nodes, "work_of", fail)
    layer = GroupedExperts(16, 16, 4, 2, fake_ranks)
    tokens = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    assert work_of_layer(layer, tokens) is None
    ours, compilation = rewrite(*dynamo_graphs(layer, tokens), MegaMoEConfig(equal_tokens=True))
    assert [one.plan.num_chunks for one in ours.experts] == [2]
    assert not compilation.dropped
    (region,) = compilation.regions
    assert "decided without predicted times: RuntimeError: of torch" in region.remarks


def test_work_of_a_layer_whose_weights_are_sharded_is_read(fake_ranks):
    """As under tensor parallelism: the layer is given a mesh, by itself and inside of tensors."""
    mesh = DeviceMesh("cpu", torch.arange(fake_ranks.size()))
    sharded = nn.Parameter(DTensor.from_local(torch.ones(4, 4), mesh, [Shard(1)], run_check=False))

    def program(x, w):
        x = DTensor.from_local(x.sin(), mesh, [Replicate()])
        return (x @ w).to_local().sum()

    work = work_of(program, ROWS, sharded)
    (product,) = (w for w in work.forward if w.operations)
    assert product.operations == 2 * 8 * 4 * 4 and work.backward
    assert [work.forward[need].name for need in product.needs] == ["sin"]


def test_the_backward_of_a_checkpoint_computes_again_all_but_what_exchanges_received():
    splits, group = [8], one_rank_group()

    def program(x, w):
        sent = c10d.all_to_all_single(x.sin() @ w, splits, splits, group)
        return (c10d.wait_tensor(sent).cos() @ w).exp().sum()

    graph = graph_of(program, ROWS, WEIGHT)
    replayed = Replayed(nodes=(), exchanges={})
    kept, again = (
        read_work(TracedNodes(graph, is_recomputed=r), replayed, EMPTY) for r in (False, True)
    )
    assert [w.name for w in again.forward] == [w.name for w in kept.forward]
    products = [[w.operations for w in work.backward if w.operations] for work in (kept, again)]
    assert len(products[1]) > len(products[0])
    assert [w.exchange for w in again.backward if w.link_bytes] == [
        w.exchange for w in kept.backward if w.link_bytes
    ]


def test_layers_inside_a_checkpoint_are_priced_with_what_it_computes_again(fake_ranks):
    """Not with a policy of the checkpoint's own, which says what is kept."""
    layer = GroupedExperts(16, 16, 4, 2, fake_ranks)
    tokens = torch.randn(32, 16, dtype=torch.bfloat16, requires_grad=True)
    keeps = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    runs = {
        False: layer,
        True: lambda x: checkpoint(layer, x, use_reentrant=False),
        None: lambda x: checkpoint(layer, x, use_reentrant=False, context_fn=keeps),
    }
    predicted = {}
    for name, run in runs.items():
        config = MegaMoEConfig(equal_tokens=True, chunks="auto", hardware="h100")
        _, compilation = rewrite(outer_graph(run, tokens), config)
        (region,) = compilation.regions
        predicted[name] = region.decision["as_it_is_us"]
    assert predicted[True] > predicted[False] == predicted[None]


def outer_graph(program, x):
    return dynamo_graphs(program, x)[0]


def test_a_sum_over_ranks_is_among_those_of_its_group(fake_ranks):
    """An all-reduce does not say how many these are: half of it is sent to the other one, twice."""
    name = fake_ranks.group_name
    work = work_of(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", name)), ROWS.detach())
    assert [w.link_bytes for w in work.forward if w.exchange] == [2 * ROWS.nbytes / 2]
