"""What is run: a module with its tokens, and what one step of it must compute.

A layer has one module for all variants, compared with its own eager step. A block has a module for
every plan, compared with the whole block on one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.link.block import Block, Stack, part_of_rank, replicated_names
from benchmarks.link.cases import BlockCase, Case, Plan
from benchmarks.link.layer import MoELayer
from benchmarks.link.whole_block import make_block, run_reference

DTYPE: Final = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Values:
    """What a step computed, to compare ways of computing it."""

    out: torch.Tensor
    input_grad: torch.Tensor
    weight_grads: tuple[torch.Tensor, ...]

    def same_bits(self, other: Values) -> bool:
        """Whether all of both are equal bit for bit."""
        pairs = zip(self._all(), other._all(), strict=True)
        return all(torch.equal(ours, theirs) for ours, theirs in pairs)

    def _all(self) -> tuple[torch.Tensor, ...]:
        return self.out, self.input_grad, *self.weight_grads


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A module, this rank's tokens and the gradient of its output."""

    module: nn.Module
    tokens: torch.Tensor
    grad: torch.Tensor
    replicated: frozenset[str] = frozenset()
    """Parameters whose gradient is the sum of all ranks'."""
    expected: Values | None = None
    """None: what the module computes when run eagerly."""


class Subjects(Protocol):
    """Makes the module of each plan, once."""

    def of(self, plan: Plan | None) -> Subject:
        """Return the subject of a plan."""


def subjects_of(case: Case, group: dist.ProcessGroup) -> Subjects:
    """Return what `case` measures, over `group`."""
    return BlockSubjects(case, group) if isinstance(case, BlockCase) else OneLayer(case, group)


class OneLayer:
    """A routed layer; there is one way to divide it."""

    def __init__(self, case: Case, group: dist.ProcessGroup) -> None:
        """Make the layer and this rank's tokens, the same on every run."""
        generator = torch.Generator().manual_seed(100 + dist.get_rank())
        shape = (case.tokens, case.width)
        tokens, grad = (torch.randn(*shape, generator=generator).to(DTYPE) for _ in range(2))
        self._subject = Subject(
            module=MoELayer(case, group), tokens=tokens.requires_grad_(), grad=grad
        )

    def of(self, plan: Plan | None) -> Subject:
        """Return the layer."""
        assert plan is None
        return self._subject


class BlockSubjects:
    """A block in every plan: the weights of one seed, each rank's part of them."""

    def __init__(
        self, case: BlockCase, group: dist.ProcessGroup, dtype: torch.dtype = DTYPE
    ) -> None:
        """Make the whole block and run its reference, in float32."""
        self._case, self._group = case, group
        self._whole = make_block(case, dtype)
        self._reference = run_reference(case, self._whole, torch.float32)
        self._subjects: dict[Plan, Subject] = {}

    def of(self, plan: Plan | None) -> Subject:
        """Return the block divided as `plan` says."""
        assert plan is not None
        if plan not in self._subjects:
            self._subjects[plan] = self._divided(plan)
        return self._subjects[plan]

    def _divided(self, plan: Plan) -> Subject:
        case, rank = self._case, dist.get_rank()
        blocks = [Block(case, self._group, plan) for _ in range(case.blocks)]
        for block in blocks:
            weights = part_of_rank(self._whole.weights, case, plan, rank)
            block.load_state_dict({k: w.clone() for k, w in weights.items()}, assign=True)
        grads = [part_of_rank(g, case, plan, rank) for g in self._reference.weight_grads]
        along = 1 if plan.attention == "dp" else 0
        tokens, grad, out, input_grad = (
            x.chunk(case.num_ranks, along)[rank].clone()
            for x in (
                self._whole.tokens,
                self._whole.grad,
                self._reference.out,
                self._reference.input_grad,
            )
        )
        names = [name for name, _ in blocks[0].named_parameters()]
        replicated = replicated_names(plan)
        places = [f"blocks.{i}." for i in range(case.blocks)] if case.blocks > 1 else [""]
        module = Stack(blocks) if case.blocks > 1 else blocks[0]
        return Subject(
            module=module,
            tokens=tokens.requires_grad_(),
            grad=grad,
            replicated=frozenset(place + name for place in places for name in replicated),
            expected=Values(out, input_grad, tuple(g[name] for g in grads for name in names)),
        )
