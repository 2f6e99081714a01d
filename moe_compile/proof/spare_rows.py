"""Check that experts take more rows than the counts tell of, and read none of those behind.

Contract
    A region passes only where every row, for each sampled vector of counts, stands in each grouped
    product where it stands without rows behind, and comes back at its place; and where neither a
    row behind, nor the gradient of its place, is read by a product or meets another row.
    Operators are followed by name: rows are gathered and written by an index of their first
    dimension, joined, cut, changed element by element, or multiplied in groups.
    The verdict is the same on every rank that has the same graph.

Every place along the first dimension of a tensor has a label: the number of its row, `CONSTANT`,
or `SPARE`, which is a row behind or memory that nobody filled. Places that the operator of groups
leaves unfilled become `SPARE`, and must have been so, or constant, before: their gradients are not
filled either, and go where the places came from.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import sympy
import torch
import torch.fx as fx

from moe_compile.dims.record import Operator
from moe_compile.graph.memory import storages_of
from moe_compile.graph.query import input_splits, output_splits, value_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.count_run import (
    CountRun,
    OneRun,
    Sample,
    TooLarge,
    Unevaluable,
    draw_samples,
)
from moe_compile.proof.operator_call import functional
from moe_compile.proof.row_trace import Dispatched, HostRead, Produced, Trace, trace_body
from moe_compile.proof.sampled_counts import FAILURES, counts_of
from moe_compile.regions.body_nodes import BodyNeeds
from moe_compile.regions.regions import MoERegion, RowProof

CONSTANT: Final = -1
SPARE: Final = -2
NUM_SAMPLES: Final = 24
"""Vectors of counts tried: beyond small ones, which are tried in every combination."""
INTERPRETED: Final = 3
"""The same where a kernel of Triton is interpreted, which takes seconds."""
SPARE_ROWS: Final = (0, 1, 13)
"""Rows behind that are tried for each vector of counts."""
FILLED: Final = frozenset({"zeros", "new_zeros", "zeros_like", "full", "new_full", "full_like"})
UNFILLED: Final = frozenset({"empty", "new_empty", "empty_like"})
VIEWS: Final = frozenset(
    {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "expand"}
)
GATHERS: Final = {"index": "indices", "index_select": "index"}
WRITES: Final = {"index_put": "indices", "_unsafe_index_put": "indices", "index_copy": "index"}


def check_spare_rows(region: MoERegion, proof: RowProof, needs: BodyNeeds) -> Left | None:
    """Return why the experts of `region` may read rows behind those of the counts, or None."""
    assert proof.facts is not None
    trace = trace_body(region)
    if not isinstance(trace, Trace):
        return trace[1]
    try:
        rows = _Steps.of(region, trace, frozenset(needs.nodes))
        run = CountRun(trace, proof.facts, rows.integers)
        samples = draw_samples(proof.facts, INTERPRETED if run.interprets else NUM_SAMPLES)
        for sample in itertools.islice(samples, INTERPRETED if run.interprets else None):
            _check(region, run, rows, sample)
    except Left as refused:
        return refused
    except (Unevaluable, TooLarge, *FAILURES) as error:
        detail = (
            f"traced with padding rows after the counted rows: {type(error).__name__}: {error}"
        )[:200]
        return Left(Reason.PREMISE_UNCHECKED, detail)
    return None


def _check(region: MoERegion, run: CountRun, rows: _Steps, sample: Sample) -> None:
    """Compare the groups, and the rows sent back, with and without rows behind."""
    num_rows = sum(sample[symbol] for symbol in run.facts.received)
    own, expected = torch.arange(num_rows, device="cpu"), None
    for spare in SPARE_ROWS:
        labels = rows.labelled(run, sample, region, spare)
        if not torch.equal(labels.of(rows.sent)[:num_rows], own):
            raise Left(
                Reason.ROWS_OUT_OF_ORDER,
                "the counted rows must come back in order if padding rows follow them, and do not",
            )
        expected = labels.groups if expected is None else expected
        if not all(map(torch.equal, labels.groups, expected)):
            raise Left(
                Reason.ROWS_MIXED, "a group gets other rows if padding rows follow the counted rows"
            )


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps of a body on its rows, and the integers that they read."""

    received: list[torch.Tensor]
    sent: torch.Tensor
    steps: list[Operator]
    integers: list[torch.Tensor]

    @staticmethod
    def of(region: MoERegion, trace: Trace, needed: frozenset[fx.Node]) -> _Steps:
        """Return the steps of `needed` that make or write rows, or constants that join them.

        A mask of rows, as `gate > 0`, has rows too.
        """
        received = [s.tensor for s in trace.steps if isinstance(s, Dispatched)]
        launch = region.combine
        sent = next(s.tensor for s in trace.steps if isinstance(s, Produced) and s.node is launch)
        known, steps, integers = {id(t) for t in received}, list[Operator](), list[torch.Tensor]()
        for step in trace.steps:
            if not isinstance(step, Operator) or step.node not in needed:
                continue
            made = [*step.outputs, *step.written]
            reads = any(id(t) in known for t in step.inputs) or step.name in (*FILLED, *UNFILLED)
            is_mask = step.is_pointwise and all(t.dtype is torch.bool for t in made)
            if reads and (is_mask or all(t.is_floating_point() for t in made)):
                integers += [
                    t for t in step.inputs if not t.is_floating_point() and id(t) not in known
                ]
                steps.append(step)
                known |= {id(t) for t in made}
        return _Steps(received, sent, steps, integers)

    def labelled(self, run: CountRun, sample: Sample, region: MoERegion, spare: int) -> _Labels:
        """Return the labels of all rows for one vector of counts, with `spare` rows behind."""
        one = OneRun(run.facts, sample)
        _tell_sizes(one, region, spare)
        given = {region.received_counts: run.facts.received, region.counts: run.facts.sent}
        for key, node in run.inputs.items():
            if node in given:
                one.tensors[key] = counts_of(node, given[node], sample)
        with torch.no_grad():
            for _, step in run.steps:
                if not isinstance(step, HostRead):
                    one.step(step)
        labels = _Labels(one)
        own = torch.arange(sum(sample[s] for s in run.facts.received) + spare, device="cpu")
        own[len(own) - spare :] = SPARE
        for tensor in self.received:
            labels.set(tensor, own)
        for step in self.steps:
            labels.follow(step)
        return labels


