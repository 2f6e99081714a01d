"""Sums per token as one operator: bitwise where none rounds, in torchtitan's layer by the bound."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from moe_compile.report.process_report import REPORT
from moe_compile.testing.equivalence import differing_tensors
from moe_compile.testing.rank_pool import RankPool
from tests.dispatch_layers import (
    ByInverse,
    InOrder,
    InOrderWeighted,
    IntoEmpty,
    SharedInOrder,
    SharedInOrderWeighted,
    SharedOut,
    WeightedInOrder,
)
from tests.equivalence.test_layers import build
from tests.equivalence.test_sums_on_nodes import whole, whole_pairs
from tests.equivalence.test_two_hops import a_case, check
from tests.layers import GroupedExperts
from tests.slow_parameters import slow_but

OPTIONS = {"megamoe.numerics": "bounded", "megamoe.strict": True, "megamoe.codegen": "fx"}
CASES = (
    (InOrderWeighted, 2),
    (InOrderWeighted, 1),
    (InOrder, 2),
    (IntoEmpty, 1),
    (WeightedInOrder, 3),
    (ByInverse, 2),
    (SharedInOrder, 2),
    (SharedInOrderWeighted, 2),
)


def differing(rank, case, style, chunks):
    torch._dynamo.reset()
    options = {**OPTIONS, "megamoe.chunks": chunks}
    layer = whole(style)
    return differing_tensors(lambda: build(case, layer), whole_pairs(case, rank), options)


@pytest.mark.parametrize(("style", "chunks"), slow_but(CASES[:1], CASES))
def test_sums_that_do_not_round_are_equal(two_ranks, style, chunks):
    """Output, gradients of tokens, of weights of rows and of experts; other tokens in each step."""
    dtype = torch.float32 if issubclass(style, InOrderWeighted) else torch.float64
    tokens = ((9, 14), (16, 3), (4, 0))
    if (
        style is IntoEmpty
    ):  # eagerly a rank without rows writes none, and goes back without a message
        tokens = tokens[:2]
    elif issubclass(style, SharedOut):
        tokens = ((8, 8),)
    case = a_case(GroupedExperts, *tokens, dtype=dtype, hidden=32, top_k=3, num_experts=8)
    check(two_ranks.run(differing, case, style, chunks))


# --- torchtitan's layer ------------------------------------------------------------------------

WIDTH, TOP_K, EXPERTS = 64, 4, 8
EPS = torch.finfo(torch.float32).eps


class Products(TorchFunctionMode):
    """Keeps what batched products are given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.bmm:
            self.given.append([one.detach().double() for one in args])
        return function(*args, **(kwargs or {}))


def titan_layer():
    """Return torchtitan's layer of a rank: routers are equal, experts its own."""
    importlib.import_module("torchtitan_integration.cpu_launcher").prepare_torch()
    moe = importlib.import_module("torchtitan.models.moe")
    parallel = importlib.import_module("torchtitan.distributed.expert_parallel")
    torch.manual_seed(0)
    settings = moe.MoEArgs(
        num_experts=EXPERTS, num_shared_experts=0, top_k=TOP_K, score_before_experts=False
    )
    layer = moe.MoE(settings, WIDTH, 48)
    with torch.no_grad():
        layer.init_weights(0.5, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    parallel.ExpertParallel()._apply(layer.experts, mesh)
    return layer.to(torch.bfloat16)


def step(function, layer, x):
    """Return the output and all gradients of a step, by name."""
    mine = x.clone().requires_grad_()
    output = function(mine)
    output.backward(torch.ones_like(output) + 0.5 * x)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    local = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return {"output": output.detach(), "tokens": mine.grad, **local}


def titan_step(rank, chunks):
    """Return what is wrong with torchtitan's layer, compiled, beside eager and float64."""
    x = torch.randn(1, (40, 25)[rank], WIDTH, generator=torch.Generator().manual_seed(rank))
    x, eager, other = x.to(torch.bfloat16), titan_layer(), titan_layer()
    torch._dynamo.reset()
    options = {**OPTIONS, "megamoe.chunks": chunks}
    compiled = torch.compile(other, backend="megamoe", fullgraph=True, options=options)
    with Products() as products:
        expected = step(eager, eager, x)
    found = step(compiled, other, x)
    (scores, rows), wrong = products.given[0], []
    exact, most = torch.bmm(scores, rows)[:, 0], torch.bmm(scores.abs(), rows.abs())[:, 0]
    error = (found["output"][0].double() - exact).abs()
    rounded = torch.finfo(torch.bfloat16).eps / 2 * found["output"][0].double().abs()
    if not (error <= TOP_K * EPS * most + 1.01 * rounded).all():
        wrong.append("output is beyond the bound")
    for name, tensor in expected.items():
        is_rows = name.startswith("experts.")
        close = torch.equal if is_rows else lambda a, b: torch.allclose(a, b, rtol=2e-2, atol=2e-2)
        if not close(found[name], tensor):
            wrong.append(name)
    said = [line for one in REPORT.compilations for line in one.rewrites]
    if not said or not all("applied to the weighted sums" in line for line in said):
        wrong.append(f"it says {said}")
    return wrong


@pytest.fixture(scope="module")
def titan_ranks():
    pytest.importorskip("torchtitan")
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("chunks", slow_but([2], [1, 2]))
def test_torchtitans_layer_is_within_the_bound(titan_ranks, chunks):
    """Output beside float64, gradients of experts bit for bit, of router and tokens closely."""
    check(titan_ranks.run(titan_step, chunks))
