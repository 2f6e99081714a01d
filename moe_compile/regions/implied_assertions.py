"""Assertions about host integers that hold whenever a region runs at all.

Contract
    An assertion is implied only if it follows from the dispatch's own demands on its split sizes
    (no count is negative, and the counts sent add up to the rows), or if it says that the size of
    a tensor is not negative. A program that breaks one of the first kind fails in the exchange,
    asserted or not, and none breaks the second. All others are the user's, or cannot be told from
    the user's, and stay.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Final

import sympy
import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, statically_known_true
from torch.utils._sympy.functions import FloorDiv

from moe_compile.graph.effects import always_holds
from moe_compile.graph.query import tensor_of, value_of, where_equal
from moe_compile.regions.count_facts import CountFacts
from moe_compile.regions.regions import MoERegion

RELATIONS: Final[dict[Any, Callable[[Any, Any], Any]]] = {
    operator.ge: sympy.Ge,
    operator.gt: sympy.Gt,
    operator.le: sympy.Le,
    operator.lt: sympy.Lt,
    operator.eq: sympy.Eq,
}
ARITHMETIC: Final[dict[Any, Callable[..., Any]]] = {
    operator.add: operator.add,
    operator.sub: operator.sub,
    operator.mul: operator.mul,
    operator.neg: operator.neg,
    torch.sym_sum: lambda terms: sympy.Add(*terms),
}
DIVIDES: Final[dict[Any, Callable[..., Any]]] = {
    operator.mod: sympy.Mod,
    operator.floordiv: FloorDiv,
}


def is_implied(assertion: fx.Node, region: MoERegion, facts: CountFacts) -> bool:
    """Whether the condition of `assertion` follows from the counts of `region` alone."""
    if always_holds(assertion):
        return True
    condition = assertion.args[0]
    if assertion.target is torch._check_is_size:
        number = _formula(condition, region, facts)
        return number is not None and bool(number.is_nonnegative)
    return isinstance(condition, fx.Node) and _follows(condition, region, facts)


def _follows(condition: fx.Node, region: MoERegion, facts: CountFacts) -> bool:
    """Whether a relation, or one of several, follows from the counts of `region`.

    Of two sizes that broadcast, torch asserts that one is 1 or equals the other.
    """
    if condition.target is operator.or_:
        return any(isinstance(a, fx.Node) and _follows(a, region, facts) for a in condition.args)
    if condition.target not in RELATIONS:
        return False
    left, right = (_formula(argument, region, facts) for argument in condition.args)
    if left is None or right is None:
        return False
    if condition.target is operator.eq:
        return _is_at_least(left, right, region, facts) and _is_at_least(right, left, region, facts)
    if condition.target in (operator.gt, operator.lt):
        left, right = _strict(left, right, condition.target)
        return _is_at_least(left, right, region, facts)
    low, high = (right, left) if condition.target is operator.ge else (left, right)
    return _is_at_least(high, low, region, facts)


def _strict(left: sympy.Expr, right: sympy.Expr, relation: object) -> tuple[sympy.Expr, sympy.Expr]:
    """Return (high, low + 1) of `high > low`, over integers."""
    return (left, right + 1) if relation is operator.gt else (right, left + 1)


def _formula(argument: Any, region: MoERegion, facts: CountFacts) -> sympy.Expr | None:
    """Return a number of the host as a formula in the counts, or None.

    The formula is that of the program: a fact learnt from an assertion would make that assertion
    true. In a division, the counts sent are taken to add up to the rows.
    """
    if isinstance(argument, int):
        return sympy.Integer(argument)
    if not isinstance(argument, fx.Node):
        return None
    compute = ARITHMETIC.get(argument.target) or DIVIDES.get(argument.target)
    if compute is None or argument.kwargs:
        value = value_of(argument)
        formula = facts.formula_written(value)
        return _known_before(value) if formula is None else formula
    operands = [
        [_formula(a, region, facts) for a in given] if isinstance(given, list | tuple) else given
        for given in argument.args
    ]
    known = [o if isinstance(o, list) else _formula(o, region, facts) for o in operands]
    if any(k is None or (isinstance(k, list) and None in k) for k in known):
        return None
    if argument.target in DIVIDES:
        sent, num_rows = sympy.Add(*facts.sent), _num_rows(region, facts)
        known = [where_equal(number, sent, num_rows) for number in known]
    return compute(*known)


def _num_rows(region: MoERegion, facts: CountFacts) -> sympy.Expr:
    """Return the number of rows sent, as a formula of their tensor's size."""
    rows = tensor_of(region.rows)
    assert rows is not None
    return facts.formula(rows.shape[0])


def _known_before(size: Any) -> sympy.Expr | None:
    """Return a size as a formula of the sizes of the graph's inputs; None where it needs more."""
    if not isinstance(size, torch.SymInt) or free_unbacked_symbols(size.node._expr):
        return None
    formula = size.node.expr  # facts that tracing learnt of it are guards
    return None if free_unbacked_symbols(formula) else formula


def _is_at_least(high: sympy.Expr, low: sympy.Expr, region: MoERegion, facts: CountFacts) -> bool:
    """Whether `high >= low` by form, given that the counts sent add up to the rows."""
    rows = tensor_of(region.rows)
    assert rows is not None
    num_rows = rows.shape[0]
    sent = facts.formula(num_rows)
    is_input = _known_before(num_rows) is not None
    if is_input and high.is_Integer and statically_known_true(num_rows <= int(high)):
        high = sent  # by the bounds of inputs' sizes
    spare = sympy.Add(*facts.sent) - sent  # zero where the dispatch runs
    difference = sympy.expand(high - low)
    return any(sympy.expand(difference + sign * spare).is_nonnegative for sign in (0, 1, -1))
