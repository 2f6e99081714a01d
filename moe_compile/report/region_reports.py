"""The outcome for one MoE region, or one attention operator, in a report; and why.

Contract
    Plain data: names, numbers, reasons. No graph node outlives its compilation through it.
    Of a decision of the planner: the choice, the runner-up, the margin and why. Times are
    predictions for the hardware profile, of forward and backward around the region.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from moe_compile.journal.entries import Verdict
from moe_compile.plan.choose_plan import Decision, Priced

AS_WRITTEN: Final = (
    "run as written: ranks compiled it differently, and all run the original program"
)
DOES_NOT_COMPILE: Final = "run as written: the rewritten program does not compile"
"""The verdict on all regions of a program that the ranks do not agree to run rewritten."""

CHUNKED: Final = "chunked"
ALL_GATHERED: Final = "all-gathered"
IN_TWO_HOPS: Final = "dispatched in two hops"
NO_READS: Final = "without host reads"
STANDS_IN: Final = (
    "this program runs in steps whose rows do not fit into the buffers, and in validation"
)
LEFT_WHOLE: Final = "left whole"
"""Verdicts on regions that are proven; on others the verdict is the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionReport:
    """The outcome for one MoE region."""

    name: str
    where: str
    """`file.py:line in function` of the dispatch."""
    num_ranks: int
    num_local_experts: int
    num_chunks: int
    num_host_reads: int
    """Blocking reads by the host per forward pass of the region."""
    verdict: str
    """`chunked`, `all-gathered`, `dispatched in two hops` or `without host reads`, or why none of
    these."""
    sized_by: str = "counts"
    """Source of the rows per expert: `counts`, or a `capacity` in equal parts."""
    remedy: str = ""
    """Remedy where the experts are not proven to run in chunks; "" where they are."""
    dispatch: str = "all_to_all"
    """The collective that moves the tokens, as the option names it."""
    nodes: str = "off"
    """Whether a token crosses to a node once, as the option names it."""
    hop_slices: int = 1
    """Slices of tokens that hop 1 goes in, in two hops, beside the chunks."""
    chunk_edges: str = "even"
    """Edges of the chunks, as the option names them."""
    num_tokens: int = 0
    """Tokens of each rank where they are gathered and known when compiling; 0 in other cases. All
    ranks must have as many, and compare this number before they run."""
    dispatch_figures: dict[str, float] = field(default_factory=dict)
    """Rows per token, bytes per token each way by either dispatch; {} if not known."""
    wires: dict[str, tuple[str, int, int]] = field(default_factory=dict)
    """`dispatch` and `combine` -> number format, bytes of a row before, bytes of a row now."""
    decision: dict[str, object] = field(default_factory=dict)
    """The planner's choice, the runner-up, margin, why, advice; {} where it had no say."""
    remarks: tuple[str, ...] = ()
    to_do: tuple[str, ...] = ()
    """Remedies for each thing left undone, a sentence for each reason."""

    def as_written(self, why: str) -> Self:
        """Return the report on the region run as the program has it, for the reason `why`."""
        wires = {name: ("same", before, before) for name, (_, before, _) in self.wires.items()}
        return replace(
            self,
            num_chunks=1,
            verdict=why,
            dispatch="all_to_all",
            nodes="off",
            hop_slices=1,
            chunk_edges="even",
            num_tokens=0,
            wires=wires,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionReport:
    """The outcome for one attention operator."""

    name: str
    where: str
    """`file.py:line in function` of the attention."""
    is_region: bool
    """Whether it stands between exchanges of heads for sequence."""
    num_ranks: int
    num_heads: int
    """Query heads of a rank; 0 where there is no region."""
    num_kv_heads: int
    num_chunks: int
    verdict: str
    """`chunked`, or why not."""
    decision: dict[str, object] = field(default_factory=dict)
    """The planner's choice, the runner-up, margin, why; {} where it had no say."""
    remarks: tuple[str, ...] = ()
    to_do: tuple[str, ...] = ()
    """Remedies for each thing left undone, a sentence for each reason."""

    def as_written(self, why: str) -> Self:
        """Return the report on attention run as the program has it, for the reason `why`."""
        return replace(self, num_chunks=1, verdict=why) if self.is_region else self


def edges_remarks(left: Mapping[str, Verdict]) -> list[str]:
    """Return why chunks have equally many experts, where options leave that open."""
    why = left.get("chunk_edges")
    return [f"every chunk has the same number of experts: {why.why}"] if why is not None else []


MOST_ADVICE: Final = 2
"""Ways not allowed that a report names: the fastest, and the fastest with the other dispatch."""


def decision_remarks(decision: Decision | None) -> list[str]:
    """Return the remarks on a decision; none where the planner had none."""
    if decision is None:
        return []
    chosen, runner_up = decision.chosen, decision.runner_up
    said = f"planned{_routing(decision)}: {chosen.candidate}, predicted {_ms(chosen)}"
    if chosen is not decision.as_it_is:
        said += f", {decision.gain:.1%} less than without a rewrite"
    if runner_up is not None:
        said += f"; the next best is {runner_up.candidate}, {decision.margin:+.1%}"
    for other in (decision.other_dispatch, decision.other_edges):
        if other is not None and (runner_up is None or other.candidate != runner_up.candidate):
            said += f"; {other.candidate}, {other.us / decision.chosen.us - 1.0:+.1%}"
    return [f"{said}; {decision.why.value}", *(_advice(w, decision) for w in _named(decision))]


def decision_figures(decision: Decision | None) -> dict[str, object]:
    """Return the decision as data; empty where the planner had none."""
    if decision is None:
        return {}
    runner_up, other = decision.runner_up, decision.other_dispatch
    edges = decision.other_edges
    return {
        "chosen": str(decision.chosen.candidate),
        "predicted_us": decision.chosen.us,
        "as_it_is_us": decision.as_it_is.us,
        "runner_up": str(runner_up.candidate) if runner_up else "",
        "runner_up_us": runner_up.us if runner_up else 0.0,
        "margin": decision.margin,
        "other_dispatch": str(other.candidate) if other else "",
        "other_dispatch_us": other.us if other else 0.0,
        "other_edges": str(edges.candidate) if edges else "",
        "other_edges_us": edges.us if edges else 0.0,
        "routing_skew": decision.routing_skew,
        "why": decision.why.value,
        "ranked": [
            {"options": one.candidate.options, "predicted_us": one.us} for one in decision.ranked
        ],
        "advice": [
            {"candidate": str(one.candidate), "predicted_us": one.us, "is_lossy": one.is_lossy}
            for one in decision.advice
        ],
    }


def _named(decision: Decision) -> list[Priced]:
    """Return the advice to print: the fastest, and the fastest with another dispatch."""
    fastest = list(decision.advice[:MOST_ADVICE])
    dispatch = decision.chosen.candidate.dispatch
    others = [one for one in decision.advice if one.candidate.dispatch != dispatch]
    if others and others[0] not in fastest:
        fastest[-1] = others[0]
    return fastest


def _advice(one: Priced, decision: Decision) -> str:
    less = 1.0 - one.us / decision.chosen.us
    why = "it changes bits" if one.is_lossy else "the options ask for a different rewrite"
    return (
        f"faster, but not chosen because {why}: {one.candidate}, with {less:.1%} less predicted "
        "time"
    )


def _routing(decision: Decision) -> str:
    skew = decision.routing_skew
    return f" for experts that are chosen unevenly, by routing_skew = {skew:g}" if skew else ""


def _ms(one: Priced) -> str:
    return f"{one.us / 1e3:.2f} ms"
