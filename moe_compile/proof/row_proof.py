"""Prove that a region's experts treat rows independently, so that chunks may run apart.

Contract
    A proof holds for any counts: running the body on the rows and the counts of some experts
    gives the values, forward and backward, that running it on all gives for those rows. A node
    that is not understood is refused, with the reason.
    A rank with no token, or one, proves the same as others.

Steps that are not followed (kernels, arithmetic that makes an index) are not trusted: where the
proof needs such an index and the group sizes to agree on the rows of each expert, both are
computed for sampled counts and compared (sampled_counts.py). The proof says on how many.

Pseudo-code
    run the body on fake tensors, noting aten operators
    received rows = every run of rows in the order of the dispatch's split sizes
    for each operator: the value of its outputs follows from those of its inputs, or refuse
    the combine must send the rows back in the order received
    premises about indices must hold on sampled counts

Functions whose backward is written by hand (`torch.autograd.Function`) may keep rows apart.
The backward is followed as the forward is. Given a gradient for every row of a result, it must
make a gradient for every row of an argument from that row alone. A gradient of a tensor from
outside the region must be made of rows of one expert.

Operators that read rows of one expert alone: whatever they do, a chunk does the same.
A chunk of whole experts has all rows of each of its experts, in the order received, so that such
an operator reads the same numbers. It must not run in chunks without the expert: on no rows it
may give NaN, or a gradient that is not zero. Chunks of tokens have a part of an expert's rows:
they need rows that are independent.

The sizes of a tensor must agree with the value that the proof gives it.
A size that the tracer gave a symbol of its own is named by the proof's formula.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import torch
import torch.fx as fx

from moe_compile.dims.record import UNTRACEABLE, Operator
from moe_compile.graph.query import (
    input_splits,
    is_launch,
    operator_at,
    operator_of,
    output_splits,
    tensor_of,
    value_of,
)
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.constants import constants_behind
from moe_compile.proof.grouped_rules import why_not_sliceable
from moe_compile.proof.kernel_bits import bits
from moe_compile.proof.operator_call import SYMBOLIC, Call, Knowledge, functional
from moe_compile.proof.region_form import form_of, keep_proof, kept_proof
from moe_compile.proof.row_rules import apply
from moe_compile.proof.row_trace import (
    Dispatched,
    GradientMade,
    GradientOf,
    HostRead,
    NotFollowed,
    Produced,
    Step,
    Trace,
    trace_body,
)
from moe_compile.proof.sampled_counts import check_on_samples, check_single_experts
from moe_compile.proof.view_rules import WrittenParts
from moe_compile.regions.count_facts import CountFacts, said_to_be
from moe_compile.regions.outside_reads import Reads, is_differentiable
from moe_compile.regions.regions import MoERegion, RowProof
from moe_compile.regions.row_domain import (
    FROM_COUNTS,
    Fixed,
    Formulas,
    IndexPerColumn,
    Labels,
    OfExpert,
    Order,
    Outside,
    Permutation,
    Rows,
    RunPositions,
    UnknownIndex,
    Value,
    length,
    reads_outside,
)


def prove_rows_independent(region: MoERegion, *, may_round: bool = False) -> RowProof | Left:
    """Return the proof that chunking `region` relies on, or the refusal.

    `may_round`: sums over rows may round differently, by the bounds of `outside_reads`.
    One proof is made for all regions that differ in names only.
    """
    form = form_of(region)
    kept = None if form is None else kept_proof(form, may_round=may_round)
    if kept is not None:
        return kept
    found = _proven(region, may_round=False)
    rounds = may_round and isinstance(found, Left)
    if rounds:  # else the proof is the same
        found = _proven(region, may_round=True)
    if form is not None and isinstance(found, RowProof):
        keep_proof(form, found, may_round=rounds)
    return found


def _proven(region: MoERegion, *, may_round: bool) -> RowProof | Left:
    trace = trace_body(region, may_round=may_round)
    if not isinstance(trace, Trace):
        return _refused(*trace)
    proof = _Proof(region, trace, Reads(may_share=may_round))
    for moment, step in enumerate(trace.steps):
        try:
            proof.known.moment = moment
            proof.follow(step)
        except Left as unproven:
            return _refused(step.node, unproven)
        except UNTRACEABLE as error:
            covered = Left(Reason.UNKNOWN_OPERATOR, f"{type(error).__name__}: {error}")
            return _refused(step.node, covered)
    found = proof.bits.found
    if found is not None and bits().refuses:
        return _refused(found.node, Left(Reason.MAY_ROUND, found.detail))
    try:
        proof.check_combine()
        proof.check_reordered()
        return proof.result(proof.check_premises(trace))
    except Left as unproven:
        return _refused(region.combine, unproven)


class _Proof:
    """The proof of one region, step by step."""

    def __init__(self, region: MoERegion, trace: Trace, reads: Reads) -> None:
        received = tensor_of(region.received_counts)
        assert received is not None
        self.facts = CountFacts(region.num_ranks, region.num_local_experts, received.numel())
        self.facts.set_outside(_sizes_outside(region))
        self.region, self.known = region, Knowledge(self.facts, reads, trace.made_stable)
        self.produced: dict[fx.Node, torch.Tensor] = {}
        self.bits, self.parts = bits().rows(), WrittenParts(self.known)
        for given in trace.inputs:
            self.produced[given.node] = given.tensor
            self.known.set(given.tensor, self._input(given))

    def _input(self, given: Produced) -> Value:
        if given.node is self.region.received_counts:
            return Formulas(self.facts.received)
        if given.node is self.region.counts:
            return Formulas(self.facts.sent)
        if given.node in self.region.others:
            behind = constants_behind(given.node, self.region)
            return Outside(frozenset({given.node}), behind=behind, is_given=True)
        return UnknownIndex()  # until a dispatch tells their order; nothing reads them before

    def follow(self, step: Step) -> None:
        """Take in `step`; raise Left where the proof ends."""
        if isinstance(step, Operator):
            self._operator(step)
        elif isinstance(step, Produced):
            self.produced[step.node] = step.tensor
            self._name_sizes(step)
        elif isinstance(step, HostRead):
            self._host_read(step)
        elif isinstance(step, NotFollowed):
            self._not_followed(step)
        elif isinstance(step, GradientOf):
            self.bits.follow_gradient(step.tensor)
            self.known.set(step.tensor, gradient_of(self.known, step))
        elif isinstance(step, GradientMade):
            check_gradient(self.known, step)
        elif isinstance(step, Dispatched):
            splits = output_splits(step.node), input_splits(step.node)
            self.facts.set_root(*([_size(s) for s in side] for side in splits))
            self.known.set(step.tensor, Rows(0, self.facts.root))

    def _operator(self, step: Operator) -> None:
        func = functional(step.func)
        if torch.Tag.nondeterministic_seeded in step.func.tags and step.node in self.region.body:
            raise Left(Reason.RANDOM, str(step.func))
        if func is None:
            self._written_by_custom(step)
            return
        call = Call(step.node, func, step.args, step.kwargs, step.out, self.known)
        random = torch.Tag.nondeterministic_seeded in func.tags
        results: Value | list[Value] = Fixed() if random else self._applied(call)
        outputs = call.outputs
        each = results if isinstance(results, list) else [results] * len(outputs)
        self.bits.follow(call, each)
        self.parts.follow(call)
        if step.func._schema.is_mutable:
            self.parts.note_writer(call, each[0] if each else None)
        held = self.parts.written(step.written, call, each)
        for tensor, value in itertools.chain(held, zip(outputs, each, strict=True)):
            self.known.set(tensor, checked(self.facts, tensor, value))
            self.bits.follow_memory(call, tensor, value)

    def _applied(self, call: Call) -> Value | list[Value]:
        try:
            return apply(call)
        except Left as unproven:
            found = of_one_expert(call, unproven)
            self.bits.follow_one_expert(call)
            return found

    def _name_sizes(self, step: Produced) -> None:
        """Note formulas of sizes that the graph gave a symbol of their own, as a slice's length."""
        in_graph = tensor_of(step.node)
        if is_launch(step.node) or in_graph is None:
            return
        for size, traced in zip(in_graph.shape, step.tensor.shape, strict=True):
            if self.facts.is_unknown(size) and not self.facts.is_unknown(traced):
                self.facts.read_on_host(size, self.facts.formula(traced))

    def _host_read(self, step: HostRead) -> None:
        value = self.known.value(step.tensor)
        if isinstance(value, Rows):
            raise Left(Reason.HOST_READ_OF_ROWS)
        if self.facts.num_ranks > 1 and (said := said_to_be(value_of(step.node))) is not None:
            raise Left(
                Reason.VALUE_FROM_COUNTS,
                f"the program asserts that an integer computed from the counts is {said}, "
                "and a chunk has other counts",
            )
        if isinstance(value, Formulas):
            self.facts.read_on_host(value_of(step.node), value.cells[0])

    def _written_by_custom(self, step: Operator) -> None:
        if step.func.namespace == "aten":  # may change the form of its input, not only values
            raise Left(Reason.UNKNOWN_OPERATOR, str(step.func))
        call = Call(step.node, step.func, step.args, step.kwargs, step.out, self.known)
        for tensor in (*call.written, *call.outputs):
            self._not_followed(NotFollowed(step.node, tensor, tuple(call.inputs)))

    def _not_followed(self, step: NotFollowed) -> None:
        values = [self.known.value(t) for t in step.inputs]
        if not all(isinstance(v, (*FROM_COUNTS, Fixed)) for v in values):
            raise Left(Reason.UNKNOWN_OPERATOR, str(step.node.target))
        tainted = any(map(reads_outside, values))
        self.known.forget_aliases(step.tensor)
        self.known.set(step.tensor, UnknownIndex(reads_outside=tainted))

    def check_combine(self) -> None:
        """Raise Left unless all rows sent back stand in the order received."""
        for one in self.region.combined:
            if self.known.value(self.produced[one.launch]) != Rows(0, self.facts.root):
                raise Left(Reason.ROWS_OUT_OF_ORDER, operator_at(one.launch))

    def check_reordered(self) -> None:
        """Raise Left where more than a sum may depend on an order that a sort leaves open."""
        for node in self.known.whole if self.known.reordered else ():
            detail = (
                f"{operator_at(node)} must compute each row by itself, and may read several "
                "rows of an expert"
            )
            raise Left(Reason.UNSTABLE_SORT, detail)

    def check_premises(self, trace: Trace) -> int:
        """Return the number of sampled counts on which the premises hold; 0 without premises."""
        check_single_experts(self.region, trace, self.facts, self.known.claims)
        premises = self.facts.premises
        if not premises:
            return 0
        return check_on_samples(self.region, trace, self.facts, self.known.claims, premises)

    def result(self, sampled: int) -> RowProof:
        """Return the evidence gathered."""
        grouped = self.known.grouped.items()
        unsliceable = [(n, y or why_not_sliceable(self.region, self.known, n)) for n, y in grouped]
        rows = [(n, self._only_expert(n)) for n in self.region.row_side]
        return RowProof(
            sliceable=tuple(n for n, why in unsliceable if why is None),
            padding={n: rows for n, rows in self.known.padding.items() if any(rows)},
            unsliceable=tuple((n, why) for n, why in unsliceable if why is not None),
            expert_rows=tuple((n, e) for n, e in rows if e is not None),
            facts=self.facts,
            joins=tuple(dict.fromkeys(self.known.joins)),
            whole=tuple((n, frozenset(e)) for n, e in self.known.whole.items()),
            writes=tuple(self.parts.for_one()),
            searches=self.known.searches,
            shared=tuple(self.known.reads.shared),
            reordered=tuple(self.known.reordered),
            sampled=sampled,
            last_bits=self.bits.said(),
        )

    def _only_expert(self, node: fx.Node) -> int | None:
        tensor = self.produced.get(node)
        value = None
        if tensor is not None and not self.known.is_forgotten(tensor):
            value = self.known.value(tensor)
        if isinstance(value, OfExpert):
            return value.expert
        return self.facts.is_rows_of_one(value.order) if isinstance(value, Rows) else None


