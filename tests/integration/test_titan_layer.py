"""torchtitan's layer of experts: sums per token in one operator, scores before the last product.

Outputs are beside float64, gradients of experts bit for bit, of router and tokens closely.
"""

import pytest

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe import MoE, MoEArgs

from moe_compile.report.process_report import REPORT
from tests.equivalence import test_apply_scores as before_down
from tests.equivalence.test_token_sums import OPTIONS
from tests.equivalence.test_two_hops import check
from tests.slow_parameters import slow_but

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


def build():
    """Return the layer of a rank: routers are equal, experts its own."""
    torch.manual_seed(0)
    settings = MoEArgs(
        num_experts=EXPERTS, num_shared_experts=0, top_k=TOP_K, score_before_experts=False
    )
    layer = MoE(settings, WIDTH, 48)
    with torch.no_grad():
        layer.init_weights(0.5, torch.device("cpu"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    ExpertParallel()._apply(layer.experts, mesh)
    return layer.to(torch.bfloat16)


def step(function, layer, x):
    """Return the output and all gradients of a step, by name."""
    mine = x.clone().requires_grad_()
    output = function(mine)
    output.backward(torch.ones_like(output) + 0.5 * x)
    grads = {name: p.grad for name, p in layer.named_parameters()}
    local = {n: g.to_local() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return {"output": output.detach(), "tokens": mine.grad, **local}


def both_ways(rank, options):
    """Return a step's tensors eagerly and compiled, and what eager products were given."""
    x = torch.randn(1, (40, 25)[rank], WIDTH, generator=torch.Generator().manual_seed(rank))
    x, eager, other = x.to(torch.bfloat16), build(), build()
    torch._dynamo.reset()
    compiled = torch.compile(other, backend="megamoe", fullgraph=True, options=options)
    with Products() as products:
        expected = step(eager, eager, x)
    return expected, step(compiled, other, x), products.given


def sums_beyond_the_bound(rank, chunks):
    """Return what is wrong with the compiled layer, beside eager and float64."""
    before = len(REPORT.compilations)
    expected, found, given = both_ways(rank, {**OPTIONS, "megamoe.chunks": chunks})
    (scores, rows), wrong = given[0], []
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
    said = [line for one in REPORT.compilations[before:] for line in one.rewrites]
    if not said or not all("applied to the weighted sums" in line for line in said):
        wrong.append(f"it says {said}")
    return wrong


@pytest.mark.parametrize("chunks", slow_but([2], [1, 2]))
def test_sums_per_token_are_within_the_bound(two_ranks, chunks):
    two_ranks.regroup()  # programs of one place have one plan
    check(two_ranks.run(sums_beyond_the_bound, chunks))


def far_from_eager(rank, options):
    """Return what of the layer, compiled with scores before the last product, is not close."""
    expected, found, _ = both_ways(rank, before_down.asked(options))
    wrong = before_down.unless_applied()
    for name, tensor in expected.items():
        if not (found[name] - tensor).norm() <= 3e-2 * tensor.norm():
            wrong.append(name)
    return wrong


SCORED = ({"chunks": 2, "numerics": "bounded"}, {"chunks": 1})


@pytest.mark.slow
@pytest.mark.parametrize("options", SCORED)
def test_scores_before_the_last_product_stay_close(two_ranks, options):
    two_ranks.regroup()
    check(two_ranks.run(far_from_eager, options))
