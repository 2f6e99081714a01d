"""Operators that a CPU rounds by the place of an element, and rows for which it does not matter.

Contract
    Where the functions return "", an element of a row is rounded alike whatever number of rows
    stand before and behind it: forward, and in the backward of the operator. Else they say what may
    round differently.
    A rounding sum within rows is reported (`Repeated`) where its input, or the gradient that it
    sends back, may lie in memory as one number per row, repeated with stride 0.

A CPU runs an elementwise operator over flat memory in blocks of two vectors, and the last elements
of each thread's share one by one, by other code. For some operators the two differ in the last bit.
They meet the same elements only where blocks and shares end where rows end. Some operators have
other code for a tensor without gaps, and a single part of longer rows is one. On CUDA every element
is computed by the same code, whole blocks or not: nothing is reported there.
A CPU's matrix products of four and eight bytes add up in another order where a row begins at
another distance from a 64-byte boundary of memory: rows must lie whole multiples of 64 bytes apart.
Its products of one matrix per row add up in another order for a single row. Sums over a dimension
in front of the rows run over several rows at once.
So do sums within rows whose numbers have stride 0, over the last rows by other code
(`vectorized_outer_sum` in ATen/native/cpu/SumKernel.cpp; seen in four bytes). `rows.sum(1)` sends
back such a gradient, and an addition hands it on as it is: the gradient of `one_per_row`, of `(rows
+ one_per_row[:, None]).sum(1)`, is a sum of that kind. The gradient of a product with a whole row,
or of a function of one, lies row by row again. An operator that is not known to write a new
gradient is taken to hand on the one it gets.
A GPU's library may choose another kernel where rows do not begin on 16 bytes; that is not checked,
since torch's grouped products ask for such rows, and other products were not measured there.
Differences are those of this machine.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from moe_compile.dims.record import SAME_VALUES
from moe_compile.proof.kernel_bits import BLOCK_BYTES
from moe_compile.proof.operator_call import SYMBOLIC, Call
from moe_compile.regions.row_domain import Rows, Value

ROUNDED_RIGHT: Final = SAME_VALUES | frozenset(
    {
        "neg", "abs", "sign", "sgn", "mul", "div", "sqrt", "reciprocal", "square", "relu",
        "leaky_relu", "threshold", "hardtanh", "clamp", "clamp_min", "clamp_max", "maximum",
        "minimum", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
        "logical_or", "logical_not", "logical_xor", "isnan", "isinf", "floor", "ceil", "round",
        "trunc", "copysign", "fill", "zero",
    }
)  # fmt: skip
"""Operators that move data, or whose result and gradient are correctly rounded steps."""

SCALED: Final = frozenset({"add", "sub", "rsub"})
"""Operators rounded correctly without a factor: only some code fuses `a + alpha * b`."""

WHOLE_POWERS: Final = (0, 1, 2, 3)
NORMS: Final = (None, 1, 2, 3, math.inf)
"""Powers of norms whose gradient was seen to round alike for any number of rows; None is 2."""

ALIKE_IN_FLOAT: Final = frozenset({"exp", "log", "tanh", "sin", "cos", "log1p", "expm1", "rsqrt"})
"""Operators that round alike in four and eight bytes: the last elements run through the same vector
code, filled up (ATen/cpu/vml.h); `rsqrt` is two correctly rounded steps."""

LIE_APART: Final = frozenset(
    {
        "acos", "acosh", "add", "addcdiv", "addcmul", "asin", "asinh", "atan", "atan2", "atanh",
        "cos", "cosh", "digamma", "div", "elu", "erf", "erfc", "erfinv", "exp", "exp2", "expm1",
        "fmod", "frac", "hardshrink", "hardsigmoid", "hardswish", "hypot", "i0", "lerp", "lgamma",
        "log", "log10", "log1p", "log2", "mish", "pow", "remainder", "rsqrt", "rsub", "sigmoid",
        "silu", "sin", "sinc", "sinh", "softplus", "softshrink", "sub", "tan", "tanh",
    }
)  # fmt: skip
"""Operators seen to compute rows that lie apart as they compute one such row by itself, forward and
backward. GELU and logit do not."""

ALONE_OTHERWISE: Final = frozenset({"var", "std"})
"""Reductions that compute a single number, as of one row, by other code (`std_var_out` in
ATen/native/ReduceOps.cpp)."""

ALIGNED_BYTES: Final = 64
"""Boundary on which operands of a product must lie to be added up alike, as Intel says of its
library ("Obtaining Numerically Reproducible Results" in the developer guide of oneMKL; bits were
seen to depend on 16). Products of two bytes run in another library; theirs were never seen to."""

NUM_GRADIENTS: Final = 128
"""Gradients tried with each value: every mantissa of bfloat16, 7 bits."""


def on_cuda(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is on CUDA, where bits are taken not to depend on an element's place."""
    return tensor.device.type == "cuda"


