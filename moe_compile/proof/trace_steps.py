"""The steps of a region's body, as the row proof reads them.

Contract
    Tensors are fake, and told apart by identity.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from moe_compile.dims.record import Operator


@dataclass(frozen=True, slots=True)
class Produced:
    """`node` produced `tensor`: an input of the body, or the result of one of its nodes.

    For a combine, the rows it sends.
    """

    node: fx.Node
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class HostRead:
    """The host read `tensor` at `node`, as the size `value_of(node)`."""

    node: fx.Node
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class NotFollowed:
    """`node` filled `tensor` from its `inputs`."""

    node: fx.Node
    tensor: torch.Tensor
    inputs: tuple[torch.Tensor, ...]
    read: tuple[tuple[fx.Node, Any], ...] = ()
    """Node -> the value `node` reads of it."""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A dispatch happened, and brought `tensor`: sizes that it needs are known."""

    node: fx.Node
    tensor: torch.Tensor


@dataclass(frozen=True, slots=True)
class GradientOf:
    """`tensor` is the gradient that a function written by hand is given of its result `result`."""

    node: fx.Node
    tensor: torch.Tensor
    result: torch.Tensor


@dataclass(frozen=True, slots=True)
class GradientMade:
    """`tensor` is the gradient that a function written by hand gives its argument `argument`."""

    node: fx.Node
    tensor: torch.Tensor
    argument: torch.Tensor


Step = Operator | Produced | HostRead | NotFollowed | Dispatched | GradientOf | GradientMade


@dataclass(frozen=True, slots=True)
class Trace:
    """The steps of one body, in order."""

    inputs: tuple[Produced, ...]
    steps: tuple[Step, ...]
    made_stable: frozenset[fx.Node] = frozenset()
    """Sorts of the body that are taken for stable ones, and are not."""
