"""What each compilation of this process found and did, kept for the report.

Contract
    Plain data: names, numbers, reasons. No graph node outlives its compilation through it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Final

import torch
import torch.fx as fx

from moe_compile.analysis.regions import MoERegion, Refused
from moe_compile.graph.query import is_launch
from moe_compile.planning.state import CompileState, RegionPlan
from passes.contract import PassReport
from passes.pipeline import Dropped

SOURCE_LINE: Final = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionReport:
    """What became of one MoE region."""

    name: str
    where: str
    """`file.py:line in function` of the dispatch."""
    num_ranks: int
    num_local_experts: int
    num_chunks: int
    num_host_reads: int
    """Blocking reads by the host per forward pass of the region."""
    verdict: str
    """`chunked`, or why not."""
    remarks: tuple[str, ...] = ()


@dataclass(kw_only=True, slots=True)
class Compilation:
    """One call of the backend that found regions."""

    family: str
    regions: list[RegionReport] = field(default_factory=list)
    left_alone: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    settings: str = ""
    is_recompile: bool = False
    """Whether Dynamo had compiled this code before, for other shapes or values."""

    def add_level(self, results: Iterable[PassReport | Dropped], state: CompileState) -> None:
        """Take over what the Dynamo-level passes did to one graph."""
        chunked: set[str] = set()
        for result in results:
            if isinstance(result, Dropped):
                self.dropped.append(f"{result.pass_name}: {result.reason}")
            elif result.pass_name == "chunk_regions":
                chunked |= set(result.applied)
        self.regions += [_region_report(plan, plan.region.name in chunked) for plan in state.plans]
        self.left_alone += [f"{d.candidate}: {d.reason.value}" for d in state.decoys]
        state.plans, state.decoys = [], []

    def plan_digest(self) -> str:
        """Return a hash of every decision, equal on ranks that decided alike."""
        decisions = [(r.where, r.num_chunks, r.verdict) for r in self.regions]
        text = f"{self.settings} {decisions} {sorted(self.dropped)}"
        return hashlib.sha256(text.encode()).hexdigest()


def describe(gm: fx.GraphModule, state: CompileState) -> Compilation:
    """Return an empty description of the compilation of `gm`."""
    graphs = (m.graph for m in gm.modules() if isinstance(m, fx.GraphModule))
    launches = [n for graph in graphs for n in graph.nodes if is_launch(n)]
    places = list(dict.fromkeys(where(node) for node in launches))
    return Compilation(
        family="; ".join(places[:1]),
        settings=state.config.digest_text(),
        is_recompile=_is_recompile(),
    )


def _is_recompile() -> bool:
    context = torch._guards.CompileContext.try_get()
    compile_id = getattr(context, "compile_id", None)
    return bool(getattr(compile_id, "frame_compile_id", 0))


def where(node: fx.Node) -> str:
    """Return `file.py:line in function`, the user's line that made `node`; "" when unknown."""
    frames = SOURCE_LINE.findall(node.meta.get("stack_trace") or "")
    own = [f for f in frames if "_functional_collectives.py" not in f[0]]
    if not own:
        return ""
    path, line, function = own[-1]
    return f"{PurePath(path).name}:{line} in {function}"


def _region_report(plan: RegionPlan, chunked: bool) -> RegionReport:
    region = plan.region
    refused = plan.proof if isinstance(plan.proof, Refused) else None
    unchunked = refused.reason.value if refused else "one chunk"
    detail = f" ({refused.detail})" if refused and refused.detail else ""
    remarks = [plan.remark.value] if plan.remark else []
    if refused is None and chunked:
        remarks += [f"weights not sliced: {why}" for why in _unsliced(plan)]
    return RegionReport(
        name=region.name,
        where=where(region.dispatch) if not chunked else where(region.result),
        num_ranks=region.num_ranks,
        num_local_experts=region.num_local_experts,
        num_chunks=plan.num_chunks if chunked else 1,
        num_host_reads=1 if chunked else _host_reads(region),
        verdict="chunked" if chunked else unchunked + detail,
        remarks=tuple(remarks),
    )


def _unsliced(plan: RegionPlan) -> list[str]:
    pairs = [] if isinstance(plan.proof, Refused) else list(plan.proof.unsliceable)
    return list(dict.fromkeys(reason for _, reason in pairs))


def _host_reads(region: MoERegion) -> int:
    """Return how often the host waits for integers of the region, as the model wrote it.

    Values read one by one from one tensor on the host cost the one copy that brought it there.
    """
    sources = set()
    for node in region.count_side:
        if node.op == "call_method" and node.target == "item":
            source = node.args[0]
            assert isinstance(source, fx.Node)
            tensor = source.args[0] if source.args else None
            sources.add(tensor if _is_on_host(tensor) else node)
    return len(sources)


def _is_on_host(tensor: object) -> bool:
    """Whether `tensor` was brought to the host whole."""
    return (
        isinstance(tensor, fx.Node)
        and tensor.op == "call_method"
        and tensor.target in ("to", "cpu")
    )
