"""mixture-of-experts, st-moe-pytorch and soft-moe-pytorch, by one author."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.acceptance.subject import Call, Case, Subject

WIDTH = 16
NUM_EXPERTS = 4


def _subject(model: nn.Module, rank: int, sizes: tuple[int, ...] = (32, 48)) -> Subject:
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = (torch.randn(2, n, WIDTH, generator=generator) for n in sizes)
    return Subject(model=model, calls=[Call(args=(x,)) for x in tokens])


def _one_level(rank: int) -> Subject:
    from mixture_of_experts import MoE

    torch.manual_seed(rank)
    return _subject(MoE(dim=WIDTH, num_experts=NUM_EXPERTS), rank)


def _two_levels(rank: int) -> Subject:
    from mixture_of_experts import HeirarchicalMoE

    torch.manual_seed(rank)
    return _subject(HeirarchicalMoE(dim=WIDTH, num_experts=(2, 2)), rank)


def _sparse(rank: int) -> Subject:
    from st_moe_pytorch import MoE, SparseMoEBlock

    torch.manual_seed(rank)
    experts = MoE(dim=WIDTH, num_experts=NUM_EXPERTS)
    return _subject(SparseMoEBlock(experts, add_ff_before=True), rank)


def _gathered(rank: int) -> Subject:
    from st_moe_pytorch import MoE

    torch.manual_seed(0)
    return _subject(MoE(dim=WIDTH, num_experts=NUM_EXPERTS, is_distributed=True), rank)


def _soft(rank: int) -> Subject:
    from soft_moe_pytorch import SoftMoE

    torch.manual_seed(rank)
    return _subject(SoftMoE(dim=WIDTH, seq_len=32, num_experts=NUM_EXPERTS), rank)


def _soft_dynamic(rank: int) -> Subject:
    from soft_moe_pytorch import DynamicSlotsSoftMoE

    torch.manual_seed(rank)
    return _subject(DynamicSlotsSoftMoE(dim=WIDTH, num_experts=NUM_EXPERTS), rank)


CASES = (
    Case(name="MoE", package="mixture-of-experts", build=_one_level),
    Case(name="HeirarchicalMoE", package="mixture-of-experts", build=_two_levels),
    Case(name="SparseMoEBlock", package="st-moe-pytorch", build=_sparse),
    Case(name="MoE, tokens gathered", package="st-moe-pytorch", build=_gathered, num_ranks=2),
    Case(name="SoftMoE", package="soft-moe-pytorch", build=_soft),
    Case(name="DynamicSlotsSoftMoE", package="soft-moe-pytorch", build=_soft_dynamic),
)
