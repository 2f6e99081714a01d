"""A pass that proposes rewrites and applies them: the interface for packages outside this one.

Contract
    Proposing edits nothing, and proposals are data equal on all ranks: they join the plan, which
    ranks compare. They are applied to the graph, and to a copy to be priced, so they name nodes by
    their names.
    Proposals that "auto" could not choose under the option `numerics` are skipped. Where ranks
    promise equal sizes and the graph's inputs have static ones, so are those predicted to take
    longer, by one percent or more.

Pseudo-code
    proposals = `propose`
    skip them if the option numerics does not allow their loss
    apply them to a copy of the graph, trace both: skip them if that is predicted to take longer
    apply them to the graph, add them to the plan
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Generic, TypeVar

import torch.fx as fx

from moe_compile.errors import ContractViolation
from moe_compile.graph.query import has_static_inputs
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import allowed_by
from moe_compile.plan.plan import RewritePlan
from moe_compile.plan.state import CompileState
from passes.bisected import regions_left_out
from passes.contract import Fact, GraphPass

LEAST_LOSS: Final = 0.01
"""Share of the time by which a rewrite must be predicted to lose to be skipped: constants that a
program computes from the number of its rank change predictions by less."""

Proposal = TypeVar("Proposal", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposed(Generic[Proposal]):
    """The findings of a rewrite in one graph."""

    proposals: tuple[Proposal, ...] = ()
    """Edits to make: frozen data of numbers and strings, whose `repr` ranks compare and whose `str`
    the report shows. Nodes stand in it by name; groups do not, since ranks name them apart."""
    skipped: tuple[Verdict, ...] = ()
    """Candidates it leaves, with the reason: `Reason.OTHER` and a detail if none fits."""


class Rewrite(GraphPass, Generic[Proposal]):
    """One rewrite of the Dynamo graph. Subclasses are frozen dataclasses of their settings."""

    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.WAITS_VISIBLE})
    numerics: ClassVar[str] = "exact"
    """The largest change it may make, in the words of the option `numerics`."""
    bound: ClassVar[str] = ""
    """The size of that change, where it is not "exact"; a sentence of the report."""
    is_decided: ClassVar[bool] = False
    """Whether it carries out, on the exchanges of regions, a decision of options or the planning
    pass: neither `numerics` nor a price is asked then."""

    @abstractmethod
    def propose(self, graph: fx.Graph, state: CompileState) -> Proposed[Proposal]:
        """Return the edits to make to `graph`, and the candidates left; edit nothing.

        Of `state` only the fields that `docs/extend.md` names describe the graph at hand.
        """

    def region_of(self, proposal: Proposal) -> str:
        """Return the name of the region that a proposal changes; asked where it is `by_region`."""
        raise ContractViolation(
            f"rewrite {self.name} sets by_region, so each of its proposals must name its region; "
            f"{proposal} names none"
        )

    @abstractmethod
    def apply(self, graph: fx.Graph, proposals: tuple[Proposal, ...], state: CompileState) -> None:
        """Carry out `proposals` on `graph`, or on a copy with the same names; edit nothing else."""

    def measures(self, proposals: tuple[Proposal, ...]) -> dict[str, float]:
        """Return figures for the report; each key ends in its unit."""
        del proposals
        return {}

    def run(self, graph: fx.Graph, state: CompileState) -> PassReport:
        """Propose, judge, apply."""
        found = self._left(self.propose(graph, state), state)
        said = tuple(_said(proposal) for proposal in found.proposals)
        report = PassReport(pass_name=self.name, skipped=found.skipped)
        if not found.proposals:
            return report
        report = replace(report, measures=self.measures(found.proposals))
        if not self.is_decided:
            refused, times = self._judge(graph, found.proposals, state)
            report = replace(report, measures={**report.measures, **times})
            if refused is not None:
                skipped = (replace(refused, candidate=str(p)) for p in found.proposals)
                return replace(report, skipped=(*found.skipped, *skipped))
        self.apply(graph, found.proposals, state)
        state.rewrites += (
            RewritePlan(name=self.name, proposals=said, is_of_regions=self.is_decided),
        )
        loses = f" ({self.numerics}: {self.bound})" if self.bound else ""
        return replace(report, applied=tuple(f"{p}{loses}" for p in found.proposals))

    def _left(self, found: Proposed[Proposal], state: CompileState) -> Proposed[Proposal]:
        """Return `found` without the proposals on regions that the pass is left out of."""
        if not self.by_region:
            return found
        left = regions_left_out(self.name, map(self.region_of, found.proposals), state)
        state.withdraw_from(left, self.name)
        skipped = (
            Verdict(candidate=str(one), reason=why.reason, detail=why.detail)
            for one in found.proposals
            if (why := left.get(self.region_of(one))) is not None
        )
        return Proposed(
            proposals=tuple(p for p in found.proposals if self.region_of(p) not in left),
            skipped=(*found.skipped, *skipped),
        )

    def _judge(
        self, graph: fx.Graph, proposals: tuple[Proposal, ...], state: CompileState
    ) -> tuple[Verdict | None, dict[str, float]]:
        """Return the verdict against the proposals, and the times predicted without and with."""
        if not state.config.allows(self.numerics):
            detail = allowed_by(self.numerics)
            return Verdict(candidate="", reason=Reason.ROUNDS, detail=detail), {}
        if state.predict is None or not _can_price(graph, state):
            return None, {}
        assert graph.owning_module is not None
        whole, rewritten = (copy_of_graph(graph.owning_module) for _ in range(2))
        self.apply(rewritten.graph, proposals, state)
        rewritten.graph.lint()
        rewritten.recompile()
        before, after = state.predict(whole, False), state.predict(rewritten, True)
        times = {"predicted_us_before": before, "predicted_us": after}
        if after <= before * (1.0 + LEAST_LOSS):
            return None, times
        detail = f"predicted {after} us with it, {before} us without it"
        return Verdict(candidate="", reason=Reason.BY_PRICE, detail=detail), times


def _said(proposal: Hashable) -> str:
    """Return the text of a proposal that ranks compare."""
    hash(proposal)
    if " at 0x" in (text := repr(proposal)):
        raise ContractViolation(
            "a proposal's text must be the same on every rank, but this one contains an "
            f"address in memory: {text}"
        )
    return text


def _can_price(graph: fx.Graph, state: CompileState) -> bool:
    """Whether all ranks predict the same: equal inputs, of sizes known when compiling.

    A region on gathered tokens, or one in two hops, is emitted by the number of its rank. A body of
    a higher-order operator is not compiled by itself.
    """
    by_rank = any(one.plan.gathers or one.plan.is_in_two_hops for one in state.experts)
    if not state.config.equal_tokens or by_rank or state.graph_name != "dynamo":
        return False
    return has_static_inputs(graph)
