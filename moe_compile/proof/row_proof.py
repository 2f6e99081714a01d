"""Prove that a region's experts treat rows independently, so that chunks may run apart.

Contract
    A proof holds for any counts: running the body on the rows and the counts of some experts
    gives the values, forward and backward, that running it on all gives for those rows. What is
    not understood is refused, with the reason and the node.
    No number of this rank's tokens decides: with none, or one, it proves what others prove.

What is not followed (kernels, arithmetic that makes an index) is not believed: where the proof
needs that such an index and the group sizes agree about which rows belong to which expert, both
are computed for sampled counts and compared (sampled_counts.py). The proof says on how many.

Pseudo-code
    run the body on fake tensors, noting aten operators
    received rows = every run of rows in the order the dispatch's split sizes tell
    for each operator: the value of its outputs follows from those of its inputs, or refuse
    the combine must send the rows back in the order received
    what was taken for granted of indices must hold on sampled counts
"""

from __future__ import annotations

import itertools

import torch
import torch.fx as fx

from moe_compile.graph.query import (
    input_splits,
    is_launch,
    operator_at,
    operator_of,
    output_splits,
    tensor_of,
    value_of,
)
from moe_compile.journal.reasons import Reason
from moe_compile.proof.constant_nodes import constants_behind
from moe_compile.proof.grouped_rules import why_not_sliceable
from moe_compile.proof.hand_written import check_gradient, gradient_of
from moe_compile.proof.kept_proofs import keep_proof, kept_proof
from moe_compile.proof.kernel_bits import bits
from moe_compile.proof.one_expert import of_one_expert
from moe_compile.proof.operator_call import Call, Knowledge, functional, written_tensors
from moe_compile.proof.region_form import form_of
from moe_compile.proof.row_rules import apply
from moe_compile.proof.row_sizes import checked
from moe_compile.proof.row_trace import UNTRACEABLE, trace_body
from moe_compile.proof.sampled_counts import check_on_samples, check_single_experts
from moe_compile.proof.trace_steps import (
    Dispatched,
    GradientMade,
    GradientOf,
    HostRead,
    NotFollowed,
    Operator,
    Produced,
    Step,
    Trace,
)
from moe_compile.proof.written_parts import WrittenParts
from moe_compile.regions.count_facts import CountFacts, said_to_be
from moe_compile.regions.outside_reads import Reads
from moe_compile.regions.regions import MoERegion, Refused, RowProof
from moe_compile.regions.row_domain import (
    FROM_COUNTS,
    Fixed,
    Formulas,
    OfExpert,
    Opaque,
    Outside,
    Rows,
    Unproven,
    Value,
    reads_outside,
)


def prove_rows_independent(region: MoERegion, *, may_round: bool = False) -> RowProof | Refused:
    """Return what chunking `region` may rely on, or why not.

    `may_round`: sums over rows may round otherwise, by the bounds of `outside_reads`.
    One proof is made for all regions that differ in names only.
    """
    form = form_of(region)
    kept = None if form is None else kept_proof(form, may_round=may_round)
    if kept is not None:
        return kept
    found = _proven(region, may_round=False)
    rounds = may_round and isinstance(found, Refused)
    if rounds:  # else the proof is the same
        found = _proven(region, may_round=True)
    if form is not None and isinstance(found, RowProof):
        keep_proof(form, found, may_round=rounds)
    return found


