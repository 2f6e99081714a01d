"""What the backward of one forward operator moves: bytes and kernels, before there is a backward.

Contract
    Follows how derivatives are written, not what any run took:
    a gather's is rows of zeros and a scatter into them; a scatter's is a gather;
    an elementwise operator has one operator per input, which reads the gradient and the inputs the
    derivative asks for; between elementwise ones nothing is read or written;
    a value that several read has the sum of their gradients;
    the gradient of what was broadcast is written whole, then summed.
    What is elementwise and needed again is computed again, as the partitioner does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.fx as fx

from moe_compile.graph.query import called_name, tensor_of, value_of
from moe_compile.planning.sizes import NominalSizes

LINEAR: Final = frozenset({"add", "iadd", "neg", "sub"})
"""Derivatives that ask for no input."""
PRODUCT_LIKE: Final = frozenset({"div", "imul", "mul", "truediv"})
"""Derivatives that ask for the other inputs."""
COPIES: Final = frozenset({"bfloat16", "contiguous", "float", "to", "type_as"})
FUNCTIONS: Final = frozenset({"abs", "clamp", "exp", "gelu", "pow", "relu", "rsqrt", "sigmoid"}) | {
    "silu"
}
"""Derivatives that ask for what they were given."""
CONSTANTS: Final = frozenset({"zeros_like", "ones_like", "empty_like", "zeros", "ones", "empty"})
"""Calls whose result depends on no value: nothing is read, nothing flows back through them."""
ELEMENTWISE: Final = LINEAR | PRODUCT_LIKE | COPIES | FUNCTIONS | {"zeros_like"}
"""Calls that a compiler fuses with their neighbours."""
GATHERS: Final = frozenset({"gather", "getitem", "index_select", "topk"})
SCATTERS: Final = frozenset({"index_add", "index_copy", "index_put", "scatter", "scatter_add"})


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes read and written, and kernels that do."""

    nbytes: float = 0.0
    num_kernels: int = 0

    def __add__(self, other: Moved) -> Moved:
        """Return both together."""
        return Moved(self.nbytes + other.nbytes, self.num_kernels + other.num_kernels)


def is_elementwise_call(node: fx.Node) -> bool:
    """Whether a compiler fuses this call with its neighbours."""
    return called_name(node) in ELEMENTWISE


def has_gradient(node: fx.Node) -> bool:
    """Whether a gradient flows to the value of `node`."""
    tensor = tensor_of(node)
    is_float = tensor is not None and tensor.dtype.is_floating_point
    return is_float and called_name(node) not in CONSTANTS


class BackwardWork:
    """Reads operators of one Dynamo graph."""

    def __init__(self, sizes: NominalSizes, free: Collection[fx.Node]) -> None:
        """`free` are nodes that do nothing: what they give is what they were given."""
        self._sizes = sizes
        self._free = free

    def of(self, node: fx.Node) -> Moved | None:
        """Return what the backward of `node` moves; None for operators not known here."""
        name = called_name(node)
        if name in ELEMENTWISE:
            return self._elementwise(node)
        if name in GATHERS:
            source = self._bytes(node.all_input_nodes[0])
            return Moved(3.0 * source + self._largest(node), 2)
        if name in SCATTERS:
            rows = max(map(self._bytes, filter(has_gradient, node.all_input_nodes)), default=0.0)
            return Moved(min(self._bytes(node), rows) + rows, 1)
        return None

    def sum_of(self, node: fx.Node) -> Moved:
        """Return what adding up the gradients of `node`'s value moves."""
        readers = list(self._readers(node))
        if len(readers) < 2:
            return Moved()
        size = self._bytes(node)
        read = size * sum(not is_elementwise_call(r) for r in readers)
        return Moved(read) if is_elementwise_call(node) else Moved(read + size, 1)

    def _elementwise(self, node: fx.Node) -> Moved:
        grad = 0.0 if self._is_gradient_fused(node) else self._bytes(node)
        moved = Moved()
        for given in filter(has_gradient, node.all_input_nodes):
            read = grad + sum(self._read_again(s) for s in self._saved(node, given))
            moved = moved + self._written(node, given, read)
        return moved

    def _written(self, node: fx.Node, given: fx.Node, read: float) -> Moved:
        out, size = self._bytes(node), self._bytes(given)
        if self._elements(given) < self._elements(node):
            return Moved(read + 2.0 * out + size, 2)
        source = self._through_free(given)
        is_fused = is_elementwise_call(source) or len(list(self._readers(source))) > 1
        return Moved(read) if is_fused else Moved(read + size, 1)

    def _saved(self, node: fx.Node, given: fx.Node) -> list[fx.Node]:
        """Return the inputs that the derivative for `given` asks for."""
        name = called_name(node)
        if name in FUNCTIONS:
            return [given]
        others = [a for a in node.all_input_nodes if a is not given and tensor_of(a) is not None]
        return others if name in PRODUCT_LIKE else []

    def _read_again(self, node: fx.Node) -> float:
        """Return bytes read to have the value of `node` in an elementwise operator."""
        source = self._through_free(node)
        if not is_elementwise_call(source):
            return self._bytes(node)
        return sum(self._read_again(a) for a in source.all_input_nodes if tensor_of(a) is not None)

    def _is_gradient_fused(self, node: fx.Node) -> bool:
        return all(map(is_elementwise_call, self._readers(node)))

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """Return the operators that a gradient for `node` comes from, behind views."""
        for user in node.users:
            if user in self._free:
                yield from self._readers(user)
            elif has_gradient(user) or not isinstance(value_of(user), torch.Tensor):
                yield user

    def _through_free(self, node: fx.Node) -> fx.Node:
        while node in self._free and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        return node

    def _bytes(self, node: fx.Node) -> float:
        return float(self._sizes.nbytes(value_of(node)))

    def _largest(self, node: fx.Node) -> float:
        """Return the bytes of the floating-point results."""
        values = value_of(node)
        values = values if isinstance(values, tuple | list) else (values,)
        floats = [t for t in values if isinstance(t, torch.Tensor) and t.dtype.is_floating_point]
        return float(sum(map(self._sizes.nbytes, floats)))

    def _elements(self, node: fx.Node) -> float:
        tensor = tensor_of(node)
        return self._bytes(node) / tensor.element_size() if tensor is not None else 0.0
