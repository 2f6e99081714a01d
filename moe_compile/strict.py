"""What the option `strict` raises for: what was matched, or asked for, and left as it is.

Contract
    Nothing is raised for what is no region, for what is done already, or for what does not pay.
    Where rows are dispatched by sizes known only at run time, a region was meant to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from moe_compile.analysis.attention_regions import UNPROVEN
from moe_compile.analysis.regions import Refused
from moe_compile.config import MegaMoEConfig
from moe_compile.errors import RegionRefused
from moe_compile.planning.dispatch_rules import quantises_rows
from moe_compile.planning.state import CompileState
from moe_compile.report.compilations import Compilation


def refuse_unmatched(config: MegaMoEConfig, compilation: Compilation) -> None:
    """Raise RegionRefused for a graph that dispatches rows by an exchange of no region."""
    if not config.strict or config.chunks == 1:
        return
    matched = [] if compilation.has_regions else [u for u in compilation.unmatched if u.is_region]
    for left in (*matched, *compilation.unmatched_dispatches):
        raise RegionRefused(
            f"{compilation.place_of_exchange}: no MoE region was found: {left}. To do: "
            f"{left.remedy}. Set megamoe.strict = False to run it as it is"
        )


def refuse_unmet(config: MegaMoEConfig, state: CompileState) -> None:
    """Raise RegionRefused for the first matched region that an option asked for in vain."""
    if config.strict:
        asked = (_unquantised, _unswitched, _unchunked, _unsplit)
        for complaint in chain.from_iterable(unmet(state) for unmet in asked):
            raise RegionRefused(complaint)


def _unquantised(state: CompileState) -> Iterator[str]:
    for plan in state.plans:
        for exchange in (plan.dispatch, plan.combine):
            if exchange.refusal:
                yield (
                    f"the {exchange.name} of {plan.region.name} is not quantised: "
                    f"{exchange.refusal}. Set megamoe.{exchange.name}_wire = 'same'"
                )
    if state.config.chunks == 1 and quantises_rows(state.config):  # else `_unchunked` says so
        for refused in (decoy for decoy in state.decoys if decoy.is_region):
            yield (
                f"{refused.candidate} is not quantised: {refused.reason.value} ({refused.detail}). "
                "Set megamoe.dispatch_wire = megamoe.combine_wire = 'same'"
            )


def _unswitched(state: CompileState) -> Iterator[str]:
    if state.config.dispatch != "all_gather":
        return
    for plan in state.plans:
        if not plan.switch.is_switched:
            yield (
                f"{plan.region.name} is not all-gathered: {plan.switch.reason.value} "
                f"({plan.switch.detail}). Set megamoe.dispatch = 'all_to_all'"
            )


def _unchunked(state: CompileState) -> Iterator[str]:
    if state.config.chunks == 1:
        return
    unproven = [plan.proof for plan in state.plans if isinstance(plan.proof, Refused)]
    for refused in (*unproven, *(decoy for decoy in state.decoys if decoy.is_region)):
        yield (
            f"{refused.candidate} is not chunked: {refused.reason.value} ({refused.detail}). "
            "Set megamoe.strict = False to run it as it is"
        )


def _unsplit(state: CompileState) -> Iterator[str]:
    if state.config.attention_chunks == 1:
        return
    for attention in state.attention:
        if attention.reason in UNPROVEN:
            detail = f" ({attention.detail})" if attention.detail else ""
            yield (
                f"the attention at {attention.where} is not split in groups of heads: "
                f"{attention.reason.value}{detail}. "
                "Set megamoe.attention_chunks = 1 to run it as it is"
            )
        for why in attention.projections_whole:
            yield (
                f"the attention at {attention.where} is not split as asked: {why}. "
                "Set megamoe.attention_split = 'none'"
            )
