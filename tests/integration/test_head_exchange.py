"""Attention divided by Ulysses: its values and gradients, and the elements that travel for them."""

import contextlib
import functools
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("torchtitan", reason="pip install megamoe[titan]")

from torchtitan.models.deepseek_v3 import DeepSeekV3ModelArgs
from torchtitan.models.deepseek_v3.model.model import Attention, precompute_freqs_cis

from torchtitan_integration.ulysses import LatentUlysses, Ulysses, gathers_latent

BATCH, SIZE = 2, 8


class Causal(nn.Module):
    """Called as torchtitan's attention is."""

    def forward(self, q, k, v, *, scale=None, enable_gqa=True):
        return F.scaled_dot_product_attention(
            q, k, v, scale=scale, is_causal=True, enable_gqa=enable_gqa
        )


def latent_attention():
    sizes = {"dim": 16, "n_heads": 4, "max_seq_len": 16, "original_seq_len": 16}
    latent = {"kv_lora_rank": 6, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
    args = DeepSeekV3ModelArgs(**sizes, **latent)
    attention = Attention(args)
    attention.inner_attention = Causal()
    return attention, precompute_freqs_cis(args)


@functools.cache
def mesh_of_first(ranks):
    group = dist.new_group(list(range(ranks)))
    return group if dist.get_rank() >= ranks else DeviceMesh.from_group(group, "cpu")


def differentiated(function, inputs, weights):
    """Return the result and the gradients of its weighted sum."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    result = function(*inputs)
    return [result.detach(), *torch.autograd.grad((result * weights).sum(), inputs)]


def attend(rank, ranks, heads, kv_heads):
    """Return what this rank has of the result and of gradients, and what it should have."""
    mesh = mesh_of_first(ranks)
    if rank >= ranks:
        return []
    torch.manual_seed(0)
    counts = (heads, kv_heads, kv_heads, heads)  # the last: weights of the result
    *qkv, weights = (torch.randn(BATCH, n, 24, SIZE, dtype=torch.float64) for n in counts)
    whole = differentiated(Causal(), qkv, weights)

    def part(x):
        return x.chunk(ranks, 2)[rank]

    divided = parallelize_module(Causal(), mesh, Ulysses())
    ours = differentiated(divided, map(part, qkv), part(weights))
    return list(zip(ours, map(part, whole), strict=True))


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"), [(2, 4, 4), (2, 4, 2), (4, 8, 2), (4, 8, 1), (3, 6, 3)]
)
def test_attention_of_the_parts_is_attention_of_the_whole(four_ranks, ranks, heads, kv_heads):
    pairs = [pair for each in four_ranks.run(attend, ranks, heads, kv_heads) for pair in each]
    assert len(pairs) == 4 * ranks
    for ours, whole in pairs:
        torch.testing.assert_close(ours, whole, rtol=0, atol=1e-13)


def attend_latently(rank, ranks):
    mesh = mesh_of_first(ranks)
    if rank >= ranks:
        return []
    torch.manual_seed(0)
    attention, rotations = latent_attention()
    parameters = list(attention.parameters())
    x, weights = torch.randn(2, BATCH, 16, 16)
    positions = torch.arange(16).expand(BATCH, 16)

    def run(x, weights, positions):
        return differentiated(
            lambda x, *_: attention(x, rotations, None, positions), [x], weights
        ) + list(torch.autograd.grad(
            (attention(x, rotations, None, positions) * weights).sum(), parameters
        ))  # fmt: skip

    whole = run(x, weights, positions)
    parallelize_module(attention, mesh, LatentUlysses())
    ours = run(*(x.chunk(ranks, 1)[rank].contiguous() for x in (x, weights, positions)))
    for gradient in ours[2:]:
        dist.all_reduce(gradient, group=mesh.get_group())
    wanted = [x.chunk(ranks, 1)[rank] for x in whole[:2]] + whole[2:]
    return list(zip(ours, wanted, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_gathered_latent_gives_torchtitans_attention(four_ranks, ranks):
    pairs = [pair for each in four_ranks.run(attend_latently, ranks) for pair in each]
    assert len(pairs) == ranks * (2 + 5)
    for ours, whole in pairs:
        torch.testing.assert_close(ours, whole, rtol=1e-5, atol=1e-5)


class Sent(TorchDispatchMode):
    """Counts the elements that this rank sends to others."""

    def __init__(self, ranks):
        super().__init__()
        self.ranks, self.elements = ranks, Fraction(0)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        others = Fraction(self.ranks - 1)
        shares = {
            "_c10d_functional::all_to_all_single": others / self.ranks,
            "_c10d_functional::reduce_scatter_tensor": others / self.ranks,
            "_c10d_functional::all_gather_into_tensor": others,
        }
        if share := shares.get(func.name()):
            self.elements += share * args[0].numel()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def fake_mesh(ranks):
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (ranks,))
    finally:
        dist.destroy_process_group()


def elements_sent(mesh, function, *inputs):
    """Return what is sent in the forward and in the backward."""
    inputs = [x.requires_grad_() for x in inputs]
    with Sent(mesh.size()) as forward:
        result = function(*inputs)
    with Sent(mesh.size()) as backward:
        result.sum().backward()
    return forward.elements, backward.elements


@pytest.mark.parametrize("per_kv_head", [1, 4, 8])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_elements_sent_are_those_of_the_formula(ranks, per_kv_head):
    heads, sequence = 16, 4 * ranks
    with fake_mesh(ranks) as mesh:
        counts = (heads, heads // per_kv_head, heads // per_kv_head)
        qkv = (torch.randn(BATCH, n, sequence // ranks, SIZE) for n in counts)
        sent = elements_sent(mesh, parallelize_module(Causal(), mesh, Ulysses()), *qkv)
    unit = Fraction(2 * BATCH * sequence * heads * SIZE * (ranks - 1), ranks)
    repeated = min(per_kv_head, heads // ranks)
    assert sent == (unit * (1 + Fraction(1, repeated)) / ranks,) * 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_elements_sent_with_a_latent_are_those_of_the_formula(ranks):
    with fake_mesh(ranks) as mesh:
        attention, rotations = latent_attention()
        divided = parallelize_module(attention, mesh, LatentUlysses())
        tokens = 16 // ranks
        positions = torch.arange(tokens).expand(BATCH, tokens)
        x = torch.randn(BATCH, tokens, 16)
        sent = elements_sent(mesh, lambda x: divided(x, rotations, None, positions), x)
    heads, keys, values, latent = 4, 8 + 4, 6, 6 + 4
    per_token = heads * (keys + values) * Fraction(ranks - 1, ranks) + latent * (ranks - 1)
    assert sent == (BATCH * tokens * per_token,) * 2


def test_the_latent_travels_where_it_is_less():
    attention, _ = latent_attention()  # 10 elements for all heads, or 4 times 18
    assert [gathers_latent(attention, ranks) for ranks in (2, 4, 7, 8)] == [True] * 3 + [False]
    assert not gathers_latent(Causal(), 2)
