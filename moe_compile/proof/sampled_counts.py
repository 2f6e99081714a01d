"""Check on sampled counts the premises of the row proof about indices it could not follow.

Contract
    A region passes only where, for every sampled vector of counts, each stretch of rows that an
    index not followed chose holds every row of its expert once, and no other; permutations are
    permutations; sizes, labels and orders that were followed are those computed.
    A premise that needs values from outside the region is refused. Large counts are
    left out where a tensor would have more than `MOST_ELEMENTS`; integers from 2^24 on, which
    float32 does not hold, are never tried.
    The verdict is the same on every rank that has the same graph.

The host's arithmetic on integers that it reads in a region is run on sampled counts too, but
for arithmetic that needs values from outside the region.
To apply orders and indices to a sample, every row received has a number of its own; padding has
none.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

import sympy
import torch
import torch.fx as fx
from torch.utils import _pytree as pytree

from moe_compile.dims.record import Operator
from moe_compile.graph.effects import is_host_arithmetic
from moe_compile.graph.query import is_assertion, operator_at, tensor_of, value_of
from moe_compile.journal.reasons import Left, Reason
from moe_compile.proof.count_run import (
    NUM_DRAWN,
    CountRun,
    OneRun,
    Sample,
    TooLarge,
    Unevaluable,
    draw_samples,
    large_samples,
    number,
    single_samples,
)
from moe_compile.proof.operator_call import SYMBOLIC, Claim
from moe_compile.proof.row_trace import HostRead, Step, Trace
from moe_compile.regions.count_facts import CountFacts, Premise
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_domain import (
    Formulas,
    GroupOfRow,
    IndexPerColumn,
    Labels,
    Order,
    Permutation,
    RunPositions,
    Segment,
    Selected,
    UnknownIndex,
    is_padding,
    is_selected,
    reads_outside,
)

INTERPRETED = 4096
"""Total of counts that a kernel is interpreted for, about 2 s: 0.5 ms a count on one core."""

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError,
            AssertionError)  # fmt: skip
"""Exceptions that an operator may raise on tensors it was not written for."""


def check_on_samples(
    region: MoERegion,
    trace: Trace,
    facts: CountFacts,
    claims: Iterable[Claim],
    premises: Iterable[Premise],
) -> int:
    """Return the number of sampled counts on which `premises` and `claims` hold; or raise Left."""
    premises, claims = tuple(dict.fromkeys(premises)), tuple(claims)
    indices = {i for p in premises for i in _indices((p.rows.parent, p.rows))}
    wanted = [claim.tensor for claim in claims if claim.value in indices]
    wanted += facts.group_ends
    run = CountRun(trace, facts, wanted)
    num_drawn = NUM_DRAWN
    if run.interprets:
        num_drawn = max(1, min(NUM_DRAWN, INTERPRETED // len(facts.root)))
    by_moment: dict[int, list[Claim]] = {}
    for claim in claims:
        ends = any(claim.tensor is end for end in facts.group_ends)
        if ends or not isinstance(claim.value, Formulas):
            by_moment.setdefault(claim.moment, []).append(claim)
    num_checked = 0
    large = large_samples(facts, spread=not run.interprets)
    for sample in itertools.chain(draw_samples(facts, num_drawn), large):
        try:
            _check(region, run, sample, by_moment, premises)
        except TooLarge:
            continue
        except (Unevaluable, *FAILURES) as error:
            detail = f"{type(error).__name__}: {error}"[:200]
            raise Left(Reason.PREMISE_UNCHECKED, detail) from error
        except Differs as error:
            counts = [sample[segment.length] for segment in facts.root]
            raise Left(Reason.PREMISE_FALSE, f"{error}, counts {counts}"[:200]) from error
        num_checked += 1
    return num_checked


def check_single_experts(
    region: MoERegion, trace: Trace, facts: CountFacts, claims: Iterable[Claim]
) -> None:
    """Raise Left where a computation from counts fails for rows of one expert, or of none.

    A chunk may have no others, though this rank's experts together have. Operators that are not
    torch's are tried where a premise needs them. Operators that need values from outside the
    region are not tried.
    """
    known = [c.tensor for c in claims if not reads_outside(c.value)]
    run, host = CountRun(trace, facts, known), HostRun(region, trace)
    for sample in single_samples(facts):
        one = OneRun(facts, sample)
        try:
            if run.is_plain:
                with suppress(Unevaluable):
                    _check(region, run, sample, {}, (), one)
            host.on(one)
        except Differs as error:
            raise Left(Reason.PREMISE_FALSE, str(error)) from error
        except FAILURES as error:
            detail = f"{type(error).__name__}: {error}"[:200]
            raise Left(Reason.FAILS_WITHOUT_ROWS, detail) from error


def _indices(given: Iterable[Order | Selected]) -> set[UnknownIndex]:
    """Return the indices that chose rows, those behind them included."""
    found: set[UnknownIndex] = set()
    for one in given:
        if isinstance(one, Selected):
            found |= {one.index, *_indices([one.parent])}
        else:
            found |= _indices([s.rows for s in one if isinstance(s.rows, Selected)])
    return found


def _check(
    region: MoERegion,
    run: CountRun,
    sample: Sample,
    claims: dict[int, list[Claim]],
    premises: tuple[Premise, ...],
    alone: OneRun | None = None,
) -> None:
    """Run on one sample; `alone` is that run where values from outside may be missing."""
    with torch.no_grad():
        rows = SampledRows(run.facts, sample)
        given = {
            region.received_counts: counts_of(region.received_counts, run.facts.received, sample),
            region.counts: counts_of(region.counts, run.facts.sent, sample),
        }
        for moment, step, one in run.on(sample, given, alone, skips=alone is not None):
            _check_read(run.facts, step, one)
            for claim in claims.get(moment, ()):
                if id(claim.tensor) in one.tensors:
                    rows.check(claim, one.tensors[id(claim.tensor)])
        for premise in premises:
            rows.check_premise(premise)


def counts_of(node: fx.Node, symbols: tuple[sympy.Symbol, ...], sample: Sample) -> torch.Tensor:
    """Return the real counts of `node` in a sample, in the form of its fake tensor."""
    form = tensor_of(node)
    assert form is not None
    values = [sample[symbol] for symbol in symbols]
    return torch.tensor(values, dtype=form.dtype, device="cpu").reshape(tuple(form.shape))


def _check_read(facts: CountFacts, step: Step, run: OneRun) -> None:
    if isinstance(step, HostRead):
        formula = facts.formula_read(value_of(step.node))
        if formula is not None and number(formula, run.sample) != int(run.tensor(step.tensor)):
            raise Differs(
                f"the integer of {operator_at(step.node)} must equal {formula}, and does not"
            )


class HostRun:
    """The host's arithmetic in one region, and the sizes of its tensors."""

    def __init__(self, region: MoERegion, trace: Trace) -> None:
        """Collect the arithmetic and the sizes; equal sizes are looked at once."""
        found = (node for node in region.body if is_host_arithmetic(node))
        self._nodes = [node for node in found if not is_assertion(node)]
        made = pytree.tree_leaves([s.out for s in trace.steps if isinstance(s, Operator)])
        sizes = [size for leaf in made if isinstance(leaf, torch.Tensor) for size in leaf.shape]
        symbolic = [size for size in sizes if isinstance(size, torch.SymInt)]
        self._sizes = list({size.node._expr: size for size in symbolic}.values())

    def on(self, run: OneRun) -> None:
        """Compute every number and every size, with the integers that `run` has read.

        Passes on errors of the host's arithmetic; raises ValueError for a negative size.
        """
        numbers: dict[fx.Node, Any] = {}

        def number(node: fx.Node) -> Any:
            value = value_of(node)
            known = numbers.get(node, value)
            return run.size(value) if known is value and isinstance(value, SYMBOLIC) else known

        for node in self._nodes:
            with suppress(Unevaluable):
                args = fx.node.map_arg(node.args, number)
                assert callable(node.target)
                numbers[node] = node.target(*args)
        for size in self._sizes:
            with suppress(Unevaluable):
                if (length := run.size(size)) < 0:
                    raise ValueError(f"a tensor would have {length} rows")