def _size(size: object) -> object:
    return value_of(size) if isinstance(size, fx.Node) else size


def _sizes_outside(region: MoERegion) -> list[object]:
    sizes: list[object] = []
    for node in region.others:
        value = value_of(node)
        sizes += value.shape if isinstance(value, torch.Tensor) else [value]
    return [size for size in sizes if isinstance(size, torch.SymInt)]


def _refused(node: fx.Node, why: Left) -> Left:
    """Return the refusal, naming the operator and the user's line."""
    operator = operator_of(node)
    where = [f"{operator}: {why.detail}" if why.detail else operator]
    lines = (line.strip() for line in node.meta.get("stack_trace", "").splitlines())
    where += [line for line in lines if line.strip("^~ ")][-2:]
    return Left(why.reason, " | ".join(where))


def gradient_of(known: Knowledge, step: GradientOf) -> Value:
    """Return the value of the gradient of a result: that of the result, row by row."""
    result = known.value(step.result)
    if not isinstance(result, Rows | OfExpert):
        raise Left(
            Reason.UNKNOWN_OPERATOR,
            f"{operator_at(step.node)} must return rows, and one of its results has none",
        )
    return result


def check_gradient(known: Knowledge, step: GradientMade) -> None:
    """Raise Left where a chunk would make another gradient of an argument."""
    argument, gradient = known.value(step.argument), known.value(step.tensor)
    if isinstance(argument, Outside):
        if not any(map(is_differentiable, argument.nodes)):
            return
        if not isinstance(gradient, OfExpert):
            raise Left(Reason.SHARED_PARAMETER, f"{operator_at(step.node)}, in its backward pass")
        known.whole.setdefault(step.node, set()).add(gradient.expert)
        known.reads.add(argument, None, gradient.expert)
    elif isinstance(argument, Rows | OfExpert):
        is_constant = isinstance(gradient, Fixed) and gradient.is_uniform
        if gradient != argument and not is_constant:
            raise Left(Reason.ROWS_MIXED, f"{operator_at(step.node)}, in its backward pass")


