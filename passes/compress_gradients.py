"""Send float32 gradients as bfloat16: a reduce-scatter becomes an all-to-all and a float32 sum.

Contract
    Requires  FUNCTIONAL.
    Keeps     the sum: float32, of contributions each rounded once to bfloat16. A contribution that
              was bfloat16 before it was cast up is not rounded at all. Half the bytes travel.

    wait(reduce_scatter_tensor(x, "sum", n, group))  ->
        sum(view(wait(all_to_all_single(bfloat16(x), even, even, group)), [n, ...]), 0, float32)

Off unless `gradient_wire = "bf16_fp32_sum"`. A parameter's gradient is told from an activation's,
which tensor parallelism reduces, by its uses: the graph returns it, and on the way its values are
at most cast, scaled or added to, or summed over replicas (MegaScale-MoE, section 5).
A linear operator is so element by element, except for rounding: the sum of two results is the
result for the sum, apart from a constant added. An operator that is not listed here is said not to
be linear, pointwise ones too.
Each rank decides by its own backward graph. The facts of the forward that decide it are part of the
plan that ranks agree on; where they decide apart all the same, the orders they record differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
import torch.fx as fx

from moe_compile.graph.edit import ValuedEmitter, erase_unused, substitute
from moe_compile.graph.query import (
    C10D,
    argument_of,
    group_name,
    is_reduce_scatter,
    is_tangent,
    is_wait,
    tensor_of,
    waits_on,
)
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.contract import Fact, GraphPass

ATEN: Final = torch.ops.aten
SUMMED: Final = ("sum", "avg")
"""Reductions that are sums, up to a factor."""
COPIES: Final = frozenset(
    {
        ATEN._to_copy.default,
        ATEN._unsafe_view.default,
        ATEN.clone.default,
        torch.ops.prims.convert_element_type.default,
    }
)
SUMS: Final = frozenset(
    {
        ATEN.add.Tensor,
        ATEN.add.Scalar,
        ATEN.sub.Tensor,
        ATEN.sub.Scalar,
        ATEN.rsub.Tensor,
        ATEN.rsub.Scalar,
        ATEN.neg.default,
    }
)
PRODUCTS: Final = frozenset({ATEN.mul.Tensor, ATEN.mul.Scalar})
QUOTIENTS: Final = frozenset({ATEN.div.Tensor, ATEN.div.Scalar})


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientReduction:
    """A reduce-scatter whose contributions can travel as bfloat16."""

    launch: fx.Node
    waits: Sequence[fx.Node]
    """The wait on the launch, then those on that wait."""
    source: fx.Node
    """The tensor to reduce, float32 `[n K, ...]`, or the bfloat16 that it was cast from."""
    ranks: int
    group: Any
    is_mean: bool

    @property
    def payload_bytes(self) -> int:
        """Return the bytes a rank contributes as float32."""
        whole = tensor_of(self.launch.all_input_nodes[0])
        assert whole is not None
        return whole.numel() * whole.element_size()


@dataclass(frozen=True)
class CompressGradients(GraphPass):
    """See the module docstring."""

    name: ClassVar[str] = "compress_gradients"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.FUNCTIONAL})
    commutes_with: ClassVar[frozenset[str]] = frozenset({"lower_row_ops"})

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Decide for every reduce-scatter, then replace those of parameters' gradients."""
        found: list[GradientReduction] = []
        skipped: list[Verdict] = []
        gradients = _gradients(graph)
        for launch in [node for node in graph.nodes if is_reduce_scatter(node)]:
            seen = _match(launch, state, gradients)
            if isinstance(seen, Verdict):
                skipped.append(seen)
            else:
                found.append(seen)
        names = tuple(reduction.launch.name for reduction in found)
        before = float(sum(reduction.payload_bytes for reduction in found))
        for reduction in found:
            _replace(reduction)
        measures = {"gradient_bytes_before": before, "gradient_bytes": before / 2}
        return PassReport(
            pass_name=self.name,
            applied=names,
            skipped=tuple(skipped),
            measures=measures if found else {},
        )


def _match(
    launch: fx.Node, state: CompileState, gradients: Collection[fx.Node]
) -> GradientReduction | Verdict:
    if left := _not_asked(launch, state, gradients) or _not_a_sum(launch):
        return left
    (source,) = launch.all_input_nodes
    before = source.all_input_nodes[0] if _is_cast_up(source) else source
    given = _arguments(launch)
    return GradientReduction(
        launch=launch,
        waits=waits_on(launch),
        source=before,
        ranks=given["group_size"],
        group=given["group_name"],
        is_mean=given["reduce_op"] == "avg",
    )


def _not_asked(
    launch: fx.Node, state: CompileState, gradients: Collection[fx.Node]
) -> Verdict | None:
    if state.config.gradient_wire == "same":
        return _left(launch, Reason.NOT_ASKED)
    if not state.is_backward:
        return _other(launch, "it is in a forward graph")
    if launch not in gradients:
        return _other(
            launch, "the forward pass computes it too, and the backward pass only computes it again"
        )
    if launch.target is not C10D.reduce_scatter_tensor.default:
        return _left(launch, Reason.COALESCED)
    if group_name(launch) in state.gathered_groups:
        return _other(
            launch,
            "its process group also gathers tokens, so it may sum a gradient of tokens "
            "instead of one of a parameter",
        )
    return None


