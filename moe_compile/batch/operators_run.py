"""Follow factors through any function of torch: by the operators that it runs.

Contract
    The function runs once on fake tensors. What an operator does to dimensions is told by its tags
    and its schema: it computes element by element, reduces dimensions, works along some, or changes
    the form; others are taken apart as torch itself does. One of no such kind raises Lost.
    A write in place is followed as what it writes; whose memory it is, is asked elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.batch.batch_terms import loss_arguments
from moe_compile.dims.arguments import from_left
from moe_compile.dims.expert_rules import is_known_by_name
from moe_compile.dims.factors import Dims, Factor, Lost, flat, regroup, size_of, unify
from moe_compile.dims.record import SAME_VALUES, UNTRACEABLE, Operator, Recorder
from moe_compile.dims.rules import meeting
from moe_compile.dims.tracker import ExpertTracker, is_movement
from moe_compile.graph.dependence import storages, written_arguments
from moe_compile.graph.inner_graphs import is_higher_order
from moe_compile.graph.observation import call, fake_mode_of, running_on
from moe_compile.graph.query import is_launch, is_wait, operator_at, tensor_of, value_of

OUTSIDE: Final = ("placeholder", "get_attr")
FORMS: Final = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze"}
)
"""Operators that deal factors out to other dimensions, in order: their sizes say how."""
ALONG: Final = frozenset(
    {
        "_softmax", "_log_softmax", "_safe_softmax", "cumsum", "cumprod", "cummax", "cummin",
        "logcumsumexp", "flip", "roll", "glu", "sort", "topk", "slice", "select", "unfold",
        "repeat_interleave", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d",
        "replication_pad1d", "replication_pad2d", "_fft_r2c", "_fft_c2c", "_fft_c2r",
    }
)  # fmt: skip
"""Operators that keep all dimensions but those that they name apart."""
MADE: Final = frozenset(
    {"zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
     "new_empty"}
)  # fmt: skip
"""Operators that make tensors of numbers alone."""
SQUARE: Final = frozenset({"tril", "triu"})
"""Operators that tell the places of the last two dimensions."""
SAMPLES: Final = frozenset(
    {
        "convolution", "native_group_norm", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d", "max_pool2d_with_indices", "max_pool3d_with_indices",
    }
)  # fmt: skip
"""Operators that treat the first dimension of their input apart, and mix all others."""
PLACED: Final = frozenset({"gather", "scatter", "scatter_add", "scatter_reduce"})
"""Operators that find places along one dimension, and keep to their own in all others."""


def is_run(node: fx.Node) -> bool:
    """Whether factors are followed through `node` by what it runs: no rule knows it by its name."""
    if node.op not in ("call_function", "call_method") or is_launch(node) or is_wait(node):
        return False
    if is_higher_order(node) or is_movement(node) or is_known_by_name(node):
        return False
    module = str(getattr(node.target, "__module__", "torch")).partition(".")[0]
    return node.op == "call_method" or module in ("torch", operator.add.__module__, "builtins")


def writes_own(node: fx.Node) -> bool:
    """Whether the memory that `node` writes in place was made by the graph."""
    given = {s for n in node.graph.nodes if n.op in OUTSIDE for s in storages(n)}
    written = [storages(one) for one in written_arguments(node)]
    return all(memory and not memory & given for memory in written)


def check_numbers(node: fx.Node, sources: Sequence[fx.Node]) -> None:
    """Raise Lost where `node` computes with a number that is not known when compiling."""
    written = node.args[2] if node.target is operator.setitem else None
    given = [*sources, *([written] if isinstance(written, fx.Node) else [])]
    if any(tensor_of(one) is None for one in given):
        raise Lost(f"{operator_at(node)}: a size is not known when compiling")


def run_rule(tracker: ExpertTracker, node: fx.Node) -> Dims:
    """Return the factors of what `node` makes: of several tensors they are the same."""
    fake = fake_mode_of([value_of(source) for source in node.all_input_nodes])
    if fake is None:
        raise Lost(f"{operator_at(node)} is no operator that factors are followed through")
    run, loss = _Run(tracker, node), loss_arguments(node)
    recorder = Recorder(run.follow, _is_followed)
    apart = None if loss is None else {**loss, "reduction": "none"}
    args, kwargs = (node.args, node.kwargs) if apart is None else ((), apart)
    try:
        with running_on(fake), recorder:
            given = fx.node.map_arg((args, kwargs), run.given)
            made = recorder.run(node, lambda: call(node, *given))
    except UNTRACEABLE as error:
        raise Lost(f"{operator_at(node)} does not run: {error}") from error
    if made is None:  # `x[...] = y`
        made = run.given(node.args[0])
    dims = run.result(made)
    if loss is None or loss["reduction"] == "none":
        return dims
    run.close(dims)
    tracker.terms[node] = dims
    return []


class _Run:
    """The factors of the tensors that one node makes on its way."""

    def __init__(self, tracker: ExpertTracker, node: fx.Node) -> None:
        self.tracker, self.node = tracker, node
        self._given: dict[fx.Node, Any] = {}
        self._dims: dict[int, tuple[torch.Tensor, Dims]] = {}
        """Identity of a tensor -> the tensor, which so stays alive, and its factors."""

    def given(self, node: Any) -> Any:
        """Return what the tracer stored of an argument, a tensor by a name of its own."""
        if node not in self._given:
            value = value_of(node)
            if isinstance(value, torch.Tensor):
                value = value.detach()
                self.put(value, self.tracker.dims(node))
            self._given[node] = value
        return self._given[node]

    def put(self, tensor: torch.Tensor, dims: Dims) -> None:
        """Say what the factors of a tensor are; raises Lost unless its sizes agree."""
        if [size_of(dim) for dim in dims] != self.sizes(tensor):
            raise Lost(f"{operator_at(self.node)} has other sizes than were followed to it")
        self._dims[id(tensor)] = tensor, dims

    def dims(self, tensor: torch.Tensor) -> Dims:
        """Return the factors of a tensor; of one that comes of nowhere new ones."""
        if id(tensor) not in self._dims:
            self.put(tensor, [[Factor(size)] for size in self.sizes(tensor)])
        return [flat(dim) for dim in self._dims[id(tensor)][1]]

    def sizes(self, tensor: torch.Tensor) -> list[int]:
        """Return the sizes of a tensor, or what stands for them."""
        return [self.tracker.numbers.product_of(size) for size in tensor.shape]

    def close(self, dims: Sequence[list[Factor]]) -> None:
        """Note dimensions whose indices are not treated apart."""
        self.tracker.closed += [(self.node, dim) for dim in dims]

    def result(self, made: Any) -> Dims:
        """Return the factors of all tensors in `made`; raises Lost where they differ."""
        each = [self.dims(t) for t in pytree.tree_leaves(made) if isinstance(t, torch.Tensor)]
        if not each or any(dims != each[0] for dims in each):
            raise Lost(f"{operator_at(self.node)} makes tensors of different dimensions")
        return each[0]

    def follow(self, one: Operator) -> None:
        """Follow factors through an operator that makes tensors of tensors."""
        if not one.outputs or not one.inputs:
            return
        rule = _rule_of(one.func)
        if rule is None:
            raise Lost(
                f"{operator_at(self.node)} runs {one.func}, which factors are not followed through"
            )
        rule(_Call(self, one))


def _is_followed(func: torch._ops.OpOverload) -> bool:
    return not _name(func) or _rule_of(func) is not None


class _Call:
    """One operator that a node runs."""

    def __init__(self, run: _Run, one: Operator) -> None:
        self.run, self.name, self.writes = run, _name(one.func), one.func._schema.is_mutable
        self.inputs, self.outputs, self.argument = one.inputs, one.outputs, one.argument

    def first(self) -> Dims:
        """Return the factors of the first tensor."""
        return self.run.dims(self.inputs[0])

    def named(self, num_dims: int) -> list[int]:
        """Return the dimensions that the call names, from the left; all where it names none."""
        names = (self.argument(name) for name in ("dim", "dims", "dimension"))
        given = next((one for one in names if one is not None and one != []), None)
        if given is None:
            return list(range(num_dims))
        several = given if isinstance(given, list | tuple) else [given]
        return [from_left(d, num_dims) for d in several]

    def put(self, dims: Dims) -> None:
        """Say what the factors of all results are."""
        for tensor in self.outputs:
            self.run.put(tensor, dims)


def _name(func: torch._ops.OpOverload) -> str:
    """Return the name of an operator of torch, "" of another.

    One that writes in place has the name of that which does not.
    """
    namespace, _, name = str(func._schema.name).partition("::")
    return name.removesuffix("_") if namespace in ("aten", "prims") else ""


def _rule_of(func: torch._ops.OpOverload) -> Callable[[_Call], None] | None:
    """Return how factors are followed through an operator, None for one of no known kind."""
    name = _name(func)
    if not name:
        return None
    if _is_pointwise(func) or name in SAME_VALUES | {"fill", "expand"}:
        return _pointwise
    named = next((rule for names, rule in KINDS if name in names), None)
    return named or (_reduced if _reduces(name) else None)


def _is_pointwise(func: torch._ops.OpOverload) -> bool:
    """Whether elements come of elements; `prims` have no tags, but those of `aten`."""
    known = {func}
    if func.namespace == "prims" and (packet := getattr(torch.ops.aten, _name(func), None)):
        known = {getattr(packet, one) for one in packet.overloads()}
    return any(torch.Tag.pointwise in one.tags for one in known)


def _reduces(name: str) -> bool:
    """Whether the operator makes one element of many, along dimensions that it may keep."""
    packet = getattr(torch.ops.aten, name, None)
    overloads = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    return any(one.name == "keepdim" for each in overloads for one in each._schema.arguments)


def _pointwise(one: _Call) -> None:
    """Follow elements that come of elements, broadcast; what is written keeps its dimensions."""
    sizes = one.run.sizes(one.outputs[0])
    dims: Dims = [[] for _ in sizes]
    for source in one.inputs:
        given = one.run.dims(source)
        for i, dim in enumerate(given, len(sizes) - len(given)):
            if one.writes and flat(dims[i]) and flat(dim):
                unify(dims[i], dim)
            dims[i] = meeting(dims[i], dim)
    found = zip(dims, sizes, strict=True)
    one.put([dim if size_of(dim) == size else [Factor(size)] for dim, size in found])


def _reduced(one: _Call) -> None:
    given = one.first()
    along = one.named(len(given))
    one.run.close([given[d] for d in along])
    if one.outputs[0].dim() == len(given):
        one.put([[] if i in along else dim for i, dim in enumerate(given)])
    else:
        one.put([dim for i, dim in enumerate(given) if i not in along])


def _along(one: _Call) -> None:
    """Follow what keeps all dimensions, and treats apart the indices of those it does not name."""
    given, sizes = one.first(), one.run.sizes(one.outputs[0])
    if len(sizes) < len(given):
        _reduced(one)
        return
    along = _padded(one) if "pad" in one.name else one.named(len(given))
    if one.name == "slice" and sizes == one.run.sizes(one.inputs[0]):
        along = []  # all of it
    one.run.close([given[d] for d in along])
    dims = [[Factor(sizes[i])] if i in along else dim for i, dim in enumerate(given)]
    one.put([*dims, *([Factor(size)] for size in sizes[len(given) :])])


def _padded(one: _Call) -> list[int]:
    """Return the dimensions that are padded: two numbers for each, the last one first."""
    last = one.inputs[0].dim() - 1
    pad = one.argument("pad") or one.argument("padding")
    return [last - i // 2 for i in range(0, len(pad), 2) if pad[i] != 0 or pad[i + 1] != 0]


def _formed(one: _Call) -> None:
    factors = [factor for dim in one.first() for factor in dim]
    one.put(regroup(factors, one.run.sizes(one.outputs[0])))


def _turned(one: _Call) -> None:
    dims = one.first()
    order = list(range(len(dims)))
    if one.name == "permute":
        order = one.named(len(dims))
    elif len(dims) > 1:
        pair = (0, 1) if one.name == "t" else (one.argument("dim0"), one.argument("dim1"))
        i, j = (from_left(d, len(dims)) for d in pair)
        order[i], order[j] = order[j], order[i]
    one.put([dims[i] for i in order])


def _squared(one: _Call) -> None:
    dims = one.first()
    one.run.close(dims[-2:])
    one.put(dims)


def _sampled(one: _Call) -> None:
    """Follow `[N, C, ...]` in which every n is treated apart."""
    first, *others = one.first()
    weights = [dim for other in one.inputs[1:] for dim in one.run.dims(other)]
    one.run.close([*others, *weights])
    for tensor in one.outputs:
        sizes = one.run.sizes(tensor)
        if sizes[0] != size_of(first):
            raise Lost(f"{operator_at(one.run.node)} makes tensors of different dimensions")
        one.run.put(tensor, [first, *([Factor(size)] for size in sizes[1:])])


def _placed(one: _Call) -> None:
    """Follow places along one dimension, by an index of its own place in all others."""
    given = one.first()
    at = one.named(len(given))[0]
    for other in one.inputs[1:]:
        dims = one.run.dims(other)
        for i, (mine, its) in enumerate(zip(given, dims, strict=bool(dims))):
            if i != at:
                unify(mine, its)
        one.run.close(dims[at : at + 1])
    one.run.close([given[at]])
    source = one.argument("index") if one.name == "gather" else one.inputs[0]
    one.put(one.run.dims(source))


def _masked(one: _Call) -> None:
    """Follow `x[mask] = number`: an element is written by the mask at its own place."""
    mask, *others = one.argument("indices")
    values = one.argument("values")
    if others or mask is None or mask.dtype is not torch.bool or values.dim():
        raise Lost(f"{operator_at(one.run.node)} indexes by a tensor")
    for mine, its in zip(one.first(), one.run.dims(mask), strict=False):
        unify(mine, its)
    one.put(one.first())


def _made(one: _Call) -> None:
    """Begin anew: what is made of numbers has the sizes of another tensor and nothing of it."""
    one.put([[Factor(size)] for size in one.run.sizes(one.outputs[0])])


KINDS: Final = (
    (ALONG, _along),
    (FORMS, _formed),
    (frozenset({"permute", "transpose", "t"}), _turned),
    (SQUARE, _squared),
    (SAMPLES, _sampled),
    (PLACED, _placed),
    (frozenset({"index_put"}), _masked),
    (MADE, _made),
)
"""Names of operators -> how factors are followed through them."""
