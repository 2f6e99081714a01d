"""Sum the rows that a combine brought per token where they came, each row read once.

Contract
    Requires  PLANNED, REWRITTEN.
    Keeps     every collective; what experts are given; gradients of rows, which are products.
    Loses     by BOUND, where the option `numerics` allows that: sums per token are made in another
              order, as are the sums that gradients of their weights are.

    z = zeros; z[order] = rows; bmm(scores, z by token)   becomes   token_sums(rows, order, scores)
    rows = permute_rows(cat(of chunks), p)                the same, of the rows of each chunk
    z[order + k first] = rows                             pad(token_sums(rows, order, scores of
                                                          tokens from first on)) with zeros

The last is the form under tensor parallelism, where a rank sends the rows of a part of the tokens
that follow one another. The sums of others are zeros, as gradients of their weights are; as the
program is written these are zeros times a gradient, so NaN where that is not finite.

Without it rows are written in order, in float32 where scores are, and read again: at eight rows of
bfloat16 a token eight times the bytes. What is no such sum stays, and the report says why.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
import torch.fx as fx
from sympy import sympify

from moe_compile.errors import ContractViolation
from moe_compile.graph.dependence import Dependence
from moe_compile.graph.edit import Emitter, erase_dead, replace_uses
from moe_compile.graph.legality import Legality
from moe_compile.graph.query import number_of, tensor_of
from moe_compile.journal.entries import Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.ops.permute import PERMUTE_ROWS
from moe_compile.ops.row_sums import TOKEN_SUMS
from moe_compile.plan.state import CompileState
from moe_compile.regions.row_chain import NotByRow, num_rows, shape_of
from moe_compile.regions.surroundings import REFUSALS
from moe_compile.regions.token_index import TokenIndex
from moe_compile.regions.token_regions import TokenSum
from moe_compile.regions.token_sums import find_token_sum
from passes.contract import Fact
from passes.replay.sizes import Size
from passes.rewrite import Proposed, Rewrite

BOUND: Final = (
    "each sum is off by at most k eps times the sum of the magnitudes of its k terms, and rounded "
    "to its type once; each gradient of a weight by D eps times that of its D products; eps is "
    "that of float32, of float64 where rows or weights are"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """The sums of one region."""

    region: str
    num_terms: int
    """k."""
    width: int
    """D."""
    is_weighted: bool

    def __str__(self) -> str:
        """Return what reports print."""
        kind = "weighted sums" if self.is_weighted else "sums"
        return f"the {kind} per token of {self.region}, k = {self.num_terms}, D = {self.width}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Form:
    """What is to become of the nodes of a sum."""

    sums: TokenSum
    rows: tuple[fx.Node, ...]
    """What came, of each chunk where chunks are put together for the sum alone."""
    inverse: fx.Node | None
    """Which of the rows put together each row of the whole is; None where they are the whole."""
    old: tuple[fx.Node, ...]
    """All that the new operator takes the place of."""
    order: fx.Node
    """The order of the rows among those that have one."""
    part: _Part | None
    """Which tokens have rows; None where all have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Tokens that follow one another, of some number of tokens."""

    first: int
    number: int
    of: int


@dataclass(frozen=True)
class FuseTokenSums(Rewrite[Fused]):
    """See the module docstring."""

    name: ClassVar[str] = "fuse_token_sums"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLANNED, Fact.REWRITTEN})
    numerics: ClassVar[str] = "bounded"
    bound: ClassVar[str] = BOUND
    is_decided: ClassVar[bool] = True

    def propose(self, graph: fx.Graph, state: CompileState) -> Proposed[Fused]:
        """Return the sums of all regions that have the form; none that `numerics` does not allow.

        What a region sums in its new form itself, on gathered tokens or nodes, is no candidate.
        """
        if not (state.results and state.config.allows(self.numerics)):
            return Proposed()
        legality = Legality(Dependence(graph), graph)
        proposals, skipped = [], []
        for one in state.experts:
            name = one.found.region.name
            if (result := state.results.get(name)) is None:
                continue
            form = _form_of(result, num_rows(one.found.region.rows), legality)
            if isinstance(form, Verdict):
                skipped.append(replace(form, candidate=f"the sums per token of {name}"))
            else:
                proposals.append(_proposed(name, form))
        return Proposed(proposals=tuple(proposals), skipped=tuple(skipped))

    def apply(self, graph: fx.Graph, proposals: tuple[Fused, ...], state: CompileState) -> None:
        """Emit each, and erase what stood there."""
        rows = {one.found.region.name: one.found.region.rows for one in state.experts}
        for one in proposals:
            legality = Legality(Dependence(graph), graph)
            form = _form_of(state.results[one.region], num_rows(rows[one.region]), legality)
            if isinstance(form, Verdict):
                raise ContractViolation(f"{one} are no more what they were: {form.why}")
            _carry_out(form, legality)


def _proposed(region: str, form: _Form) -> Fused:
    rows, num_terms = tensor_of(form.sums.rows), number_of(form.sums.num_slots)
    assert rows is not None and num_terms is not None
    is_weighted, width = form.sums.weights is not None, int(rows.shape[1])
    return Fused(region=region, num_terms=num_terms, width=width, is_weighted=is_weighted)


def _form_of(result: fx.Node, num_sent: object, legality: Legality) -> _Form | Verdict:
    """Return what sums the rows of `result` per token, or why that stays as it is."""
    try:
        _, sums = find_token_sum(result, num_sent, legality.dependence)
        order, part = _order_and_part(sums, legality)
    except NotByRow as stopped:
        found = stopped.found
        return Verdict(candidate="", reason=found.reason, detail=found.detail)
    permuted = sums.rows
    old, rows, inverse = sums.tail, [sums.rows], None
    if permuted.target is PERMUTE_ROWS and {*permuted.users} <= {*sums.tail}:
        whole, _, inverse = permuted.args
        old, rows = (permuted, *old), [whole]
        if whole.target is torch.cat and len(whole.users) == 1 and len(whole.args) == 1:
            old, rows = (whole, *old), whole.args[0]
    form = _Form(
        sums=sums, rows=tuple(rows), inverse=inverse, old=tuple(old), order=order, part=part
    )
    if (obstacle := legality.obstacle(form.old, sums.total)) is not None:
        return Verdict(candidate="", reason=REFUSALS[obstacle.hazard], detail=str(obstacle))
    return form


def _order_and_part(sums: TokenSum, legality: Legality) -> tuple[fx.Node, _Part | None]:
    """Return the order of the rows, and the tokens that have `k` rows, each in a place of its own.

    Raises NotByRow unless these follow one another, and no other token has a row.
    """
    known = TokenIndex(frozenset().union(*legality.dependence.writes.values()))
    rows, num_terms = tensor_of(sums.rows), number_of(sums.num_slots)
    if not sums.is_order or num_terms is None:
        raise NotByRow(Reason.NO_SLOTS, sums.total)
    is_matrix = rows is not None and rows.dim() == 2 and type(rows.shape[1]) is int
    if not is_matrix or len(shape_of(sums.total)) != 2:
        raise NotByRow(Reason.NO_SUM, sums.total)
    is_whole = num_rows(sums.index) == sympify(sums.num_sums) * num_terms
    if is_whole and known.is_permutation(sums.index):
        return sums.index, None
    order, shift = known.unshifted(sums.index)
    part = _part(number_of(shift), number_of(num_rows(order)), number_of(sums.num_sums), num_terms)
    if sums.needs_all or part is None or not known.is_permutation(order):
        raise NotByRow(Reason.NO_SLOTS, sums.index)
    return order, part


def _part(
    shift: int | None, num_sent: int | None, num_tokens: int | None, num_terms: int
) -> _Part | None:
    """Return the tokens that `num_sent` places from `shift` on are all places of, if they are."""
    if shift is None or num_sent is None or num_tokens is None:
        return None
    (first, before), (number, over) = divmod(shift, num_terms), divmod(num_sent, num_terms)
    is_there = before == over == 0 <= first <= num_tokens - number
    return _Part(first=first, number=number, of=num_tokens) if is_there else None


def _carry_out(form: _Form, legality: Legality) -> None:
    sums = form.sums
    total = tensor_of(sums.total)
    assert total is not None
    read = [node for node in (*form.rows, form.order, sums.weights, form.inverse) if node]
    dead = legality.unneeded(form.old, {sums.total: None}, read_anew=read)
    emit, num_terms, part = Emitter(sums.total), number_of(sums.num_slots), form.part
    assert num_terms is not None
    order, weights, num_tokens = form.order, sums.weights, _number_of_tokens(form, emit)
    if part is not None and weights is not None:
        bounds = (part.first * num_terms, part.number * num_terms)
        weights = emit.call(torch.narrow, emit.method("reshape", weights, -1), 0, *bounds)
    if form.inverse is not None:
        order = emit.call(operator.getitem, order, form.inverse)
    made = emit.call(
        TOKEN_SUMS, list(form.rows), order, weights, num_tokens, num_terms, total.dtype
    )
    if part is not None:
        around = (part.first, part.of - part.first - part.number)
        made = emit.call(torch.nn.functional.pad, made, (0, 0, *around))
    made.meta.update({k: v for k, v in sums.total.meta.items() if k == "example_value"})
    replace_uses({sums.total: made})
    erase_dead(dead)


def _number_of_tokens(form: _Form, emit: Emitter) -> Size:
    """Return how many tokens have rows."""
    if form.part is not None:
        return form.part.number
    if (known := number_of(form.sums.num_sums)) is not None:
        return known
    num_rows = emit.method("size", form.order, 0)
    return emit.call(operator.floordiv, num_rows, number_of(form.sums.num_slots))
