"""Small wrong changes of Python source: where they can be made, and the changed source.

Contract
    Points of a source are listed in one order, so a point names the same change in every process.
    Changed are conditions, comparisons, operators, integers, statements that call or raise; not
    annotations, decorators, assertions, messages: a change there is no change of behaviour.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Point:
    """One change of one source."""

    line: int
    """The first line of what is changed, from 1."""
    change: str
    """What is changed into what, as source on one line."""
    node: int
    """Position of the node in `ast.walk` of the source."""
    variant: int
    """Which of the changes of this node."""


Change = tuple[ast.AST, str]
"""What stands in a node's place, and the change in words."""

COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
NAMES: Final = {"any": "all", "all": "any", "min": "max", "max": "min"}


def points(source: str) -> list[Point]:
    """Return every change that can be made to `source`."""
    tree = ast.parse(source)
    untouched = {id(n) for part in _parts_without_behaviour(tree) for n in ast.walk(part)}
    return [
        Point(line=_line(node), change=change, node=number, variant=variant)
        for number, node in enumerate(ast.walk(tree))
        if id(node) not in untouched
        for variant, (_, change) in enumerate(_changes(node))
    ]


def mutate(source: str, point: Point) -> str:
    """Return `source` with the change at `point`; layout and comments are lost."""
    tree = ast.parse(source)
    node = list(ast.walk(tree))[point.node]
    changed, _ = list(_changes(node))[point.variant]
    return ast.unparse(ast.fix_missing_locations(_Replacement(node, changed).visit(tree)))


class _Replacement(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        """Prepare to put `new` in the place of `old`."""
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        """Return what stands in the place of `node`."""
        return self._new if node is self._old else self.generic_visit(node)


def _parts_without_behaviour(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert | ast.JoinedStr):
            yield node
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from node.decorator_list
            returns = getattr(node, "returns", None)
            yield from [returns] if returns else []
        elif isinstance(node, ast.AnnAssign | ast.arg) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield node
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "TypeVar"):
            yield from node.args[1:]
        elif isinstance(node, ast.Raise) and node.exc is not None:
            yield node.exc


def _changes(node: ast.AST) -> Iterator[Change]:
    for rule in (_of_tests, _of_conditions, _of_arithmetic, _of_values, _of_statements):
        yield from rule(node)


def _of_tests(node: ast.AST) -> Iterator[Change]:
    """Negate what decides; a comparison or a `not` is negated by its own rule."""
    own = ast.Compare | ast.UnaryOp
    if isinstance(node, ast.If | ast.While | ast.IfExp) and not isinstance(node.test, own):
        changed = copy.copy(node)
        changed.test = _negated(node.test)
        yield changed, _said(node.test, changed.test)
    elif isinstance(node, ast.comprehension):
        for i, test in enumerate(node.ifs):
            if not isinstance(test, own):
                kept = copy.copy(node)
                kept.ifs = [*node.ifs[:i], _negated(test), *node.ifs[i + 1 :]]
                yield kept, _said(test, kept.ifs[i])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand, _said(node, node.operand)


def _negated(test: ast.expr) -> ast.expr:
    return ast.copy_location(ast.UnaryOp(op=ast.Not(), operand=test), test)


def _of_conditions(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.BoolOp):
        other = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
        yield _said_change(node, ast.BoolOp(op=other, values=node.values))
    elif isinstance(node, ast.Compare):
        for i, operator in enumerate(node.ops):
            if type(operator) in COMPARISONS:
                ops = [*node.ops[:i], COMPARISONS[type(operator)](), *node.ops[i + 1 :]]
                yield _said_change(node, ast.Compare(node.left, ops, node.comparators))


def _of_arithmetic(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.BinOp | ast.AugAssign) or type(node.op) not in ARITHMETIC:
        return
    other = ARITHMETIC[type(node.op)]()
    if isinstance(node, ast.AugAssign):
        if not _is_literal(node.value):
            yield _said_change(node, ast.AugAssign(node.target, other, node.value))
    elif not (_is_literal(node.left) or _is_literal(node.right)):
        yield _said_change(node, ast.BinOp(node.left, other, node.right))


def _is_literal(node: ast.expr) -> bool:
    """Whether `node` is a literal that has no minus: adding is concatenation."""
    return isinstance(node, ast.List | ast.Tuple | ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _of_values(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield _said_change(node, ast.Constant(node.value + 1))
    elif isinstance(node, ast.Constant) and type(node.value) is bool:
        yield _said_change(node, ast.Constant(not node.value))
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in NAMES:
        other = ast.Name(NAMES[node.func.id], ast.Load())
        yield _said_change(node, ast.Call(other, node.args, node.keywords))


def _of_statements(node: ast.AST) -> Iterator[Change]:
    """Leave out a statement that raises or calls."""
    calls = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if calls or isinstance(node, ast.Raise):
        yield _said_change(node, ast.Pass())


def _line(node: ast.AST) -> int:
    """Return the line of `node`, or of the first part of it that has one."""
    return next((n.lineno for n in ast.walk(node) if hasattr(n, "lineno")), 0)


def _said_change(old: ast.AST, new: ast.AST) -> Change:
    return new, _said(old, new)


def _said(old: ast.AST, new: ast.AST) -> str:
    return f"{_text(old)}  ->  {_text(new)}"


def _text(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())
