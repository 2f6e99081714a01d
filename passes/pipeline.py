"""The passes of each level, in the order they run, and the one runner.

Contract
    The tuples below are the whole order; configuration selects from them, never reorders.
    Rewrites of other distributions follow the last pass on the Dynamo graph, by name.
    A pass that raises is dropped: the graph is as if the pass were absent, one warning says why.
    A pass that needs a fact of a dropped pass is left out as well, and the report says so.
    Facts of a graph (`CompileState.facts_of`) are forgotten once a pass has changed it.
    `TORCH_LOGS="+moe_compile"` prints the graph before a level, and after each pass that changed
    it; under `TORCH_TRACE` tlparse shows the same as artifacts `megamoe_<graph>_<step>`; where a
    page is asked for the journal keeps their texts.
    While torch's own bisector searches, it decides too which passes are left out.
"""

from __future__ import annotations

import functools
import logging
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch.fx as fx
from torch._logging import trace_structured

from moe_compile.config import OF_REGION, pass_in_region
from moe_compile.entry_points import REWRITES, installed
from moe_compile.errors import ContractViolation, InvalidConfig, MegaMoEError, nearest
from moe_compile.graph.modes import without_saved_tensors_hooks
from moe_compile.graph.snapshot import Snapshot, lines_of
from moe_compile.journal.entries import Dropped, GraphText, PassReport
from moe_compile.journal.reasons import Reason
from moe_compile.plan.state import CompileState
from passes.apply_scores import ApplyScores
from passes.bisected import BISECTED, DYNAMO_PASSES, is_left_out
from passes.bound_captures import BoundCaptures
from passes.compress_gradients import CompressGradients
from passes.contract import Fact, GraphPass
from passes.copy_fills import CopyFills
from passes.detect_regions import DetectRegions
from passes.feed_products import FeedProducts
from passes.fold_row_moves import FoldRowMoves
from passes.forward_cat_split import ForwardCatSplit
from passes.fuse_token_sums import FuseTokenSums
from passes.lower_row_ops import LowerRowOps
from passes.measure_waits import MeasureWaits
from passes.merge_host_reads import MergeHostReads
from passes.normalize_exchanges import NormalizeExchanges
from passes.offload_activations import OffloadActivations
from passes.outside import load_rewrites
from passes.pin_order import PinOrder
from passes.plan_regions import PlanRegions
from passes.quantize_exchanges import QuantizeExchanges
from passes.quantize_products import QuantizeProducts
from passes.quantize_where_made import QuantizeWhereMade
from passes.realize_slices import RealizeSlices
from passes.record_order import RecordOrder
from passes.rewrite import Rewrite
from passes.rewrite_regions import RewriteRegions
from passes.route_exchanges import RouteExchanges
from passes.save_exchanges import SaveExchanges
from passes.save_overwritten import SaveOverwritten
from passes.schedule_exchanges import ScheduleExchanges
from passes.size_attention import SizeAttention
from passes.sizes_from_splits import SizesFromSplits
from passes.sort_nodes import SortNodes
from passes.split_addends import SplitAddends
from passes.split_batch import SplitBatch
from passes.unpack_integers import UnpackIntegers
from passes.verify_schedule import VerifySchedule
from passes.whole_weights import WholeWeights
from passes.zero_empty_groups import ZeroEmptyGroups

LOG: Final = logging.getLogger("moe_compile.passes")  # under TORCH_LOGS=+moe_compile


@dataclass(frozen=True, slots=True)
class Level:
    """The passes that run on one kind of graph, in order."""

    passes: tuple[GraphPass, ...]
    given: frozenset[Fact] = frozenset()
    """Facts that the tracer guarantees of the level's graphs."""
    subsystem: str = "post_grad_passes"
    """Name that torch's bisector has for passes on these graphs."""


DYNAMO: Final = Level(
    (
        NormalizeExchanges(),
        SplitBatch(),
        ApplyScores(),
        DetectRegions(),
        PlanRegions(),
        RewriteRegions(),
        FuseTokenSums(),
        QuantizeExchanges(),
        QuantizeProducts(),
        RouteExchanges(),
    ),
    subsystem=DYNAMO_PASSES,
)
"""Passes on the Dynamo graph, before AOTAutograd derives the backward."""

JOINT: Final = Level(
    (
        SortNodes(),
        ForwardCatSplit(),
        MergeHostReads(),
        SizesFromSplits(),
        SaveExchanges(),
        SaveOverwritten(),
        WholeWeights(),
        FeedProducts(),
    ),
    frozenset({Fact.FUNCTIONAL}),
    subsystem="joint_graph_passes",
)
"""Passes on the joint graph, before it is partitioned."""

PARTITIONED: Final = Level((OffloadActivations(),), frozenset({Fact.FUNCTIONAL}))
"""Passes on the forward graph as it is partitioned, which change the backward graph with it."""

POST_GRAD_EARLY: Final = Level(
    (FoldRowMoves(), LowerRowOps(), CompressGradients(), ZeroEmptyGroups()),
    frozenset({Fact.FUNCTIONAL}),
)
"""Passes on the forward and the backward graph apart, before Inductor's own passes on them."""

POST_GRAD: Final = Level(
    (
        SplitAddends(),
        UnpackIntegers(),
        ScheduleExchanges(),
        VerifySchedule(),
    ),
    frozenset({Fact.FUNCTIONAL}),
)
"""Passes on the forward and the backward graph apart, before Inductor lowers them."""

RECORD: Final = Level((RecordOrder(), MeasureWaits()), frozenset({Fact.FUNCTIONAL}))
"""Passes on the same graphs next, in whatever order their nodes are."""