ANY_ROWS: Final = frozenset(
    {
        Reason.ROWS_MIXED,
        Reason.UNKNOWN_OPERATOR,
        Reason.VALUE_FROM_COUNTS,
        Reason.SIZE_FROM_COUNTS,
        Reason.ROWS_FROM_OUTSIDE,
    }
)
"""Refusals that do not matter for an operator that reads one expert's rows."""


def of_one_expert(call: Call, unproven: Left) -> list[Value]:
    """Return the results of `call`, if it reads one expert's rows alone; else raise `unproven`."""
    values = [call.value(t) for t in call.inputs]
    expert = _the_expert(call, values)
    if expert is None or unproven.reason not in ANY_ROWS or not _reads_only(call, values, expert):
        raise unproven
    for value in values:
        if isinstance(value, Outside):
            call.known.reads.add(value, None, expert)
    call.known.whole.setdefault(call.node, set()).add(expert)
    orders = {length(v.order): v.order for v in values if isinstance(v, Rows)}
    return [_result(call, tensor, orders, expert, unproven) for tensor in call.outputs]


def _the_expert(call: Call, values: list[Value]) -> int | None:
    found: set[int | None] = {v.expert for v in values if isinstance(v, OfExpert)}
    found |= {call.facts.is_rows_of_one(v.order) for v in values if isinstance(v, Rows)}
    return found.pop() if len(found) == 1 else None


