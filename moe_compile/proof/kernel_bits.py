"""A model of where last bits of a row's result depend on the row's place in memory.

Contract
    A pass runs the same operators on the same rows in the same order. A model answers whether a
    kernel then gives the same bits for a row, and reports pass the answer on (docs/numerics.md).
    Nothing is refused for it, unless the model in use refuses: tests have a stricter one.
    The answer is "" where a model knows of no bit that changes.

The default model has a simple rule. On a CPU last bits may differ where a row's result does not
fill two vectors, which many kernels take at once, or where several threads share the rows;
for heads and experts with a capacity, on every CPU. The rule may name rows that round alike.
On other devices every row is taken to be computed by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.dims.record import SAME_VALUES
from moe_compile.graph.query import operator_of, tensor_of
from moe_compile.proof.operator_call import Call
from moe_compile.regions.row_domain import Rows, Value

BLOCK_BYTES: Final = 128
"""Two vectors of AVX-512, the longest in use; blocks of shorter ones end where these do
(`vectorized_loop` in ATen/native/cpu/Loops.h)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A possible change of last bits, and its node."""

    node: fx.Node
    detail: str


class RowBits:
    """The findings of a model in one region, whose proof passes it every operator."""

    def __init__(self) -> None:
        """Begin with nothing found."""
        self.found: Finding | None = None

    def said(self) -> str:
        """Return the finding and its operator, "" where there is none."""
        return "" if self.found is None else f"{operator_of(self.found.node)}: {self.found.detail}"

    def note(self, node: fx.Node, detail: str) -> None:
        """Note a possible change of last bits, unless it is ""; the first finding is kept."""
        if detail and self.found is None:
            self.found = Finding(node, detail)

    def follow(self, call: Call, results: Sequence[Value]) -> None:
        """Take in `call` and the proven values of its outputs, before anything is written."""
        computes = call.is_pointwise or call.is_product or call.name == "_grouped_mm"
        if computes and call.name not in SAME_VALUES:
            for tensor, value in zip(call.outputs, results, strict=True):
                self.note(call.node, _of_rows(tensor, value.dim) if isinstance(value, Rows) else "")

    def follow_one_expert(self, call: Call) -> None:
        """Take in beforehand that `call` is only known to read all rows of one expert."""

    def follow_memory(self, call: Call, tensor: torch.Tensor, value: Value) -> None:
        """Take in each tensor that `call` made or wrote, with its new value."""

    def follow_gradient(self, gradient: torch.Tensor) -> None:
        """Take in a gradient that a function written by hand is given."""


@dataclass(frozen=True, slots=True)
class HeadBits:
    """Possible changes of last bits of attention in groups of heads."""

    groups: str = ""
    """In groups of any size."""
    alone: str = ""
    """In groups of one query head."""


class KernelBits:
    """The model of last bits; this one is the default."""

    refuses: bool = False
    """Whether a region is left as it is where the model finds something."""

    def rows(self) -> RowBits:
        """Return the object that follows the operators of one region with its rows."""
        return RowBits()

    def experts(self, whole: Sequence[Call], part: Sequence[Call]) -> str:
        """Return the reason why chunks of experts with a capacity may round differently, or "".

        `whole` and `part` are a node's operators on all experts and on some: the same ones.
        """
        del part
        on_a_cpu = any(is_cpu_float(tensor) for call in whole for tensor in call.outputs)
        return (
            (
                "experts share the vectors and threads of a kernel, which may round differently "
                "for some experts than for all"
            )
            if on_a_cpu
            else ""
        )

    def heads(self, core: fx.Node, operands: Sequence[fx.Node], num_kv_heads: int) -> HeadBits:
        """Return the reasons why groups of heads of the attention `core` may round differently."""
        del core, num_kv_heads
        tensors = map(tensor_of, operands)
        on_a_cpu = any(tensor is not None and is_cpu_float(tensor) for tensor in tensors)
        return HeadBits(
            "heads share the vectors and threads of a kernel, which may round differently for "
            "some heads than for all"
            if on_a_cpu
            else ""
        )


def is_cpu_float(tensor: torch.Tensor) -> bool:
    """Whether a CPU computes the numbers of `tensor`, and rounds them."""
    number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return number and tensor.device.type == "cpu"


def _of_rows(tensor: torch.Tensor, row_dim: int) -> str:
    if not is_cpu_float(tensor):
        return ""
    if torch.get_num_threads() > 1:
        return "several threads share the rows"
    sizes = (*tensor.shape[:row_dim], *tensor.shape[row_dim + 1 :])
    if not all(isinstance(size, int) for size in sizes):
        return "the width of the rows is known at run time only, so rows may not fill whole vectors"
    num_bytes = math.prod(sizes) * tensor.element_size()
    return f"rows of {num_bytes} bytes do not fill whole vectors" if num_bytes % BLOCK_BYTES else ""


_in_use = KernelBits()


def bits() -> KernelBits:
    """Return the model in use."""
    return _in_use


def use_bits(model: KernelBits) -> KernelBits:
    """Let this process use `model`; return the one before."""
    global _in_use
    before, _in_use = _in_use, model
    return before


@contextmanager
def bits_by(model: KernelBits) -> Iterator[None]:
    """Use `model` inside the block."""
    before = use_bits(model)
    try:
        yield
    finally:
        use_bits(before)
