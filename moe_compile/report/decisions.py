"""What the planner decided, in words: the choice, the runner-up, the margin and why.

Contract
    Times are predictions for the hardware profile, of forward and backward around the region.
"""

from __future__ import annotations

from typing import Final

from moe_compile.planning.choose_plan import Decision, Priced

MOST_ADVICE: Final = 2
"""Ways that change bits a report names: the fastest ones."""


def decision_remarks(decision: Decision | None) -> list[str]:
    """Return what to say of a decision; nothing where the planner had none."""
    if decision is None:
        return []
    chosen, runner_up = decision.chosen, decision.runner_up
    said = f"planned: {chosen.candidate}, predicted {_ms(chosen)}"
    if chosen is not decision.as_it_is:
        said += f", {decision.gain:.1%} less than as it is"
    if runner_up is not None:
        said += f"; next {runner_up.candidate}, {decision.margin:+.1%}"
    advice = [_advice(way, decision) for way in decision.advice[:MOST_ADVICE]]
    return [f"{said}; {decision.why.value}", *advice]


def decision_figures(decision: Decision | None) -> dict[str, object]:
    """Return the same as data; empty where the planner had no decision."""
    if decision is None:
        return {}
    runner_up = decision.runner_up
    return {
        "chosen": str(decision.chosen.candidate),
        "predicted_us": decision.chosen.us,
        "as_it_is_us": decision.as_it_is.us,
        "runner_up": str(runner_up.candidate) if runner_up else "",
        "runner_up_us": runner_up.us if runner_up else 0.0,
        "margin": decision.margin,
        "why": decision.why.value,
        "advice": [
            {"candidate": str(way.candidate), "predicted_us": way.us} for way in decision.advice
        ],
    }


def _advice(way: Priced, decision: Decision) -> str:
    less = 1.0 - way.us / decision.chosen.us
    return f"not chosen, since it changes bits: {way.candidate}, predicted {less:.1%} less"


def _ms(way: Priced) -> str:
    return f"{way.us / 1e3:.2f} ms"
