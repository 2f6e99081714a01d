"""What is computed and sent around one region, as amounts: operations, bytes, messages.

Contract
    Amounts hold for any hardware: `planning/rates.py` turns them into time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

MEMORY_BACKWARD: Final = 1.5
"""Bytes of the backward of an operator over its forward's: three passes over rows for two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """One operator: what it takes, forward."""

    name: str
    needs: tuple[int, ...] = ()
    """Indices of earlier work whose results it reads."""
    operations: float = 0.0
    """Floating-point operations of a matrix product."""
    nbytes: float = 0.0
    """Read and written, weights excluded."""
    weight_bytes: float = 0.0
    """Of weights read; where above 0, backward makes their gradient."""
    link_bytes: float = 0.0
    """That leave a rank; above 0 for exchanges alone."""
    exchange: str = ""
    """`dispatch` or `combine` of the region at hand, `other` of another; "" for compute."""
    is_gather: bool = False
    """Whether an exchange is an all-gather or a reduce-scatter, which have a rate of their own."""
    num_kernels: int = 1
    """Launched where the work is done once."""
    backward: float = MEMORY_BACKWARD
    """Backward over forward, weight gradients excluded; 0 where no gradient passes."""
    backward_nbytes: float | None = None
    """Read and written backward, weight gradients excluded; None for `nbytes` x `backward`."""
    backward_kernels: int | None = None
    """Launched backward, weight gradients excluded; None for as many as forward."""
    is_chunked: bool = False
    """Whether each chunk does its part."""
    expert: int | None = None
    """The local expert all of it belongs to: one chunk does it, the others nothing."""
    slices_weights: bool = True
    """Whether a chunk of experts reads its own weights alone."""

    def amounts(self, *, is_backward: bool) -> tuple[float, float, int]:
        """Return operations, bytes and kernels of one phase, those for weights left out."""
        if not is_backward:
            return self.operations, self.nbytes, self.num_kernels
        moved, kernels = self.backward_nbytes, self.backward_kernels
        return (
            self.operations * self.backward,
            self.nbytes * self.backward if moved is None else moved,
            self.num_kernels if kernels is None else kernels,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionWork:
    """All work around one region, in an order that keeps needs."""

    work: tuple[Work, ...]
    num_ranks: int
    num_parts: int
    """Local experts, or KV heads: what chunks are made of."""
    row_bytes: float
    """Bytes of the rows that the region is given; chunks sort and join as many."""
    wire_shares: Mapping[str, float] = field(default_factory=dict)
    """Wire format -> its bytes over those of the model's."""
    imbalance: float = 1.0
    """Rows that the busiest rank receives over those of the mean; work in the region takes so
    much longer."""
    gathered: RegionWork | None = None
    """The same where tokens are gathered instead; its parts are tokens. None where it cannot be."""
    gather_is_bitwise: bool = False
    extra_bytes: float = 0.0
    """Alive at once beside what the region as it is has alive."""

    def by_dispatch(self, dispatch: str) -> RegionWork:
        """Return the work of one `dispatch`: this, or the same with tokens gathered."""
        if dispatch != "all_gather":
            return self
        if self.gathered is None:
            raise ValueError("tokens of this region cannot be gathered")
        return self.gathered

    @property
    def written_bytes(self) -> float:
        """Return about what all work writes forward, and keeps for backward: half of it all."""
        return sum(work.nbytes for work in self.work) / 2.0

    @property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """Return what each work reads."""
        return tuple(work.needs for work in self.work)

    @property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """Return what reads each work."""
        found: list[list[int]] = [[] for _ in self.work]
        for index, work in enumerate(self.work):
            for needed in work.needs:
                found[needed].append(index)
        return tuple(map(tuple, found))
