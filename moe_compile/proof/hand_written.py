"""Functions whose backward is written by hand (`torch.autograd.Function`): what it may do to rows.

Contract
    The backward is followed as the forward is. Given a gradient for every row of a result, it must
    make a gradient for every row of an argument from that row alone. A gradient of a tensor from
    outside the region must be made of rows of one expert.
"""

from __future__ import annotations

from moe_compile.graph.query import operator_at
from moe_compile.journal.reasons import Reason
from moe_compile.proof.operator_call import Knowledge
from moe_compile.proof.trace_steps import GradientMade, GradientOf
from moe_compile.regions.outside_reads import is_differentiable
from moe_compile.regions.row_domain import (
    Fixed,
    OfExpert,
    Outside,
    Rows,
    Unproven,
    Value,
)


def gradient_of(known: Knowledge, step: GradientOf) -> Value:
    """Return what the gradient of a result is: of its rows, row by row."""
    result = known.value(step.result)
    if not isinstance(result, Rows | OfExpert):
        raise Unproven(Reason.UNKNOWN_OPERATOR, f"{operator_at(step.node)}: a result without rows")
    return result


def check_gradient(known: Knowledge, step: GradientMade) -> None:
    """Raise Unproven where a chunk would make another gradient of an argument."""
    argument, gradient = known.value(step.argument), known.value(step.tensor)
    if isinstance(argument, Outside):
        if not any(map(is_differentiable, argument.nodes)):
            return
        if not isinstance(gradient, OfExpert):
            raise Unproven(Reason.SHARED_PARAMETER, f"{operator_at(step.node)}, in its backward")
        known.whole.setdefault(step.node, set()).add(gradient.expert)
        known.reads.add(argument, None, gradient.expert)
    elif isinstance(argument, Rows | OfExpert):
        is_constant = isinstance(gradient, Fixed) and gradient.is_uniform
        if gradient != argument and not is_constant:
            raise Unproven(Reason.ROWS_MIXED, f"{operator_at(step.node)}, in its backward")
