"""Check on sampled counts what the row proof took for granted of indices it could not follow.

Contract
    A region passes only where, for every sampled vector of counts, each stretch of rows that an
    index not followed chose holds every row of its expert once, and no other; permutations are
    permutations; sizes, labels and orders that were followed are what was computed.
    What cannot be evaluated without values from outside the region is refused. Large counts are
    left out where a tensor would have more than `MOST_ELEMENTS`; integers from 2^24 on, which
    float32 does not hold, are never tried.
    The verdict is the same on every rank that has the same graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import suppress

import sympy
import torch
import torch.fx as fx

from moe_compile.graph.query import operator_at, tensor_of, value_of
from moe_compile.journal.reasons import Reason
from moe_compile.proof.count_run import CountRun, OneRun, TooLarge, Unevaluable, number
from moe_compile.proof.count_samples import (
    NUM_DRAWN,
    Sample,
    draw_samples,
    large_samples,
    single_samples,
)
from moe_compile.proof.host_run import HostRun
from moe_compile.proof.operator_call import Claim
from moe_compile.proof.sampled_rows import Differs, SampledRows
from moe_compile.proof.trace_steps import HostRead, Step, Trace
from moe_compile.regions.count_facts import CountFacts, Premise
from moe_compile.regions.regions import MoERegion
from moe_compile.regions.row_domain import (
    Formulas,
    Opaque,
    Order,
    Selected,
    Unproven,
    reads_outside,
)

INTERPRETED = 4096
"""Counts in all that a kernel is interpreted for, about 2 s: 0.5 ms a count on one core."""

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError,
            AssertionError)  # fmt: skip
"""What running an operator on tensors it was not written for may raise."""


def check_on_samples(
    region: MoERegion,
    trace: Trace,
    facts: CountFacts,
    claims: Iterable[Claim],
    premises: Iterable[Premise],
) -> int:
    """Return on how many vectors of counts `premises` and `claims` hold; raise Unproven."""
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
            raise Unproven(Reason.PREMISE_UNCHECKED, detail) from error
        except Differs as error:
            counts = [sample[segment.length] for segment in facts.root]
            raise Unproven(Reason.PREMISE_FALSE, f"{error}, counts {counts}"[:200]) from error
        num_checked += 1
    return num_checked


def check_single_experts(
    region: MoERegion, trace: Trace, facts: CountFacts, claims: Iterable[Claim]
) -> None:
    """Raise Unproven where what is computed from counts fails for rows of one expert, or of none.

    A chunk may have no others, though this rank's experts together have. Operators that are not
    torch's are tried where a premise needs them; values from outside the region are not there, and
    what needs them is not tried.
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
            raise Unproven(Reason.PREMISE_FALSE, str(error)) from error
        except FAILURES as error:
            detail = f"{type(error).__name__}: {error}"[:200]
            raise Unproven(Reason.FAILS_WITHOUT_ROWS, detail) from error


def _indices(given: Iterable[Order | Selected]) -> set[Opaque]:
    """Return the indices that chose rows, those behind them included."""
    found: set[Opaque] = set()
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
            region.received_counts: _counts(region.received_counts, run.facts.received, sample),
            region.counts: _counts(region.counts, run.facts.sent, sample),
        }
        for moment, step, one in run.on(sample, given, alone, skips=alone is not None):
            _check_read(run.facts, step, one)
            for claim in claims.get(moment, ()):
                if id(claim.tensor) in one.tensors:
                    rows.check(claim, one.tensors[id(claim.tensor)])
        for premise in premises:
            rows.check_premise(premise)


def _counts(node: fx.Node, symbols: tuple[sympy.Symbol, ...], sample: Sample) -> torch.Tensor:
    form = tensor_of(node)
    assert form is not None
    values = [sample[symbol] for symbol in symbols]
    return torch.tensor(values, dtype=form.dtype, device="cpu").reshape(tuple(form.shape))


def _check_read(facts: CountFacts, step: Step, run: OneRun) -> None:
    if isinstance(step, HostRead):
        formula = facts.formula_read(value_of(step.node))
        if formula is not None and number(formula, run.sample) != int(run.tensor(step.tensor)):
            raise Differs(f"{operator_at(step.node)} is not {formula}")