def _reads_only(call: Call, values: list[Value], expert: int) -> bool:
    """Whether numbers and sizes that the operator reads follow from the expert's counts alone."""
    numbers = [call.facts.formula(a) for a in call.leaves if isinstance(a, SYMBOLIC)]
    for value in values:
        if isinstance(value, Formulas):
            numbers += value.cells
        elif not isinstance(value, Rows | OfExpert | Outside | Fixed):
            return False
    return all(call.facts.experts_of(number) <= {expert} for number in numbers)


def _result(
    call: Call,
    tensor: torch.Tensor,
    orders: dict[object, Order],
    expert: int,
    unproven: Left,
) -> Value:
    shape = call.shape(tensor)
    if any(not call.facts.experts_of(size) <= {expert} for size in shape):
        raise unproven
    along = [
        dim for dim, size in enumerate(shape) if call.facts.depends_on_counts(tensor.shape[dim])
    ]
    if len(along) == 1 and shape[along[0]] in orders:
        return Rows(along[0], orders[shape[along[0]]])
    return OfExpert(expert)


def checked(facts: CountFacts, tensor: torch.Tensor, value: Value) -> Value:
    """Return `value`; raise Left unless the tensor's sizes agree with it."""
    if isinstance(value, Rows):
        others = (*tensor.shape[: value.dim], *tensor.shape[value.dim + 1 :])
        if any(facts.depends_on_counts(other) for other in others):
            raise Left(
                Reason.SIZE_FROM_COUNTS,
                "a tensor must have its rows in one dimension, and has the shape "
                f"{list(tensor.shape)}",
            )
        if value.dim == 0 and is_channels_last(tensor):
            raise Left(
                Reason.UNKNOWN_OPERATOR,
                "rows must be contiguous in memory, and are laid out channels last",
            )
    sized = _sized(tensor, value)
    if sized is None:
        return value
    size, order = sized
    if facts.is_unknown(size):
        facts.read_on_host(size, length(order))
    if facts.formula(size) != length(order):
        raise Left(
            Reason.ROWS_MIXED, f"a tensor has {size} rows, but {length(order)} were expected"
        )
    return value


def is_channels_last(rows: torch.Tensor) -> bool:
    """Whether torch may find `rows`, outermost, to be laid out with the channels last.

    It does not where there is no row, and so lays out results in another way.
    """
    if rows.dim() not in (4, 5):
        return False
    channels, stride = rows.shape[1], rows.stride()
    return bool(channels != 1 and stride[-1] >= stride[1] * channels)


def _sized(tensor: torch.Tensor, value: Value) -> tuple[Any, Order] | None:
    """Return the size that is the number of rows of an order, and the order; None without one."""
    if isinstance(value, IndexPerColumn):
        return _sized(tensor, value.index)
    if isinstance(value, Rows):
        return tensor.shape[value.dim], value.order
    if isinstance(value, Labels):
        return tensor.shape[0], value.order
    if isinstance(value, Permutation):
        return tensor.shape[0], value.source
    return (tensor.shape[0], value.target) if isinstance(value, RunPositions) else None
