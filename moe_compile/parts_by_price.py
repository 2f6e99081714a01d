"""The choice of `batch_parts = "auto"`: try a program in parts of its batch, take the fastest.

Contract
    A function of the graph, the options, the hardware profile and registered nodes. Each program is
    a copy, rewritten and traced through all levels; nothing is run, no code is generated.
    Ranks compare the plan that follows before they run: should predictions differ with the number
    of a rank so much that one decides differently, all run the program as it is written.
    A program stays whole where numbers of parts are not proven for all of it, where ranks might
    decide apart (`equal_tokens`, static sizes), and where `numerics` does not allow sums in another
    order.

Pseudo-code
    whole = the program with chunks, dispatch, nodes and wires as the planner chooses them
    for 2 parts, then 4: the same, and with one chunk, if the option chunks is "auto"
        stop if no number of chunks gains over half as many parts
    choose_parts of these
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

import torch.fx as fx

from moe_compile.config import MegaMoEConfig
from moe_compile.graph.query import has_static_inputs, is_all_to_all
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.journal.entries import PassReport, Verdict
from moe_compile.journal.reasons import Reason
from moe_compile.journal.remedies import allowed_by
from moe_compile.plan.choose_plan import PartsDecision, TriedProgram, choose_parts
from moe_compile.plan.state import CompileState
from moe_compile.predicted_time import predicted
from moe_compile.report.compilations import Compilation
from passes.split_batch import BATCH, SplitBatch

NUMBERS: Final = (2, 4)
"""Numbers of parts to try; each part makes the graph and its compilation longer."""

Rewriter = Callable[[fx.GraphModule, MegaMoEConfig], tuple[CompileState, Compilation]]


def decide_parts(
    gm: fx.GraphModule, config: MegaMoEConfig, rewrite: Rewriter
) -> PartsDecision | None:
    """Return the number of parts in which `gm` runs; None where it has no batch to divide.

    `rewrite` runs the passes on the Dynamo graph; `gm` itself is not edited.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    if SplitBatch.name in config.disable_passes or not any(map(_has_all_to_all, graphs)):
        return None
    programs = _Programs(gm, replace(config, strict=False, report=""), rewrite)
    first = programs.left_whole(NUMBERS[0])
    if first is not None:
        return PartsDecision(chunks=config.chunks, left=first)
    if not programs.is_divided(NUMBERS[0]):
        return None
    if (left := _not_priced(gm.graph, config)) is not None:
        return PartsDecision(chunks=config.chunks, left=left)
    return _by_price(programs, config)


def _has_all_to_all(graph: fx.Graph) -> bool:
    return any(map(is_all_to_all, graph.nodes))


def _not_priced(graph: fx.Graph, config: MegaMoEConfig) -> Verdict | None:
    left = partial(Verdict, candidate=BATCH, option="batch_parts")
    if not config.allows("bounded"):
        return left(reason=Reason.ROUNDS, detail=allowed_by("bounded"))
    is_static = config.equal_tokens and has_static_inputs(graph)
    return None if is_static else left(reason=Reason.NO_PRICE)


def _by_price(programs: _Programs, config: MegaMoEConfig) -> PartsDecision:
    whole = programs.tried(1, config.chunks)
    others = list[TriedProgram]()
    before = whole.us
    for number in NUMBERS:
        if programs.left_whole(number) is not None:
            break
        found = [programs.tried(number, config.chunks)]
        if config.chunks == "auto" and programs.is_chunked(number):
            found.append(programs.tried(number, 1))
        others += found
        fastest = min(one.us for one in found)
        if fastest >= before:
            break
        before = fastest
    peak = max(config.step_peak_bytes, whole.peak_bytes)
    chosen, reason = choose_parts(whole, others, config.max_memory_increase * peak)
    left = None
    if reason is not None:
        said = "; ".join(map(str, (*others, whole)))
        left = Verdict(candidate=BATCH, reason=reason, detail=said, option="batch_parts")
    return PartsDecision(
        num_parts=chosen.num_parts,
        chunks=chosen.chunks,
        left=left,
        whole_us=whole.us,
        us=chosen.us,
    )


class _Programs:
    """A program in several numbers of parts, made when asked for."""

    def __init__(self, gm: fx.GraphModule, config: MegaMoEConfig, rewrite: Rewriter) -> None:
        """Prepare; no program is made yet."""
        self._gm = gm
        self._config = config
        self._rewrite = rewrite
        self._made: dict[tuple[int, int | str], tuple[fx.GraphModule, CompileState, int]] = {}

    def tried(self, num_parts: int, chunks: int | str) -> TriedProgram:
        copied, state, _ = self._program(num_parts, chunks)
        found = predicted(copied, state)
        return TriedProgram(
            num_parts=num_parts,
            chunks=chunks,
            us=found.us,
            off_us=found.off_us,
            peak_bytes=found.peak_bytes,
        )

    def left_whole(self, num_parts: int) -> Verdict | None:
        """Return why a graph of the program does not run in so many parts; None where all do."""
        skipped = (v for report in self._reports(num_parts) for v in report.skipped)
        return next(skipped, None)

    def is_divided(self, num_parts: int) -> bool:
        """Whether some graph of the program runs in so many parts."""
        return any(report.applied for report in self._reports(num_parts))

    def is_chunked(self, num_parts: int) -> bool:
        """Whether the planner chose several chunks in so many parts."""
        return self._program(num_parts, self._config.chunks)[2] > 1

    def _reports(self, num_parts: int) -> list[PassReport]:
        _, state, _ = self._program(num_parts, self._config.chunks)
        reports = (r for _, r in state.journal.records if isinstance(r, PassReport))
        return [report for report in reports if report.pass_name == SplitBatch.name]

    def _program(
        self, num_parts: int, chunks: int | str
    ) -> tuple[fx.GraphModule, CompileState, int]:
        """Return the rewritten copy, its state, and the most chunks of a region in it."""
        key = num_parts, chunks
        if key not in self._made:
            copied = copy_of_graph(self._gm)
            config = replace(self._config, batch_parts=num_parts, chunks=chunks)
            state, compilation = self._rewrite(copied, config)
            most = max((region.num_chunks for region in compilation.regions), default=1)
            self._made[key] = copied, state, most
        return self._made[key]
