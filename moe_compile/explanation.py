"""Findings of megamoe on a model before anything is compiled: `moe_compile.explain`.

Contract
    A model that Dynamo captures in one graph is not run; another is run once, on all ranks, and its
    graphs run as they were written. No code is generated. Dynamo is reset.
    Findings on a graph are the decisions of the passes when it is compiled with the same options,
    and graphs are those of `torch.compile(model, backend="megamoe")`. Where a graph ends at a
    result whose length depends on data, the findings with such results captured stand beside it.
"""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import torch
import torch._dynamo
import torch.distributed as dist
import torch.fx as fx
from rich.console import Console
from torch._guards import CompileContext, TracingContext, detect_fake_mode, tracing

from moe_compile.backend import rewrite
from moe_compile.choices import Choice, choices_of
from moe_compile.codegen import trace_graphs
from moe_compile.config import PREFIX, MegaMoEConfig, from_sources
from moe_compile.graph.query import value_of
from moe_compile.graph.snapshot import copy_of_graph
from moe_compile.graph.user_order import user_order
from moe_compile.hardware import load_profile
from moe_compile.predicted_time import timelines_as_written
from moe_compile.report.compilations import Compilation
from moe_compile.report.explain import print_report
from moe_compile.report.explanation_text import explanation_lines
from moe_compile.report.graph_breaks import GraphBreak, break_at, forget_frames, graph_break
from moe_compile.report.page import write_page
from moe_compile.report.process_report import record_of, report_of

T = TypeVar("T")
LOG: Final = logging.getLogger(__name__)
NO_RUN: Final = "fake"
"""torch's process group that moves nothing: models can be traced on it, not run."""
SETTING: Final = "torch._dynamo.config.capture_dynamic_output_shape_ops = True"
"""The line with which Dynamo captures results whose length depends on data."""


@dataclass(frozen=True, slots=True)
class WrittenGraph:
    """A graph as Dynamo captured it, to be rewritten by other options."""

    site: str
    gm: fx.GraphModule
    inputs: Sequence[Any]
    config: MegaMoEConfig

    def choices(self) -> Sequence[Choice]:
        """Return how it runs as asked and as "auto" would have it, were `equal_tokens` promised."""
        values = [value_of(node) for node in self.gm.graph.find_nodes(op="placeholder")]
        with tracing(TracingContext(detect_fake_mode(values))):
            return _tried(self.site, lambda: choices_of(self.gm, self.inputs, self.config))


@dataclass(kw_only=True, slots=True)
class Explanation:
    """Findings on a model; `print` them, or read `report`, which is as the JSON report."""

    report: Mapping[str, Any]
    breaks: Sequence[str]
    """Places where Dynamo ends a graph: `file.py:line in function: why`."""
    num_graphs: int
    is_whole: bool
    """Whether all graphs were seen."""
    if_captured: Explanation | None = None
    """Findings with `SETTING`, where a graph ends at a result of unknown length."""
    graphs: Sequence[WrittenGraph] = ()
    """Graphs with regions, as they were written."""

    def __str__(self) -> str:
        """Return the printed text."""
        text = io.StringIO()
        self.print(Console(file=text))
        return text.getvalue()

    def __repr__(self) -> str:
        """Return one line for interactive sessions, which show returned values."""
        found = sum(one["is_found"] for one in self.report["exchanges"])
        return f"<Explanation: {found} of {len(self.report['exchanges'])} exchanges found>"

    def print(self, console: Console | None = None) -> None:
        """Print exchange by exchange, then the report of regions and attention."""
        console = console or Console()
        self._print_lines(console, "megamoe")
        if self.if_captured is not None:
            self.if_captured._print_lines(console, f"with {SETTING}")
        if self.report["regions"] or self.report["attention"]:
            print_report(self.report, console)

    def html(self, path: str | os.PathLike[str], *, compare: bool = False) -> Path:
        """Write it as one page to `path`, and a trace for Perfetto beside it; return the path.

        Times, memory and graphs before and after each pass are in it. Where it is to `compare`,
        graphs with regions are traced as "auto" would have them for each value of `numerics`, too;
        on the ranks that the model was explained on. Where a graph ends at a result of unknown
        length the page is of the findings as the model is compiled now.
        """
        page = Path(path)
        found = {**self.report, "graph_breaks": list(self.breaks)}
        if compare:
            choices = [one for graph in self.graphs for one in graph.choices()]
            found["choices"] = [asdict(one) for one in choices]
        write_page(found, page)
        return page

    def _print_lines(self, console: Console, title: str) -> None:
        exchanges, whole = self.report["exchanges"], self.is_whole
        for line in explanation_lines(
            exchanges, self.breaks, self.num_graphs, title=title, is_whole=whole
        ):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


