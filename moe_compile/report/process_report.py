"""The report of one process: every compilation and every compiled graph it ran, as JSON.

Contract
    `as_dict` is plain JSON data; times are predicted from the hardware profile, never measured.
    The file is replaced whole, so that a reader never sees half of it. Rank 0 writes; where it
    cannot, it warns once, and nothing else ends.
    Each exchange of a compilation has one line: found, or not found, why, and what to change.
    A dispatch and its combine are one entry, at the line of the dispatch; exchanges of counts and
    collectives that are no all-to-all are none.
    Of a graph's texts it has the first lines, then what each step changes. A step that changes no
    line is left out. What changed between two levels is torch's.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.fx as fx

from moe_compile.journal.remedies import REMEDIES
from moe_compile.report.compilations import Compilation, regions_not_found
from moe_compile.report.graph_breaks import frames_left_out, warning_of
from moe_compile.report.page import PAGE, json_of, write_page, write_whole
from moe_compile.report.region_reports import (
    ALL_GATHERED,
    AS_WRITTEN,
    CHUNKED,
    IN_TWO_HOPS,
    LEFT_WHOLE,
    NO_READS,
    RegionReport,
)
from moe_compile.runtime.launch_records import RECORD_LAUNCHES, executed_records, on_first_execution
from moe_compile.schedule.timeline import kept_timeline
from moe_compile.schedule.timeline_data import packed
from moe_compile.source_hash import installed_version

LOG: Final = logging.getLogger(__name__)

FIGURES: Final = (
    "compute_us",
    "compute_bound_us",
    "memory_bound_us",
    "launch_bound_us",
    "exchange_us",
    "exposed_us_before",
    "exposed_us",
    "host_us",
    "least_exposed_us",
    "peak_bytes_before",
    "peak_bytes",
    "kept_bytes_before",
    "kept_bytes",
    "kept_bytes_allowed",
    "again_bytes",
    "again_us",
    "again_hidden_us",
    "gradient_bytes_before",
    "gradient_bytes",
    "contention",
    "overlap_slowdown",
)
"""Measures of the passes on graphs that the report shows."""
TORCHS: Final = "torch, between levels of passes"


class ProcessReport:
    """The compilations and graphs of one process."""

    def __init__(self) -> None:
        """Start empty."""
        self.compilations: list[Compilation] = []
        self.warnings: dict[str, None] = {}
        """Warnings on graphs with exchanges and no region; each once, in order."""
        self.graph_breaks: dict[str, None] = {}
        """Places where Dynamo ended a graph, or left a function to Python; each once, in order."""
        self.num_graphs = 0
        """Graphs that Dynamo gave to megamoe."""
        self.paths: set[Path] = set()
        self._unwritable: set[Path] = set()
        self._hardware = ""

    def add(self, compilation: Compilation, path: str, hardware: str) -> None:
        """Add one compilation; `path` is where the user wants the report, "" for nowhere.

        The file is written in any case: a report that finds nothing says so.
        """
        self.num_graphs += 1
        self._keep(compilation)
        self.warnings |= dict.fromkeys(compilation.warnings())
        self.graph_breaks |= dict.fromkeys(map(str, compilation.graph_breaks()))
        self._hardware = hardware
        if path:
            self.paths.add(Path(path).absolute())
        self.write()

    def add_dropped(self, compilation: Compilation) -> None:
        """Add a pass left out of a graph that was compiled after its compilation was added."""
        self._keep(compilation)
        self.write()

    def add_as_written(self, compilation: Compilation, why: str = AS_WRITTEN) -> None:
        """Record that a program, added as it was compiled, runs as it was written."""
        compilation.run_as_written(why)
        self.write()

    def _keep(self, compilation: Compilation) -> None:
        """Keep a compilation that has something to report, once."""
        says = compilation.has_regions or compilation.attention or compilation.has_failures
        says = says or compilation.names_parts or bool(compilation.left_out_of_regions)
        if (says or compilation.rewrites) and not any(c is compilation for c in self.compilations):
            self.compilations.append(compilation)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as JSON data."""
        left_out = frames_left_out()  # some of them after the last graph
        breaks = {**self.graph_breaks, **dict.fromkeys(map(str, left_out))}
        return report_of(
            self.compilations,
            executed_records(),
            hardware=self._hardware,
            warnings=tuple({**self.warnings, **dict.fromkeys(map(warning_of, left_out))}),
            graph_breaks=tuple(breaks),
            num_graphs=self.num_graphs,
        )

    def num_recompiles(self) -> int:
        """Return how many compilations were of a place compiled before."""
        return _num_recompiles(self.compilations)

    def write(self) -> None:
        """Write the JSON file of every path asked for, on rank 0."""
        if _rank() != 0:
            return
        for path in self.paths:
            try:
                self._write_to(path)
            except OSError as error:  # training goes on without a report
                if path not in self._unwritable:
                    LOG.warning("megamoe: the report cannot be written to %s: %s", path, error)
                self._unwritable.add(path)

    def _write_to(self, path: Path) -> None:
        report = self.as_dict()
        write_whole(json_of(path), json.dumps(report, indent=2) + "\n")
        if path.suffix == PAGE:
            write_page(report, path)


