"""What kinds of a block's compute run under exchanges, in a graph or in generated code."""

import re

from torch.utils import _pytree as pytree

from moe_compile.graph.query import group_name, is_launch, is_wait, overload_name
from moe_compile.testing.wrapper_order import EventKind, wrapper_events
from tests.block_layers import EXPERTS, HIDDEN, TOKENS, ParallelBlock, SerialBlock

COMPUTE = ("aten::mm", "aten::addmm", "aten::_grouped_mm", "aten::_scaled_dot_product")

EXPECTED = {
    (SerialBlock, "attention", "forward"): {"attention", "projection"},
    (SerialBlock, "experts", "forward"): {"experts", "shared expert"},
    (SerialBlock, "attention", "backward"): {"attention", "weight gradient"},
    (SerialBlock, "experts", "backward"): {"experts", "shared expert"},
    (ParallelBlock, "attention", "forward"): {"attention", "router"},
    (ParallelBlock, "experts", "forward"): {"attention", "experts"},
    (ParallelBlock, "attention", "backward"): {"attention", "weight gradient", "shared expert"},
    (ParallelBlock, "experts", "backward"): {"attention", "shared expert"},
}
"""What at least runs under exchanges of each kind. In a serial forward attention has nothing but
itself and the projections, since all else needs its result."""


def kind_of_compute(op, result, operands):
    """Return which part of a block `op` is, by the shapes of its result and operands."""
    if "scaled_dot_product" in op:
        return "attention"
    if "grouped_mm" in op:
        return "weight gradient" if len(result) == 3 else "experts"
    if TOKENS not in result:
        return "weight gradient"
    sizes = {size for shape in (result, *operands) for size in shape}
    if EXPERTS in sizes:
        return "router"
    return "shared expert" if HIDDEN in sizes else "projection"


def kinds_in_graph(graph):
    """Return group name -> kinds of compute between launches on it and their first waits."""
    running, found = {}, {}
    for node in graph.nodes:
        if is_launch(node):
            running[node] = found.setdefault(group_name(node), set())
        elif is_wait(node):
            running.pop(node.args[0], None)
        elif overload_name(node).startswith(COMPUTE):
            operands = [shape_of(n) for n in node.all_input_nodes]
            kind = kind_of_compute(overload_name(node), shape_of(node), operands)
            for kinds in running.values():
                kinds.add(kind)
    return found


def shape_of(node):
    return tuple(pytree.tree_leaves(node.meta["val"])[0].shape)


MADE = re.compile(r"(\w+) = empty_strided_\w+\(\(([^)]*)\)")
CHECKED = re.compile(r"assert_size_stride\((\w+), \(([^)]*)\)")
VIEWED = re.compile(r"reinterpret_tensor\((\w+), \(([^)]*)\)[^)]*\)[^)]*\)")
RENAMED = re.compile(r"^\s*(\w+) = (?:reinterpret_tensor\()?(\w+)[,;]")
RESULT = re.compile(r"out=(\w+)\)|^(\w+) = ")
OPERAND = re.compile(r"\b(?:buf|primals_|permute_|tangents_|view_|mm_)\w*")


def shapes_in_code(code):
    """Return name of a buffer or input -> its shape."""
    shapes = {}
    for line in code.splitlines():
        for pattern in (MADE, CHECKED):
            for name, sizes in pattern.findall(line):
                shapes.setdefault(name, _sizes(sizes))
        if "# reuse" in line and (renamed := RENAMED.match(line)):
            viewed = VIEWED.search(line)
            new, old = renamed.groups()
            shapes[new] = _sizes(viewed[2]) if viewed else shapes[old]
    return shapes


def _sizes(text):
    return tuple(int(s) if s.strip().isdigit() else s.strip() for s in text.split(",") if s.strip())


def kinds_in_code(code):
    """The same as `kinds_in_graph`, of the code Inductor generated."""
    shapes = shapes_in_code(code)
    running, found = {}, {}
    for event in wrapper_events(code):
        if event.kind is EventKind.LAUNCH:
            running[event.names[0]] = found.setdefault(event.group, set())
        elif event.kind is EventKind.WAIT:
            for name in event.names:
                running.pop(name, None)
        elif event.line:
            kind = _kind_of_line(event, shapes)
            for kinds in running.values():
                kinds.add(kind)
    return found


def _kind_of_line(event, shapes):
    operands = [_sizes(sizes) for _, sizes in VIEWED.findall(event.line)]
    direct = VIEWED.sub("", event.line)
    operands += [shapes[name] for name in OPERAND.findall(direct) if name in shapes]
    result = next(name for name in RESULT.search(event.line).groups() if name)
    return kind_of_compute(event.op, shapes.get(result, ()), operands)


def expected(style, phase):
    """Return kind of exchange -> kinds of compute that run under it at least."""
    return {kind: EXPECTED[style, kind, phase] for kind in ("attention", "experts")}
