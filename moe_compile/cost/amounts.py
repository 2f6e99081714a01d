"""Amounts of work of each node, on any hardware: operations, memory and link bytes, kernels.

Contract
    Pure arithmetic on nominal sizes; `cost/rates.py` turns amounts into time.
    Nothing is written between nodes that Inductor fuses: elementwise ones, fills, gathers of rows
    and concatenations, with each other, into scatters, into reductions and into `quantize_rows`,
    through views as well.
    `make cuda-table` reads the generated code for it. Where the host is the device Inductor writes
    concatenations out.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.cost.flex_mask import kept_share
from moe_compile.cost.kernel_counts import CAUSAL_SHARE, attention_operations
from moe_compile.cost.sizes import NominalSizes
from moe_compile.graph.inner_graphs import is_flex_attention, is_higher_order
from moe_compile.graph.memory import tensors_in
from moe_compile.graph.precedence import integers_taken, is_view
from moe_compile.graph.query import (
    argument_of,
    group_name,
    is_all_gather,
    is_all_to_all,
    is_copy,
    is_integer,
    is_launch,
    is_reduce_scatter,
    is_wait,
    output_splits,
    overload_name,
    tensor_of,
    value_of,
)
from moe_compile.hardware.links import leaving_share
from moe_compile.hardware.products import Product

SCALED_GROUPED: Final = "scaled_grouped_mm"
"""Our product of rows and weights that have scales; the scales of rows stand between the two."""
SCALED_GRADIENT: Final = "scaled_weight_gradient"
"""Our gradient of a weight from rows in blocks `[B, K, 128]`, with scales between as well."""
MATMULS: Final = frozenset(
    {
        "mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "_scaled_mm", SCALED_GROUPED,
        SCALED_GRADIENT,
    }
)  # fmt: skip
FUSED: Final = frozenset(
    {
        "aten::_to_copy",
        "aten::constant_pad_nd",
        "aten::select_backward",
        "aten::select_scatter",
        "aten::slice_backward",
        "aten::slice_scatter",
        "prims::convert_element_type",
    }
)
"""Operators that a compiler fuses as elementwise, though torch does not tag them so."""
ALLOCATIONS: Final = frozenset({"empty", "empty_like", "new_empty", "empty_strided"})
"""Operators that allocate memory and touch none of it."""
FILLS: Final = frozenset(
    {"full", "full_like", "new_ones", "new_zeros", "ones", "ones_like", "zeros", "zeros_like"}
)
"""Operators that read no element of their inputs."""
REDUCTIONS: Final = frozenset(
    {"_log_softmax", "_softmax", "amax", "amin", "any", "mean", "prod", "sum", "var_mean"}
)
"""Reductions whose kernels compute the values they reduce."""
ROW_QUANTISER: Final = "quantize_rows"
"""Our operator that quantises rows for a product, in the kernel that makes these."""
GATHERS: Final = frozenset({"embedding", "gather", "index", "index_select"})
"""Gathers of torch, all of which a compiler fuses with the readers of the rows."""
BY_PLACES: Final = frozenset({"sum_of_places", "dots_of_places"})
"""Our operators on rows of several matrices, by a matrix of row numbers."""
OWN_GATHERS: Final = frozenset(
    {
        "gather_quantize_pack",
        "gather_rows",
        "message_rows",
        "unpack_dequantize_permute",
        *BY_PLACES,
    }
)
"""Our operators that gather rows by an index; without one they read all rows."""
SCATTERS: Final = frozenset({"index_add", "index_copy", "index_put", "scatter", "scatter_add"})
CONCATENATION: Final = "cat"
FEW: Final = 4096
"""Tensors of at most so many integers hold counts or places of rows, not rows."""
KERNELS_OF_FEW: Final = 0.25
"""Kernels per operator on few integers: Inductor fuses scans and sums with their neighbours.
31 for 123, in the code it generates for DeepSeek-V3 16B in one, two and four chunks (5 for 12, 10
for 41, 16 for 70)."""
KERNELS_OF_FLEX: Final = {False: 1.0, True: 2.0}
"""Kernels of FlexAttention's forward; the backward sums output * gradient in one more."""
PASSES_OF: Final = {"all_reduce": 2}
"""Times the payload crosses the link, if not once: reduce-scatter, then all-gather."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Amounts:
    """Operations, bytes and kernels of one node."""

    operations: float = 0.0
    """Floating-point operations of a matrix product."""
    product: Product | None = None
    """The shape of that product."""
    read: Mapping[fx.Node, float] = field(default_factory=dict)
    """Input -> bytes read of it."""
    written: float = 0.0
    num_kernels: float = 0.0
    """Number of kernels once Inductor has fused operators."""
    link_bytes: float = 0.0
    """Bytes that leave a rank in a collective."""
    host_bytes: float = 0.0
    """Bytes of a copy to host memory, or back."""

    @property
    def nbytes(self) -> float:
        """Return bytes read and written."""
        return sum(self.read.values()) + self.written


def amounts_of(node: fx.Node, sizes: NominalSizes, *, writes_joined: bool = False) -> Amounts:
    """Return the amounts of `node`; all zero where it does no work on the device.

    `writes_joined` says that concatenations are written before they are read.
    """
    if is_free(node) or _op(node) in ALLOCATIONS:
        return Amounts()
    if is_launch(node):
        return Amounts(num_kernels=1, link_bytes=leaving_bytes(node, sizes))
    if is_copy(node):
        return Amounts(host_bytes=float(sizes.nbytes(value_of(node))))
    if (module := called_module(node)) is not None:
        nodes = module.graph.nodes
        inner = [amounts_of(n, sizes, writes_joined=writes_joined) for n in nodes]
        return Amounts(
            operations=sum(a.operations for a in inner),
            written=sum(a.nbytes for a in inner),
            num_kernels=sum(a.num_kernels for a in inner),
        )
    unfused = CONCATENATION if writes_joined else ""
    is_made_there = is_fusible(node) and _op(node) != unfused
    is_written = not (is_made_there and all(map(fuses_what_it_reads, _readers(node))))
    return Amounts(
        operations=_operations(node, sizes),
        product=_product(node, sizes),
        read=_bytes_read(node, sizes, unfused),
        written=float(sizes.nbytes(value_of(node))) if is_written else 0.0,
        num_kernels=_kernels_of(node, sizes) if is_written else 0.0,
    )


def _kernels_of(node: fx.Node, sizes: NominalSizes) -> float:
    """Return the kernels of a node whose value is written."""
    if is_flex_attention(node):
        return KERNELS_OF_FLEX[_is_backward(node)]
    tensor = tensor_of(node)
    are_few = tensor is not None and math.prod(sizes.shape(tensor)) <= FEW
    return KERNELS_OF_FEW if are_few and is_integer(node) else 1.0


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the readers of a value, and of views of it."""
    for user in node.users:
        if is_part(user):
            yield from _readers(user)
        else:
            yield user


