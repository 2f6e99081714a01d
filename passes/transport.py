"""The emission of a region's collective: by torch's functional collectives, or in another way.

Contract
    A transport emits launches and waits of `_c10d_functional`, and operators with a gradient: so
    autograd derives the way back, and the scheduler and the checks see all messages.
    Its refusals follow from facts that all ranks share; the plan holds the exchanges it carries.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.edit import Emitter
from moe_compile.graph.query import (
    C10D,
    group_name,
    input_splits,
    is_all_gather,
    is_all_to_all,
    output_splits,
    tensor_of,
)
from moe_compile.hardware.links import leaving_share
from moe_compile.journal.entries import Verdict

FUNCTIONAL: Final = "functional"


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective of a region, in the terms of torch's functional collectives."""

    kind: str
    """`all_to_all`, `all_gather` or `reduce_scatter`, which sums."""
    sent: fx.Node
    """Rows, `[R, D]` unless `example` says otherwise."""
    example: torch.Tensor | None
    """Fake tensor of such rows, perhaps of another number of rows; None where none is known."""
    received: tuple[Any, ...]
    """Rows of an all-to-all from each rank, numbers or nodes; () if as many from all."""
    given: tuple[Any, ...]
    """Rows of an all-to-all to each rank."""
    group: str
    num_ranks: int

    @classmethod
    def of(cls, launch: fx.Node, num_ranks: int, example: torch.Tensor | None) -> Collective:
        """Read a launch among `num_ranks`; `example` is for launches that passes emit."""
        sent = launch.all_input_nodes[0]
        exchanges = is_all_to_all(launch)
        gather = "all_gather" if is_all_gather(launch) else "reduce_scatter"
        return cls(
            kind="all_to_all" if exchanges else gather,
            sent=sent,
            example=example if exchanges else tensor_of(sent),
            received=tuple(output_splits(launch)) if exchanges else (),
            given=tuple(input_splits(launch)) if exchanges else (),
            group=group_name(launch),
            num_ranks=num_ranks,
        )


class Transport(ABC):
    """One way to carry collectives. Subclasses are frozen dataclasses of their settings."""

    name: ClassVar[str]
    numerics: ClassVar[str] = "exact"
    """The largest change it may make, in the words of the option `numerics`."""
    bound: ClassVar[str] = ""
    """The size of that change, where it is not "exact"; a sentence of the report."""

    @abstractmethod
    def needs(self, collective: Collective, config: MegaMoEConfig) -> Verdict | None:
        """Return a verdict on `collective.sent` if it cannot carry that, None if it can."""

    @abstractmethod
    def emit(self, early: Emitter, late: Emitter, collective: Collective) -> fx.Node:
        """Emit launches `early`, waits and all that follows `late`; return the tensor received."""

    @abstractmethod
    def bytes(self, collective: Collective, payload: float) -> float:
        """Return the bytes that leave a rank, for a `payload` of the larger side."""


@dataclass(frozen=True)
class Functional(Transport):
    """Torch's own collectives."""

    name: ClassVar[str] = FUNCTIONAL

    def needs(self, collective: Collective, config: MegaMoEConfig) -> None:
        """Return None: all collectives can be carried."""
        del collective, config

    def emit(self, early: Emitter, late: Emitter, collective: Collective) -> fx.Node:
        """Emit one launch and its wait."""
        sent, ranks, group = collective.sent, collective.num_ranks, collective.group
        if collective.kind == "all_to_all":
            splits = list(collective.received), list(collective.given)
            launch = early.call(C10D.all_to_all_single, sent, *splits, group)
        elif collective.kind == "all_gather":
            launch = early.call(C10D.all_gather_into_tensor, sent, ranks, group)
        else:
            launch = early.call(C10D.reduce_scatter_tensor, sent, "sum", ranks, group)
        return late.call(C10D.wait_tensor, launch)

    def bytes(self, collective: Collective, payload: float) -> float:
        """Return the payload less a rank's own part."""
        return payload * leaving_share(collective.num_ranks)