class Differs(Exception):
    """A computed value is not the one that the proof assumed."""


class _Numbered(NamedTuple):
    """Rows in some order: the number and the local expert of each; -1 is padding."""

    numbers: torch.Tensor
    experts: torch.Tensor


_NONE: Final = torch.empty(0, dtype=torch.int64, device="cpu")


class SampledRows:
    """The rows of one sample, numbered in the order received."""

    def __init__(self, facts: CountFacts, sample: Sample) -> None:
        self._sample = sample
        self._first: dict[object, int] = {}
        self._next = 0
        self._indices: dict[UnknownIndex, torch.Tensor] = {}
        self._all_chosen: dict[Selected, _Numbered] = {}
        self._orders: dict[Order, _Numbered] = {}
        self._order(facts.root)  # whole runs are met before any part of one

    def _length(self, formula: sympy.Expr) -> int:
        return number(formula, self._sample)

    def _lengths(self, order: Order) -> torch.Tensor:
        return torch.tensor([self._length(s.length) for s in order], device="cpu")

    def _order(self, order: Order) -> _Numbered:
        """Return the number and the expert of each row of `order`."""
        if order not in self._orders:
            self._orders[order] = self._number(order)
        return self._orders[order]

    def _number(self, order: Order) -> _Numbered:
        parts = []
        for chosen, group in itertools.groupby(order, key=is_selected):
            segments = tuple(group)
            parts += [self._chosen(s) for s in segments] if chosen else [self._plain(segments)]
        if len(parts) == 1:
            return parts[0]
        return _Numbered(*(torch.cat([_NONE, *each]) for each in zip(*parts, strict=True)))

    def _plain(self, segments: Order) -> _Numbered:
        """Return the rows of runs and padding, all at once: there may be many."""
        firsts, lengths, experts, steps = [], [], [], []
        for segment in segments:
            lengths.append(self._length(segment.length))
            steps.append(0 if is_padding(segment) else 1)
            firsts.append(-1 if is_padding(segment) else self._first_of(segment, lengths[-1]))
            experts.append(-1 if segment.expert is None else segment.expert)
        size = torch.tensor(lengths, device="cpu")
        table = torch.tensor([firsts, experts, steps, (size.cumsum(0) - size).tolist()])
        first, expert, step, start = table[:, _runs(size)]
        return _Numbered(first + step * (torch.arange(len(start), device="cpu") - start), expert)

    def _first_of(self, segment: Segment, length: int) -> int:
        start = self._length(segment.start)
        if segment.rows not in self._first:
            self._first[segment.rows] = self._next
            self._next += start + length
        return self._first[segment.rows] + start

    def _chosen(self, stretch: Segment | Premise) -> _Numbered:
        rows = stretch.rows
        assert isinstance(rows, Selected)
        if rows not in self._all_chosen:
            self._all_chosen[rows] = self._choose(rows)
        numbers, experts = self._all_chosen[rows]
        first = self._length(stretch.start)
        end = first + self._length(stretch.length)
        if not 0 <= first <= end <= len(numbers):
            raise Differs("groups must have as many rows in all as the index, and have more")
        return _Numbered(numbers[first:end], experts[first:end])

    def _choose(self, rows: Selected) -> _Numbered:
        if rows.index not in self._indices:
            raise Unevaluable("an index must be computable from the counts, and is not")
        index, (numbers, experts) = self._indices[rows.index], self._order(rows.parent)
        if ((index < -len(numbers)) | (index >= len(numbers))).any():
            raise Differs("an index must point to received rows, and points beyond them")
        return _Numbered(numbers[index], experts[index])

    def check_premise(self, premise: Premise) -> None:
        """Raise unless the stretch holds every row of its experts once.

        One expert's rows stand first, padding behind them, and in the order received: any other
        order might depend on the other experts' rows, and so might the rounding of sums over
        these rows, such as gradients of weights.
        """
        numbers, experts = self._order(premise.rows.parent)
        own = torch.isin(experts, torch.tensor(sorted(premise.experts), device="cpu"))
        whole = numbers[own].sort().values
        chosen, _ = self._chosen(premise)
        found, whose = chosen[chosen >= 0], f"experts {sorted(premise.experts)}"
        if not torch.equal(found.sort().values, whole):
            raise Differs(
                f"an index must have every row of {whose} once, and leaves out or adds some"
            )
        if len(premise.experts) == 1 and not torch.equal(chosen[: len(found)], whole):
            raise Differs(
                f"rows of {whose} must stay in the order in which they were received, and do not"
            )

    def check(self, claim: Claim, tensor: torch.Tensor) -> None:
        """Raise unless `tensor` holds the integers that the proof followed."""
        value = claim.value
        if isinstance(value, IndexPerColumn):
            columns = tensor.flatten(1)
            if not torch.equal(columns, columns[:, :1].expand_as(columns)):
                raise Differs("an index must be the same in all columns of a row, and is not")
            claim = Claim(claim.moment, claim.tensor, value.index)
            self.check(claim, columns[:, 0])
            return
        if isinstance(value, Formulas):
            holds = [self._length(cell) for cell in value.cells] == tensor.reshape(-1).tolist()
        elif isinstance(value, Labels):
            sizes = self._lengths(value.order)
            labels = torch.tensor(value.values, device="cpu")
            holds = torch.equal(labels[_runs(sizes)], tensor.long().reshape(-1))
        elif isinstance(value, RunPositions):
            runs = _runs(self._lengths(value.source))
            places = [(runs == kept).nonzero().reshape(-1) for kept in value.kept]
            holds = torch.equal(torch.cat([_NONE, *places]), tensor.long().reshape(-1))
        elif isinstance(value, Permutation):
            tensor = tensor.reshape(-1)
            _, before = self._order(value.source)
            _, after = self._order(value.target)
            holds = _is_permutation(tensor) and torch.equal(before[tensor.long()], after)
        else:
            assert isinstance(value, UnknownIndex)
            holds = self._check_opaque(value, tensor)
        if not holds:
            raise Differs(
                f"a value ({type(value).__name__}) differs from the value that the proof assumed"
            )

    def _check_opaque(self, value: UnknownIndex, tensor: torch.Tensor) -> bool:
        if tensor.dim() == 1 and not tensor.is_floating_point():
            self._indices.setdefault(value, tensor.long().clone())
        of = value.inverse_of
        if of is not None and of.is_permutation and of in self._indices:
            undone = self._indices[of][tensor.long()]
            return bool(torch.equal(undone, torch.arange(len(tensor), device="cpu")))
        if isinstance(value, GroupOfRow):
            return self._are_groups(value, tensor)
        if value.is_arange:
            return torch.equal(tensor.long(), torch.arange(len(tensor), device="cpu"))
        return _is_permutation(tensor) if value.is_permutation else True

    def _are_groups(self, value: GroupOfRow, tensor: torch.Tensor) -> bool:
        sizes = torch.tensor([self._length(size) for size in value.sizes], device="cpu")
        runs = _runs(sizes)
        behind = tensor[len(runs) :]
        return torch.equal(runs, tensor[: len(runs)].long()) and bool((behind == len(sizes)).all())


def _runs(sizes: torch.Tensor) -> torch.Tensor:
    """Return the run of each row; `repeat_interleave` starts all threads, however few the rows."""
    if (sizes < 0).any():
        raise Unevaluable("a size is negative")
    rows = torch.arange(int(sizes.sum()), device="cpu")
    return torch.searchsorted(sizes.cumsum(0), rows, right=True)


def _is_permutation(tensor: torch.Tensor) -> bool:
    return torch.equal(tensor.long().sort().values, torch.arange(len(tensor), device="cpu"))