def elementwise(call: Call) -> str:
    """Return the reason why the number of rows may change bits of an elementwise operator."""
    out, floats = call.outputs[0], _floats(call)
    if not rounds_by_position(call):
        return ""
    if any(t.dtype.is_complex for t in floats):
        return f"{call.name} of complex numbers"
    block = block_of(call)
    values = [(t, call.value(t)) for t in call.inputs]
    dims = {t.dim() - v.dim for t, v in values if isinstance(v, Rows)}
    tensors = [t for t, v in values if isinstance(v, Rows)] + call.outputs
    rows = [(t, t.dim() - from_right) for t in tensors for from_right in dims]
    if any(_extent(t, dim) % block for t, dim in rows):
        return f"{call.name} in {out.dtype}: rows of shape {list(out.shape)}, blocks of {block}"
    if call.name not in LIE_APART and any(t.stride()[dim] != _extent(t, dim) for t, dim in rows):
        return f"{call.name} in {out.dtype}: rows that are parts of longer ones"
    return ""


def _floats(call: Call) -> list[torch.Tensor]:
    tensors = (*call.inputs, *call.outputs[:1])
    return [t for t in tensors if t.dtype.is_floating_point or t.dtype.is_complex]


def rounds_by_position(call: Call) -> bool:
    """Whether an elementwise operator may round an element by its place in memory."""
    floats = _floats(call)
    return bool(floats) and not on_cuda(call.outputs[0]) and _by_position(call, floats)


def block_of(call: Call) -> int:
    """Return the elements that an operator which rounds by position takes at once."""
    block = BLOCK_BYTES // min(t.element_size() for t in _floats(call))
    return block * math.lcm(*range(1, torch.get_num_threads() + 1))


def sums_by_place(tensor: torch.Tensor) -> bool:
    """Whether sums round differently where another dimension lies outside that of the rows.

    On a CPU sums over such a dimension, in an operator or in its gradient, run over several rows
    at once in vectors, and over the last rows by other code (`vectorized_outer_sum` in
    ATen/native/cpu/SumKernel.cpp).
    """
    number = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return number and not on_cuda(tensor)


def within_rows(call: Call) -> str:
    """Return the reason why a CPU computes a single row by other code than several.

    The gradient of a norm of a power not in `NORMS` is such a case: it takes a power elementwise.
    """
    out = call.outputs[0]
    power = call.argument("ord", call.argument("p", 2)) if "norm" in call.name else 2
    if power not in NORMS and not on_cuda(out):
        return f"{call.name} of power {power}"
    if call.name in ALONE_OTHERWISE and not on_cuda(out) and out.element_size() > 2:
        return f"{call.name} in {out.dtype}"
    return ""


def product(call: Call, rows: torch.Tensor, row_dim: int) -> str:
    """Return the reason why the bits of a matrix product depend on where its rows begin.

    Gradients lie as the result does, but where that is part of longer rows: see `parts`.
    """
    out = call.outputs[0]
    if on_cuda(out) or out.element_size() <= 2:
        return ""
    for tensor, dim in ((rows, row_dim), (out, row_dim)):
        distance = tensor.stride()[dim]
        if not isinstance(distance, int) or distance * tensor.element_size() % ALIGNED_BYTES:
            return (
                f"{call.name} in {tensor.dtype}: rows {distance} elements apart, which is no "
                f"multiple of {ALIGNED_BYTES} bytes"
            )
    return ""


def batch_product(call: Call) -> str:
    """Return the reason why a product of each row by itself rounds by the number of rows.

    A CPU's library computes the only product of a batch by other code than one of several, and
    each by where it begins.
    """
    out = call.outputs[0]
    rounds = not on_cuda(out) and out.element_size() > 2
    return f"{call.name} in {out.dtype}, row by row" if rounds else ""


def parts(call: Call, row_dim: int, part_dim: int, starts: Sequence[int]) -> str:
    """Return the reason why a product that stands inside longer rows rounds by position.

    Its gradient is that part of the longer rows' gradient: there too its rows must begin on
    boundaries of memory. `starts` are the places of the parts along dimension `part_dim`.
    """
    out = call.outputs[0]
    if on_cuda(out) or not out.dtype.is_floating_point or out.element_size() <= 2:
        return ""
    distances = (out.stride()[row_dim], *(start * out.stride()[part_dim] for start in starts))
    if any(distance * out.element_size() % ALIGNED_BYTES for distance in distances):
        return f"{call.name} in {out.dtype}: parts of rows of shape {list(out.shape)}"
    return ""


def rows_of_one_expert(call: Call) -> str:
    """Return the reason why rows of one expert may round by their place, whatever `call` is.

    A chunk has them all, in the same order, and begins at another place in memory.
    """
    for tensor, value in ((t, call.value(t)) for t in call.inputs):
        if isinstance(value, Rows) and not on_cuda(tensor) and tensor.element_size() > 2:
            distance = tensor.stride()[value.dim]
            if not isinstance(distance, int) or distance * tensor.element_size() % ALIGNED_BYTES:
                return f"{call.name} in {tensor.dtype}: rows {distance} elements apart"
    return ""


