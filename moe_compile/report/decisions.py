"""What the planner decided, in words: the choice, the runner-up, the margin and why.

Contract
    Times are predictions for the hardware profile, of forward and backward around the region.
"""

from __future__ import annotations

from typing import Final

from moe_compile.plan.choose_plan import Decision, Priced

MOST_ADVICE: Final = 2
"""Ways that were not allowed a report names: the fastest, and the fastest of the other dispatch."""


def decision_remarks(decision: Decision | None) -> list[str]:
    """Return what to say of a decision; nothing where the planner had none."""
    if decision is None:
        return []
    chosen, runner_up = decision.chosen, decision.runner_up
    said = f"planned{_routing(decision)}: {chosen.candidate}, predicted {_ms(chosen)}"
    if chosen is not decision.as_it_is:
        said += f", {decision.gain:.1%} less than as it is"
    if runner_up is not None:
        said += f"; next {runner_up.candidate}, {decision.margin:+.1%}"
    for other in (decision.other_dispatch, decision.other_edges):
        if other is not None and (runner_up is None or other.candidate != runner_up.candidate):
            said += f"; {other.candidate}, {other.us / decision.chosen.us - 1.0:+.1%}"
    return [f"{said}; {decision.why.value}", *(_advice(w, decision) for w in _named(decision))]


def decision_figures(decision: Decision | None) -> dict[str, object]:
    """Return the same as data; empty where the planner had no decision."""
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
    why = "it changes bits" if one.is_lossy else "options ask for another"
    return f"faster, but not chosen since {why}: {one.candidate}, predicted {less:.1%} less"


def _routing(decision: Decision) -> str:
    skew = decision.routing_skew
    return f" for experts chosen as routing_skew = {skew:g} says" if skew else ""


def _ms(one: Priced) -> str:
    return f"{one.us / 1e3:.2f} ms"