def _tell_sizes(one: OneRun, region: MoERegion, spare: int) -> None:
    """Set the sizes that the host would read: rows behind come from the last rank."""
    local = region.num_local_experts
    for splits, counts in (
        (output_splits(region.dispatch), one.facts.received),
        (input_splits(region.dispatch), one.facts.sent),
    ):
        for rank, split in enumerate(splits):
            size = value_of(split) if isinstance(split, fx.Node) else split
            raw = size.node._expr if isinstance(size, torch.SymInt) else None
            if not isinstance(raw, sympy.Symbol):
                raise Left(Reason.SIZE_FROM_COUNTS, f"rank {rank}: {size} rows")
            one.sizes[raw] = sum(one.sample[s] for s in counts[rank * local : (rank + 1) * local])
            if counts is one.facts.received and rank == region.num_ranks - 1:
                one.sizes[raw] += spare


@dataclass(eq=False, slots=True)
class _Memory:
    """The labels of one piece of memory, which several tensors may show."""

    labels: torch.Tensor
    is_cut: bool = False
    """Whether a tensor shows a part of it."""


@dataclass(slots=True)
class _Labels:
    """The labels of rows in one run."""

    run: OneRun
    groups: list[torch.Tensor] = field(default_factory=list)
    """Of each grouped product: its ends, then the labels of the rows that it reads."""
    _memory: dict[int, _Memory] = field(default_factory=dict)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the labels of a tensor with rows."""
        return self._memory[id(tensor)].labels

    def set(self, tensor: torch.Tensor, labels: torch.Tensor) -> None:
        """Note the labels of a new tensor; raise Left where it has another number of places."""
        if self._length(tensor) != len(labels):
            raise Left(
                Reason.SIZE_FROM_COUNTS,
                "a tensor must have a place for each row if padding rows follow the counted rows, "
                "and has not",
            )
        self._memory[id(tensor)] = _Memory(labels)

    def _length(self, tensor: torch.Tensor) -> int:
        size = tensor.shape[0] if tensor.dim() else 1
        return size if isinstance(size, int) else self.run.size(size)

    def follow(self, step: Operator) -> None:
        """Label what an operator makes; raise Left where it may read a row behind."""
        func = functional(step.func)
        name = "" if func is None else str(func._schema.name).removeprefix("aten::")
        rule = RULES.get(name, _Labels._change if step.is_pointwise else None)
        if rule is None:
            raise Left(
                Reason.UNKNOWN_OPERATOR,
                f"it is not known what {name} does to padding rows that follow the counted rows",
            )
        rule(self, step, name)

    def _rows(self, step: Operator) -> list[torch.Tensor]:
        return [t for t in step.inputs if id(t) in self._memory]

    def _fill(self, step: Operator, name: str) -> None:
        """Label new memory."""
        label = CONSTANT if name in FILLED else SPARE
        self.set(step.out, torch.full((self._length(step.out),), label, device="cpu"))

    def _gather(self, step: Operator, name: str) -> None:
        """Label rows taken by an index."""
        index = self._index(step, GATHERS[name])
        (rows,) = self._rows(step)
        self.set(step.out, self.of(rows)[index])

    def _join(self, step: Operator, name: str) -> None:
        """Label rows one behind the other, or side by side."""
        if step.argument("dim", 0) != 0:
            self._columns(step, name)
            return
        self.set(step.out, torch.cat([self.of(t) for t in step.argument("tensors")]))

    def _index(self, step: Operator, argument: str) -> torch.Tensor:
        """Return the index of places along the first dimension, none of them from the end."""
        given = step.argument(argument)
        first, *others = given if isinstance(given, list | tuple) else [given]
        is_plain = first is not None and first.dim() == 1 and not any(o is not None for o in others)
        if not is_plain or first.dtype is torch.bool or step.argument("dim", 0) != 0:
            raise Left(
                Reason.UNKNOWN_OPERATOR,
                f"{step.name} must index rows by one vector of integers, and does not",
            )
        return self.run.tensor(first).long()

    def _write(self, step: Operator, name: str) -> None:
        """Label places by the values that an index puts there: each place with a row just once."""
        base, index = step.inputs[0], self._index(step, WRITES[name])
        given = step.argument("source" if name == "index_copy" else "values")
        values, memory = self.of(given), self._memory[id(base)]
        if step.argument("accumulate", False) or memory.is_cut or len(values) != len(index):
            raise Left(
                Reason.UNKNOWN_OPERATOR,
                f"it is not known what {step.name} does to padding rows that follow the counted "
                "rows",
            )
        labels = memory.labels.clone()
        index = torch.where(index < 0, index + len(labels), index)
        labels[index] = values
        written = torch.bincount(index, minlength=len(labels))
        mixed = torch.zeros_like(written).index_add(0, index, (values < 0).long()) > 0
        if ((written > 1) & ~mixed).any():
            raise Left(
                Reason.ROWS_MIXED,
                "each place must be written once, and several rows are written to one",
            )
        labels[mixed] = SPARE
        if step.func._schema.is_mutable:
            memory.labels = labels
            if step.out is not None:
                self._memory[id(step.out)] = memory
        else:
            self.set(step.out, labels)

    def _cut(self, step: Operator, _: str) -> None:
        """Label a slice."""
        rows, dim = step.inputs[0], step.argument("dim", 0)
        memory = self._memory[id(rows)]
        if dim % rows.dim():
            memory.is_cut = True
            self._memory[id(step.out)] = memory
            return
        bounds = [step.argument(bound) for bound in ("start", "end", "step")]
        cut = slice(*(self.run.real(bound) for bound in bounds))
        memory.is_cut = True
        self.set(step.out, memory.labels[cut])
        self._memory[id(step.out)].is_cut = True

    def _columns(self, step: Operator, _: str) -> None:
        """Label rows whose columns are parted, or stand side by side."""
        rows = self._rows(step)
        dims = {step.argument("dim", 0) % t.dim() for t in rows}
        labels = self.of(rows[0])
        if 0 in dims or not all(torch.equal(self.of(t), labels) for t in rows):
            raise Left(Reason.ROWS_MIXED, f"{step.name} combines rows in different orders")
        for made in step.outputs:
            self.set(made, labels)
            self._memory[id(made)].is_cut = True
        for tensor in rows:
            self._memory[id(tensor)].is_cut = True

    def _multiply(self, step: Operator, _: str) -> None:
        """Label a product of groups, and note what it reads."""
        rows, ends = step.argument("self"), step.argument("offs")
        if (
            ends is None
            or id(rows) not in self._memory
            or id(step.argument("mat2")) in self._memory
        ):
            raise Left(Reason.ROWS_MIXED, f"{step.name} sums over the rows")
        labels, groups = self.of(rows), self.run.tensor(ends).long()
        last = int(groups[-1])
        if last > len(labels) or (labels[:last] == SPARE).any() or (labels[last:] >= 0).any():
            raise Left(
                Reason.ROWS_MIXED,
                "groups must hold exactly the counted rows, and hold others where padding "
                "rows follow these",
            )
        self.groups += [groups, labels[:last]]
        made = labels.clone()
        made[last:] = SPARE
        self.set(step.out, made)

    def _change(self, step: Operator, name: str) -> None:
        """Label rows that are changed one by one, or seen in another form."""
        rows = self._rows(step)
        others = [t for t in step.inputs if id(t) not in self._memory and t.dim()]
        labels = [self.of(t) for t in rows]
        length = len(labels[0])
        is_apart = all(self._length(t) == length for t in (*rows, step.out))
        if name in VIEWS and not is_apart and bool((labels[0] == CONSTANT).all()):
            self.set(step.out, torch.full((self._length(step.out),), CONSTANT, device="cpu"))
            return
        if others or not is_apart or step.out.dim() == 0:
            raise Left(
                Reason.UNKNOWN_OPERATOR,
                f"{name} combines rows with other tensors, although padding rows follow the "
                "counted rows",
            )
        alike = all(torch.equal(labels[0], other) for other in labels[1:])
        if not alike:
            raise Left(Reason.ROWS_MIXED, f"{name} combines rows in different orders")
        shares = storages_of(step.out) == storages_of(rows[0])
        memory = self._memory[id(rows[0])] if shares else _Memory(labels[0])
        self._memory[id(step.out)] = memory


Rule = Callable[[_Labels, Operator, str], None]
RULES: Final[dict[str, Rule]] = {
    **dict.fromkeys((*FILLED, *UNFILLED), _Labels._fill),
    **dict.fromkeys(GATHERS, _Labels._gather),
    **dict.fromkeys(WRITES, _Labels._write),
    **dict.fromkeys(VIEWS, _Labels._change),
    "cat": _Labels._join,
    "split": _Labels._columns,
    "split_with_sizes": _Labels._columns,
    "slice": _Labels._cut,
    "_grouped_mm": _Labels._multiply,
}
"""What each operator on rows makes of their labels, beside those that change them one by one."""
