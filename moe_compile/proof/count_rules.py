"""Rules for operators on counts and constants alone.

Contract
    A formula stands for exactly the integers the operator computes; where an operator is not
    followed the result is opaque, never a guess.

Labels of rows: integers that are the same for all rows of a run, tables and counts of them.
The result of an operator on labels is computed on one label per run, by the operator itself.
This is valid only where the operator treats every row alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

import sympy
import torch
from torch.utils import _pytree as pytree
from torch.utils._sympy.functions import FloorDiv, Max

from moe_compile.dims.record import SAME_VALUES
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof import count_rules, order_rules
from moe_compile.proof.operator_call import SIZED, Call, dim_of
from moe_compile.proof.within_rows import row_dims
from moe_compile.regions.outside_reads import is_differentiable
from moe_compile.regions.row_domain import (
    FROM_COUNTS,
    Fixed,
    Formulas,
    IndexPerColumn,
    Labels,
    LabelTable,
    Outside,
    Permutation,
    RunPositions,
    UnknownIndex,
    Value,
    reads_outside,
)
from moe_compile.regions.token_counts import bins_of

MOVES: Final = frozenset(
    {
        "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "permute", "transpose", "t",
        "expand", "slice", "select", "clone", "alias", "detach", "repeat", "flip", "roll", "cat",
        "stack", "split", "split_with_sizes", "unbind", "index_select", "index", "diagonal",
    }
)  # fmt: skip
"""Operators whose output elements are input elements."""

RESHAPES: Final = frozenset(
    {
        "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "select", "unbind", "expand",
        "repeat",
    }
)  # fmt: skip
"""Operators that make a vector a matrix of one column, repeat that column, or take one."""

EXACT: Final = frozenset({torch.int32, torch.int64, torch.float32, torch.float64})
"""Types that hold any count this project will see."""

LARGEST_NUMBER: Final = {torch.int32: 1 << 10, torch.float32: 1 << 4}
"""Largest number in a formula of which these types hold the value for counts of a million rows."""

WHOLE: Final = frozenset({torch.int32, torch.int64})
"""Types that hold any index."""


def from_counts(call: Call) -> Value | list[Value]:
    """Return the results of an operator on counts, constants and tensors from outside."""
    values = [call.value(t) for t in call.inputs]
    if _keeps_all(call) and (kept := _kept(call)) is not None:
        return _as_held(call, kept)
    if (index := _reshaped(call, values)) is not None:
        return index
    if (result := _formulas(call, values)) is not None:
        return _as_held(call, result)
    for rule in (order_rules.parts, order_rules.joined, count_rules.counted, count_rules.follow):
        if (followed := rule(call)) is not None:
            return followed
    outside = [v for v in values if isinstance(v, Outside)]
    if any(is_differentiable(node) for v in outside for node in v.nodes):
        raise Left(Reason.VALUE_FROM_COUNTS, call.name)
    tainted = bool(outside) or any(map(reads_outside, values))
    return [UnknownIndex(reads_outside=tainted) for _ in call.outputs]


def _as_held(call: Call, result: Value | list[Value]) -> list[Value]:
    """Return `result` with formulas whose numbers the type may not hold as unknown."""
    each = result if isinstance(result, list) else [result] * len(call.outputs)
    held = [_is_held(v, t.dtype) for v, t in zip(each, call.outputs, strict=True)]
    return [value if kept else UnknownIndex() for value, kept in zip(each, held, strict=True)]


def _is_held(value: Value, dtype: torch.dtype) -> bool:
    if not isinstance(value, Formulas) or dtype not in LARGEST_NUMBER:
        return True
    numbers = (n for cell in value.cells for n in cell.atoms(sympy.Integer))
    return all(abs(n) <= LARGEST_NUMBER[dtype] for n in numbers)


def _keeps_all(call: Call) -> bool:
    """Whether the operator copies, divides by 1, or may give a view of all it has: `index[:]`."""
    if call.name == "floor_divide":
        divisor = call.argument("other")
        return type(divisor) is int and divisor == 1
    if call.name == "slice":
        return call.facts.formula(call.argument("step", 1)) == 1
    return call.name in SAME_VALUES or call.name in ("view", "_unsafe_view", "reshape")


def _kept(call: Call) -> Value | None:
    source = call.inputs[-1]  # of `copy` too: its source
    out = call.outputs[0]
    if out.dtype not in (*EXACT, source.dtype) or call.shape(out) != call.shape(source):
        return None
    value = call.value(source)
    is_index = isinstance(value, Permutation | RunPositions | UnknownIndex | IndexPerColumn)
    if is_index and {source.dtype, out.dtype} - WHOLE:
        return value if out.dtype is source.dtype else None  # a cast may lose what an index says
    return value if isinstance(value, FROM_COUNTS) else None


def _reshaped(call: Call, values: list[Value]) -> Value | None:
    """Return an index as wide as rows, or the vector taken of one; None of anything else."""
    known = values[0] if len(values) == 1 and call.name in RESHAPES else None
    source, out = call.inputs[0], call.outputs[0]
    if not isinstance(
        known, Permutation | RunPositions | UnknownIndex | IndexPerColumn
    ) or not _keeps_rows(call):
        return None
    if isinstance(known, IndexPerColumn):
        return known if out.dim() > 1 else known.index
    is_vector = source.dim() == 1 and source.dtype in WHOLE
    is_column = out.dim() > 1 and all(width == 1 for width in call.shape(out)[1:])
    return IndexPerColumn(known) if is_vector and is_column else None


def _keeps_rows(call: Call) -> bool:
    """Whether entry i along dim 0 of each result is made of entry i of the input."""
    source, out = call.inputs[0], call.outputs[0]
    if not source.dim() or not out.dim() or call.shape(out)[0] != call.shape(source)[0]:
        return False
    if any(not width.is_Integer for width in call.shape(out)[1:]):
        return False
    if call.name in ("select", "unbind"):
        return dim_of(call.argument("dim", 0), source.dim()) != 0
    return call.name not in ("expand", "repeat") or out.dim() == source.dim()


def _cells(call: Call, tensor: torch.Tensor) -> tuple[sympy.Expr, ...] | None:
    value = call.value(tensor)
    if isinstance(value, Formulas):
        return value.cells
    if isinstance(value, Fixed) and value.values is not None:
        return tuple(sympy.Integer(int(v)) for v in value.values.reshape(-1).tolist())
    return None


def _formulas(call: Call, values: list[Value]) -> Value | list[Value] | None:
    """Follow arithmetic on formulas; None where it is not followed."""
    if not all(isinstance(v, Formulas | Fixed) for v in values):
        return None
    static = all(isinstance(s, int) for t in (*call.inputs, *call.outputs) for s in t.shape)
    if not static or any(_cells(call, t) is None for t in call.inputs):
        return None
    if call.name in MOVES:
        return _moved(call)
    if call.name in ("sum", "cumsum"):
        return _summed(call)
    if call.name in ARITHMETIC:
        return _computed(call)
    return None


def _moved(call: Call) -> Value | list[Value] | None:
    """Move the numbers of the cells as the operator moves elements."""
    pool: list[sympy.Expr] = []
    indices = {id(i) for i in call.inputs[1:]} if call.name in ("index", "index_select") else set()

    def numbers(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) in indices:
            known = call.value(leaf)
            return known.values if isinstance(known, Fixed) else None
        cells = _cells(call, leaf) or ()
        first = len(pool)
        pool.extend(cells)
        return torch.arange(first, len(pool), device="cpu").reshape(leaf.shape)

    args, kwargs = pytree.tree_map(numbers, (call.args, call.kwargs))
    if any(isinstance(call.value(i), Formulas) for i in call.inputs if id(i) in indices):
        return None
    moved = pytree.tree_leaves(call.func(*args, **kwargs))
    return [Formulas(tuple(pool[i] for i in m.reshape(-1).tolist())) for m in moved]


def _numbered(tensor: torch.Tensor) -> torch.Tensor:
    return torch.arange(tensor.numel(), device="cpu").reshape(tensor.shape)


def _summed(call: Call) -> Value | None:
    (source,) = call.inputs
    cells = _cells(call, source) or ()
    if call.outputs[0].dtype not in EXACT:
        return None
    given = call.argument("dim")
    dims = [given] if isinstance(given, int) else list(given or range(source.dim()))
    last = [dim_of(d, source.dim()) for d in dims]
    first = [d for d in range(source.dim()) if d not in last]
    lines = _numbered(source).permute(*first, *last).reshape(-1, _size(source, last)).tolist()
    if call.name == "sum":
        return Formulas(tuple(sympy.Add(*(cells[i] for i in line)) for line in lines))
    found = list(cells)
    for line in lines:
        for i, total in zip(line, itertools.accumulate(cells[i] for i in line), strict=True):
            found[i] = total
    return Formulas(tuple(found))


def _size(tensor: torch.Tensor, dims: list[int]) -> int:
    size = 1
    for dim in dims:
        size *= int(tensor.shape[dim])
    return size


ARITHMETIC: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floor_divide": FloorDiv,
    "clamp_min": Max,
    "maximum": Max,
}


def _computed(call: Call) -> Value | None:
    left, right = call.args[:2]
    out = call.outputs[0]
    if call.facts.formula(call.argument("alpha", 1)) != 1 or out.dtype not in EXACT:
        return None
    operands = []
    for operand in (left, right):
        if isinstance(operand, torch.Tensor):
            cells = _cells(call, operand) or ()
            numbers = _numbered(operand).expand(out.shape).reshape(-1).tolist()
            operands.append([cells[i] for i in numbers])
        elif isinstance(operand, float | bool | torch.SymFloat | torch.SymBool):
            return None
        else:
            operands.append([call.facts.formula(operand)] * out.numel())
    compute = ARITHMETIC[call.name]
    if call.name == "floor_divide" and any(not b.is_Integer or b <= 0 for b in operands[1]):
        return None
    return Formulas(tuple(compute(a, b) for a, b in zip(*operands, strict=True)))


LABEL_MOVES: Final = frozenset(
    {
        "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "select", "unbind", "expand",
        "clone", "alias", "detach", "slice",
    }
)  # fmt: skip
"""Operators that give a vector dimensions of size 1, or take them away."""
INTEGERS: Final = (torch.int32, torch.int64, torch.bool)


def follow(call: Call) -> Value | None:
    """Return the result of an operator on labels; None where it is not followed."""
    if (kept := _same_vector(call)) is not None:
        return kept
    labelled = [(t, v) for t in call.inputs if isinstance(v := call.value(t), Labels | LabelTable)]
    orders = {value.order for _, value in labelled}
    if len(orders) != 1 or call.reads_counts() or call.outputs[0].dtype not in INTEGERS:
        return None
    if len(call.outputs) != 1 or call.name in SIZED:
        return None
    dim = _dim_of_runs(call, [(t, _dim(v)) for t, v in labelled])
    if dim is None or (of_runs := _on_runs(call)) is None:
        return None
    (order,) = orders
    if of_runs.dim() == 1:
        return Labels(order, tuple(map(int, of_runs.tolist())))
    return LabelTable(order=order, dim=dim, values=of_runs)


def counted(call: Call) -> Value | None:
    """Return the number of rows with each label, as `histc` counts them; None of anything else."""
    labels = call.value(call.inputs[0])
    if call.name != "histc" or not isinstance(labels, Labels):
        return None
    bins, *bounds = (call.argument(name) for name in ("bins", "min", "max"))
    found = bins_of(labels.values, call.inputs[0].dtype, bins, *bounds)
    if found is None:
        return None
    sizes = [
        [segment.length for segment, b in zip(labels.order, found, strict=True) if b == each]
        for each in range(bins)
    ]
    return Formulas(tuple(sympy.Add(*lengths) for lengths in sizes))


def _same_vector(call: Call) -> Value | None:
    """Follow a vector, or one column of one, that gets dimensions of size 1 or loses them."""
    if call.name not in LABEL_MOVES or len(call.inputs) != 1:
        return None
    value = call.value(call.inputs[0])
    shapes = [call.shape(tensor) for tensor in (*call.inputs, *call.outputs)]
    is_vector = all(shape and all(n == 1 for n in shape[1:]) for shape in shapes)
    if not is_vector or len({shape[0] for shape in shapes}) != 1:
        return None
    return value if isinstance(value, Labels) else None


def _dim(value: Labels | LabelTable) -> int:
    return value.dim if isinstance(value, LabelTable) else 0


def _dim_of_runs(call: Call, labelled: list[tuple[torch.Tensor, int]]) -> int | None:
    """Return the dimension of the result that goes along the rows; None where it is not known."""
    try:
        return row_dims(call, labelled)[0]
    except Left:
        return None


def _on_runs(call: Call) -> torch.Tensor | None:
    """Run the operator on one label per run; None where it reads an unknown value."""

    def of_runs(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf
        value = call.value(leaf)
        if isinstance(value, Labels):
            labels = torch.tensor(value.values, dtype=leaf.dtype, device="cpu")
            return labels.reshape(-1, *[1] * (leaf.dim() - 1))
        return value.values if isinstance(value, LabelTable | Fixed) else None

    args, kwargs = pytree.tree_map(of_runs, (call.args, call.kwargs))
    leaves = zip(call.leaves, pytree.tree_leaves((args, kwargs)), strict=True)
    if any(isinstance(a, torch.Tensor) and b is None for a, b in leaves):
        return None
    result = call.func(*args, **kwargs)
    return result if isinstance(result, torch.Tensor) else None