def _not_a_sum(launch: fx.Node) -> Verdict | None:
    given = _arguments(launch)
    whole = tensor_of(given["input"])
    if whole is None or whole.dtype is not torch.float32:
        return _other(launch, "it must reduce float32, and reduces a different type")
    if given["reduce_op"] not in SUMMED:
        return _other(launch, "it must sum or average, and does neither")
    if given["group_size"] == 1:
        return _left(launch, Reason.NO_FEWER_BYTES, "a group of one rank sends nothing")
    if not all(isinstance(size, int) for size in whole.shape):
        return _left(launch, Reason.SIZE)
    if whole.shape[0] % given["group_size"]:
        return _left(launch, Reason.SIZE)
    if len(launch.users) != 1 or not is_wait(next(iter(launch.users))):
        return _left(launch, Reason.READERS)
    if not _is_returned(waits_on(launch)):
        return _other(
            launch,
            "its result must go straight to an output of the graph, but the graph computes with it",
        )
    return None


def _left(launch: fx.Node, reason: Reason, detail: str = "") -> Verdict:
    return Verdict(candidate=launch.name, reason=reason, detail=detail)


def _other(launch: fx.Node, detail: str) -> Verdict:
    return _left(launch, Reason.NO_PARAMETER_GRADIENT, detail)


def _arguments(launch: fx.Node) -> dict[str, Any]:
    assert isinstance(launch.target, torch._ops.OpOverload)
    names = [argument.name for argument in launch.target._schema.arguments]
    return {**dict(zip(names, launch.args, strict=False)), **launch.kwargs}


def _gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes computed from gradients of the forward's results."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _is_returned(waits: Sequence[fx.Node]) -> bool:
    """Whether the awaited result reaches nothing but outputs, and only linearly."""
    reached, todo = set(waits), list(waits)
    while todo:
        value = todo.pop()
        for user in value.users:
            if user.op == "output" or user in reached:
                continue
            if not _hands_on(user, {value}):
                return False
            reached.add(user)
            todo.append(user)
    return all(_hands_on(node, reached) for node in reached)


def _hands_on(node: fx.Node, varying: Collection[fx.Node]) -> bool:
    """Whether `node` is linear in its `varying` inputs; so is a sum over replicas, and its wait."""
    if node.target is C10D.all_reduce.default:
        return argument_of(node, 1, "reduce_op") in SUMMED
    return is_wait(node) or is_linear(node, varying)


def _is_cast_up(node: fx.Node) -> bool:
    """Whether `node` is a bfloat16 tensor of the same shape and place, as float32."""
    if len(node.all_input_nodes) != 1 or node.target not in (
        ATEN._to_copy.default,
        torch.ops.prims.convert_element_type.default,
    ):
        return False
    before, after = tensor_of(node.all_input_nodes[0]), tensor_of(node)
    if before is None or after is None:
        return False
    return before.dtype is torch.bfloat16 and before.device == after.device


def _replace(reduction: GradientReduction) -> None:
    ranks, sent = reduction.ranks, reduction.source
    early, late = ValuedEmitter(reduction.launch), ValuedEmitter(reduction.waits[0])
    if _value(sent).dtype is not torch.bfloat16:
        cast = torch.ops.prims.convert_element_type.default
        sent = early.call(cast, sent, torch.bfloat16)
    if not _value(sent).is_contiguous():
        sent = early.call(ATEN.clone.default, sent, memory_format=torch.contiguous_format)
    shape = list(_value(sent).shape)
    even = [shape[0] // ranks] * ranks
    launch = early.call(C10D.all_to_all_single.default, sent, even, even, reduction.group)
    received = late.call(C10D.wait_tensor.default, launch)
    by_rank = late.call(ATEN.view.default, received, [ranks, even[0], *shape[1:]])
    total = late.call(ATEN.sum.dim_IntList, by_rank, [0], dtype=torch.float32)
    if reduction.is_mean:
        total = late.call(ATEN.div.Tensor, total, ranks)
    for wait in reversed(reduction.waits):
        substitute(wait, total)
    erase_unused([reduction.launch])


def _value(node: fx.Node) -> torch.Tensor:
    value = tensor_of(node)
    assert value is not None
    return value


def is_linear(node: fx.Node, varying: Collection[fx.Node]) -> bool:
    """Whether `node` is linear in those of its inputs that are `varying`, the others held."""
    target, value = node.target, tensor_of(node)
    if not isinstance(target, torch._ops.OpOverload) or value is None:
        return False
    if not (value.dtype.is_floating_point or value.dtype.is_complex):
        return False  # a cast to integers drops fractions
    if target in SUMS or target in COPIES:
        return True
    if target in PRODUCTS:
        return sum(factor in varying for factor in node.args) <= 1
    if target in QUOTIENTS:
        return node.args[1] not in varying
    return target.is_view and target is not ATEN.view.dtype  # that one reinterprets bits
