"""Questions about nodes: launches, waits, groups, values, places. The only copy.

Contract
    Answers hold for Dynamo graphs (targets are overload packets, values under `example_value`)
    and for AOTAutograd graphs (targets are overloads, values under `val`) alike.
"""

from __future__ import annotations

import math
import re
from pathlib import Path, PurePath
from typing import Any, Final

import sympy
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from moe_compile.graph.memory import tensors_in

C10D: Final = torch.ops._c10d_functional
SIZE: Final = torch.ops.aten.sym_size.int
"""The size of a tensor in a graph of AOTAutograd, where it is no number."""
SOURCE_LINE: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
RESUMED: Final = re.compile(r"^torch_dynamo_resume_in_(.+)_at_\d+$")
"""Dynamo's name of the rest of a function, behind a graph break."""
ASSERTIONS: Final = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch._check,
    torch._check_is_size,
)
"""Calls that stop a program unless a condition on host integers holds: the tracer's and users'."""

TORCH: Final = f"{Path(torch.__file__).parent}/"
"""Folder of torch's own files, with its end: torchtitan's begins alike."""
NAMESPACES: Final = frozenset({"_c10d_functional", "_c10d_functional_autograd"})
WAITS: Final = ("wait_tensor", "wait_tensors")
WAIT_NAMES: Final = ("_c10d_functional::wait_tensor", "megamoe::measured_wait")
"""Operators that wait for one tensor: torch's, and the one that measures it."""
OFFLOAD: Final = "ao::offload"
RELOAD: Final = "ao::reload"
COPY_WAIT: Final = "ao::wait_tensor"
"""torch's operators that copy a tensor to host memory and back, beside compute."""


def overload_name(node: fx.Node) -> str:
    """Return `namespace::op` of an operator node, "" for anything else."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return ""


def called_name(node: fx.Node) -> str:
    """Return the name of the function or tensor method a Dynamo node calls, "" for all else."""
    if node.op == "call_method":
        return str(node.target)
    return str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""


def argument_of(call: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Return the argument at `position`, or that called `name`, or `default`."""
    if len(call.args) > position:
        return call.args[position]
    return call.kwargs.get(name, default)


def is_wait(node: fx.Node) -> bool:
    """Whether the node waits for a collective; `normalize_exchanges` makes all others these."""
    return overload_name(node) in WAIT_NAMES


def is_of_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd says that a node of a joint graph is of the backward pass."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def is_offload(node: fx.Node) -> bool:
    """Whether the node starts a copy of a tensor to host memory."""
    return overload_name(node) == OFFLOAD


def is_copy(node: fx.Node) -> bool:
    """Whether the node starts a copy of a tensor to host memory, or back."""
    return overload_name(node) in (OFFLOAD, RELOAD)


def is_copy_wait(node: fx.Node) -> bool:
    """Whether the node waits for a copy."""
    return overload_name(node) == COPY_WAIT


def starts_transfer(node: fx.Node) -> bool:
    """Whether the node starts work beside compute: a collective or a copy."""
    return is_launch(node) or is_copy(node)


def ends_transfer(node: fx.Node) -> bool:
    """Whether the node waits for a collective or a copy."""
    return is_wait(node) or is_copy_wait(node)


def waits_on(launch: fx.Node) -> list[fx.Node]:
    """Return the waits on `launch`, and the waits on those: some frontends wait twice."""
    found: list[fx.Node] = []
    for user in launch.users:
        if is_wait(user):
            found += [user, *waits_on(user)]
    return found


def is_launch(node: fx.Node) -> bool:
    """Whether the node launches an asynchronous collective."""
    namespace, _, op = overload_name(node).partition("::")
    return namespace in NAMESPACES and op not in WAITS and not op.startswith("_wrap")


def is_all_to_all(node: fx.Node) -> bool:
    """Whether the node launches an all-to-all."""
    return is_launch(node) and overload_name(node).endswith("::all_to_all_single")


def is_all_gather(node: fx.Node) -> bool:
    """Whether the node launches an all-gather."""
    return is_launch(node) and "::all_gather_into_tensor" in overload_name(node)


def is_reduce_scatter(node: fx.Node) -> bool:
    """Whether the node launches a reduce-scatter, of one tensor or several."""
    return is_launch(node) and "::reduce_scatter_tensor" in overload_name(node)


def group_name(launch: fx.Node) -> str:
    """Return the name of the process group a collective runs on: its last string argument."""
    names = [a for a in (*launch.args, *launch.kwargs.values()) if isinstance(a, str)]
    return names[-1] if names else ""


def output_splits(exchange: fx.Node) -> list[Any]:
    """Return the rows an all-to-all receives from each rank; [] when the split is even."""
    return _splits(exchange, 1)


def input_splits(exchange: fx.Node) -> list[Any]:
    """Return the rows an all-to-all sends to each rank; [] when the split is even."""
    return _splits(exchange, 2)


def _splits(exchange: fx.Node, position: int) -> list[Any]:
    value = exchange.args[position]
    return list(value) if isinstance(value, list | tuple) else []


