"""gpt_oss: experts with biases, a sliding window; its blocks, chunked, equal eager bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module
from torch.nn.attention.flex_attention import and_masks, create_block_mask

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from torchtitan.models.attention import get_causal_mask_mod, get_sliding_window_mask_mod
from torchtitan.models.gpt_oss.infra.parallelize import apply_moe_ep_tp
from torchtitan.models.gpt_oss.model.model import TransformerBlock, precompute_rope_cache

from moe_compile.report.process_report import REPORT
from tests.integration.test_flex_attention import Layers, step_of, verdicts_since
from torchtitan_integration.flavors import debug_gpt_oss
from torchtitan_integration.model_parts import run_as_one_graph

SEQUENCE, BATCH, WINDOW, DIM = 256, 2, 32, 64


def build(layer, is_grouped, *, as_one_graph):
    args = debug_gpt_oss(dim=DIM, moe_inter_dim=64, sliding_window_size=WINDOW)
    args.moe_args.use_grouped_mm = is_grouped
    torch.manual_seed(0)
    block = TransformerBlock(layer, args)
    with torch.no_grad():
        block.init_weights(torch.device("cpu"))
        block.moe.router.gate.bias.normal_()
    if as_one_graph:
        run_as_one_graph(block.moe.experts)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    apply_moe_ep_tp(Layers(block), tp_mesh=None, ep_mesh=mesh, ep_etp_mesh=None, etp_enabled=False)
    return block, precompute_rope_cache(args.head_dim, SEQUENCE)


def masks():
    causal, window = get_causal_mask_mod(), get_sliding_window_mask_mod(WINDOW)
    mods = {"basic_mask": causal, "sliding_window_mask": and_masks(causal, window)}
    shape = (1, None, SEQUENCE, SEQUENCE)
    return {name: create_block_mask(mod, *shape, device="cpu") for name, mod in mods.items()}


def run(rank, layer, is_grouped, chunks, as_one_graph):
    """Return output and gradients: eager for 0 chunks."""
    torch._dynamo.reset()
    block, rotations = build(layer, is_grouped, as_one_graph=as_one_graph)
    forward = block.forward
    if chunks:
        options = {"megamoe.chunks": chunks, "megamoe.codegen": "fx", "megamoe.strict": True}
        forward = torch.compile(forward, backend="megamoe", fullgraph=True, options=options)
    own = torch.Generator().manual_seed(10 + rank)
    x, gradient = (torch.randn(BATCH, SEQUENCE, DIM, generator=own) for _ in range(2))
    x.requires_grad_()
    output = forward(x, rotations, masks())
    output.backward(gradient)
    return step_of(block, output, x)


def both_ways(rank, layer, is_grouped, chunks):
    """Return the names of tensors that differ from torchtitan's, and what was chunked."""
    eager = run(rank, layer, is_grouped, 0, False)
    before = len(REPORT.compilations)
    ours = run(rank, layer, is_grouped, chunks, True)
    assert all(tensor.isfinite().all() for tensor in eager.values())
    differ = [name for name in eager if not torch.equal(eager[name], ours[name])]
    return differ, verdicts_since(before)


@pytest.mark.parametrize(
    ("layer", "is_grouped", "chunks"),
    [
        # a sliding window in every second layer
        pytest.param(0, True, 2, marks=pytest.mark.slow),
        pytest.param(1, True, 4, marks=pytest.mark.slow),
        pytest.param(1, True, 1, marks=pytest.mark.exhaustive),
        pytest.param(1, False, 2, marks=pytest.mark.slow),
        pytest.param(0, False, 4, marks=pytest.mark.exhaustive),
    ],
)
def test_a_block_with_biased_experts_changes_no_bit(two_ranks, layer, is_grouped, chunks):
    for differ, regions in two_ranks.run(both_ways, layer, is_grouped, chunks):
        assert differ == []
        assert regions == [("left whole" if chunks == 1 else "chunked", chunks)]


def test_sharded_experts_are_one_graph(fake_ranks):
    """Dynamo does not follow all of Python: how many ranks divide an expert was a product of it."""
    experts = TransformerBlock(0, debug_gpt_oss(dim=DIM, moe_inter_dim=64)).moe.experts
    with torch.no_grad():
        experts.init_weights(0.02)
    run_as_one_graph(experts)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ep", "etp"))
    distribute_module(experts, mesh)
    compiled = torch.compile(experts, backend="eager", fullgraph=True)
    rows, counts = torch.randn(16, DIM), torch.full((experts.num_experts,), 2)
    assert torch.equal(compiled(rows, counts), experts(rows, counts))


def test_experts_run_eagerly_as_torchtitans_do(two_ranks):
    for differ, regions in two_ranks.run(both_ways, 0, True, 0):
        assert differ == regions == []
