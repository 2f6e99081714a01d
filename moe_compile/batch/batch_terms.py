"""Sums and means over the batch, losses of torch among them: the whole's from those of parts.

Contract
    A loss of `torch.nn.functional` is its result without a reduction, summed or averaged over all
    elements. `cross_entropy` and `nll_loss` average over the targets that count, by their
    weights: the number in each part is known only when it runs, so that parts compute sums, and
    their divisors are added up beside them.
"""

from __future__ import annotations

import enum
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, Final

import torch.fx as fx
import torch.nn.functional as F

from moe_compile.dims.arguments import operator_name
from moe_compile.dims.factors import Lost
from moe_compile.graph.query import operator_at, tensor_of


class Terms(enum.Enum):
    """Ways in which the values of parts make up the whole's."""

    ADDED = "they are added up"
    BY_SHARE = "they are means, and each counts by its share of the batch"
    BY_TARGETS = "their sums are added up, and divided by the sum of the weights of all targets"


BY_TARGETS: Final = ("cross_entropy", "nll_loss")
ADD_UP: Final = frozenset({"sum", "nansum", "count_nonzero"})
OF_REDUCTION: Final = {
    "sum": Terms.ADDED,
    "mean": Terms.BY_SHARE,
    "batchmean": Terms.BY_SHARE,
}
TOLD_OTHERWISE: Final = ("size_average", "reduce")
"""Former arguments of losses of torch, which `reduction` replaces."""


def terms_of(node: fx.Node) -> Terms | None:
    """Return the way in which parts' values of `node` make up the whole's; None of other nodes."""
    name = operator_name(node)
    if name in ADD_UP or name == "mean":
        return Terms.BY_SHARE if name == "mean" else Terms.ADDED
    given = loss_arguments(node)
    found = None if given is None else OF_REDUCTION.get(given["reduction"])
    if given is None or found is not Terms.BY_SHARE or "ignore_index" not in given:
        return found
    target = tensor_of(given["target"]) if isinstance(given["target"], fx.Node) else None
    if target is None or name not in BY_TARGETS:
        return None
    return found if target.dtype.is_floating_point else Terms.BY_TARGETS


def loss_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Return the arguments of a loss by their names, None for another node."""
    parameters = _parameters(node.target) if node.op == "call_function" else None
    if parameters is None:
        return None
    given = parameters.bind(*node.args, **node.kwargs)
    given.apply_defaults()
    if any(given.arguments.get(name) is not None for name in TOLD_OTHERWISE):
        raise Lost(
            f"{operator_at(node)} sets its reduction by the old arguments size_average or "
            "reduce; write reduction= instead"
        )
    return dict(given.arguments)


@functools.cache
def _parameters(function: Any) -> inspect.Signature | None:
    """Return the signature of a loss of torch; None of another function."""
    is_loss = getattr(F, str(getattr(function, "__name__", "")), None) is function
    if not is_loss or not inspect.isfunction(function):
        return None
    found = inspect.signature(function)
    return found if "reduction" in found.parameters else None


def summed_instead(loss: fx.Node, read: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return the arguments by which a loss is summed, in order; `read` maps its inputs."""
    given = loss_arguments(loss)
    assert given is not None
    return tuple(fx.node.map_arg([*{**given, "reduction": "sum"}.values()], read))


def weight_of_targets(loss: fx.Node, emit: Any, read: Callable[[Any], Any]) -> Any:
    """Emit the sum of the weights of the targets that count in a loss."""
    given = loss_arguments(loss)
    assert given is not None
    target, weight = read(given["target"]), given["weight"]
    counts = emit.call(operator.ne, target, given["ignore_index"])
    if weight is None:
        return emit.method("sum", counts)
    known = emit.method("where", target, counts, 0)
    weights = emit.call(operator.getitem, read(weight), known)
    return emit.method("sum", emit.method("where", weights, counts, 0))