def report_of(
    compilations: Sequence[Compilation],
    graphs: Sequence[Mapping[str, Any]],
    *,
    hardware: str,
    warnings: Sequence[str] = (),
    graph_breaks: Sequence[str] = (),
    num_graphs: int = 1,
    as_written: Sequence[Mapping[str, str]] = (),
) -> dict[str, Any]:
    """Return a report as JSON data; `graphs` are the records of compiled graphs.

    `as_written` are timelines of graphs before any pass, which a job does not have.
    """
    return {
        "versions": {"megamoe": installed_version(), "torch": torch.__version__},
        "hardware": hardware,
        "exchanges": [dataclasses.asdict(e) for c in compilations for e in exchanges_of(c)],
        "regions": [
            {**dataclasses.asdict(r), "graph": c.site} for c in compilations for r in c.regions
        ],
        "attention": [dataclasses.asdict(a) for c in compilations for a in c.attention],
        "left_alone": sorted({x for c in compilations for x in c.left_alone}),
        "warnings": list(warnings),
        "graph_breaks": list(graph_breaks),
        "inductor_settings_off": sorted({x for c in compilations for x in c.settings_off}),
        "dropped_passes": sorted({x for c in compilations for x in c.dropped}),
        "regions_not_found": regions_not_found(compilations),
        "rewrites": sorted({x for c in compilations for x in c.rewrites}),
        "passes": [{"where": c.site, **data} for c in compilations for data in c.journal.as_data()],
        "graphs": [
            {
                "where": g["site"],
                "phase": g["phase"],
                "launches": g["launches"],
                **figures(g),
                "timeline": kept_timeline(g.get("timeline", "")),
            }
            for g in graphs
        ],
        "as_written": list(as_written),
        "graph_texts": packed(texts) if (texts := texts_of(compilations)) else "",
        "compilations": sum(c.has_regions for c in compilations),
        "recompiles": _num_recompiles(compilations),
        "num_graphs": num_graphs,
    }


def _num_recompiles(compilations: Sequence[Compilation]) -> int:
    known = [(c.site, c.settings) for c in compilations if c.has_regions]
    return len(known) - len(set(known))


def figures(record: Any) -> dict[str, float]:
    """Return the predicted times of one compiled graph, microseconds, and its memory, bytes.

    The shares by which compute and collectives slow each other in these times are beside them.
    """
    found = {key: value for key, value in record["measures"].items() if key in FIGURES}
    if "exchange_us" in found and "exposed_us" in found:
        found["hidden_us"] = max(0.0, round(found["exchange_us"] - found["exposed_us"], 3))
    return found


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))


REPORT: Final = ProcessReport()
on_first_execution(REPORT.write)