def _viewed(node: fx.Node) -> fx.Node:
    """Return the node whose value a view is of, or the node."""
    while is_part(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_part(node: fx.Node) -> bool:
    """Whether the node is a view of a value, or one of several results."""
    return is_view(node) or node.target is operator.getitem or _op(node) == "_unsafe_view"


def is_free(node: fx.Node) -> bool:
    """Whether the node does no work on the device: not a call, a view, a wait, host arithmetic."""
    if node.op != "call_function":
        return True
    if is_wait(node) or is_part(node) or integers_taken(node):
        return True
    value = value_of(node)
    return not isinstance(value, torch.Tensor | tuple | list | dict)  # a Triton kernel's, by name


def is_elementwise(node: fx.Node) -> bool:
    """Whether a compiler would fuse the node with its neighbours: one output per element."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    return torch.Tag.pointwise in target.tags or target._schema.name in FUSED


def is_fusible(node: fx.Node) -> bool:
    """Whether a compiler may make the node's value within the kernels that read it."""
    return is_elementwise(node) or _op(node) in GATHERS | FILLS | {CONCATENATION}


def fuses_what_it_reads(node: fx.Node) -> bool:
    """Whether a compiler may make the node's inputs within the node's own kernel."""
    readers = GATHERS | SCATTERS | REDUCTIONS | {CONCATENATION, ROW_QUANTISER}
    return is_elementwise(node) or _op(node) in readers


def leaving_bytes(launch: fx.Node, sizes: NominalSizes) -> float:
    """Return the bytes that leave a rank in a collective, routed evenly."""
    sent = sum(sizes.nbytes(value_of(a)) for a in launch.all_input_nodes)
    received = sizes.nbytes(value_of(launch))
    num_ranks = ranks_of(launch)
    shared = num_ranks if num_ranks > 1 else 0  # with itself alone: as if with others
    return max(sent, received) * PASSES_OF.get(_op(launch).rstrip("_"), 1) * leaving_share(shared)


def ranks_of(launch: fx.Node) -> int:
    """Return the number of ranks in an exchange; 0 where the launch does not say.

    The whole payload is then taken to leave a rank; else all but its own part, evenly routed.
    """
    return len(output_splits(launch)) if is_all_to_all(launch) else _group_size(launch)


def called_module(node: fx.Node) -> fx.GraphModule | None:
    """Return the graph a higher-order operator calls, if it calls one; not in a kernel's loop."""
    owner = node.graph.owning_module
    if not is_higher_order(node) or is_flex_attention(node) or owner is None:
        return None
    for argument in node.all_input_nodes:
        if argument.op == "get_attr":
            module = getattr(owner, str(argument.target), None)
            if isinstance(module, fx.GraphModule):
                return module
    return None


def is_product(node: fx.Node) -> bool:
    """Whether the node is a matrix product of two of its arguments."""
    return _op(node) in MATMULS


def _bytes_read(node: fx.Node, sizes: NominalSizes, unfused: str) -> dict[fx.Node, float]:
    if _op(node) in FILLS:
        return {}
    kept = node.all_input_nodes
    if fuses_what_it_reads(node):
        base = kept[:1] if _op(node) in SCATTERS else []  # written first, if it is made there
        sources = {a: _viewed(a) for a in kept}
        made_here = {a for a, at in sources.items() if is_fusible(at) and _op(at) != unfused}
        kept = [a for a in kept if a in base or a not in made_here]
    read = {a: float(sizes.nbytes(value_of(a))) for a in kept}
    gathered = gathered_bytes(node, sizes)
    return read | {source: nbytes for source, nbytes in gathered.items() if source in read}


def _operations(node: fx.Node, sizes: NominalSizes) -> float:
    op = _op(node)
    if op in MATMULS:
        return _matmul_operations(node, sizes)
    if "attention" in op or is_flex_attention(node):
        return _attention_operations(node, sizes)
    return 0.0


def _factors(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the factors of a product."""
    tensors = _tensors(node)
    if _op(node) in (SCALED_GROUPED, SCALED_GRADIENT):
        rows, _, weight, *_ = tensors
        return rows, weight
    factors = [t for t in tensors if t.dim() >= 2]
    has_addend = overload_name(node) in ("aten::addmm", "aten::baddbmm")
    left, right = factors[-2:] if has_addend else factors[:2]
    return left, right


def _shapes(node: fx.Node, sizes: NominalSizes) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shapes of the factors of a product; of rows in blocks, those that fill blocks."""
    left, right = map(sizes.shape, _factors(node))
    if _op(node) == SCALED_GRADIENT:
        offs = sizes.shape(_tensors(node)[4])
        rows = (left[0] - offs[0]) * left[2]
        return (left[1], rows), (rows, right[1])
    return left, right


def _is_in_eight_bits(node: fx.Node) -> bool:
    """Whether both factors of a product are floating-point numbers of eight bits."""
    return all(t.is_floating_point() and t.element_size() == 1 for t in _factors(node))


def _product(node: fx.Node, sizes: NominalSizes) -> Product | None:
    """Return the shape of a product; groups that offsets divide are taken to have equal rows."""
    if not is_product(node):
        return None
    left, right = _shapes(node, sizes)
    rows, columns, reduction = float(left[-2]), float(right[-1]), float(left[-1])
    make = functools.partial(Product, in_eight_bits=_is_in_eight_bits(node))
    if len(left) == len(right) == 3:
        return make(groups=left[0], rows=rows, columns=columns, reduction=reduction)
    result = tensor_of(node)
    if len(left) == len(right) and result is not None and result.dim() == 3:
        groups = sizes.shape(result)[0]
        reduction /= max(groups, 1)
        return make(
            groups=groups, rows=rows, columns=columns, reduction=reduction, ragged="reduction"
        )
    if len(left) == len(right):
        return make(rows=rows, columns=columns, reduction=reduction)
    groups = max(left, right, key=len)[0]
    if len(left) == 3:  # columns are divided: they are the rows of the transposed product
        rows, columns = columns, rows
    rows /= max(groups, 1)
    return make(groups=groups, rows=rows, columns=columns, reduction=reduction, ragged="rows")


def _matmul_operations(node: fx.Node, sizes: NominalSizes) -> float:
    left, right = _shapes(node, sizes)
    groups = left[0] if len(left) == 3 and len(right) == 2 else 1
    return 2.0 * math.prod(left) * right[-1] / groups


def _attention_operations(node: fx.Node, sizes: NominalSizes) -> float:
    """Return the operations of attention, forward or backward.

    Only SDPA's backward is given the gradient of the output before the query.
    """
    shapes = [sizes.shape(t) for t in _tensors(node) if t.dim() == 4]
    is_backward = _is_backward(node)
    if is_backward and not is_flex_attention(node):
        shapes = shapes[1:]
    if len(shapes) < 3:
        return 0.0
    query, key, value = shapes[:3]
    share = _attended_share(node, query[-2], key[-2])
    queries, widths = math.prod(query[:-1]), query[-1] + value[-1]
    return attention_operations(queries, key[-2], widths, share, is_backward=is_backward)


def _attended_share(attention: fx.Node, num_queries: int, num_keys: int) -> float:
    """Return the share of all pairs of query and key that attention looks at.

    Kernels leave out blocks above the diagonal; SDPA's masks are tensors, and not looked into.
    """
    if is_flex_attention(attention):
        return kept_share(attention, num_queries, num_keys)
    if not isinstance(attention.target, torch._ops.OpOverload):
        return 1.0
    names = [a.name for a in attention.target._schema.arguments]
    position = names.index("is_causal") if "is_causal" in names else len(names)
    return CAUSAL_SHARE if argument_of(attention, position, "is_causal", default=False) else 1.0


def _is_backward(attention: fx.Node) -> bool:
    """Whether the operator computes a gradient."""
    target: Any = attention.target
    return "backward" in (target.name() if callable(getattr(target, "name", None)) else "")


def _op(node: fx.Node) -> str:
    """Return the name of the operator without its namespace and overload."""
    return overload_name(node).rpartition("::")[2]


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the tensors among the arguments, in order; one given twice is there twice."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    values = (tensor_of(a) for a in arguments if isinstance(a, fx.Node))
    return [t for t in values if t is not None]


def _group_size(launch: fx.Node) -> int:
    """Return the group size that a collective names, or that its group has; 0 for neither."""
    position = 1 if is_all_gather(launch) else 2 if is_reduce_scatter(launch) else None
    size = None if position is None else argument_of(launch, position, "group_size")
    return size if isinstance(size, int) else group_ranks(group_name(launch))


def group_ranks(name: str) -> int:
    """Return the ranks of the group called `name`; 0 where this process has no such group."""
    try:
        return int(dist.distributed_c10d._resolve_process_group(name).size())
    except (RuntimeError, ValueError, KeyError):
        return 0


def reads_pieces(node: fx.Node) -> bool:
    """Whether the operator takes rows of several matrices by their places."""
    return overload_name(node).rpartition("::")[2] in BY_PLACES


def gathered_bytes(gather: fx.Node, sizes: NominalSizes) -> dict[fx.Node, float]:
    """Return the bytes that `gather` reads of each tensor it takes rows from; {} for no gather."""
    op = overload_name(gather).rpartition("::")[2]
    if op in GATHERS:
        source = gather.all_input_nodes[0]
        taken = float(sizes.nbytes(value_of(gather)))
        return {source: min(taken, float(sizes.nbytes(value_of(source))))}
    if op not in OWN_GATHERS:
        return {}
    sources, places = [gather.args[0]], gather
    if op in BY_PLACES:
        sources, places = gather.args[:2]
    number = math.prod(_shape(places, sizes)[: 2 if op in BY_PLACES else 1])
    share = min(1.0, number / max(sum(_shape(source, sizes)[0] for source in sources), 1))
    return {source: share * float(sizes.nbytes(value_of(source))) for source in sources}


def _shape(node: fx.Node, sizes: NominalSizes) -> tuple[int, ...]:
    tensors = tensors_in(value_of(node))
    return tuple(sizes.shape(tensors[0])) if tensors else (1,)
