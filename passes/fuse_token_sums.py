"""Sum the rows from a combine per token in the order received, each row read once.

Contract
    Requires  PLANNED, REWRITTEN.
    Keeps     every collective; the experts' inputs; gradients of rows, which are products.
    Loses     by BOUND, where the option `numerics` allows that: sums per token are made in another
              order, and so are the sums in the gradients of their weights.

    z = zeros; z[order] = rows; bmm(scores, z by token)   becomes   token_sums(rows, order, scores)
    rows = permute_rows(cat(of chunks), p)                the same, of the rows of each chunk
    z[order + k first] = rows                             pad(token_sums(rows, order, scores of
                                                          tokens from first on)) with zeros

The last is the form under tensor parallelism, where a rank sends the rows of consecutive tokens.
The sums of other tokens are zeros, and so are gradients of their weights; in the program as written
these are zeros times a gradient, so NaN where that is not finite.

Without it rows are written in order, in float32 where scores are, and read again: at eight rows of
bfloat16 a token eight times the bytes. Other sums stay, and the report says why.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch.fx as fx

from moe_compile.errors import ContractViolation
from moe_compile.graph.edit import Emitter, erase_dead, replace_uses
from moe_compile.graph.query import number_of, tensor_of
from moe_compile.journal.entries import Verdict
from moe_compile.plan.state import CompileState
from moe_compile.regions.fused_sums import FusedSums, emit_sums, fused_sums_of
from moe_compile.regions.row_chain import num_rows
from passes.contract import Fact
from passes.rewrite import Proposed, Rewrite

BOUND: Final = (
    "each sum differs by at most k eps times the sum of the magnitudes of its k terms, and is "
    "rounded to its dtype once; each gradient of a weight differs by at most D eps times the sum "
    "of the magnitudes of its D products; eps is that of float32, or of float64 if rows or weights "
    "are float64"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """The sums of one region."""

    region: str
    num_terms: int
    """Terms per token, k."""
    width: int
    """Columns of a row, D."""
    is_weighted: bool

    def __str__(self) -> str:
        """Return its name in reports."""
        kind = "weighted sums" if self.is_weighted else "sums"
        return f"the {kind} per token of {self.region}, k = {self.num_terms}, D = {self.width}"


@dataclass(frozen=True)
class FuseTokenSums(Rewrite[Fused]):
    """See the module docstring."""

    name: ClassVar[str] = "fuse_token_sums"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.PLANNED, Fact.REWRITTEN})
    numerics: ClassVar[str] = "bounded"
    bound: ClassVar[str] = BOUND
    is_decided: ClassVar[bool] = True
    by_region: ClassVar[bool] = True

    def expected(self, graph: fx.Graph, state: CompileState) -> list[FusedSums]:
        """Return the sums that would be one operator in the graph as it is written.

        Prices are of these, even for a region that sums in a form of its own, on gathered tokens
        or nodes: the prices decide that.
        """
        is_asked = state.config.allows(self.numerics)
        if not is_asked or self.name in state.config.disable_passes or not state.found.experts:
            return []
        legality = state.facts_of(graph).legality
        regions = (one.region for one in state.found.experts)
        forms = (fused_sums_of(one.result, num_rows(one.rows), legality) for one in regions)
        return [form for form in forms if isinstance(form, FusedSums)]

    def propose(self, graph: fx.Graph, state: CompileState) -> Proposed[Fused]:
        """Return the sums of all regions that have the form; none that `numerics` does not allow.

        Sums that a region's new form makes itself, on gathered tokens or nodes, are no candidates.
        """
        if not (state.results and state.config.allows(self.numerics)):
            return Proposed()
        legality = state.facts_of(graph).legality
        proposals, skipped = [], []
        for one in state.experts:
            name = one.found.region.name
            if (result := state.results.get(name)) is None:
                continue
            form = fused_sums_of(result, num_rows(one.found.region.rows), legality)
            if isinstance(form, Verdict):
                skipped.append(replace(form, candidate=f"the sums per token of {name}"))
            else:
                proposals.append(_proposed(name, form))
        return Proposed(proposals=tuple(proposals), skipped=tuple(skipped))

    def region_of(self, proposal: Fused) -> str:
        """Return the name of its region."""
        return proposal.region

    def apply(self, graph: fx.Graph, proposals: tuple[Fused, ...], state: CompileState) -> None:
        """Emit each fused sum, and erase the nodes it replaces."""
        rows = {one.found.region.name: one.found.region.rows for one in state.experts}
        facts = state.facts_of(graph)
        for one in proposals:
            result, num_sent = state.results[one.region], num_rows(rows[one.region])
            form = fused_sums_of(result, num_sent, facts.legality)
            if isinstance(form, Verdict):
                raise ContractViolation(
                    f"{one} were planned, but the graph no longer has these nodes: {form.why}"
                )
            _carry_out(form)
            facts.forget()


def _proposed(region: str, form: FusedSums) -> Fused:
    rows, num_terms = tensor_of(form.sums.rows), number_of(form.sums.num_slots)
    assert rows is not None and num_terms is not None
    is_weighted, width = form.sums.weights is not None, int(rows.shape[1])
    return Fused(region=region, num_terms=num_terms, width=width, is_weighted=is_weighted)


def _carry_out(form: FusedSums) -> None:
    total = form.sums.total
    made = emit_sums(Emitter(total), form)
    made.meta.update({k: v for k, v in total.meta.items() if k == "example_value"})
    replace_uses({total: made})
    erase_dead(form.dead)