NAMES: Final = {
    "counts": "dispatch and combine",
    "capacity": "dispatch and combine by capacity",
}
"""Source of the rows per expert -> name of a region's two collectives."""
FRAME: Final = re.compile(r'File "[^"]*?([^/"]+)", line (\d+), in (\w+)')
"""Pattern of a line of the user's source as Dynamo notes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeOutcome:
    """The outcome of one exchange."""

    where: str
    """`file.py:line in function`."""
    is_found: bool
    """Whether it is the dispatch of a MoE region, or moves heads around attention."""
    what: str
    """Its kind, and what is done with it; "" where it was not found."""
    because: str = ""
    """Why it was not found, or why it is left whole."""
    change: str = ""
    """The remedy; "" where nothing is wrong."""


def exchanges_of(compilation: Compilation) -> list[ExchangeOutcome]:
    """Return the exchanges of a compilation, those of regions first."""
    found = [
        *map(_of_region, compilation.regions),
        *(
            ExchangeOutcome(
                where=a.where,
                is_found=True,
                what=f"attention between exchanges, {a.num_heads} heads on each of {a.num_ranks} "
                f"ranks; runs in {_chunks(a.num_chunks)}",
                because="" if a.verdict == CHUNKED else a.verdict,
            )
            for a in compilation.attention
            if a.is_region
        ),
        *(
            ExchangeOutcome(
                where=left.where,
                is_found=False,
                what="",
                because=_short(left.why),
                change=REMEDIES[left.reason],
            )
            for left in compilation.unmatched
        ),
    ]
    return list(dict.fromkeys(found))


def _of_region(region: RegionReport) -> ExchangeOutcome:
    is_rewritten = region.verdict in (CHUNKED, ALL_GATHERED, IN_TWO_HOPS, NO_READS)
    why = region.remarks if region.verdict == LEFT_WHOLE else (region.verdict, *region.remarks)
    done = f"runs in {_chunks(region.num_chunks)}"
    if region.verdict in (ALL_GATHERED, IN_TWO_HOPS, NO_READS):
        done = region.verdict
    what = NAMES[region.sized_by]
    return ExchangeOutcome(
        where=region.where,
        is_found=True,
        what=f"{what}, {region.num_local_experts} experts on each of "
        f"{region.num_ranks} ranks; {done}",
        because="" if is_rewritten else _short("; ".join(why)),
        change=region.remedy,
    )


def _short(why: str) -> str:
    """Return `why` with lines of source as `file.py:line in function`."""
    return FRAME.sub(r"\1:\2 in \3", why)


def _chunks(number: int) -> str:
    return f"{number} chunks" if number > 1 else "one piece"


def predicted_measures(graph: fx.Graph) -> dict[str, float]:
    """Return times, microseconds, and bytes, from the record that every graph with launches has."""
    found = record_of(graph)
    return figures(found) if found else {}


def record_of(graph: fx.Graph) -> dict[str, Any]:
    """Return the record that a traced graph notes when it runs; {} of a graph without launches."""
    for node in graph.find_nodes(op="call_function", target=RECORD_LAUNCHES):
        return dict(json.loads(str(node.args[1])))
    return {}


def texts_of(compilations: Sequence[Compilation]) -> list[dict[str, Any]]:
    """Return, of each graph, its place, name, first lines, and steps with their changes."""
    return [text for compilation in compilations for text in _texts_of_one(compilation)]


def _texts_of_one(compilation: Compilation) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    known: dict[str, tuple[str, ...]] = {}
    for text in compilation.journal.texts or ():
        one = {"where": compilation.site, "graph": text.graph, "lines": text.lines, "steps": []}
        steps = found.setdefault(text.graph, one)["steps"]
        if changes := _changed_lines(known.get(text.graph, text.lines), text.lines):
            steps.append({"step": text.step or TORCHS, "changes": changes})
        known[text.graph] = text.lines
    return list(found.values())


def _changed_lines(before: Sequence[str], after: Sequence[str]) -> list[list[Any]]:
    """Return [first line, line behind the last, lines in their place], in order."""
    if before == after:
        return []
    codes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [[i, j, after[k:m]] for tag, i, j, k, m in codes if tag != "equal"]