PIN: Final = Level(
    (
        QuantizeWhereMade(),
        CopyFills(),
        RealizeSlices(),
        SizeAttention(),
        BoundCaptures(),
        PinOrder(),
    ),
    frozenset({Fact.FUNCTIONAL}),
)
"""Passes on the same graphs last, where Inductor generates their code."""

LEVELS: Final = (DYNAMO, JOINT, PARTITIONED, POST_GRAD_EARLY, POST_GRAD, RECORD, PIN)
NAMES: Final = tuple(p.name for level in LEVELS for p in level.passes)


@functools.cache
def outside_rewrites() -> tuple[Rewrite[Any], ...]:
    """Return the rewrites of other distributions; raise InvalidConfig for one that is broken."""
    return load_rewrites(installed(REWRITES), NAMES)


def dynamo_level() -> Level:
    """Return the level of the Dynamo graph, rewrites of other distributions included."""
    return replace(DYNAMO, passes=(*DYNAMO.passes, *outside_rewrites()))


def all_names() -> tuple[str, ...]:
    """Return the names that `disable_passes` may have."""
    return (*NAMES, *(rewrite.name for rewrite in outside_rewrites()))


def names_by_region() -> tuple[str, ...]:
    """Return the names of the passes that `disable_passes` may leave out of one region."""
    return tuple(p.name for p in dynamo_level().passes if p.by_region)


def check_names(names: Iterable[str]) -> None:
    """Raise InvalidConfig for a name in `disable_passes` that no pass has."""
    known = all_names()
    for entry in names:
        name, _, region = entry.partition(OF_REGION)
        if name not in known:
            raise InvalidConfig(
                f"megamoe.disable_passes: there is no pass {name!r}.{nearest(name, known)}"
            )
        if name != entry and not (region and name in names_by_region()):
            raise InvalidConfig(
                f"megamoe.disable_passes has {entry!r}, but only these passes can be left out of "
                f"a single region: {', '.join(names_by_region())}. Write {name!r} to leave the "
                "pass out of all regions, or name one of these passes with a region, as "
                f"{pass_in_region(names_by_region()[0], 'region 0')!r}"
            )


def check_order(level: Level) -> None:
    """Raise ContractViolation if a pass needs a fact, or a pass, that is not before it."""
    known, names = level.given, set[str]()
    for p in level.passes:
        if late := p.after - names:
            raise ContractViolation(
                f"pass {p.name} must come after {', '.join(sorted(late))}, and comes before"
            )
        names.add(p.name)
        if missing := p.requires - known:
            raise ContractViolation(
                f"pass {p.name} needs {_names(missing)}, which no earlier pass provides"
            )
        known = (known - p.invalidates) | p.provides


def run_level(level: Level, graph: fx.Graph, state: CompileState) -> list[PassReport | Dropped]:
    """Run one level's enabled passes in order on `graph`; return the outcome of each.

    A pass that failed on this graph in an earlier attempt has its place in the journal already.

    Raises a failing pass's error when `state.config.strict`, and a check's error always.
    """
    results: list[PassReport | Dropped] = []
    result: PassReport | Dropped
    known = level.given
    state.facts_of(graph).forget()
    _show(graph, state, f"before_{level.passes[0].name}")
    _keep_text(graph, state, "")
    for p in level.passes:
        if f"{p.name} {state.graph_name}" in state.dropped:
            continue
        if p.name in state.config.disable_passes:
            result = Dropped(p.name, Reason.DISABLED)
        elif missing := p.requires - known:
            result = Dropped(p.name, Reason.NEEDS_FACT, _names(missing))
        elif is_left_out(p, level.subsystem, state.graph_name):
            state.left_out.append(f"{p.name} {state.graph_name}")
            result = Dropped(p.name, Reason.DISABLED, BISECTED)
        else:
            result = _run_one(p, graph, state)
        if isinstance(result, PassReport):
            known = (known - p.invalidates) | p.provides
            state.measures.update(result.measures)
            if result.changed:
                _show(graph, state, f"after_{p.name}")
                _keep_text(graph, state, p.name)
        state.journal.add(state.graph_name, result)
        results.append(result)
    return results


def _show(graph: fx.Graph, state: CompileState, step: str) -> None:
    """Print `graph`, and have tlparse show it, where the user asks for it."""
    name = f"megamoe_{state.graph_name}_{step}"
    LOG.debug("%s:\n%s", name, graph)
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "string"},
        payload_fn=lambda: str(graph),
    )


def _keep_text(graph: fx.Graph, state: CompileState, step: str) -> None:
    if state.journal.texts is not None:
        state.journal.texts.append(GraphText(state.graph_name, step, lines_of(graph)))


def _run_one(p: GraphPass, graph: fx.Graph, state: CompileState) -> PassReport | Dropped:
    before, facts = Snapshot(graph), state.facts_of(graph)
    try:
        with without_saved_tensors_hooks():
            report = p.run(graph, state)
        graph.lint()
    except Exception as error:
        if state.config.strict or p.is_check:
            raise
        state.rename_nodes(before.restore(graph))
        reason = f"{type(error).__name__}: {error}"
        LOG.warning("megamoe: pass %s failed and is left out for this graph: %s", p.name, reason)
        known = isinstance(error, MegaMoEError)
        LOG.debug("%s", reason if known else traceback.format_exc())
        return Dropped(p.name, Reason.FAILED, reason)
    finally:
        state.facts = facts  # as regions have them; the pass may have looked at a copy meanwhile
        if facts.has_any and not before.holds(graph):
            facts.forget()
    return report


def _names(facts: frozenset[Fact]) -> str:
    return ", ".join(sorted(f.name for f in facts))
