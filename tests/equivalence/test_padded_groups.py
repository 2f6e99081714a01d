"""torchtitan's layer, whose groups are padded, with each chunk's weights alone: eager's bits."""

import importlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moe_compile.testing.rank_pool import RankPool

WIDTH, HIDDEN, EXPERTS, TOP_K = 64, 48, 8, 2


def layer_on(rank):
    """Return the layer of a rank: routers are equal, experts its own."""
    torch.manual_seed(rank)
    titan_layer = importlib.import_module("tests.proof.titan_layer")  # where torchtitan is
    layer = titan_layer.TitanExperts(WIDTH, HIDDEN, EXPERTS, TOP_K, dist.group.WORLD, True)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        layer.router.copy_(torch.randn(WIDTH, EXPERTS, generator=generator))
    return layer.to(torch.bfloat16)


def computed(function, layer, x):
    """Return the output and all gradients of a step."""
    mine = x.clone().requires_grad_()
    output = function(mine)
    output.backward(torch.ones_like(output) + 0.5 * output.detach())
    gradients = [p.grad for p in layer.parameters()]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    return [output.detach(), mine.grad, *local]


def layers_on(rank, indices, **options):
    """Return the layer as it is, and compiled; the indices of rows are made by `indices`."""
    kernel = importlib.import_module("torchtitan.models.moe.utils")
    titan_layer = importlib.import_module("tests.proof.titan_layer")
    kernel.generate_permute_indices = getattr(titan_layer, indices)
    torch._dynamo.reset()
    eager, other = layer_on(rank), layer_on(rank)
    options = {f"megamoe.{n}": v for n, v in {"codegen": "fx", "strict": True, **options}.items()}
    compiled = torch.compile(other, backend="megamoe", fullgraph=True, options=options)
    return eager, other, compiled


def run(rank, indices, chunks, tokens, edges):
    """Return which tensors of a step are those of eager."""
    eager, other, compiled = layers_on(rank, indices, chunks=chunks, chunk_edges=edges)
    x = torch.randn(tokens[rank], WIDTH).to(torch.bfloat16)
    both = zip(computed(eager, eager, x), computed(compiled, other, x), strict=True)
    return [torch.equal(a, b) for a, b in both]


def in_parts(rank, tokens):
    """Return which tensors of a step in two parts are those of gradient accumulation over them.

    And whether the indices that the layer keeps, which a kernel writes, are those of the whole.
    """
    asked = {"batch_parts": 2, "chunks": 1, "equal_tokens": True}
    eager, other, compiled = layers_on(rank, "permute_indices_by_kernel", **asked)
    x = torch.randn(tokens, WIDTH).to(torch.bfloat16)
    first, last = (computed(eager, eager, part) for part in x.chunk(2))
    expected = [torch.cat((mine, its)) for mine, its in zip(first[:2], last[:2], strict=True)]
    both = zip([*expected, *last[2:]], computed(compiled, other, x), strict=True)
    eager(x)
    kept = (layer.dispatcher.permuted_indices for layer in (eager, other))
    return [*(torch.equal(a, b) for a, b in both), torch.equal(*kept)]


@pytest.fixture(scope="module")
def pool():
    pytest.importorskip("torchtitan")
    with RankPool(2) as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize(
    ("indices", "chunks", "tokens", "edges"),
    [
        ("permute_indices", 2, (2048, 1500), "even"),
        ("permute_indices", 4, (700, 5), "even"),
        ("permute_indices", 3, (2048, 1500), "even"),
        ("permute_indices", 2, (0, 9), "even"),
        ("permute_indices_by_kernel", 4, (2048, 1500), "even"),
        ("permute_indices", 2, (2048, 1500), "load"),
        ("permute_indices", 3, (700, 5), "load"),
        ("permute_indices", 2, (0, 9), "load"),
    ],
)
def test_a_chunk_with_its_own_weights_alone_has_eagers_bits(pool, indices, chunks, tokens, edges):
    """So has one whose experts follow from their rows."""
    for same in pool.run(run, indices, chunks, tokens, edges):
        assert all(same), same


@pytest.mark.slow
def test_parts_of_the_batch_keep_the_indices_that_a_kernel_writes_of_the_whole(pool):
    for same in pool.run(in_parts, 64):
        assert all(same), same
