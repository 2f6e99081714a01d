"""Rows in which one number stands several times: a CPU sums them by where the row stands.

Contract
    A rounding sum within rows is told where its input, or the gradient that it sends back, may
    lie in memory as one number per row, repeated with stride 0: the loop of the sum then runs over
    rows, several at once in vectors, and over the last rows by other code
    (`vectorized_outer_sum` in ATen/native/cpu/SumKernel.cpp; seen in four bytes).

`rows.sum(1)` sends back such a gradient, and an addition hands it on as it is: of
`(rows + one_per_row[:, None]).sum(1)` the gradient of `one_per_row` is a sum of that kind. The
gradient of a product with a whole row, or of a function of one, lies row by row again; an operator
that is not known to make one anew is taken to hand on what comes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from moe_compile.dims.record import SAME_VALUES
from moe_compile.proof.operator_call import Call
from moe_compile.regions.row_domain import Rows, Value
from moe_compile.testing.cpu_rounding.position_rounding import on_cuda

ADDITIONS: Final = frozenset({"add", "sub", "rsub"})
LINEAR: Final = ADDITIONS | SAME_VALUES | {"neg", "mul", "div"}
"""Operators whose gradient is the one that comes, times numbers at most, where nothing that they
read fills rows."""

MULTIPLY: Final = frozenset(
    {
        "abs", "clamp", "clamp_max", "clamp_min", "cos", "elu", "erf", "exp", "expm1", "gelu",
        "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log", "log1p", "masked_fill",
        "mish", "pow", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt",
        "square", "tanh", "threshold", "where",
    }
)  # fmt: skip
"""Functions whose gradient is the one that comes times, or chosen by, what they read or gave."""

MADE_ANEW: Final = frozenset(
    {
        "mm", "addmm", "bmm", "_grouped_mm", "index", "index_select", "gather", "embedding",
        "index_put", "_unsafe_index_put", "index_copy", "index_add", "scatter", "scatter_add",
        "constant_pad_nd", "amax", "amin", "max", "min", "sort", "topk", "argmax", "argmin",
        "native_layer_norm", "_fused_rms_norm", "_softmax", "_log_softmax", "glu",
    }
)  # fmt: skip
"""Other operators that write the gradient of what they read row by row: products, moves of whole
rows, what picks elements, and norms."""

SUMS: Final = frozenset(
    {
        "sum", "mean", "var", "std", "var_mean", "prod", "logsumexp", "linalg_vector_norm", "norm",
        "_softmax", "_log_softmax", "cumsum", "cumprod",
    }
)  # fmt: skip
"""Reductions and scans that round; others pick a number, and its gradient goes where it stood."""


@dataclass(slots=True)
class Repeated:
    """Identities of tensors of rows in which one number may stand several times."""

    values: set[int] = field(default_factory=set)
    """In the tensor itself."""
    gradients: set[int] = field(default_factory=set)
    """In gradients that go back through it, should a sum send one."""

    def follow(self, call: Call, results: Sequence[Value]) -> str:
        """Note what `call` makes of what it reads; return that it sums such rows, or ""."""
        marked = self.values | self.gradients
        sums = call.name in SUMS and any(id(t) in marked and _rounds(t) for t in call.inputs)
        for tensor, result in zip(call.outputs, results, strict=True):
            if isinstance(result, Rows):
                whole = _elements(tensor, result)
                if _values(call, whole, self.values):
                    self.values.add(id(tensor))
                if _gradients(call, whole, self.gradients):
                    self.gradients.add(id(tensor))
        return f"{call.name} of rows in which one number stands several times" if sums else ""


def _rounds(tensor: torch.Tensor) -> bool:
    return tensor.dtype.is_floating_point and not on_cuda(tensor)


def _values(call: Call, whole: int, known: set[int]) -> bool:
    rows = _rows_read(call)
    inherits = any(id(t) in known for t, _ in rows)
    if call.name == "expand":
        return inherits or _is_broadcast(call, whole)
    if call.is_pointwise:
        return inherits and not _fills(call, whole, known)
    return inherits and call.outputs[0]._is_view()


def _gradients(call: Call, whole: int, known: set[int]) -> bool:
    inherits = any(id(t) in known for t, _ in _rows_read(call))
    if call.name in ("expand", *ADDITIONS):
        return inherits or _is_broadcast(call, whole)
    if call.name in LINEAR:
        return inherits and not _fills(call, whole, known)
    return inherits and call.name not in MULTIPLY | MADE_ANEW


def _rows_read(call: Call) -> list[tuple[torch.Tensor, Rows]]:
    return [(t, v) for t in call.inputs if isinstance(v := call.value(t), Rows)]


def _is_broadcast(call: Call, whole: int) -> bool:
    return any(_elements(t, v) < whole for t, v in _rows_read(call))


def _fills(call: Call, whole: int, known: set[int]) -> bool:
    """Whether the operator reads whole rows in which every element has its own place."""
    return any(_elements(t, v) == whole and id(t) not in known for t, v in _rows_read(call))


def _elements(tensor: torch.Tensor, rows: Rows) -> int:
    """Return the number of elements of a row; their sizes never depend on the counts."""
    return math.prod(int(size) for size in tensor.shape[rows.dim + 1 :])
