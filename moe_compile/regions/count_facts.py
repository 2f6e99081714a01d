"""Facts that follow from the counts: the expert that a size belongs to, and when it is zero.

Contract
    Every size is a formula in the counts, one symbol per count. A size that
    is not known as a formula belongs to no expert, and counts as never zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max

from moe_compile.journal.reasons import Left, Reason
from moe_compile.regions.row_domain import Order, Segment, Selected, is_padding


@dataclass(frozen=True, slots=True)
class Premise:
    """An assumption: `length` rows from `start` on, chosen by an unknown index, are of `experts`.

    Each row stands once; rows of a single expert are in the order received, padding behind them.
    """

    rows: Selected
    start: sympy.Expr
    length: sympy.Expr
    experts: frozenset[int]


class CountFacts:
    """The counts of one region as symbols, and the sizes the host computed from them."""

    def __init__(self, num_ranks: int, num_local_experts: int, num_received: int) -> None:
        """Name one symbol per received count; expert `k % num_local_experts` has count k."""
        self.num_ranks, self.num_local_experts = num_ranks, num_local_experts
        self.received = self._symbols("received", num_received)
        self.sent = self._symbols("sent", num_ranks * num_local_experts)
        self.root: Order = ()
        """The rows as received; empty until the dispatch was seen."""
        self.premises: list[Premise] = []
        """Assumptions of the proof about indices it could not follow."""
        self.group_ends: list[torch.Tensor] = []
        """Tensors of the offsets at which groups of such rows end."""
        self._expert = {s: k % num_local_experts for k, s in enumerate(self.received)}
        self._expert |= {s: k % num_local_experts for k, s in enumerate(self.sent)}
        self._formula: dict[sympy.Symbol, sympy.Expr] = {}
        self._outside: frozenset[sympy.Symbol] = frozenset()

    def renamed(self, names: Mapping[sympy.Symbol, sympy.Symbol]) -> CountFacts:
        """Return these facts with the tracer's symbols renamed.

        Symbols without a new name, which no size in the graph has, and premises are left out.
        Raises KeyError where a formula reads such a symbol.
        """
        counts = {one: one for one in (*self.received, *self.sent)}
        known = {**names, **counts}
        other = CountFacts(self.num_ranks, self.num_local_experts, len(self.received))
        other.root = self.root
        formulas = {names[raw]: f for raw, f in self._formula.items() if raw in names}
        read = {s: known[s] for formula in formulas.values() for s in formula.free_symbols}
        other._formula = {raw: formula.xreplace(read) for raw, formula in formulas.items()}
        other._outside = frozenset(names[one] for one in self._outside)
        return other

    @staticmethod
    def _symbols(name: str, count: int) -> tuple[sympy.Symbol, ...]:
        options = {"integer": True, "nonnegative": True}
        return tuple(sympy.Symbol(f"{name}_{k}", **options) for k in range(count))

    def set_outside(self, sizes: Sequence[Any]) -> None:
        """Note sizes that do not depend on the counts."""
        symbols = (s for size in sizes for s in _expression(size).free_symbols)
        self._outside = frozenset(symbols)

    def read_on_host(self, size: Any, formula: sympy.Expr) -> None:
        """Note that the host read `size`, whose value is `formula`."""
        raw = size.node._expr if isinstance(size, torch.SymInt) else None
        if isinstance(raw, sympy.Symbol) and raw not in self._outside:
            self._formula.setdefault(raw, formula)

    def is_unknown(self, size: Any) -> bool:
        """Whether `size` is a symbol of which nothing is known yet."""
        raw = size.node._expr if isinstance(size, torch.SymInt) else None
        known = raw in self._formula or raw in self._outside
        return isinstance(raw, sympy.Symbol) and not known

    def formula(self, size: Any) -> sympy.Expr:
        """Return an integer or symbolic size as a formula in the counts.

        It is read as the program wrote it, before tracing specialised it to this rank: a rank
        without tokens sends no rows, and its tracer writes 0 for every count it sends.
        """
        written = _written(size).xreplace(self._formula)
        known = self._outside.union(self._expert)
        if written.free_symbols <= known:
            return written
        return _expression(size).xreplace(self._formula)

    def formula_written(self, size: Any) -> sympy.Expr | None:
        """Return the formula of a size as the program computed it; None where it is not followed.

        Facts that tracing learnt, such as from an assertion of the program, are not used.
        """
        formula = _written(size).xreplace(self._formula) if isinstance(size, torch.SymInt) else None
        known = self._outside.union(self._expert)
        followed = formula is not None and formula.free_symbols and formula.free_symbols <= known
        return formula if followed else None

    def formula_read(self, size: Any) -> sympy.Expr | None:
        """Return the formula of a size the host read; None where it is not followed."""
        return self._formula.get(_written(size))

    def depends_on_counts(self, size: Any) -> bool:
        """Whether the value may differ between chunks."""
        return bool(self.formula(size).free_symbols - self._outside)

    def experts_of(self, formula: sympy.Expr) -> frozenset[int | None]:
        """Return the experts whose counts `formula` reads, with None for unknown symbols."""
        symbols = formula.free_symbols - self._outside
        return frozenset(self._expert.get(symbol) for symbol in symbols)

    def expert_with(self, count: sympy.Symbol) -> int:
        """Return the local expert whose rows `count` counts."""
        return self._expert[count]

    def left_without(self, formula: sympy.Expr, expert: int) -> int | None:
        """Return `formula` with the counts of `expert` set to 0; None if not one number."""
        zeros = {s: sympy.S.Zero for s, e in self._expert.items() if e == expert}
        left = formula.xreplace(zeros)
        return int(left) if left.is_Integer else None

    def vanishes_without(self, formula: sympy.Expr, expert: int) -> bool:
        """Whether `formula` is 0 whenever the counts of `expert` are."""
        return self.left_without(formula, expert) == 0

    def rows_of(self, expert: int) -> sympy.Expr:
        """Return the number of rows of `expert` that were received."""
        return sympy.Add(*(s.length for s in self.root if s.expert == expert))

    def run(self, count: sympy.Expr) -> Segment:
        """Return the rows that the received `count` counts."""
        return Segment(("received", count), count, self._expert[count])

    def runs(self, size: sympy.Expr) -> Order | None:
        """Return the runs whose counts add up to `size`, by rank; None when it is no such sum."""
        terms = size.as_coefficients_dict()
        if any(t not in self.received or c != 1 for t, c in terms.items()):
            return None
        return tuple(self.run(t) for t in self.received if t in terms)

    def set_root(self, received: Sequence[Any], sent: Sequence[Any]) -> None:
        """Read the order of received rows off the split sizes of the dispatch.

        Raises Left unless each rank's size is the sum of its counts, one per local expert.
        """
        runs = self._runs_per_rank(received, self.received)
        if any(self.formula(size) != 0 for size in sent):  # traced without a row, it sends none
            self._runs_per_rank(sent, self.sent)
        self.root = tuple(self.run(count) for per_rank in runs for count in per_rank)

    def _runs_per_rank(
        self, sizes: Sequence[Any], counts: tuple[sympy.Symbol, ...]
    ) -> list[list[sympy.Symbol]]:
        per_rank = len(counts) // self.num_ranks
        found = []
        for rank, size in enumerate(sizes):
            if self.num_ranks == 1 and not self.formula(size).free_symbols:
                found.append(list(counts))
                continue  # all rows stay here: tracing found their number to be the input's
            terms = self.formula(size).as_coefficients_dict()
            mine = [c for c in counts[rank * per_rank : (rank + 1) * per_rank] if c in terms]
            experts = [self._expert[c] for c in mine]
            whole = len(terms) == len(mine) and all(terms[c] == 1 for c in mine)
            if not whole or experts != list(range(self.num_local_experts)):
                raise Left(
                    Reason.NO_COUNT_EXCHANGE,
                    f"the split size of rank {rank} must be the sum of its counts, and is {size}",
                )
            found.append(mine)
        return found

    def expert_of(self, order: Order) -> int | None:
        """Return the one expert all rows of `order` belong to, padding aside; None when several."""
        experts = {self._expert_of_segment(s) for s in order if not is_padding(s)}
        return experts.pop() if len(experts) == 1 else None

    def _expert_of_segment(self, segment: Segment) -> int | None:
        """Return the expert of a segment.

        Of rows chosen by an index not followed, a segment holds all rows of one expert if its
        length follows from that expert's counts alone and has room for them, and its start does
        not depend on them: the index and the sizes are computed by one body from the same counts.
        """
        if not isinstance(segment.rows, Selected):
            return segment.expert
        experts = self.experts_of(segment.length)
        expert = next(iter(experts)) if len(experts) == 1 else None
        if expert is None or expert in self.experts_of(segment.start):
            return None
        if not self.has_room_for(segment.length, expert, segment.rows):
            return None
        own = frozenset([expert])
        self.premises.append(Premise(segment.rows, segment.start, segment.length, own))
        return expert

    def note_experts_of(self, segment: Segment) -> bool:
        """Return whether a segment holds all rows of some experts, and note it as a premise."""
        if self._expert_of_segment(segment) is not None:
            return True
        assert isinstance(segment.rows, Selected)
        sizes: dict[frozenset[int | None], sympy.Expr] = {}
        for term in sympy.Add.make_args(segment.length):
            whose = self.experts_of(term)
            sizes[whose] = sizes.get(whose, sympy.S.Zero) + term
        experts = {e for whose in sizes if len(whose) == 1 for e in whose if e is not None}
        if len(experts) < len(sizes) or experts & self.experts_of(segment.start):
            return False
        for (expert,), size in sizes.items():
            if expert is None or not self.has_room_for(size, expert, segment.rows):
                return False
        whole = frozenset(experts)
        self.premises.append(Premise(segment.rows, segment.start, segment.length, whole))
        return True

    def note_all_rows(self, rows: Selected, size: sympy.Expr) -> None:
        """Note the premise that an index chose every row once, in `size` places."""
        everyone = frozenset(range(self.num_local_experts))
        self.premises.append(Premise(rows, sympy.S.Zero, size, everyone))

    def has_room_for(self, size: sympy.Expr, expert: int, rows: Selected) -> bool:
        """Whether `size` is at least the number of rows of `expert`, by its form.

        Where `rows` were permuted, none can be padding: then it must be that number.
        """
        needed = self.rows_of(expert)
        return size == needed or (not rows.index.is_permutation and _is_at_least(size, needed))

    def is_rows_of_one(self, order: Order) -> int | None:
        """Return the expert of `order` if there are no rows when its counts are 0; else None."""
        expert = self.expert_of(order)
        total = sympy.Add(*(segment.length for segment in order))
        empty = expert is not None and self.vanishes_without(total, expert)
        return expert if empty else None


def _expression(size: Any) -> sympy.Expr:
    symbolic = isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool)
    return size.node.expr if symbolic else sympy.sympify(size)


def _written(size: Any) -> sympy.Expr:
    """Return a size as it was computed, before later replacements of its symbols."""
    symbolic = isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool)
    return size.node._expr if symbolic else sympy.sympify(size)


def said_to_be(size: Any) -> sympy.Expr | None:
    """Return the expression by which tracing replaced a host integer; None where it did not.

    Later nodes compute from the replacement. A 0 is ignored: it only says that this rank has no
    tokens. Any other replacement asserts counts that a chunk would not have.
    """
    if not isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    found = size.node.expr
    return found if found not in (size.node._expr, 0) else None


def _is_at_least(size: sympy.Expr, rows: sympy.Expr) -> bool:
    """Whether `size >= rows >= 0` by form: max, added constants, rounding up to a multiple."""
    if size == rows:
        return True
    if isinstance(size, Max | sympy.Max):
        return any(_is_at_least(a, rows) for a in size.args)
    constant, rest = size.as_coeff_Add()
    if constant > 0:
        return _is_at_least(rest, rows)
    multiple, inner = size.as_coeff_Mul()
    if multiple.is_Integer and multiple > 0 and isinstance(inner, FloorDiv):
        numerator, divisor = inner.args
        return multiple == divisor and _is_at_least(numerator - (divisor - 1), rows)
    return False
