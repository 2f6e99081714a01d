"""The model of last bits of torch's kernels for CPUs: which programs must be equal bit for bit.

Contract
    Where nothing is found, a region in parts has the bits of the whole, forward and backward:
    `position_rounding`, `repeated_elements`, `expert_rounding` and `head_rounding` say why.
    A model that refuses leaves a region as it is where something is found, so that all that is
    rewritten must be equal; one that does not lets reports tell of it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
import torch.fx as fx

from moe_compile.proof.kernel_bits import HeadBits, KernelBits, RowBits, bits_by, use_bits
from moe_compile.proof.operator_call import Call, dim_of
from moe_compile.regions.row_domain import Rows, Value
from moe_compile.testing.cpu_rounding import position_rounding as rounding
from moe_compile.testing.cpu_rounding.expert_rounding import first_difference
from moe_compile.testing.cpu_rounding.head_rounding import rounds_alone, rounds_by_group
from moe_compile.testing.cpu_rounding.repeated_elements import Repeated

REDUCTIONS: Final = ("var", "std", "linalg_vector_norm", "norm")
STRICT: Final = "TESTS_HAVE_STRICT_BITS"
"""Variable of the environment: set, every rank of a `RankPool` has a model that refuses."""


class CpuRows(RowBits):
    """What is found of the rows of one region."""

    def __init__(self, *, refuses: bool) -> None:
        """Begin with nothing found; one that `refuses` may tell the proof what needs an expert."""
        super().__init__()
        self._refuses = refuses
        self._repeated = Repeated()
        self._one_expert: Call | None = None

    def follow(self, call: Call, results: Sequence[Value]) -> None:
        """Take in `call` and what its outputs are proven to be, before anything is written."""
        if call is self._one_expert:
            self.note(call.node, rounding.rows_of_one_expert(call))
        elif results and isinstance(results[0], Rows):
            self.note(call.node, _rounding(call, results[0].dim))
        self.note(call.node, self._repeated.follow(call, results))

    def follow_one_expert(self, call: Call) -> None:
        """Take in beforehand that `call` is only known to read all rows of one expert."""
        self._one_expert = call

    def follow_memory(self, call: Call, tensor: torch.Tensor, value: Value) -> None:
        """Note rows that sums may round by their number: it is the same for those of one expert."""
        if not isinstance(value, Rows) or not _lie_inside(call, tensor, value.dim):
            return
        expert = call.facts.is_rows_of_one(value.order)
        if expert is None:
            detail = f"rows are not the outermost dimension of shape {list(tensor.shape)}"
            self.note(call.node, detail)
        elif self._refuses:
            call.known.whole.setdefault(call.node, set()).add(expert)

    def follow_gradient(self, gradient: torch.Tensor) -> None:
        """Take in a gradient that a function written by hand is given: it may be of anything."""
        self._repeated.values.add(id(gradient))


class CpuBits(KernelBits):
    """The model."""

    def __init__(self, *, refuses: bool) -> None:
        """Leave regions as they are where something is found, or tell of it only."""
        self.refuses = refuses

    def rows(self) -> CpuRows:
        """Return what is told of the operators of one region with its rows."""
        return CpuRows(refuses=self.refuses)

    def experts(self, whole: Sequence[Call], part: Sequence[Call]) -> str:
        """Return what may round otherwise in chunks of experts with a capacity."""
        return first_difference(whole, part)

    def heads(self, core: fx.Node, operands: Sequence[fx.Node], num_kv_heads: int) -> HeadBits:
        """Return what may round otherwise in groups of heads of the attention `core`."""
        rounds = rounds_by_group(core, operands, num_kv_heads)
        return HeadBits(
            groups="torch's kernel for these sizes, layouts, masks and backends" if rounds else "",
            alone="threads share the products of one head" if rounds_alone(operands) else "",
        )


def strict_bits() -> AbstractContextManager[None]:
    """Refuse, inside the block, what a CPU may round otherwise in parts."""
    return bits_by(CpuBits(refuses=True))


def recorded_bits() -> AbstractContextManager[None]:
    """Let reports tell, inside the block, what a CPU may round otherwise in parts."""
    return bits_by(CpuBits(refuses=False))


def use_bits_of_environment() -> None:
    """Refuse in this process what a CPU may round otherwise in parts, where `STRICT` is set."""
    if STRICT in os.environ:
        use_bits(CpuBits(refuses=True))


def _rounding(call: Call, row_dim: int) -> str:
    """Return where `call`, whose result has its rows along `row_dim`, rounds by their place."""
    if call.name in ("mm", "addmm"):
        names = ("self", "mat2") if call.name == "mm" else ("mat1", "mat2")
        return rounding.product(call, call.argument(names[row_dim]), row_dim)
    if call.name == "_grouped_mm":
        return rounding.product(call, call.argument("self"), 0)
    if call.name == "bmm":
        return rounding.batch_product(call)
    if call.name in ("stack", "cat", "constant_pad_nd"):
        return _joined(call, row_dim)
    if call.name in REDUCTIONS:
        return rounding.within_rows(call)
    return rounding.elementwise(call) if call.is_pointwise else ""


def _joined(call: Call, row_dim: int) -> str:
    """Return where results of products, put into longer rows, round by their place there."""
    ndim = call.outputs[0].dim()
    if call.name == "constant_pad_nd":
        amounts = [*call.argument("pad")]
        padded = [(ndim - 1 - i, amounts[2 * i : 2 * i + 2]) for i in range(len(amounts) // 2)]
        beside = [(d, amount[0]) for d, amount in padded if d != row_dim and any(amount)]
        return next(filter(None, (rounding.parts(call, row_dim, d, [n]) for d, n in beside)), "")
    dim = dim_of(call.argument("dim", 0), ndim)
    if dim == row_dim:
        return ""
    sizes = [1 if call.name == "stack" else int(t.shape[dim]) for t in call.inputs]
    return rounding.parts(call, row_dim, dim, [sum(sizes[:i]) for i in range(len(sizes))])


def _lie_inside(call: Call, rows: torch.Tensor, row_dim: int) -> bool:
    """Whether another dimension lies outside that of the rows, in shape or in memory."""
    others = [d for d, size in enumerate(rows.shape) if d != row_dim and size != 1]
    far = any(d < row_dim or call.facts.depends_on_counts(rows.stride(d)) for d in others)
    return far and rounding.sums_by_place(rows)
