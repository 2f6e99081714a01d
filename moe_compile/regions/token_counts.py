"""A test that counts say how often each expert was chosen, however the program counts.

Contract
    The nodes from the chosen experts to the counts are run, on the CPU, for drawn choices: counts
    pass if they say how often each expert was chosen in all of these. Choices are drawn
    from a fixed seed, at the number of tokens that the graph is for. Ranks with other numbers try
    other choices; where one of them refuses, all run the program as written, as their plans differ.
    Counts are refused if they need anything but the choices, draw random numbers, or go through a
    type that does not hold all numbers of rows. No tensor of the program is read or written.
    Whether `histc` of labels counts them, `bins_of` says for every device: bins are computed
    exactly, as CUDA does for integers this small, and for floating-point labels the operator itself
    on a CPU must agree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import sympy
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from moe_compile.graph.dependence import Dependence
from moe_compile.graph.effects import communicates, may_draw
from moe_compile.graph.query import (
    called_name,
    expression_of,
    is_integer,
    is_launch,
    is_wait,
    tensor_of,
    value_of,
)
from moe_compile.regions.row_chain import shape_of
from moe_compile.regions.token_index import HOLDS_ALL, TokenIndex

TYPES: Final = frozenset({*HOLDS_ALL, torch.bool, torch.float32, torch.float64})
"""Types allowed on the way; float32 holds the integers up to 2^24 rows."""
SEED: Final = 20240229
SIZES: Final = (3, 300)
"""Values that stand for a size that is a symbol."""
MOST_ELEMENTS: Final = 1 << 26
"""Limit for one tensor: `one_hot` of 32,768 tokens, 8 of 256 experts each, has as many."""
FAILURES: Final = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)
"""Exceptions that a call may raise on tensors it was not written for."""
EXACT_BELOW: Final = 1 << 22
"""Bound of label times bins below which a float32 quotient rounds to no other whole number."""
FLOATS: Final = (torch.float32, torch.float64)
INTEGERS: Final = (torch.int32, torch.int64)


def counts_values(
    known: TokenIndex, counts: fx.Node, chosen: fx.Node, dependence: Dependence
) -> bool:
    """Whether `counts[e]` is how often `chosen`, indices that a `topk` gave, holds e."""
    scores = (known.topk_of(chosen) or {}).get("input")
    steps = _steps(counts, chosen, dependence)
    if steps is None or not isinstance(scores, fx.Node) or known.is_written(chosen):
        return False
    shape, num_choices = shape_of(chosen), shape_of(scores)[-1]
    of_symbols = SIZES if any(type(size) is not int for size in shape) else SIZES[:1]
    try:
        return all(
            _are_counts(_run(steps, {chosen: drawn}, number)[counts], drawn)
            for number in of_symbols
            for drawn in _choices([_size(s, number) for s in shape], _size(num_choices, number))
        )
    except FAILURES:
        return False


def _steps(counts: fx.Node, chosen: fx.Node, dependence: Dependence) -> list[fx.Node] | None:
    """Return the nodes from `chosen` to `counts`, in order; None where more is needed."""
    if not dependence.is_filled_first(counts):
        return None
    found: set[fx.Node] = set()
    todo = [counts, *dependence.writers(counts)]
    while todo:
        node = todo.pop()
        if node is chosen or node in found or isinstance(value_of(node), int | torch.SymInt):
            continue
        if not _can_run(node):
            return None
        found.add(node)
        todo += dependence.needs(node)
    return dependence.in_order(found)


def _can_run(node: fx.Node) -> bool:
    """Whether the node is a call of torch that computes the same each time, and on this rank."""
    is_call = node.op in ("call_function", "call_method")
    if not is_call or isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    if is_launch(node) or is_wait(node) or may_draw(node) or communicates(node):
        return False
    tensor = tensor_of(node)
    return tensor is None or tensor.dtype in TYPES


def _size(size: Any, number: int) -> int:
    """Return a size with `number` for each symbol; raise ValueError for a data-dependent one."""
    expression = sympy.sympify(expression_of(size))
    if free_unbacked_symbols(expression):
        raise ValueError(
            f"{expression} must be known at compile time, and is known at run time only"
        )
    return int(expression.subs(dict.fromkeys(expression.free_symbols, number)))


def _choices(shape: Sequence[int], num_choices: int) -> Iterator[torch.Tensor]:
    """Yield k different drawn choices for each token, then the last k experts for all tokens."""
    *tokens, k = shape
    if math.prod(tokens) * num_choices > MOST_ELEMENTS:
        raise ValueError("the layer has more tokens times experts than megamoe samples")
    generator = torch.Generator().manual_seed(SEED)
    drawn = torch.rand(*tokens, num_choices, generator=generator, device="cpu")
    yield drawn.topk(k)[1]
    yield torch.arange(num_choices - k, num_choices, device="cpu").expand(shape).contiguous()


def _run(
    steps: Sequence[fx.Node], values: dict[fx.Node, Any], number: int
) -> Mapping[fx.Node, Any]:
    """Run `steps` on the CPU and add to `values`; each symbol of a size is `number`."""

    def real(node: fx.Node) -> Any:
        return values[node] if node in values else _size(node, number)

    def on_cpu(tree: Any) -> Any:
        return pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), tree)

    with torch.no_grad(), torch.device("cpu"):
        for node in steps:
            made = tensor_of(node)
            if made is not None and _elements(made, number) > MOST_ELEMENTS:
                raise ValueError(f"{node} has more elements than megamoe samples")
            args = on_cpu(fx.node.map_arg(node.args, real))
            kwargs = on_cpu(fx.node.map_arg(node.kwargs, real))
            values[node] = _function(node)(*args, **kwargs)
    return values


def _function(node: fx.Node) -> Callable[..., Any]:
    """Return the node's function for a CPU, where torch has no histogram of integers."""
    if called_name(node) == "histc" and is_integer(node):
        return _histogram
    return node.target if callable(node.target) else getattr(torch.Tensor, node.target)