@dataclass(kw_only=True, slots=True)
class _Seen:
    """Graphs and findings of a backend that compiles nothing."""

    config: MegaMoEConfig
    num_graphs: int = 0
    is_whole: bool = True
    """Whether all graphs were seen."""
    ends_at_length: bool = False
    """Whether a graph ends at a result whose length depends on data."""
    compilations: list[Compilation] = field(default_factory=list)
    records: list[dict[str, Any]] = field(default_factory=list)
    graphs: list[WrittenGraph] = field(default_factory=list)
    as_written: list[dict[str, str]] = field(default_factory=list)
    """Timelines of graphs before any pass, as a report has them."""
    breaks: dict[str, None] = field(default_factory=dict)

    def note(self, broken: GraphBreak) -> None:
        """Record a place where a graph ends."""
        self.breaks[str(broken)] = None
        self.ends_at_length |= broken.is_of_unknown_length

    def look_at(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
        """Run the passes on a copy of `gm` and record their findings, and the graph's timelines."""
        self.num_graphs += 1
        if (broken := graph_break(gm)) is not None:
            self.note(broken)
        if not user_order(gm):
            return
        copied = copy_of_graph(gm)
        state, compilation = rewrite(copied, self.config, keeps_texts=True)
        self.compilations.append(compilation)
        if compilation.has_regions:
            written = WrittenGraph(compilation.site, copy_of_graph(gm), inputs, self.config)
            self.graphs.append(written)
        self.as_written += _tried(state.site, lambda: timelines_as_written(gm, inputs, state))
        graphs = _tried(
            state.site, lambda: trace_graphs(copied, inputs, state) if state.has_work else ()
        )
        self.records += [record for one in graphs if (record := record_of(one.graph))]


def _tried(site: str, trace: Callable[[], Sequence[T]]) -> Sequence[T]:
    try:
        return trace()
    except Exception as error:  # noqa: BLE001  (times are beside the point: what is found is)
        LOG.warning("megamoe: the times of %s cannot be predicted: %s", site, error)
        return ()


class _Captured(BaseException):
    """Ends the call of a model whose graph is known; no `except Exception` of a model ends it."""


def explain(model: Any, *inputs: Any, **options: Any) -> Explanation:
    """Print and return what megamoe finds in `model(*inputs)`; see `moe_compile.explain`.

    Raises InvalidConfig for an unknown option or value.
    """
    ours = {name.removeprefix(PREFIX): value for name, value in options.items()}
    asked = from_sources(options=ours, environment=os.environ)
    config = replace(asked, codegen="fx", strict=False, report="")
    model = _as_written(model)
    seen = _look(model, inputs, config)
    explanation = _explanation(seen)
    if seen.ends_at_length:
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            captured = _captured(model, inputs, config)
        explanation.if_captured = _explanation(captured) if captured.is_whole else None
    if not dist.is_initialized() or dist.get_rank() == 0:
        explanation.print()
    return explanation


def _as_written(model: Any) -> Any:
    """Return the model given to `torch.compile` if `model` is its result, else `model`."""
    return getattr(model, "_torchdynamo_orig_callable", getattr(model, "_orig_mod", model))


def _explanation(seen: _Seen) -> Explanation:
    hardware = load_profile(seen.config.hardware).name
    return Explanation(
        report=report_of(
            seen.compilations,
            seen.records,
            hardware=hardware,
            as_written=seen.as_written,
        ),
        breaks=list(seen.breaks),
        num_graphs=seen.num_graphs,
        is_whole=seen.is_whole,
        graphs=seen.graphs,
    )


def _look(model: Any, inputs: Sequence[Any], config: MegaMoEConfig) -> _Seen:
    """Return the findings on the model's graphs, from a run if there are several."""
    captured = _captured(model, inputs, config)
    if captured.is_whole:
        return captured
    seen = _Seen(config=config, breaks=captured.breaks, ends_at_length=captured.ends_at_length)
    can_run = not dist.is_initialized() or dist.get_backend() != NO_RUN

    def see_and_run(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., Any]:
        seen.look_at(gm, given)
        return gm.forward if can_run else _end

    seen.is_whole = _traced(seen, torch.compile(model, backend=see_and_run), inputs) and can_run
    return seen


def _captured(model: Any, inputs: Sequence[Any], config: MegaMoEConfig) -> _Seen:
    """Return the findings on the model's one graph; `is_whole` is False if there are several.

    `fullgraph=True` is not used: with it Dynamo captures calls that otherwise end a graph.
    """
    seen = _Seen(config=config)

    def see(gm: fx.GraphModule, given: Sequence[Any]) -> Callable[..., NoReturn]:
        compiling = CompileContext.current_compile_id()
        if compiling is not None and compiling.frame_id:  # Dynamo left the frame around to Python
            seen.is_whole = False
        else:
            seen.look_at(gm, given)
        return _end

    with torch._dynamo.error_on_graph_break(True):
        seen.is_whole &= _traced(seen, torch.compile(model, backend=see), inputs)
    return seen


def _traced(seen: _Seen, compiled: Callable[..., Any], inputs: Sequence[Any]) -> bool:
    """Call `compiled`; return whether Dynamo traced all of it."""
    torch._dynamo.reset()
    try:
        compiled(*inputs)
    except _Captured:
        return True
    except torch._dynamo.exc.TorchDynamoException as error:
        seen.note(break_at(getattr(error, "real_stack", None) or (), str(error)))
        return False
    finally:
        torch._dynamo.reset()
        forget_frames()  # a report of the run would name them
    return True


def _end(*arguments: Any) -> NoReturn:
    del arguments
    raise _Captured
