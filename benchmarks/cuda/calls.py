"""What generated code does: calls, and the tensors they are given and make.

Contract
    Sizes are expressions of the code's own symbols. A tensor is known by the storage it lies in,
    and by what it is a view of there: storages are reused.
"""

from __future__ import annotations

import ast
import enum
from dataclasses import dataclass, field


class Kind(enum.Enum):
    """What a call is."""

    TRITON = "Triton kernel"
    EXTERN = "operator of torch or of ours"
    LAUNCH = "collective, launched"
    WAIT = "wait"
    COPY = "copy to host memory or back, launched"
    COPY_WAIT = "wait for a copy"
    TO_HOST = "blocking copy to the host"
    ITEM = "integer of a tensor, by itself"
    INTEGERS = "integers of a tensor, by one call"
    PART = "part that a CUDA graph captures; its own calls follow"
    FREE = "name given up"
    RETURN = "result"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor that a call is given or makes: where it lies, and its size where it is said."""

    storage: str
    shape: tuple[str, ...] | None = None
    itemsize: int = 0
    reused_as: str = ""
    """Name of the buffer that the storage was given to after another, "" for its first."""

    @property
    def buffer(self) -> str:
        """Return the name of the buffer it is, or is a view of."""
        return self.reused_as or self.storage


@dataclass(kw_only=True, slots=True)
class Call:
    """One thing the code does."""

    kind: Kind
    name: str
    reads: list[Tensor] = field(default_factory=list)
    writes: list[Tensor] = field(default_factory=list)
    numels: list[str] = field(default_factory=list)
    """Of a Triton kernel of Inductor's: elements it is run for, by dimension."""
    symbols: list[str] = field(default_factory=list)
    """Other arguments of a Triton kernel that are numbers."""
    integers: list[str] = field(default_factory=list)
    """Names of the integers that are taken out of a tensor."""
    splits: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Rows received and sent, of an all-to-all."""
    group: str = ""
    """Name of the process group of an all-to-all."""
    part: int | None = None
    """Number of the captured part that it is in, None outside of these."""
    line: int = 0


@dataclass(kw_only=True, slots=True)
class Wrapper:
    """The code of one graph."""

    calls: list[Call]
    inputs: tuple[str, ...]
    tensors: frozenset[str]
    """Those of the inputs that are tensors."""
    results: tuple[str, ...]
    """Buffers that it returns; "" for what is no tensor."""
    equations: list[tuple[str, str]]
    """Expressions that the code asserts to be equal."""
    num_range_checks: dict[str, int]
    """Symbol -> how often it is compared with a constant."""
    num_triton_sources: int
    """Distinct Triton kernels."""
    allocated_again: tuple[str, ...] = ()
    """Buffers that more than one statement allocates, of one run."""
    named_sizes: dict[str, str] = field(default_factory=dict)
    """Symbol -> the sum that the code gives it."""
    lists_given: tuple[str, ...] = ()
    """Lists of tensors that captured parts are given, which torch cannot record."""


def names_in(expression: str) -> set[str]:
    """Return the names in an expression."""
    return {n.id for n in ast.walk(ast.parse(expression, mode="eval")) if isinstance(n, ast.Name)}
