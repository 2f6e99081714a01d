"""torchtitan's DeepSeek-V3 with FlexAttention: its blocks, chunked, equal eager bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from torchtitan.models.attention import get_causal_mask_mod, get_document_mask_mod
from torchtitan.models.deepseek_v3.model.model import TransformerBlock, precompute_freqs_cis
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp

from moe_compile.report.process_report import REPORT
from tests.integration.titan_jobs import OURS, STEPS, STOCK, train
from tests.slow_parameters import exhaustive_but
from torchtitan_integration.flavors import debug_deepseek_v3
from torchtitan_integration.layout import KEYS

SEQUENCE, BATCH, END = 256, 2, 0
FLEX = {"attn_type": "flex", "attn_mask_type": "block_causal"}


class Layers:
    """What torchtitan lays out of a model."""

    def __init__(self, block):
        self.layers = {"0": block}


def build():
    args = debug_deepseek_v3(dim=64, inter_dim=64, moe_inter_dim=32, **FLEX)
    args.max_seq_len, args.moe_impl = SEQUENCE, "standard"
    torch.manual_seed(0)
    block = TransformerBlock(args.n_dense_layers, args)
    with torch.no_grad():
        block.init_weights(torch.device("cpu"))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("ep",))
    apply_moe_ep_tp(Layers(block), tp_mesh=None, ep_mesh=mesh, etp_mesh=None, ep_etp_mesh=None)
    return block, precompute_freqs_cis(args)


def documents(rank, sequences=slice(None)):
    """Return a mask as torchtitan makes it: causal, and within documents of 50 tokens or so."""
    tokens = torch.randint(0, 50, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(rank))
    tokens = tokens[sequences]
    mask = and_masks(get_causal_mask_mod(), get_document_mask_mod(tokens, END))
    return create_block_mask(mask, len(tokens), None, SEQUENCE, SEQUENCE, device="cpu")


def step_of(block, output, x):
    """Return the output of a step of `block`, and all gradients, by name."""
    tensors = {"output": output.detach(), "input": x.grad}
    for name, parameter in block.named_parameters():
        found = parameter.grad
        tensors[name] = found.to_local() if isinstance(found, DTensor) else found
    return tensors


def run(rank, chunks, parts=1):
    """Return output and gradients: eager for 0 chunks, one part of the batch after another."""
    torch._dynamo.reset()
    block, rotations = build()
    forward = block.forward
    if chunks:
        options = {"chunks": chunks, "codegen": "fx", "strict": True, "batch_parts": parts}
        options["equal_tokens"] = parts > 1  # another plan of one place needs other options
        options = {f"megamoe.{name}": value for name, value in options.items()}
        forward = torch.compile(forward, backend="megamoe", fullgraph=True, options=options)
    own = torch.Generator().manual_seed(10 + rank)
    x, gradient = (torch.randn(BATCH, SEQUENCE, 64, generator=own) for _ in range(2))
    x.requires_grad_()
    outputs = []
    for i in range(1 if chunks else parts):
        own = slice(None) if chunks else slice(i * BATCH // parts, (i + 1) * BATCH // parts)
        outputs.append(forward(x[own], rotations, documents(rank, own)))
        outputs[-1].backward(gradient[own])
    return step_of(block, torch.cat(outputs), x)


def both_ways(rank, chunks, parts=1):
    """Return the number of tensors, the names of those that differ, and what was chunked."""
    eager, before = run(rank, 0, parts), len(REPORT.compilations)
    compiled = run(rank, chunks, parts)
    differ = [name for name in eager if not torch.equal(eager[name], compiled[name])]
    return len(eager), differ, verdicts_since(before)


def verdicts_since(before):
    """Return what became of each region of all but the first `before` compilations."""
    regions = [region for c in REPORT.compilations[before:] for region in c.regions]
    return [(region.verdict, region.num_chunks) for region in regions]


@pytest.mark.parametrize("chunks", exhaustive_but([2], [1, 2, 4]))
def test_a_block_with_flex_attention_is_chunked_and_changes_no_bit(two_ranks, chunks):
    for number, differ, regions in two_ranks.run(both_ways, chunks):
        assert number > 15 and differ == []
        assert regions == [("left whole" if chunks == 1 else "chunked", chunks)]


@pytest.mark.slow
def test_parts_of_the_batch_attend_within_their_own_documents(two_ranks):
    for number, differ, regions in two_ranks.run(both_ways, 1, 2):
        assert number > 15 and differ == []
        assert regions == 2 * [("left whole", 1)]


CHECKPOINTING = [
    {KEYS["checkpointing"]: "none"},
    {KEYS["checkpointing"]: "selective", KEYS["selective"]: "op"},
    {KEYS["checkpointing"]: "full"},
]


@pytest.mark.parametrize(
    "checkpointing",
    exhaustive_but(CHECKPOINTING[1:2], CHECKPOINTING),
    ids=lambda settings: settings[KEYS["checkpointing"]],
)
def test_a_flavor_with_flex_attention_trains_to_torchtitans_losses(
    kept_two_ranks, tmp_path, checkpointing
):
    flex = {"model.flavor": "tiny_flex", "training.seq_len": 128}
    stock = {**STOCK, **CHECKPOINTING[0]}
    theirs = train(kept_two_ranks, 2, tmp_path / "stock", flex, stock)
    ours = train(kept_two_ranks, 2, tmp_path / "ours", flex, checkpointing, OURS)
    assert sorted(ours[0].steps) == list(range(1, STEPS + 1))
    for rank, other in zip(ours, theirs, strict=True):
        assert rank.steps == other.steps
        assert (set(rank.verdicts), set(rank.chunks)) == ({"chunked"}, {2})