def _extent(tensor: torch.Tensor, row_dim: int) -> int:
    """Return the elements of a row that lie next to each other; 1 where rows are not outermost."""
    if any(size != 1 for size in tensor.shape[:row_dim]):
        return 1
    extent = 1
    for size, stride in zip(
        reversed(tensor.shape[row_dim + 1 :]), reversed(tensor.stride()[row_dim + 1 :]), strict=True
    ):
        if not isinstance(size, int) or (size != 1 and stride != extent):
            return 1
        extent *= size
    return extent


def _by_position(call: Call, floats: list[torch.Tensor]) -> bool:
    if any(t.dtype.is_complex for t in floats):
        return call.name not in SAME_VALUES
    if call.name in ROUNDED_RIGHT:
        return call.argument("rounding_mode") is not None
    if call.name in SCALED:
        return bool(call.argument("alpha", 1) != 1)
    if call.name == "pow" and call.argument("exponent") in WHOLE_POWERS:
        return False
    if len(call.inputs) != 1 or len({t.dtype for t in floats}) != 1:
        return True
    if any(isinstance(leaf, SYMBOLIC) for leaf in call.leaves):
        return True
    if floats[0].element_size() > 2:
        return call.name not in ALIKE_IN_FLOAT
    return _differs(call.func, _arguments(call), floats[0].dtype)


Arguments = tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]


def _arguments(call: Call) -> Arguments:
    """Return the arguments, None for the tensor."""

    def plain(leaf: Any) -> Any:
        return None if isinstance(leaf, torch.Tensor) else leaf

    kwargs = tuple(sorted((name, plain(value)) for name, value in call.kwargs.items()))
    return tuple(map(plain, call.args)), kwargs


def try_common_functions() -> None:
    """Try the activation of most experts, for a process that is copied: it takes half a second."""
    _differs(torch.ops.aten.silu.default, ((None,), ()), torch.bfloat16)


@functools.cache
def _differs(func: torch._ops.OpOverload, arguments: Arguments, dtype: torch.dtype) -> bool:
    """Try all values of two bytes in whole vectors and one by one; gradients too."""
    args, kwargs = arguments

    def run(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = func(x, *args[1:], **dict(kwargs))
        return result

    return differs_by_position(run, dtype)


def differs_by_position(run: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
    """Whether a function of one number rounds a value of `dtype` (two bytes) by its position.

    Numbers and infinities are tried, NaNs are not.
    """
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32, device="cpu")
    x = values.to(torch.int16).view(dtype)
    x = x[~x.isnan()]
    mantissas = torch.arange(NUM_GRADIENTS, device="cpu") / NUM_GRADIENTS + 1
    gradients = mantissas.to(dtype)[:, None].expand(-1, len(x)).contiguous()
    wide = x.expand_as(gradients).contiguous()
    whole = _forward_and_backward(run, wide, gradients)
    single = _forward_and_backward(run, _strided(wide), _strided(gradients))
    return not all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(whole, single, strict=True)
    )


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values at every other element of memory, where no vector can be read."""
    return torch.stack([tensor, tensor], -1)[..., 0]


def _forward_and_backward(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, gradient: torch.Tensor
) -> list[torch.Tensor]:
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        result = run(leaf)
        found = [result.detach()]
        if result.requires_grad:
            found += torch.autograd.grad(result, leaf, gradient)
    return found


ADDITIONS: Final = frozenset({"add", "sub", "rsub"})
LINEAR: Final = ADDITIONS | SAME_VALUES | {"neg", "mul", "div"}
"""Operators whose gradient is the incoming one, times numbers at most, where nothing that they read
fills rows."""

MULTIPLY: Final = frozenset(
    {
        "abs", "clamp", "clamp_max", "clamp_min", "cos", "elu", "erf", "exp", "expm1", "gelu",
        "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "log", "log1p", "masked_fill",
        "mish", "pow", "reciprocal", "relu", "rsqrt", "sigmoid", "silu", "sin", "softplus", "sqrt",
        "square", "tanh", "threshold", "where",
    }
)  # fmt: skip
"""Functions whose gradient is the incoming one times, or chosen by, their input or output."""

MADE_ANEW: Final = frozenset(
    {
        "mm", "addmm", "bmm", "_grouped_mm", "index", "index_select", "gather", "embedding",
        "index_put", "_unsafe_index_put", "index_copy", "index_add", "scatter", "scatter_add",
        "constant_pad_nd", "amax", "amin", "max", "min", "sort", "topk", "argmax", "argmin",
        "native_layer_norm", "_fused_rms_norm", "_softmax", "_log_softmax", "glu",
    }
)  # fmt: skip
"""Other operators that write the gradient of their input row by row: products, moves of whole rows,
picks of elements, and norms."""

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
    """Tensors that may have repeats themselves."""
    gradients: set[int] = field(default_factory=set)
    """Tensors whose gradients may have repeats, should a sum send one."""

    def follow(self, call: Call, results: Sequence[Value]) -> str:
        """Note the tensors with repeats that `call` makes; return a reason if it sums such rows."""
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
