"""What a case is: a model of a package, its inputs, and how many ranks run it.

Contract
    `build(rank)` is called in a process of its own for every run, and gives equal subjects each
    time. Inputs of floating point and all parameters have gradients; outputs of floating point
    are what they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """Arguments of one step."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A model and the steps it runs."""

    model: nn.Module
    calls: Sequence[Call]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of the table."""

    name: str
    package: str
    """The distribution whose version is shown."""
    build: Callable[[int], Subject]
    num_ranks: int = 1
    with_inductor: bool = False
    """Whether Inductor's code is compared too; it takes minutes."""