def _proven(region: MoERegion, *, may_round: bool) -> RowProof | Refused:
    trace = trace_body(region, may_round=may_round)
    if not isinstance(trace, Trace):
        return _refused(region, *trace)
    proof = _Proof(region, trace, Reads(may_share=may_round))
    for moment, step in enumerate(trace.steps):
        try:
            proof.known.moment = moment
            proof.follow(step)
        except Unproven as unproven:
            return _refused(region, step.node, unproven)
        except UNTRACEABLE as error:
            covered = Unproven(Reason.UNKNOWN_OPERATOR, f"{type(error).__name__}: {error}")
            return _refused(region, step.node, covered)
    found = proof.bits.found
    if found is not None and bits().refuses:
        return _refused(region, found.node, Unproven(Reason.MAY_ROUND, found.detail))
    try:
        proof.check_combine()
        proof.check_reordered()
        return proof.result(proof.check_premises(trace))
    except Unproven as unproven:
        return _refused(region, region.combine, unproven)


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
            behind = constants_behind(given.node)
            return Outside(frozenset({given.node}), behind=behind, is_given=True)
        return Opaque()  # until a dispatch tells their order; nothing reads them before

    def follow(self, step: Step) -> None:
        """Note what `step` makes known; raise Unproven where the proof ends."""
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
            raise Unproven(Reason.RANDOM, str(step.func))
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
        held = self.parts.written(written_tensors(step.func, step.args, step.kwargs), call, each)
        for tensor, value in itertools.chain(held, zip(outputs, each, strict=True)):
            self.known.set(tensor, checked(self.facts, tensor, value))
            self.bits.follow_memory(call, tensor, value)

    def _applied(self, call: Call) -> Value | list[Value]:
        try:
            return apply(call)
        except Unproven as unproven:
            found = of_one_expert(call, unproven)
            self.bits.follow_one_expert(call)
            return found

    def _name_sizes(self, step: Produced) -> None:
        """Note what sizes are that the graph gave a symbol of its own, as to a slice's length."""
        in_graph = tensor_of(step.node)
        if is_launch(step.node) or in_graph is None:
            return
        for size, traced in zip(in_graph.shape, step.tensor.shape, strict=True):
            if self.facts.is_unknown(size) and not self.facts.is_unknown(traced):
                self.facts.read_on_host(size, self.facts.formula(traced))

    def _host_read(self, step: HostRead) -> None:
        value = self.known.value(step.tensor)
        if isinstance(value, Rows):
            raise Unproven(Reason.HOST_READ_OF_ROWS)
        if self.facts.num_ranks > 1 and (said := said_to_be(value_of(step.node))) is not None:
            raise Unproven(Reason.VALUE_FROM_COUNTS, f"the program asserts that it is {said}")
        if isinstance(value, Formulas):
            self.facts.read_on_host(value_of(step.node), value.cells[0])

    def _written_by_custom(self, step: Operator) -> None:
        if step.func.namespace == "aten":  # may change the form of its input, not only values
            raise Unproven(Reason.UNKNOWN_OPERATOR, str(step.func))
        call = Call(step.node, step.func, step.args, step.kwargs, step.out, self.known)
        for tensor in (*call.written, *call.outputs):
            self._not_followed(NotFollowed(step.node, tensor, tuple(call.inputs)))

    def _not_followed(self, step: NotFollowed) -> None:
        values = [self.known.value(t) for t in step.inputs]
        if not all(isinstance(v, (*FROM_COUNTS, Fixed)) for v in values):
            raise Unproven(Reason.UNKNOWN_OPERATOR, str(step.node.target))
        tainted = any(map(reads_outside, values))
        self.known.forget_aliases(step.tensor)
        self.known.set(step.tensor, Opaque(reads_outside=tainted))

    def check_combine(self) -> None:
        """Raise Unproven unless all rows sent back stand in the order received."""
        for one in self.region.combined:
            if self.known.value(self.produced[one.launch]) != Rows(0, self.facts.root):
                raise Unproven(Reason.ROWS_OUT_OF_ORDER, operator_at(one.launch))

    def check_reordered(self) -> None:
        """Raise Unproven where more than a sum may depend on an order that a sort leaves open."""
        for node in self.known.whole if self.known.reordered else ():
            detail = f"{operator_at(node)} may read several rows of an expert"
            raise Unproven(Reason.UNSTABLE_SORT, detail)

    def check_premises(self, trace: Trace) -> int:
        """Return on how many sampled counts what was taken for granted holds; 0 if nothing was."""
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


def _refused(region: MoERegion, node: fx.Node, why: Unproven) -> Refused:
    """Return the refusal, naming the operator and the user's line."""
    operator = operator_of(node)
    where = [f"{operator}: {why.detail}" if why.detail else operator]
    lines = (line.strip() for line in node.meta.get("stack_trace", "").splitlines())
    where += [line for line in lines if line.strip("^~ ")][-2:]
    return Refused(
        candidate=region.name, reason=why.reason, detail=" | ".join(where), is_region=True
    )