def has_dynamic_splits(exchange: fx.Node) -> bool:
    """Whether a split list holds sizes known only at run time."""
    return any(isinstance(s, fx.Node) for s in (*output_splits(exchange), *input_splits(exchange)))


def expression_of(size: Any) -> Any:
    """Return the number or expression of a size, or of a node; equal sizes have equal ones."""
    value = value_of(size) if isinstance(size, fx.Node) else size
    return value.node.expr if isinstance(value, torch.SymInt) else value


def where_equal(size: Any, length: Any, other: Any) -> Any:
    """Return the expression of a size where `length`, a sum of symbols, is equal to `other`."""
    whole, length, other = map(sympy.sympify, (size, length, other))
    symbols = sorted(length.free_symbols - other.free_symbols, key=str)
    symbol = next((one for one in symbols if length.coeff(one) == 1), None)
    return whole if symbol is None else whole.subs(symbol, other - (length - symbol))


def number_of(size: Any) -> int | None:
    """Return the value of a size that can have one only, such as by an assertion; else None."""
    expression = expression_of(size)
    return int(expression) if getattr(expression, "is_Integer", type(expression) is int) else None


def is_never_negative(size: Any) -> bool:
    """Whether an integer, or one that the host knows at run time, is at least 0 for any sizes."""
    value = value_of(size) if isinstance(size, fx.Node) else size
    if isinstance(value, torch.SymInt):
        return statically_known_true(value >= 0)
    return type(value) is int and value >= 0


def value_of(node: fx.Node) -> Any:
    """Return the fake value the tracer stored, or None."""
    return node.meta.get("val", node.meta.get("example_value"))


def tensor_of(node: fx.Node) -> torch.Tensor | None:
    """Return the fake tensor the node produces, or None when it is no tensor."""
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) else None


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether no operator made the tensor, for autograd.

    For a view of memory that was written, `is_leaf` of autograd would make the view once more,
    with symbols for its sizes that no node binds, or fail.
    """
    return not tensor._is_view() and tensor.is_leaf


def is_tangent(node: fx.Node) -> bool:
    """Whether the node of AOTAutograd's graph is an input that brings a gradient of a result.

    It is recognised by its name, as torch's own partitioner does it.
    """
    return node.op == "placeholder" and node.name.startswith("tangents")


def has_gradient(node: fx.Node) -> bool:
    """Whether a gradient flows through the node's value, by the tracer's values."""
    return any(tensor.requires_grad for tensor in tensors_in(value_of(node)))


def has_static_inputs(graph: fx.Graph) -> bool:
    """Whether all inputs are known to have sizes that are numbers."""
    values = [value_of(node) for node in graph.find_nodes(op="placeholder")]
    sizes = [s for v in values if isinstance(v, torch.Tensor) for s in v.shape]
    return None not in values and not any(isinstance(v, torch.SymInt) for v in (*values, *sizes))


def known_rows(node: fx.Node) -> int:
    """Return the length of the first dimension where it is known when compiling, else 0."""
    tensor = tensor_of(node)
    return tensor.shape[0] if tensor is not None and type(tensor.shape[0]) is int else 0


def bytes_of_row(rows: torch.Tensor | None) -> int:
    """Return the bytes of an entry along the first dimension; 0 of no tensor or unknown sizes."""
    sizes = [] if rows is None else rows.shape[1:]
    if rows is None or not all(type(size) is int for size in sizes):
        return 0
    return math.prod(sizes) * rows.element_size()


def is_assertion(node: fx.Node) -> bool:
    """Whether the node stops the program unless a condition on host numbers holds."""
    return node.op == "call_function" and node.target in ASSERTIONS


def is_integer(node: fx.Node) -> bool:
    """Whether the node is a tensor of integers."""
    tensor = tensor_of(node)
    return tensor is not None and not (
        tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool
    )


def source_place(node: fx.Node) -> str:
    """Return `file.py:line in function`, the user's line that made `node`; "" when unknown."""
    frames = SOURCE_LINE.findall(node.meta.get("stack_trace") or "")
    own = [frame for frame in frames if not frame[0].startswith(TORCH)]
    if not own:
        return ""
    return place_of(*own[-1])


def place_of(file: str, line: Any, function: str) -> str:
    """Return `file.py:line in function`, with the user's name of the function."""
    resumed = RESUMED.match(function)
    return f"{PurePath(file).name}:{line} in {resumed[1] if resumed else function}"


def operator_at(node: fx.Node) -> str:
    """Return the operator of a node and the user's line that it stands on."""
    place = source_place(node)
    return f"{operator_of(node)} at {place}" if place else operator_of(node)


def operator_of(node: fx.Node) -> str:
    """Return the operator of a node, by the name that a user knows."""
    if node.op == "output":
        return "the result of the graph"
    if node.op in ("placeholder", "get_attr"):
        return f"the input `{node.name}`"
    if node.op == "call_method":
        return f"`.{node.target}()`"
    return f"`{getattr(node.target, '__name__', node.target)}`"
