"""The rows of one sample of counts, numbered: what orders and indices make of them.

Contract
    Every row received has a number of its own; padding has none.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

import sympy
import torch

from moe_compile.proof.count_run import Unevaluable, number
from moe_compile.proof.count_samples import Sample
from moe_compile.proof.operator_call import Claim
from moe_compile.regions.count_facts import CountFacts, Premise
from moe_compile.regions.row_domain import (
    Formulas,
    Groups,
    Labels,
    Opaque,
    Order,
    Permutation,
    Places,
    Segment,
    Selected,
    Wide,
    is_padding,
    is_selected,
)


class Differs(Exception):
    """What was computed is not what the proof took for granted."""


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
        self._indices: dict[Opaque, torch.Tensor] = {}
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
            raise Differs("groups longer than the index")
        return _Numbered(numbers[first:end], experts[first:end])

    def _choose(self, rows: Selected) -> _Numbered:
        if rows.index not in self._indices:
            raise Unevaluable("an index that was not computed")
        index, (numbers, experts) = self._indices[rows.index], self._order(rows.parent)
        if ((index < -len(numbers)) | (index >= len(numbers))).any():
            raise Differs("an index beyond the rows")
        return _Numbered(numbers[index], experts[index])

    def check_premise(self, premise: Premise) -> None:
        """Raise unless the stretch holds every row of its experts once.

        One expert's rows stand first, padding behind them, and in the order received: no other
        order is known to be the same whatever rows the other experts have, and so are the
        roundings of sums over these rows, which gradients of weights are.
        """
        numbers, experts = self._order(premise.rows.parent)
        own = torch.isin(experts, torch.tensor(sorted(premise.experts), device="cpu"))
        whole = numbers[own].sort().values
        chosen, _ = self._chosen(premise)
        found, whose = chosen[chosen >= 0], f"experts {sorted(premise.experts)}"
        if not torch.equal(found.sort().values, whole):
            raise Differs(f"an index leaves out or adds rows of {whose}")
        if len(premise.experts) == 1 and not torch.equal(chosen[: len(found)], whole):
            raise Differs(f"rows of {whose} are not in the order received")

    def check(self, claim: Claim, tensor: torch.Tensor) -> None:
        """Raise unless `tensor` holds what the proof followed."""
        value = claim.value
        if isinstance(value, Wide):
            columns = tensor.flatten(1)
            if not torch.equal(columns, columns[:, :1].expand_as(columns)):
                raise Differs("an index is not the same all along a row")
            claim = Claim(claim.moment, claim.tensor, value.index)
            self.check(claim, columns[:, 0])
            return
        if isinstance(value, Formulas):
            holds = [self._length(cell) for cell in value.cells] == tensor.reshape(-1).tolist()
        elif isinstance(value, Labels):
            sizes = self._lengths(value.order)
            labels = torch.tensor(value.values, device="cpu")
            holds = torch.equal(labels[_runs(sizes)], tensor.long().reshape(-1))
        elif isinstance(value, Places):
            runs = _runs(self._lengths(value.source))
            places = [(runs == kept).nonzero().reshape(-1) for kept in value.kept]
            holds = torch.equal(torch.cat([_NONE, *places]), tensor.long().reshape(-1))
        elif isinstance(value, Permutation):
            tensor = tensor.reshape(-1)
            _, before = self._order(value.source)
            _, after = self._order(value.target)
            holds = _is_permutation(tensor) and torch.equal(before[tensor.long()], after)
        else:
            assert isinstance(value, Opaque)
            holds = self._check_opaque(value, tensor)
        if not holds:
            raise Differs(f"{type(value).__name__} not as followed")

    def _check_opaque(self, value: Opaque, tensor: torch.Tensor) -> bool:
        if tensor.dim() == 1 and not tensor.is_floating_point():
            self._indices.setdefault(value, tensor.long().clone())
        of = value.inverse_of
        if of is not None and of.is_permutation and of in self._indices:
            undone = self._indices[of][tensor.long()]
            return bool(torch.equal(undone, torch.arange(len(tensor), device="cpu")))
        if isinstance(value, Groups):
            return self._are_groups(value, tensor)
        if value.is_arange:
            return torch.equal(tensor.long(), torch.arange(len(tensor), device="cpu"))
        return _is_permutation(tensor) if value.is_permutation else True

    def _are_groups(self, value: Groups, tensor: torch.Tensor) -> bool:
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