def _histogram(
    input: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0
) -> torch.Tensor:
    """Return `torch.histc` of integers; raise ValueError where its bins are not known."""
    labels, times = input.unique(return_counts=True)
    places = bins_of(labels.tolist(), input.dtype, bins, min, max)
    if places is None:
        raise ValueError("the bins of histc must be Python numbers, and are not")
    inside = torch.tensor([place is not None for place in places])
    found = torch.tensor([place for place in places if place is not None], dtype=torch.int64)
    return input.new_zeros(bins).scatter_add(0, found, times[inside].to(input.dtype))


def _elements(made: torch.Tensor, number: int) -> int:
    """Return the number of elements of a tensor, with 1 for each data-dependent size."""
    sizes = (sympy.sympify(expression_of(size)) for size in made.shape)
    return math.prod(_size(s, number) for s in sizes if not free_unbacked_symbols(s))


def _are_counts(found: Any, chosen: torch.Tensor) -> bool:
    """Whether entry e of a vector of integers is how often e stands in `chosen`."""
    if not isinstance(found, torch.Tensor) or found.dtype not in HOLDS_ALL or found.dim() != 1:
        return False
    expected = torch.bincount(chosen.flatten(), minlength=len(found))[: len(found)]
    return torch.equal(found.long(), expected)


def bins_of(
    labels: Sequence[int], dtype: torch.dtype, bins: Any, least: Any, most: Any
) -> tuple[int | None, ...] | None:
    """Return the bin of each label, None for one outside all of them; None where it is not known.

    `bins`, `least` and `most` are those of `torch.histc`, which is given the labels as `dtype`.
    """
    if dtype not in (*FLOATS, *INTEGERS) or not all(map(_is_whole, (bins, least, most))):
        return None
    if bins < 1 or least >= most:  # where both are equal the labels themselves set the bounds
        return None
    if any(abs(label - least) * bins >= EXACT_BELOW for label in labels):
        return None
    exact = tuple(_bin(label, bins, int(least), int(most)) for label in labels)
    if dtype in FLOATS:
        computed = [_by_operator(label, dtype, bins, least, most) for label in labels]
        if computed != [None if b is None else [b] for b in exact]:
            return None
    return exact


def _is_whole(number: Any) -> bool:
    return type(number) in (int, float) and number == int(number)


def _bin(label: int, bins: int, least: int, most: int) -> int | None:
    if not least <= label <= most:
        return None
    return min((label - least) * bins // (most - least), bins - 1)


def _by_operator(
    label: int, dtype: torch.dtype, bins: int, least: float, most: float
) -> list[int] | None:
    """Return the bins that a CPU counts a label in."""
    value = torch.tensor([label], dtype=dtype, device="cpu")
    return torch.histc(value, bins, least, most).nonzero().flatten().tolist() or None
